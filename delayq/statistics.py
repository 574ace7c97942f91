"""How many messages are where, and what a client has done: the figures that it gives, and how partitions' make one queue's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from delayq._scheduling.open_delayed import OpenDelayedQueue
from delayq._scheduling.open_reliable import OpenReliableQueue
from delayq.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq.alarm import AlarmKind

    AnyOpen = OpenDelayedQueue | OpenReliableQueue


@dataclass(frozen=True)
class Stats:
    """How many messages are where.

    Attributes:
        delayed: Not due yet.
        ready: Due, and with no worker. Messages whose lease has ended are among them.
        leased: With workers. This and ``delayed`` are exact up to a thousand leases; beyond, messages that are delayed may be
            counted here, as many as there are leases that have ended and whose messages nobody has claimed again yet.
        dead: Dead letters.
        oldest_due_age: For how long the oldest ready message has been due, seconds; 0 when none is.
        paused: Whether the queue is paused.
    """

    delayed: int
    ready: int
    leased: int
    dead: int
    oldest_due_age: float
    paused: bool

    @classmethod
    def total(cls, parts: Sequence[Stats]) -> Stats:
        """Those of a queue, from its partitions'; paused if any is."""
        return cls(
            sum(part.delayed for part in parts),
            sum(part.ready for part in parts),
            sum(part.leased for part in parts),
            sum(part.dead for part in parts),
            max(part.oldest_due_age for part in parts),
            any(part.paused for part in parts),
        )


@dataclass(frozen=True)
class ClientStatistics:
    """What a client holds and has done.

    Attributes:
        connections: Open connections to the server.
        connections_opened: Connections opened so far.
        timers: Wake-ups that are armed.
        alarm: What wakes the event loop for them: ``"timerfd"`` (Linux, exact to a tenth of a millisecond) or ``"loop"`` (its own
            timers: whole milliseconds on asyncio). None before the first.
        round_trips: Commands sent so far.
        errors: Calls that failed so far.
        queues: Open queues.
        waiting: Queues on which somebody waits for a message.
        quarantined: Unreadable records found so far.
        returned: Messages found so far whose lease had ended: their consumer died, or was too slow.
        timer_wakeups: How often the event loop has woken the timer.
        timer_lag: How much later than at the moment asked for it did so, over all wake-ups, seconds.
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


@dataclass(frozen=True)
class QueueStatistics:
    """What a client has done with a queue since it opened that queue. What other processes do is not in it.

    Attributes:
        name: The queue's name. All its partitions are one here.
        kind: ``"delayed"`` or ``"reliable"``.
        offered: Messages that were stored. Occurrences of what recurs are not among them.
        delivered: Messages that were handed out. What was fetched ahead and given back is not among them.
        acked: Messages that were acknowledged. Those that ``take`` and the like hand out for good never are.
        retried: Messages that came back after a failure, to be tried again.
        dead: Messages that became dead letters: without an attempt left, rejected, or with their last lease ended.
        released: Messages of a reliable queue that came back untouched, as when their handler was cancelled.
        expired: Messages of a reliable queue that were found past their time to live.
        lease_ended: Messages of a delayed queue whose lease had ended: their consumer died, or was too slow.
        quarantined: Unreadable records of a delayed queue.
        errors: Calls for what is due that failed.
        waiting: Whether somebody waits for a message.
    """

    name: str
    kind: Literal["delayed", "reliable"]
    offered: int
    delivered: int
    acked: int
    retried: int
    dead: int
    released: int
    expired: int
    lease_ended: int
    quarantined: int
    errors: int
    waiting: bool


def statistics_of(queues: Sequence[AnyOpen]) -> QueueStatistics:
    """What was done with a queue, or with all of its partitions that are open."""
    first = queues[0]
    counts = [queue.counts for queue in queues]
    delayed = [queue.transfer for queue in queues if isinstance(queue, OpenDelayedQueue)]
    claims = [queue.claims for queue in queues if isinstance(queue, OpenReliableQueue)]
    return QueueStatistics(
        name=first.whole,
        kind=first.kind,
        offered=sum(each.offered for each in counts),
        delivered=sum(each.delivered for each in counts),
        acked=sum(each.acked for each in counts),
        retried=sum(each.retried for each in counts),
        dead=sum(each.buried for each in counts) + sum(each.died for each in claims),
        released=sum(each.released for each in counts),
        expired=sum(each.expired for each in claims),
        lease_ended=sum(each.returned for each in delayed),
        quarantined=sum(each.quarantined for each in delayed),
        errors=sum(queue.pushes.errors for queue in queues),
        waiting=any(each.waiting for each in delayed) or any(each.taker.waiting for each in claims),
    )


def stats_of(depths: Sequence[Sequence[Any] | BaseException]) -> Stats | ServerError:
    """Those of a queue, from what is known of its partitions."""
    stats = []
    for depth in depths:
        if isinstance(depth, ServerError):
            return depth
        if isinstance(depth, BaseException):
            raise depth
        stats.append(Stats(*depth))
    return Stats.total(stats)
