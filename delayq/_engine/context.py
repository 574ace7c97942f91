"""The services that queues are built from, and the counters that each of them keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from delayq._engine.suspects import Suspects
from delayq.instrumentation import Hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._background import Background
    from delayq._engine.server_clock import ServerClock
    from delayq._redis.client import RedisClient
    from delayq._redis.pipeline import CallCoalescer
    from delayq._redis.topology import Topology
    from delayq._timer.timer import HashedWheelTimer


Channels = Literal["notices", "summons", "notifications", "nothing"]
"""The channels of a queue to which a client listens: those of its announcements and notices; of the
summons, which are for dormant clients; of notifications only, which tell of changed settings and of
single messages; or none. A client that listens to any of them receives the notifications, too, from
then on until the queue is closed.
"""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The services that queues are built from.

    Attributes:
        server: Runs commands and scripts.
        nodes: Locates the server that holds a key.
        timer: The client's only timer wheel.
        clock: Estimates the clock of the server that holds the queue.
        background: Owns tasks that outlive a call.
        coalescer: Sends calls of many queues in one round trip.
        resync_interval: How often everything is re-checked, whatever happens, in seconds.
        retry_most: Longest wait before a failed call is tried again, in seconds.
        hooks: The observers to notify.
        suspects: Tracks the suspect that the client has at work.
        listen: Changes to which channels of the queue that these services are for the client
            listens.
        at_recheck: Takes a function to call at each re-check until it returns False.
    """

    server: RedisClient
    nodes: Topology
    timer: HashedWheelTimer
    clock: ServerClock
    background: Background
    coalescer: CallCoalescer
    resync_interval: float
    retry_most: float
    hooks: Hooks = field(default_factory=Hooks)
    suspects: Suspects[Any] = field(default_factory=Suspects)
    listen: Callable[[Channels], None] = lambda _: None
    at_recheck: Callable[[Callable[[], bool]], object] = lambda _: None


@dataclass(slots=True)
class Counters:
    """Message counters of one queue on this client, from the moment the queue was opened.

    Attributes:
        offered: Messages stored.
        delivered: Messages handed out.
        acked: Messages acknowledged.
        retried: Messages given back after a failure, to be tried again.
        buried: Messages made dead letters by their holder.
        released: Messages given back untouched by their holder.
        lease_ended: Messages of a delayed queue found with their lease ended.
        quarantined: Unreadable records of a delayed queue.
        slots: Messages that workers handle at a time now, at most. The first partition counts for
            all, because workers take from all of them alike.
        free_slots: Return how many of them are free, one for each worker.
    """

    offered: int = 0
    delivered: int = 0
    acked: int = 0
    retried: int = 0
    buried: int = 0
    released: int = 0
    lease_ended: int = 0
    quarantined: int = 0
    slots: int = 0
    free_slots: list[Callable[[], int]] = field(default_factory=list)
