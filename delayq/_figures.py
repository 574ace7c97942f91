"""How the figures of a queue's partitions add up to the queue's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._delayed.open_queue import OpenDelayedQueue
from delayq._reliable.open_queue import OpenReliableQueue
from delayq.errors import ServerError
from delayq.stats import QueueStatistics, Stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    AnyOpen = OpenDelayedQueue | OpenReliableQueue


def statistics_of(queues: Sequence[AnyOpen]) -> QueueStatistics:
    """Return what was done with a queue, or with all of its open partitions."""
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
        lease_ended=sum(each.lease_ended for each in counts),
        quarantined=sum(each.quarantined for each in counts),
        errors=sum(queue.pushes.errors for queue in queues),
        waiting=any(each.waiting for each in delayed) or any(each.taker.waiting for each in claims),
    )


def stats_of(depths: Sequence[Sequence[Any] | BaseException]) -> Stats | ServerError:
    """Return the figures of a queue from the depths of its partitions, or the first error among them."""
    stats = []
    for depth in depths:
        if isinstance(depth, ServerError):
            return depth
        if isinstance(depth, BaseException):
            raise depth
        stats.append(Stats(*depth))
    return Stats.total(stats)
