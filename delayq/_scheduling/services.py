"""What a queue is made with: all but the clock its client's queues share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delayq._scheduling.suspects import Suspects
from delayq.hooks import Hooks

if TYPE_CHECKING:
    from delayq._background import Background
    from delayq._redis.nodes import Nodes
    from delayq._redis.server import Server
    from delayq._scheduling.server_clock import ServerClock
    from delayq.timer import HashedWheelTimer


@dataclass(frozen=True, slots=True)
class Services:
    """The parts from which queues are made.

    Attributes:
        server: Runs commands and scripts.
        nodes: Where keys live.
        timer: The client's one wheel.
        clock: What the clock of the server shows that has the queue.
        background: Owns tasks that outlive a call.
        resync_interval: How often everything is looked at, whatever happens, seconds.
        retry_most: The longest wait before a failed call is tried again, seconds.
        hooks: Who watches.
        suspects: Which suspect the client has at work.
    """

    server: Server
    nodes: Nodes
    timer: HashedWheelTimer
    clock: ServerClock
    background: Background
    resync_interval: float
    retry_most: float
    hooks: Hooks = field(default_factory=Hooks)
    suspects: Suspects = field(default_factory=Suspects)
