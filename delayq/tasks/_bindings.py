"""The bindings of tasks to clients, by which their calls reach a queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from delayq._background import running_loop
from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from delayq._reliable.queue import ReliableQueue
    from delayq.codecs.protocol import Codec
    from delayq.tasks._calls import Call

    Work = Callable[[ReliableQueue[Call]], Coroutine[Any, Any, "R"]]

R = TypeVar("R")


class AnyClient(Protocol):
    """A client, async or not."""

    @property
    def reliable_queue(self) -> Callable[..., Any]:
        """The method that opens a queue."""


class Binding(Protocol):
    """The way from tasks to their queue on one client.

    Attributes:
        is_sync: Whether only :meth:`run` works.
    """

    is_sync: bool

    def queue(self) -> ReliableQueue[Call]:
        """Return the queue."""

    def run(self, work: Work[R]) -> R:
        """Call the queue from a thread without an event loop, and return the result."""


class AsyncBinding:
    """Reaches the queue through a :class:`delayq.Client`.

    Attributes:
        client: The client.
    """

    is_sync = False

    def __init__(
        self, client: Any, name: str, codec: Codec[Call], settings: Mapping[str, Any]
    ) -> None:
        self.client: Any = client
        self._name = name
        self._codec = codec
        self._settings = settings
        self._queue: ReliableQueue[Call] | None = None
        self._loop = running_loop()

    def queue(self) -> ReliableQueue[Call]:
        if self._queue is None or self._queue.closed:
            queue: ReliableQueue[Call] = self.client.reliable_queue(
                self._name, codec=self._codec, **self._settings
            )
            # Other handles show its messages as JSON.
            queue.keep_codec()
            self._queue, self._loop = queue, asyncio.get_running_loop()
        return self._queue

    def run(self, work: Work[R]) -> R:
        if running_loop() is not None:
            raise ConfigurationError(
                "offer_sync() would block the event loop: write await ... .offer() here"
            )
        if self._loop is None or not self._loop.is_running():
            raise ConfigurationError(
                "offer_sync() needs a client of delayq.sync, or one whose event loop runs in"
                " another thread"
            )

        async def act() -> R:
            return await work(self.queue())

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result()


class SyncBinding:
    """Reaches the queue through a client of :mod:`delayq.sync`, whose ``run`` provides an async
    one.
    """

    is_sync = True

    def __init__(
        self, client: Any, name: str, codec: Codec[Call], settings: Mapping[str, Any]
    ) -> None:
        self._client = client
        self._queue_args = name, codec, settings
        self._binding: AsyncBinding | None = None

    def queue(self) -> ReliableQueue[Call]:
        raise NotImplementedError

    def run(self, work: Work[R]) -> R:
        async def act(client: Any) -> R:
            # After a fork, it is another one.
            if self._binding is None or self._binding.client is not client:
                self._binding = AsyncBinding(client, *self._queue_args)
            return await work(self._binding.queue())

        result: R = self._client.run(act)
        return result
