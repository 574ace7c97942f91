"""What exists while a client is open."""

from __future__ import annotations

import asyncio

import anyio

from delayq._background import Background
from delayq._redis.address import AnyAddress, ClusterAddress
from delayq._redis.cluster import Cluster
from delayq._redis.connections import Connections
from delayq._redis.nodes import Nodes, OneServer
from delayq._redis.server import Server
from delayq._scheduling.scheduler import Scheduler
from delayq.timer import HashedWheelTimer

# So short that the wheel adds next to nothing to what the alarm can do. An idle one costs nothing however short it is.
_TICK = 0.0001
# What is on its way when a client closes has so long, and closing takes so long in all, seconds.
GRACE = 0.4
_CLOSE_WITHIN = 0.9


class Session:
    """Connections, the one timer, the background tasks and the scheduler, which all queues of a client share."""

    def __init__(self, address: AnyAddress, max_connections: int, resync_interval: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.nodes: Nodes = (
            Cluster(address, max_connections)
            if isinstance(address, ClusterAddress)
            else OneServer(Connections(address, max_connections))
        )
        self.server: Server = Server(self.nodes)
        self.timer: HashedWheelTimer = HashedWheelTimer(tick_duration=_TICK)
        self.background: Background = Background()
        self.scheduler: Scheduler = Scheduler(self.server, self.nodes, self.timer, self.background, resync_interval)

    def check_loop(self) -> None:
        """Raise a clear error where asyncio would hang or fail late.

        Raises:
            ConfigurationError: We are not in the event loop, or the process, in which the client was opened.
        """
        if asyncio._get_running_loop() is not self._loop:  # noqa: SLF001 - documented for libraries; it does not raise
            raise self.server.wrong_loop()

    async def aclose(self) -> None:
        """Close every queue, then everything else."""
        try:
            with anyio.move_on_after(_CLOSE_WITHIN):
                await asyncio.gather(*(self.scheduler.close(queue, GRACE) for queue in self.scheduler.queues))
        finally:
            self.timer.stop()
            await self.background.aclose()
            await self.nodes.aclose()
