"""The settings that one queue handle declares, compared with those on the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._redis.connection import own_copy
from delayq._redis.retry import retry_delay
from delayq.errors import DelayqError, ServerError, ServerRefused

if TYPE_CHECKING:
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.settings import Declared


class Declaration:
    """Declares the settings of a queue that a handle was given, at the handle's first call.

    Attributes:
        is_made: Whether the settings on the server are known, and agree with the declared ones.
    """

    def __init__(self, queue: OpenReliableQueue, declared: Declared) -> None:
        self.is_made: bool = False
        self._queue = queue
        self._declared = declared
        # The calls under way, by whether the caller is about to store something.
        self._making: dict[bool, asyncio.Task[DelayqError | None]] = {}

    async def make(self, *, stores: bool = False) -> None:
        """Learn the settings on the server, and declare those of the handle.

        If the caller ``stores`` something, a queue without a number of partitions gets one.
        Concurrent callers share one call. Raises as :meth:`KnownSettings.learn`, and
        :class:`~delayq.Closed`.
        """
        queue = self._queue
        if (making := self._making.get(stores)) is None:
            making = self._making[stores] = queue.services.background.spawn(
                self._make(stores), f"settings of {queue.name}"
            )
        either: set[asyncio.Future[Any]] = {making, queue.closing}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        queue.check_open()
        if (error := making.result()) is not None:
            raise own_copy(error)

    async def make_within(self, wait: float | None) -> float | None:
        """Declare as :meth:`make`, for a caller that waits ``wait`` seconds for messages.

        A caller that waits for messages waits for the server as well.

        Returns:
            How long the caller still waits, in seconds.

        Raises:
            TimeoutError: The time is over.
        """
        queue = self._queue
        until = queue.loop.time() + wait if wait else None
        tries = 0
        async with asyncio.timeout_at(until):
            while not self.is_made:
                try:
                    await self.make()
                except ServerRefused:
                    raise
                except ServerError:
                    if wait == 0:
                        raise
                    tries += 1
                    pause = retry_delay(tries, most=queue.services.retry_most)
                    await asyncio.wait({queue.closing}, timeout=pause)
                    queue.check_open()
        return wait if until is None else max(until - queue.loop.time(), 0.001)

    def give_way(self, changes: Declared) -> None:
        """Declare the changed settings from now on, where the handle declared other ones."""
        self._declared = {name: changes.get(name, text) for name, text in self._declared.items()}

    async def _make(self, stores: bool) -> DelayqError | None:
        try:
            await self._queue.settings.learn(self._declared, stores=stores)
        except DelayqError as error:
            return error
        else:
            self.is_made = True
            return None
        finally:
            del self._making[stores]
