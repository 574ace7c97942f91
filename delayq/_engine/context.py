"""The services that the queues of a client share, except for the clock."""

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
    from delayq._redis.together import Together
    from delayq._redis.topology import Topology
    from delayq._timer.timer import HashedWheelTimer


Channels = Literal["notices", "summons", "notifications", "nothing"]
"""What a client listens to of a queue: notices of due messages, calls for dormant clients, only
notifications about its settings and single messages, which come with both, or nothing. After a
client has listened to something, it receives the notifications until the queue is closed.
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
        together: Sends calls of many queues in one round trip.
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
    together: Together
    resync_interval: float
    retry_most: float
    hooks: Hooks = field(default_factory=Hooks)
    suspects: Suspects[Any] = field(default_factory=Suspects)
    listen: Callable[[Channels], None] = lambda _: None
    at_recheck: Callable[[Callable[[], bool]], object] = lambda _: None
