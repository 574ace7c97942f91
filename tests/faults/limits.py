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
  process was neither killed nor stopped.
- *idle*: all in all, less was running than the limits allowed, see :func:`shares`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.faults.checker import Rules, Violation, check
from tests.faults.history import Delivered, End

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.faults.history import History

TOKEN_US = 50
"""An end of leases that is taken already gives way to a free one, a few microseconds later."""
LEAST_SHARE = 0.95
LEAST_SPARE = 0.15
QUEUE = "the queue"
"""The name under which the whole queue is reported."""

_TOLD_US = 100_000
"""The time within which a living process tells the server about an end."""
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
    paused: set[str] = field(default_factory=set)
    """The consumers that were stopped for a while, so that they may have lost leases."""

    leases: set[tuple[int, int]] = field(default_factory=set)
    """What was seen to be leased on the server: keys of messages, and the ends of their leases."""

    spare: float = 1.0
    """The share of the machine's processor time that nothing used."""

    def claims(self, lease_us: int) -> list[Delivered]:
        """Return all deliveries in the order of their claims, also those that were never noted.

        A process that is killed has not noted what was on its way to it. Only the server knows.
        """
        held: dict[int, list[Delivered]] = defaultdict(list)
        for one in self.history.delivered:
            held[one.key].append(one)
        unnoted = []
        for key, ends_us in self.leases:
            claimed_us = ends_us - lease_us
            # A leased message cannot be claimed, so that is its lease as it began, or renewed.
            if not any(one.claimed_us <= claimed_us <= one.ends_us for one in held[key]):
                unnoted.append(Delivered(key, 0, claimed_us=claimed_us, ends_us=ends_us))
        return sorted((*self.history.delivered, *unnoted), key=lambda one: one.claimed_us)

    def by_group(self, some: Iterable[Delivered]) -> dict[str, list[Delivered]]:
        """Return the deliveries of each group."""
        found: dict[str, list[Delivered]] = {name: [] for name in self.bounds}
        for one in some:
            if one.key in self.groups:
                found[self.groups[one.key]].append(one)
        return found


def judge(log: Log, rules: Rules) -> list[Violation]:
    """Return all violations, apart from those of the throughput."""
    found = check(log.history, rules)
    claims = log.claims(rules.lease_us)
    for name, some in log.by_group(claims).items():
        found += _of_bound(log, name, log.bounds[name], some)
    found += _of_bound(log, QUEUE, log.whole, claims)
    found += _again(log)
    return found


def judge_share(log: Log, lease_us: int, least: float = LEAST_SHARE) -> list[Violation]:
    """Return a violation if the throughput was below this share of what the limits allow.

    On a machine that was busy throughout, processes had to wait for a processor, and nothing can be
    said about limits.
    """
    if log.spare < LEAST_SPARE:
        return []
    share = shares(log, lease_us)[QUEUE]
    words = f"{share:.1%} of what the limits allow were running, of at least {least:.0%}"
    return [Violation("idle", 0, words)] if share < least else []


# The limits


def _of_bound(log: Log, name: str, bound: Bound, some: Sequence[Delivered]) -> Iterator[Violation]:
    if bound.concurrency is not None:
        yield from _too_many(log, name, bound.concurrency, some)
    if bound.rate is not None:
        yield from _too_fast(name, bound.rate, bound.per_us, some)


def _too_many(log: Log, name: str, most: int, some: Sequence[Delivered]) -> Iterator[Violation]:
    ends: list[int] = []
    for one in some:
        if not one.seen_us:
            # Its handler never ran.
            continue
        # One that ends at this moment has made room.
        while ends and ends[0] <= one.claimed_us:
            heapq.heappop(ends)
        heapq.heappush(ends, _ran_until(log, one))
        if len(ends) > most:
            words = f"was number {len(ends)} to run in {name}, of {most}, at {one.claimed_us}"
            yield Violation("too many", one.key, words)


def _ran_until(log: Log, one: Delivered) -> int:
    """Return until when a message certainly ran and had its slot."""
    return min(one.ends_us, one.ended_us or log.kills.get(one.who, _ENDLESS))


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
        for first, second in itertools.pairwise(some):
            done = first.end is End.UNKNOWN and first.ended_us < first.ends_us
            if done and first.who not in log.kills and first.who not in log.paused:
                words = f"came to {second.who} after {first.who} had handled it, and lived"
                yield Violation("again", key, words)


# The throughput


def shares(log: Log, lease_us: int) -> dict[str, float]:
    """Return the share of what the limits allowed that ran: of each group, and of the queue.

    Slots and starts are pools: a running message has a slot, and a start takes a token, which is
    back after the window. A group whose messages wait while no pool is empty, neither its own nor
    the queue's, loses what it could start: that many parts of the pool that holds it back most of
    the time. The rest is its share, of the time in which it had due messages. The share of the
    queue weighs groups by that time.

    The time in which nothing may start is not counted: until a killed process has lost its lease,
    and until a message that failed is due again.
    """
    lost_in_all, waited_in_all, found = 0.0, 0, dict[str, float]()
    for name, sweep in _sweeps(log, lease_us):
        found[name] = 1 - sweep.lost / sweep.waited if sweep.waited else 1.0
        lost_in_all, waited_in_all = lost_in_all + sweep.lost, waited_in_all + sweep.waited
    return found | {QUEUE: 1 - lost_in_all / waited_in_all if waited_in_all else 1.0}


Event = tuple[int, str, int]
"""A moment, the pool, and by how much the number in use changes."""
_WAITING = "waiting"


def _sizes(bound: Bound, prefix: str = "") -> dict[str, int]:
    sizes = {"slots": bound.concurrency, "tokens": bound.rate}
    return {prefix + name: size for name, size in sizes.items() if size is not None}


def _sweeps(log: Log, lease_us: int) -> Iterator[tuple[str, _Sweep]]:
    claims = log.claims(lease_us)
    spans = _Spans(log, claims, lease_us)
    whole_events = list(spans.of_pools(claims, log.whole, "whole "))
    for name, some in log.by_group(claims).items():
        events = [*spans.of_pools(some, log.bounds[name]), *spans.of_waiting(name, some)]
        sizes = _sizes(log.bounds[name]) | _sizes(log.whole, "whole ")
        yield name, _Sweep([*events, *whole_events], sizes)


class _Sweep:
    """The throughput that a group lost, and how long its messages waited, both in microseconds."""

    def __init__(self, events: Iterable[Event], sizes: Mapping[str, int]) -> None:
        self.waited = 0
        used = dict.fromkeys((*sizes, _WAITING), 0)
        blocked = dict.fromkeys(sizes, 0)
        unstarted, at = 0, 0
        for moment, pool, change in sorted(events):
            if moment > at:
                free = {name: max(0, size - used[name]) for name, size in sizes.items()}
                count = min(used[_WAITING], *free.values())
                unstarted += (moment - at) * count
                if used[_WAITING] > 0:
                    self.waited += moment - at
                    for each, left in free.items():
                        blocked[each] += 0 if left else moment - at
            at = moment
            if pool in used:
                used[pool] += change
        # A pool that is never empty holds nothing back.
        narrowest = max(sizes, key=lambda name: (blocked[name], -sizes[name]))
        self.lost = unstarted / sizes[narrowest]


class _Spans:
    """The spans of time in which messages wait, and have slots and tokens."""

    def __init__(self, log: Log, claims: Sequence[Delivered], lease_us: int) -> None:
        self._log = log
        self._lease_us = lease_us
        self._again_us: dict[int, int] = {}
        """The claim after each delivery, by its identity."""
        self._last_us = claims[-1].claimed_us if claims else 0
        last: dict[int, Delivered] = {}
        for one in claims:
            if one.key in last:
                self._again_us[id(last[one.key])] = one.claimed_us
            last[one.key] = one
        self._keys: dict[str, list[int]] = defaultdict(list)
        for key, name in log.groups.items():
            self._keys[name].append(key)

    def of_pools(
        self, some: Iterable[Delivered], bound: Bound, prefix: str = ""
    ) -> Iterator[Event]:
        for one in some:
            if bound.concurrency is not None:
                yield from _span(prefix + "slots", one.claimed_us, self._until(one))
            if bound.rate is not None:
                until = one.claimed_us + bound.per_us
                yield from _span(prefix + "tokens", one.claimed_us, until)

    def of_waiting(self, name: str, some: Sequence[Delivered]) -> Iterator[Event]:
        """Yield when messages waited for their first start."""
        firsts: dict[int, Delivered] = {}
        for one in some:
            firsts.setdefault(one.key, one)
        for key in self._keys[name]:
            due_us = self._log.history.offered[key].due_us
            if (first := firsts.get(key)) is None:
                yield from _span(_WAITING, due_us, self._last_us)
            elif first.seen_us:
                # The delay began when the offer had arrived, which only the queue knows, and a
                # claim that was not noted does not tell.
                yield from _span(_WAITING, max(due_us, first.due_us), first.claimed_us)

    def _until(self, one: Delivered) -> int:
        """Return until when a message may have kept its slot."""
        again = self._again_us.get(id(one), _ENDLESS)
        killed = self._log.kills.get(one.who, _ENDLESS)
        told = one.ended_us and (again == _ENDLESS or one.ended_us < killed - _TOLD_US)
        if told or killed == _ENDLESS:
            return min(one.ended_us or one.ends_us, one.ends_us)
        # The lease may have been renewed, or the end may not have left the process.
        return min(again, killed + self._lease_us)


def _span(pool: str, start: int, end: int) -> tuple[Event, ...]:
    return ((start, pool, 1), (end, pool, -1)) if end > start else ()
