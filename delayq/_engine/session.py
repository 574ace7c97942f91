"""The objects that exist while a client is open."""

from __future__ import annotations

import asyncio
import os

# It is documented for libraries, and does not raise.
from asyncio import _get_running_loop
from threading import get_ident
from typing import TYPE_CHECKING
from weakref import WeakSet

from delayq._background import Background
from delayq._engine.context import EngineContext
from delayq._engine.scheduler import Scheduler
from delayq._engine.server_clock import ServerClock
from delayq._redis.client import RedisClient
from delayq._redis.durability import Disk
from delayq._redis.pipeline import CallCoalescer
from delayq._redis.pool import ConnectionPool
from delayq._redis.topology import Cluster, Topology
from delayq._redis.url import Address, AnyAddress, ClusterAddress
from delayq._timer.timer import HashedWheelTimer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._engine.scheduler import QueuePart
    from delayq.instrumentation import Hooks

# Seconds. An idle wheel costs nothing, however short its ticks.
_TICK, _TICKS = 0.000025, 2048


class Session:
    """The connections, the timer, the tasks and the scheduler of a client."""

    def __init__(
        self,
        address: AnyAddress,
        max_connections: int,
        resync_interval: float,
        hooks: Hooks,
        retry_for: float | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        # None in a child process.
        self._thread: int | None = get_ident()
        _of_this_process.add(self)
        self.nodes: Topology = (
            Cluster(address, max_connections)
            if isinstance(address, ClusterAddress)
            else Topology(ConnectionPool(address, max_connections))
        )
        directory = address.directory if isinstance(address, Address) else ""
        self.server: RedisClient = RedisClient(
            self.nodes, retry_for, Disk(directory) if directory else None
        )
        self.timer: HashedWheelTimer = HashedWheelTimer(_TICK, _TICKS)
        self.background: Background = Background()
        self._closing: asyncio.Task[None] | None = None
        # Tasks that wait until queues closed on their own have given everything back.
        self._closing_queues: set[asyncio.Task[None]] = set()
        services = EngineContext(
            self.server,
            self.nodes,
            self.timer,
            ServerClock(self._loop.time),
            self.background,
            CallCoalescer(self.server, self.background),
            resync_interval,
            # No caller should wait longer for a retry than for the re-check.
            min(5.0, resync_interval),
            hooks,
        )
        self.scheduler: Scheduler = Scheduler(services)

    def on_fork(self) -> None:
        """Belong to no thread from now on: this is a child process."""
        self._thread = None

    def check_loop(self) -> None:
        """Raise ConfigurationError unless the client was opened in this event loop and process.

        Otherwise asyncio would hang, or fail late.
        """
        # While our loop runs in its thread, no other one does. Asking asyncio which one runs is a
        # system call on Python 3.11.
        if get_ident() == self._thread and self._loop.is_running():
            return
        if _get_running_loop() is not self._loop:
            raise self.server.wrong_loop()

    async def aclose(self) -> None:
        """Close every queue, then everything else, even if the caller is cancelled.

        Messages that reached no consumer are on their way back before this waits for anything.
        """
        if self._closing is None:
            end = self.scheduler.close(self.scheduler.parts)
            # Not one of the background tasks, because it ends them.
            self._closing = asyncio.create_task(self._end(end), name="delayq close")
        await _wait_until_closed(self._closing)

    async def close_parts(self, parts: Sequence[QueuePart]) -> None:
        """Close a queue, or all its partitions, as :meth:`aclose` does."""
        end = self.scheduler.close(parts)
        # Not one of the background tasks: if the client closes meanwhile, it waits for this one.
        closing = asyncio.create_task(end(), name=f"delayq close {parts[0].name}")
        self._closing_queues.add(closing)
        closing.add_done_callback(self._closing_queues.discard)
        await _wait_until_closed(closing)

    async def _end(self, end_queues: Callable[[], Awaitable[None]]) -> None:
        try:
            await end_queues()
            if self._closing_queues:
                await asyncio.wait(self._closing_queues)
        finally:
            self.timer.stop()
            await self.background.aclose()
            await self.nodes.aclose()


async def _wait_until_closed(closing: asyncio.Task[None]) -> None:
    """Wait until closing has ended, even if cancelled. After a second one, it ends on its own."""
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.shield(closing)
        raise


_of_this_process: WeakSet[Session] = WeakSet()


def _after_fork() -> None:
    for session in _of_this_process:
        session.on_fork()
    _of_this_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
