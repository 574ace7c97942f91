"""What exists while a client is open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from delayq._background import Background
from delayq._redis.address import AnyAddress, ClusterAddress
from delayq._redis.cluster import Cluster
from delayq._redis.connections import Connections
from delayq._redis.nodes import Nodes, OneServer
from delayq._redis.server import Server
from delayq._scheduling.scheduler import Scheduler
from delayq.timer import HashedWheelTimer

if TYPE_CHECKING:
    from delayq.hooks import Hooks

# So short that the wheel adds next to nothing to what the alarm can do. An idle one costs nothing however short it is.
_TICK = 0.0001
# All queues are closed within so long, seconds.
_CLOSE_WITHIN = 0.9


class Session:
    """Connections, the one timer, the background tasks and the scheduler, which all queues of a client share."""

    def __init__(self, address: AnyAddress, max_connections: int, resync_interval: float, hooks: Hooks) -> None:
        self._loop = asyncio.get_running_loop()
        self.nodes: Nodes = (
            Cluster(address, max_connections)
            if isinstance(address, ClusterAddress)
            else OneServer(Connections(address, max_connections))
        )
        self.server: Server = Server(self.nodes)
        self.timer: HashedWheelTimer = HashedWheelTimer(tick_duration=_TICK)
        self.background: Background = Background()
        self.scheduler: Scheduler = Scheduler(self.server, self.nodes, self.timer, self.background, resync_interval, hooks)

    def check_loop(self) -> None:
        """Raise a clear error where asyncio would hang or fail late.

        Raises:
            ConfigurationError: We are not in the event loop, or the process, in which the client was opened.
        """
        if asyncio._get_running_loop() is not self._loop:  # noqa: SLF001 - documented for libraries; it does not raise
            raise self.server.wrong_loop()

    async def aclose(self) -> None:
        """Close every queue, then everything else."""
        # Not gathered in a scope of anyio's: who ends well although it was cancelled lets asyncio forget who cancelled it, and
        # then the scope takes it for somebody else's doing.
        closing = [self.background.spawn(self.scheduler.close(queue), f"close {queue.name}") for queue in self.scheduler.queues]
        try:
            if closing:
                await asyncio.wait(closing, timeout=_CLOSE_WITHIN)
        finally:
            self.timer.stop()
            await self.background.aclose()
            await self.nodes.aclose()
