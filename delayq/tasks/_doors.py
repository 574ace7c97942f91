"""The ways by which calls of tasks reach a queue: one for each client that they are bound to."""
# ruff: noqa: SLF001 - the tasks and the queue are one library

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delayq._reliable.queue import ReliableQueue
    from delayq.codecs.protocol import Codec
    from delayq.tasks._calls import Call


class AnyClient(Protocol):
    """A client, async or not."""

    @property
    def reliable_queue(self) -> Callable[..., Any]:
        """The method that opens a queue."""


class Door(Protocol):
    """Leads calls to a queue.

    Attributes:
        is_sync: Whether only :meth:`offer_sync` works.
    """

    is_sync: bool

    def queue(self) -> ReliableQueue[Call]:
        """Return the queue."""

    def offer_sync(self, call: Call, options: Mapping[str, Any]) -> str:
        """Offer a call, wait for it in this thread, and return the id of its message."""


class AsyncDoor:
    """Leads through a :class:`delayq.Client`."""

    is_sync = False

    def __init__(
        self, client: AnyClient, name: str, codec: Codec[Call], settings: Mapping[str, Any]
    ) -> None:
        self._client = client
        self._name = name
        self._codec = codec
        self._settings = settings
        self._queue: ReliableQueue[Call] | None = None
        self._loop = asyncio._get_running_loop()

    def queue(self) -> ReliableQueue[Call]:
        if self._queue is None or self._queue._first.closed:
            queue: ReliableQueue[Call] = self._client.reliable_queue(
                self._name, codec=self._codec, **self._settings
            )
            # Other handles show its messages as JSON.
            queue.keep_codec()
            self._queue, self._loop = queue, queue._open.loop
        return self._queue

    def offer_sync(self, call: Call, options: Mapping[str, Any]) -> str:
        if asyncio._get_running_loop() is not None:
            raise ConfigurationError(
                "offer_sync() would block the event loop: write await ... .offer() here"
            )
        if self._loop is None or not self._loop.is_running():
            raise ConfigurationError(
                "offer_sync() needs a client of delayq.sync, or one whose event loop runs in"
                " another thread"
            )

        async def offer() -> str:
            return await self.queue().offer(call, **options)

        return asyncio.run_coroutine_threadsafe(offer(), self._loop).result()


class SyncDoor:
    """Leads through a client that blocks its thread."""

    is_sync = True

    def __init__(
        self, client: AnyClient, name: str, codec: Codec[Call], settings: Mapping[str, Any]
    ) -> None:
        self._queue = client.reliable_queue(name, codec=codec, **settings)

    def queue(self) -> ReliableQueue[Call]:
        raise NotImplementedError

    def offer_sync(self, call: Call, options: Mapping[str, Any]) -> str:
        stored: str = self._queue.offer(call, **options)
        return stored
