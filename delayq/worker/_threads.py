"""Runs handlers that are no coroutines."""

from __future__ import annotations

import asyncio
import math
from threading import Lock
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, to_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_WAITING, _BEGUN, _ABANDONED = range(3)


class Threads:
    """Threads for so many handlers at a time.

    A thread cannot be stopped. Who waits for one may go on without it; its place stays taken until it has ended, or
    handlers that hang would make more and more threads.
    """

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)
        self._no_limit = CapacityLimiter(math.inf)

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run it in a thread, in a copy of the current context. If the caller is cancelled, it goes on for nobody."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        begins = Lock()
        state = _WAITING

        def call() -> Any:
            nonlocal state
            with begins:
                if state == _ABANDONED:
                    return None
                state = _BEGUN
            try:
                return function()
            finally:
                # The loop may have ended before it.
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._places.release)

        try:
            return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._no_limit)
        except BaseException:
            with begins:
                if state == _WAITING:
                    # It never will begin.
                    state = _ABANDONED
                    self._places.release()
            raise
