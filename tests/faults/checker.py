"""Judge a history: find every violation, by kind and message.

These are pure functions, without a clock or a server.

The rules:

- *lost*: an offer was reported as stored, but no consumer ever finished with the message.
- *unexpected*: a message was delivered that was never offered, or whose offer was reported as not
  stored.
- *expired*: a message was delivered although its time to live had ended.
- *held*: an id was refused although the message that had it had expired.
- *early*: a message was delivered before its delay had passed, or before the moment at which the
  queue itself says it was due.
- *stored twice*: one offer arrived as two messages.
- *duplicate*: a message was redelivered although its lease had not ended and no consumer had given
  it back; without leases, any redelivery is a duplicate.
- *after ack*: a message was redelivered although the queue had confirmed its acknowledgement.
- *stuck*: a message arrived later than the allowed time after it was due and the last fault that
  could delay it was over.
- *attempts*: the attempt numbers do not rise, or rise faster than leases can end.
- *result*: a message was acknowledged, and its result is not there, or is that of no consumer which
  may have acknowledged it.
- *checkpoint*: an attempt began with an older state than one that was saved before it, or called a
  step again whose result was stored.
- *left*: something is still on the server although it is no longer needed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.faults.history import End, Told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.faults.history import Delivered, Fault, History, Offered

ByKey = dict[int, list["Delivered"]]
# As far as anyone can tell, the consumer finished with messages that ended like this.
_DONE = (End.ACKED, End.UNATTENDED, End.UNKNOWN, End.EITHER)
# Messages that ended like this may be redelivered before their lease ends.
_BACK = (End.RETURNED, End.NACKED, End.EITHER)


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not happen."""

    kind: str
    key: int
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: message {self.key} {self.words}"


@dataclass(frozen=True, slots=True)
class Rules:
    """The promises of a queue."""

    lease_us: int
    """0 means for good: a message is never redelivered."""
    within_us: int
    """How long a message may take once it is due and nothing is broken."""


def check(history: History, rules: Rules) -> list[Violation]:
    """Return every violation in a history, ordered by kind and key."""
    by_key: ByKey = defaultdict(list)
    for one in history.delivered:
        by_key[one.key].append(one)
    for some in by_key.values():
        some.sort(key=lambda one: (one.claimed_us or one.seen_us, one.seen_us))

    violations = [
        *_lost(history, by_key, rules),
        *_stuck(history, by_key, rules),
        *_held(history),
        *(Violation("left", 0, what) for what in history.left),
    ]
    unattended: list[Violation] = []
    for key, some in by_key.items():
        offered = history.offered.get(key)
        violations += _unexpected(key, offered)
        if offered is not None:
            violations += _early(key, offered, some)
        violations += _stored_twice(key, some)
        violations += _again(key, some, rules)
        violations += _results(key, some, history.results)
        if rules.lease_us:
            violations += _attempts(key, some, offered, rules)
            violations += _checkpoints(key, some)
            for end, violation in _after_ack(key, some, history.doubts):
                (violations if end is End.ACKED else unattended).append(violation)
    # The log does not say which messages these were, so it may explain this many violations.
    if len(unattended) > history.nameless_doubts:
        violations += unattended
    return sorted(violations, key=lambda violation: (violation.kind, violation.key))


def summary(violations: Sequence[Violation], show: int = 5) -> str:
    """Return how many violations there are of each kind, and the first ones in full."""
    counts = Counter(violation.kind for violation in violations)
    return (
        "; ".join(
            [f"{count} {kind}" for kind, count in counts.items()]
            + [str(violation) for violation in violations[:show]]
        )
        or "none"
    )


# The rules, one by one


def _lost(history: History, by_key: ByKey, rules: Rules) -> Iterator[Violation]:
    for key, offered in history.offered.items():
        if offered.told is not Told.OK or offered.expires:
            continue
        some = by_key.get(key, [])
        if not some:
            yield Violation("lost", key, "was stored and never came")
        elif rules.lease_us and not any(one.end in _DONE for one in some):
            ends = ", ".join(one.end for one in some)
            yield Violation("lost", key, f"was stored and never handled: {ends}")


def _unexpected(key: int, offered: Offered | None) -> Iterator[Violation]:
    if offered is None:
        yield Violation("unexpected", key, "came, and nobody has offered it")
    elif offered.told is Told.FAILED:
        yield Violation("unexpected", key, "came, and its offer was said to have failed")
    elif offered.expires:
        yield Violation("expired", key, "came, although its time to live had ended")


def _held(history: History) -> Iterator[Violation]:
    for key, offered in history.offered.items():
        if offered.told is Told.HELD:
            yield Violation("held", key, "was refused for its id, whose message had expired")


def _early(key: int, offered: Offered, some: Sequence[Delivered]) -> Iterator[Violation]:
    for one in some:
        if one.seen_us < offered.due_us:
            words = f"came {offered.due_us - one.seen_us} us before its delay had passed"
            yield Violation("early", key, words)
        elif one.due_us and one.due_us > (one.claimed_us or one.seen_us):
            words = f"left the server {one.due_us - one.claimed_us} us before it was due"
            yield Violation("early", key, words)


def _stored_twice(key: int, some: Sequence[Delivered]) -> Iterator[Violation]:
    copies = {one.copy for one in some}
    if len(copies) > 1:
        yield Violation("stored twice", key, f"came as {', '.join(sorted(copies))}")


def _again(key: int, some: Sequence[Delivered], rules: Rules) -> Iterator[Violation]:
    for first, second in itertools.pairwise(some):
        if not rules.lease_us:
            yield Violation("duplicate", key, f"came to {first.who} and to {second.who}")
        elif first.end not in _BACK and first.ends_us > second.claimed_us:
            left = first.ends_us - second.claimed_us
            words = f"came to {second.who} while {first.who} had it for {left} us more"
            yield Violation("duplicate", key, words)


def _after_ack(
    key: int, some: Sequence[Delivered], doubts: set[str]
) -> Iterator[tuple[End, Violation]]:
    for first, second in itertools.pairwise(some):
        if first.end is End.ACKED or (first.end is End.UNATTENDED and first.copy not in doubts):
            words = f"came to {second.who} after {first.who} had acknowledged it"
            yield first.end, Violation("after ack", key, words)


def _results(
    key: int, some: Sequence[Delivered], results: Mapping[str, object]
) -> Iterator[Violation]:
    for copy in {one.copy for one in some if one.copy in results}:
        mine, found = [one for one in some if one.copy == copy], results[copy]
        possible = [[key, one.attempt] for one in mine if one.end in _DONE]
        is_sure = any(one.end is End.ACKED for one in mine)
        if found not in possible and (is_sure or not isinstance(found, type)):
            yield Violation("result", key, f"has the result {found}, and not one of {possible}")


def _attempts(
    key: int, some: Sequence[Delivered], offered: Offered | None, rules: Rules
) -> Iterator[Violation]:
    numbered = [one for one in some if one.attempt]
    if not numbered:
        return
    # Attempts that were never seen belonged to consumers that died or whose reply was lost: each
    # lasted a whole lease.
    first = numbered[0]
    earliest = (offered.due_us if offered else first.due_us) + (first.attempt - 1) * rules.lease_us
    if first.attempt > 1 and first.claimed_us < earliest:
        words = f"came first with attempt {first.attempt}, and there was no time for those before"
        yield Violation("attempts", key, words)
    for before, after in itertools.pairwise(numbered):
        more = after.attempt - before.attempt
        free_from = before.claimed_us if before.end in _BACK else before.ends_us
        if more < 0 or (more == 0 and before.end not in (End.RETURNED, End.EITHER)):
            words = f"came with attempt {after.attempt} after {before.attempt}"
            yield Violation("attempts", key, words)
        elif more > 1 and after.claimed_us < free_from + (more - 1) * rules.lease_us:
            words = f"came with attempt {after.attempt} too soon after {before.attempt}"
            yield Violation("attempts", key, words)


def _checkpoints(key: int, some: Sequence[Delivered]) -> Iterator[Violation]:
    saved = step = 0
    for one in some:
        if 0 <= one.loaded < saved:
            yield Violation("checkpoint", key, f"began with {one.loaded} after {saved} was saved")
        if step and one.step not in (0, step):
            yield Violation("checkpoint", key, f"has called a step again that gave {step}")
        saved, step = max(saved, one.saved), step or one.step


def _stuck(history: History, by_key: ByKey, rules: Rules) -> Iterator[Violation]:
    waits = _Waits(history.faults)
    for key, some in by_key.items():
        offered = history.offered.get(key)
        if offered is None:
            continue
        first = min(one.seen_us for one in some)
        late = first - waits.healthy_from(offered.due_us, first)
        if late > rules.within_us:
            words = f"came {late / 1_000_000:.1f} s after nothing was in its way any more"
            yield Violation("stuck", key, words)


class _Waits:
    """The moments from which messages could have arrived."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        in_order = sorted(faults, key=lambda fault: fault.from_us)
        self._starts = [fault.from_us for fault in in_order]
        # For each fault, the latest end of all faults that began no later than it did.
        self._ends = list(itertools.accumulate((fault.to_us for fault in in_order), max))

    def healthy_from(self, due_us: int, seen_us: int) -> int:
        """Return when the message was due, or when the last fault before its arrival ended."""
        count = bisect_right(self._starts, seen_us)
        return max(due_us, self._ends[count - 1]) if count else due_us
