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
    from collections.abc import Awaitable, Callable

    from delayq._scheduling.scheduler import OpenQueue
    from delayq.hooks import Hooks

# So short that the wheel adds next to nothing to what the alarm can do. An idle one costs nothing however short it is.
_TICK = 0.0001


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
        self._closing: asyncio.Task[None] | None = None
        # What waits until queues that were closed on their own have given everything back.
        self._closing_queues: set[asyncio.Task[None]] = set()
        self.scheduler: Scheduler = Scheduler(self.server, self.nodes, self.timer, self.background, resync_interval, hooks)

    def check_loop(self) -> None:
        """Raise a clear error where asyncio would hang or fail late.

        Raises:
            ConfigurationError: We are not in the event loop, or the process, in which the client was opened.
        """
        if asyncio._get_running_loop() is not self._loop:  # noqa: SLF001 - documented for libraries; it does not raise
            raise self.server.wrong_loop()

    async def aclose(self) -> None:
        """Close every queue, then everything else.

        All that was taken for nobody is on its way back before anything is waited for, and a caller who is cancelled leaves the
        rest to a task.
        """
        if self._closing is None:
            end = self.scheduler.close(self.scheduler.queues)
            # Not one of the background tasks, for it ends them.
            self._closing = asyncio.create_task(self._end(end), name="delayq close")
        await _ended(self._closing)

    async def close_queue(self, queue: OpenQueue) -> None:
        """Close one queue, as :meth:`aclose` does."""
        end = self.scheduler.close([queue])
        # Not one of the background tasks: a client that closes meanwhile waits for it.
        closing = asyncio.create_task(end(), name=f"delayq close {queue.name}")
        self._closing_queues.add(closing)
        closing.add_done_callback(self._closing_queues.discard)
        await _ended(closing)

    async def _end(self, end_queues: Callable[[], Awaitable[None]]) -> None:
        try:
            await end_queues()
            if self._closing_queues:
                await asyncio.wait(self._closing_queues)
        finally:
            self.timer.stop()
            await self.background.aclose()
            await self.nodes.aclose()


async def _ended(closing: asyncio.Task[None]) -> None:
    """Wait until closing has ended, also when cancelled. A second cancellation leaves it to its task."""
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.shield(closing)
        raise
