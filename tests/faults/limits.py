"""Judge the limits and groups of a queue by a log of what its workers did.

These are pure functions, without a clock or a server. :mod:`tests.faults.limits_storm` makes logs.

All times are microseconds of the server's clock, which the workers on this machine read as well.
The moment at which the server started a message needs no tolerance for its way to the worker: a
lease ends a fixed time after the server began it, and a message tells the end of its lease. Only
the few microseconds that make an end unique remain, :data:`TOKEN_US`.

The rules, besides those of :mod:`tests.faults.checker`:

- *too many*: more messages of a group, or of the queue, ran at one moment than its concurrency
  allows. A message runs from its claim to the end of its handler, to the kill of its process, or to
  the end of its lease, whichever comes first: a handler that outlives its lease has lost its slot.
- *too fast*: the server started more messages within some window than the rate allows. A window
  includes its start and not its end.
- *again*: a message was delivered again although its handler had finished within its lease, and its
  process was neither killed nor stopped; or after it had been cancelled.
- *idle*: the slots of cancelled messages whose handlers had ended were free for too long, at the
  median, although messages of their groups waited for them.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.faults.checker import Rules, Violation, check
from tests.faults.history import REUSED, Delivered, End

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.faults.history import History

TOKEN_US = 50
"""An end of leases that is taken already gives way to a free one, a few microseconds later."""
QUEUE = "the queue"
"""The name under which the whole queue is reported."""

_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit: of messages that run at once, and of starts within any ``per_us``."""

    concurrency: int | None = None
    rate: int | None = None
    per_us: int = 1_000_000


@dataclass
class Log:
    """Everything that is known about a run."""

    history: History
    groups: dict[int, str]
    """The group of each message, by key."""
    bounds: dict[str, Bound]
    """By group."""
    whole: Bound = Bound()
    """Of the whole queue."""
    kills: dict[str, int] = field(default_factory=dict)
    """When each killed consumer was certainly dead."""
    cancelled: dict[int, int] = field(default_factory=dict)
    """When each message was cancelled for certain that was cancelled while it ran, by key."""
    paused: set[str] = field(default_factory=set)
    """The consumers that were stopped for a while, so that they may have lost leases."""

    leases: set[tuple[int, int]] = field(default_factory=set)
    """What was seen to be leased on the server: keys of messages, and the ends of their leases."""

    def claims(self, lease_us: int) -> list[Delivered]:
        """Return all deliveries in the order of their claims, also those that were never noted.

        A process that is killed has not noted what was on its way to it. Only the server knows.
        """
        by_key: dict[int, list[Delivered]] = defaultdict(list)
        for one in self.history.delivered:
            by_key[one.key].append(one)
        for key, ends_us in sorted(self.leases):
            claimed_us = ends_us - lease_us
            # A leased message cannot be claimed, so that is its lease as it began, or renewed.
            if not any(
                one.claimed_us <= claimed_us <= self._renewed_until(one) for one in by_key[key]
            ):
                by_key[key].append(Delivered(key, 0, claimed_us=claimed_us, ends_us=ends_us))
        claims = (one for key in by_key for one in self._started(key, by_key[key]))
        return sorted(claims, key=lambda one: one.claimed_us)

    def _started(self, key: int, claims: list[Delivered]) -> Iterator[Delivered]:
        """Yield the claims of a message but for those from which it went back before it was begun:
        a rate does not count them.
        """
        claims.sort(key=lambda one: one.claimed_us)
        for one, later in itertools.zip_longest(claims, claims[1:]):
            # Claimed again within its lease; or cancelled when it may have been back.
            went_back = later.claimed_us < one.ends_us if later else key in self.cancelled
            if one.seen_us or not went_back:
                yield one

    def _renewed_until(self, one: Delivered) -> int:
        """Return when the lease of a delivery ended, or was renewed last.

        A process that was killed has not noted how often it had renewed it.
        """
        return one.ends_us if one.ended_us else max(one.ends_us, self.kills.get(one.who, 0))


def judge(log: Log, rules: Rules) -> list[Violation]:
    """Return all violations."""
    return [*check(log.history, rules), *over_limits(log, rules), *_again(log), *_idle(log, rules)]


def judge_storm(
    history: History, rules: Rules, most: tuple[int | None, int | None]
) -> list[Violation]:
    """Return all violations of a storm of a queue in which so many messages may run at once, in all
    and of each group.
    """
    groups = {key: history.group_of(key) or "" for key in history.offered}
    whole, group = map(Bound, most)
    # The other queue of a storm has no limit.
    some = [one for one in history.delivered if not one.copy.startswith(REUSED)]
    log = Log(
        replace(history, delivered=some),
        groups,
        dict.fromkeys(groups.values(), group),
        whole,
        history.kills,
    )
    return [*check(history, rules), *over_limits(log, rules)]


def over_limits(log: Log, rules: Rules) -> list[Violation]:
    """Return what broke the limits."""
    violations: list[Violation] = []
    claims = log.claims(rules.lease_us)
    of_groups = defaultdict(list)
    for claim in claims:
        of_groups[log.groups.get(claim.key, "")].append(claim)
    bounds = [(name, bound, of_groups[name]) for name, bound in log.bounds.items()]
    for name, bound, some in (*bounds, (QUEUE, log.whole, claims)):
        if bound.concurrency is not None:
            violations += _too_many(log, name, bound.concurrency, some)
        if bound.rate is not None:
            violations += _too_fast(name, bound.rate, bound.per_us, some)
    return violations


def _too_many(log: Log, name: str, most: int, some: Sequence[Delivered]) -> Iterator[Violation]:
    ends: list[int] = []
    for one in some:
        if not one.seen_us:
            # Its handler never ran.
            continue
        # One that ends at this moment has made room.
        while ends and ends[0] <= one.claimed_us:
            heapq.heappop(ends)
        # Until then, it certainly ran and had its slot.
        ran_until = min(one.ends_us, one.ended_us or log.kills.get(one.who, _ENDLESS))
        heapq.heappush(ends, ran_until)
        if len(ends) > most:
            words = f"was number {len(ends)} to run in {name}, of {most}, at {one.claimed_us}"
            yield Violation("too many", one.key, words)


def _too_fast(name: str, rate: int, per_us: int, some: Sequence[Delivered]) -> Iterator[Violation]:
    for first, last in zip(some, itertools.islice(some, rate, None), strict=False):
        took = last.claimed_us - first.claimed_us
        if took < per_us - TOKEN_US:
            words = f"was start {rate + 1} of {name} in {took} us, of {rate} in {per_us}"
            yield Violation("too fast", last.key, words)


def _again(log: Log) -> Iterator[Violation]:
    runs: dict[int, list[Delivered]] = defaultdict(list)
    for one in sorted(log.history.delivered, key=lambda one: one.claimed_us):
        runs[one.key].append(one)
    for key, some in runs.items():
        if some[-1].claimed_us > log.cancelled.get(key, _ENDLESS):
            yield Violation("again", key, f"came to {some[-1].who} after it had been cancelled")
        for first, second in itertools.pairwise(some):
            done = first.end is End.UNKNOWN and first.ended_us < first.ends_us
            if done and first.who not in log.kills and first.who not in log.paused:
                words = f"came to {second.who} after {first.who} had handled it, and lived"
                yield Violation("again", key, words)


def _idle(log: Log, rules: Rules) -> Iterator[Violation]:
    starts: dict[str, list[Delivered]] = defaultdict(list)
    for one in sorted(log.history.delivered, key=lambda one: one.claimed_us):
        starts[log.groups.get(one.key, "")].append(one)
    waits = []
    for group, some in starts.items():
        bound = log.bounds.get(group, Bound())
        claimed = [one.claimed_us for one in some]
        for ended in [one for one in some if one.key in log.cancelled and one.ended_us]:
            before = bisect_right(claimed, ended.ended_us)
            next_one = some[before] if before < len(some) else None
            lately = before - bisect_right(claimed, ended.ended_us - bound.per_us)
            # Only it was running, and nothing else held the next one up.
            if bound.concurrency != 1 or lately >= (bound.rate or _ENDLESS) or next_one is None:
                continue
            if log.history.offered[next_one.key].due_us < ended.ended_us:
                waits.append((next_one.claimed_us - ended.ended_us, next_one.key))
    if len(waits) > 4 and (wait := sorted(waits)[len(waits) // 2])[0] > rules.lease_us / 3:
        yield Violation("idle", wait[1], f"waited {wait[0]} us for a slot that was free")
