"""The figures that queues and clients report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from delayq._timer.alarm import AlarmKind


# After how many of its intervals without a report a worker counts as silent.
_SILENT_AFTER = 1.5


COUNTED_STATES = ("ready", "delayed", "leased", "dead")
"""The states of messages that :class:`QueueDepth` counts, in the order of lists and tables."""


@dataclass(frozen=True)
class QueueDepth:
    """The number of messages that the server has of a queue, by state.

    Attributes:
        delayed: Messages that are not due yet; for a delayed queue, also those that are due and
            have not been transferred yet.
        ready: Messages that are due and not held by a worker, including those whose lease has
            ended.
        leased: Messages held by workers.
        dead: Dead letters of a reliable queue.
        oldest_due_age: How long the oldest ready message has been due, or has been without the
            lease that it lost, seconds; 0 if there is none.
            For a delayed queue, how long the first ``delayed`` message has been due.
        paused: Whether a reliable queue is paused.
        quarantined: Unreadable records of a delayed queue; None if unknown.
        paused_for: How long a reliable queue has been paused, seconds; None if it is not, or if
            that is unknown, because an earlier release has paused it.
    """

    delayed: int
    ready: int
    leased: int
    dead: int
    oldest_due_age: float
    paused: bool = False
    quarantined: int | None = 0
    paused_for: float | None = None

    @classmethod
    def total(cls, parts: Sequence[QueueDepth]) -> QueueDepth:
        """Add up partitions. Their queue is paused if any of them is."""
        unknown = any(part.quarantined is None for part in parts)
        pauses = [part.paused_for for part in parts if part.paused]
        known = [pause for pause in pauses if pause is not None]
        return cls(
            **{state: sum(getattr(part, state) for part in parts) for state in COUNTED_STATES},
            oldest_due_age=max(part.oldest_due_age for part in parts),
            paused=any(part.paused for part in parts),
            quarantined=None if unknown else sum(part.quarantined or 0 for part in parts),
            paused_for=max(known, default=None) if len(known) == len(pauses) else None,
        )


@dataclass(frozen=True)
class ClientStats:
    """The state of a client, and counts of its work so far.

    Attributes:
        connections: Open connections to the server.
        connections_opened: Connections opened so far.
        timers: Armed wake-ups.
        alarm: The source of the event loop's wake-ups: ``"timerfd"`` (Linux, exact to a tenth of a
            millisecond) or ``"loop"`` (its own timers: whole milliseconds on asyncio). None before
            the first wake-up is armed.
        round_trips: Commands sent so far.
        errors: Calls that failed so far.
        queues: Open queues.
        waiting: Queues with a consumer waiting for a message.
        quarantined: Unreadable records found so far.
        returned: Messages found so far whose lease had ended: their consumer died, or was too slow.
        timer_wakeups: The number of times the event loop has woken the timer.
        timer_lag: How much later than requested those wake-ups came, added up over all of them,
            seconds.
    """

    connections: int
    connections_opened: int
    timers: int
    alarm: AlarmKind | None
    round_trips: int
    errors: int
    queues: int
    waiting: int
    quarantined: int
    returned: int
    timer_wakeups: int
    timer_lag: float


@dataclass(frozen=True, kw_only=True)
class QueueStats:
    """A client's work on a queue since it opened the queue, without the work of other processes.

    Attributes:
        name: The queue's name. All its partitions count as one queue.
        kind: ``"delayed"`` or ``"reliable"``.
        offered: Messages that were stored, except occurrences of recurring messages.
        delivered: Messages that were handed out, except those that were fetched ahead and given
            back.
        acked: Messages that were acknowledged. Those that ``take`` and similar calls hand out for
            good are never counted.
        retried: Messages that came back after a failure, to be retried.
        dead: Messages that became dead letters: no attempt left, rejected, or their last lease
            ended.
        released: Messages of a reliable queue that came back untouched, as when their handler was
            cancelled.
        expired: Messages of a reliable queue that were found past their time to live.
        lease_ended: Messages of a delayed queue whose lease had ended: their consumer died, or was
            too slow.
        quarantined: Unreadable records of a delayed queue.
        errors: Failed calls for due messages.
        waiting: Whether a consumer is waiting for a message.
        in_flight: Messages being handled: their leases are being renewed.
        slots: How many messages the workers of this client handle at a time, at most.
        free_slots: How many more they could handle now. A worker that is busy with other queues
            has none.
    """

    name: str
    kind: Literal["delayed", "reliable"]
    offered: int
    delivered: int
    acked: int
    retried: int
    dead: int = 0
    released: int = 0
    expired: int = 0
    lease_ended: int = 0
    quarantined: int = 0
    errors: int
    waiting: bool
    in_flight: int = 0
    slots: int = 0
    free_slots: int = 0

    @classmethod
    def total(cls, parts: Sequence[QueueStats]) -> QueueStats:
        """Add up partitions. Their queue is waiting if any of them is."""
        sums = {name: sum(getattr(part, name) for part in parts) for name in _COUNTS}
        return replace(parts[0], waiting=any(part.waiting for part in parts), **sums)


_COUNTS = tuple(
    count.name for count in fields(QueueStats) if count.name not in ("name", "kind", "waiting")
)


# The upper end of the first bucket, seconds. Each of the others reaches 1.41 times as far as the
# one before; the last one also has what is longer than 15 hours.
_FIRST = 0.0001
LAST_BUCKET = 59
"""The last bucket of a :class:`Spread`."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a :class:`Spread` that counts a duration."""
    if seconds <= _FIRST:
        return 0
    return min(LAST_BUCKET, 1 + int(2 * math.log2(seconds / _FIRST)))


@dataclass(frozen=True)
class Spread:
    """How durations are spread, from which quantiles are estimated, to within a fifth.

    Attributes:
        buckets: How many there were, by bucket: bucket 0 counts those up to 0.1 ms, and each of the
            others reaches 1.41 times as far as the one before.
    """

    buckets: Mapping[int, int]

    @property
    def count(self) -> int:
        """How many durations there were. On a busy queue, this is an estimate."""
        return sum(self.buckets.values())

    @property
    def p50(self) -> float | None:
        """The median, seconds; None if there were none."""
        return self.quantile(0.5)

    @property
    def p99(self) -> float | None:
        """The duration that 99 % do not exceed, seconds; None if there were none."""
        return self.quantile(0.99)

    def quantile(self, share: float) -> float | None:
        """Return the duration that this share of all do not exceed, seconds; None if there were
        none.
        """
        remaining = share * self.count
        for bucket in sorted(self.buckets):
            remaining -= self.buckets[bucket]
            if remaining <= 0:
                # The middle of the bucket, on a logarithmic scale.
                return float(_FIRST * 2 ** ((bucket - 0.5) / 2)) if bucket else _FIRST
        return None

    @classmethod
    def total(cls, parts: Sequence[Spread]) -> Spread:
        """Add up spreads."""
        buckets: dict[int, int] = {}
        for part in parts:
            for bucket, count in part.buckets.items():
                buckets[bucket] = buckets.get(bucket, 0) + count
        return cls(buckets)


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The work of all processes on a reliable queue in a minute, an hour, or several of them.

    Attributes:
        start: When it began, UTC.
        seconds: How long it is. The current one has not ended yet.
        offered: Messages that were stored, except occurrences of recurring messages.
        handled: Messages that were acknowledged.
        failed: Attempts that failed, after which the message was to be retried.
        dead: Messages that became dead letters, except those that were buried while no worker had
            them: nothing failed then.
        expired: Messages that were found past their time to live.
        lateness: How long after they were due messages were handed out.
        handling: How long handlers took: ``async with message`` blocks, and listeners of workers.
    """

    start: datetime
    seconds: int
    offered: int
    handled: int
    failed: int
    dead: int
    expired: int
    lateness: Spread
    handling: Spread

    @classmethod
    def total(cls, parts: Sequence[Activity]) -> Activity:
        """Add up activities that follow each other, of which there is at least one."""
        counts = ("seconds", "offered", "handled", "failed", "dead", "expired")
        return replace(
            parts[0],
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            lateness=Spread.total([part.lateness for part in parts]),
            handling=Spread.total([part.handling for part in parts]),
        )


@dataclass(frozen=True)
class RunningMessage:
    """A message that a worker handles.

    Attributes:
        id: Its id.
        attempt: The number of this attempt, from 1.
        since: When its handler began (UTC), to within some milliseconds.
        partition: The partition that it comes from, from 0.
    """

    id: str
    attempt: int
    since: datetime
    partition: int = 0


@dataclass(frozen=True)
class BlockedLoop:
    """Code that blocked the event loop of a process, so that nothing else ran there.

    Attributes:
        code: The function, with its file and line.
        seconds: How long.
        recent: For how much of the minute before ``until`` loops of the process were blocked, in
            seconds.
        until: When the loop ran again (UTC).
    """

    code: str
    seconds: float
    recent: float
    until: datetime


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A client that works on a reliable queue: a worker, or other code that takes messages.

    Attributes:
        queue: The queue's name.
        host: The name of its machine.
        pid: The id of its process there.
        version: The version of delayq that it uses.
        slots: How many messages its workers handle at a time, at most; 0 for code without a worker.
        running: How many messages it handled when it last reported.
        messages: The 20 of them that had run longest.
        started_at: When it opened the queue (UTC).
        seen_at: When it last reported (UTC).
        declared: The settings of the queue that its code declares and of which the server has
            another value, by name; each as the server would store it.
        free: How many more messages of the queue its workers could have begun when it last
            reported. Workers share their slots among the queues.
        process_slots: How many messages the workers of its process handle at a time, at most, of
            all queues together.
        interval: After how long it reports again at the latest, in seconds.
        blocked: The code that last blocked an event loop of its process for more than a second;
            None if none has within an hour.
    """

    queue: str
    host: str
    pid: int
    version: str
    slots: int
    running: int
    messages: tuple[RunningMessage, ...]
    started_at: datetime
    seen_at: datetime
    declared: Mapping[str, str] = field(default_factory=dict)
    free: int = 0
    process_slots: int = 0
    interval: float = 0.0
    blocked: BlockedLoop | None = None

    def silence(self, now: datetime) -> float | None:
        """Return for how many seconds it has not reported by ``now``, if its next report is overdue
        by the server's time; None if it is not.
        """
        silence = (now - self.seen_at).total_seconds()
        return silence if silence > _SILENT_AFTER * self.interval else None
