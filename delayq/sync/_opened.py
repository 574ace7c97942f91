"""The asynchronous client, with its queues, that does the work of a synchronous one."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from delayq._redis.connection import own_copy
from delayq.errors import Closed, DelayqError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from delayq.client import Client
    from delayq.instrumentation import Observer

Q_co = TypeVar("Q_co", covariant=True)


class Declared(Protocol[Q_co]):
    """A queue as a synchronous client has declared it."""

    def open_on(self, client: Client) -> Q_co: ...


class Opened:
    """An asynchronous client, and its queues. All methods are called in the portal's loop.

    Attributes:
        observers: The observers that the client notifies.
    """

    def __init__(self, unopened: Client | None, new_client: Callable[[], Client]) -> None:
        """Args:
        unopened: The client, if it was created before.
        new_client: Creates one, also whenever opening the previous one has failed.
        """
        self.observers: list[Observer] = []
        self._unopened = unopened
        self._new_client = new_client
        self._client: Client | None = None
        self._opening: asyncio.Task[Client] | None = None
        # In the order in which they were declared: each inherits settings from those before it.
        self._queues: WeakKeyDictionary[Declared[Any], Any] = WeakKeyDictionary()

    @property
    def declared(self) -> list[Declared[Any]]:
        """The queues that are in use, in the order in which they were declared."""
        return [*self._queues]

    @property
    def private_server(self) -> str | None:
        """The address of the client's private server; None if it has none."""
        return None if self._client is None else self._client.private_server

    @property
    def endpoint(self) -> tuple[str, int | None] | None:
        """The client's endpoint; None if it is unknown."""
        known = self._client or self._unopened
        return None if known is None else known.endpoint

    async def client(self) -> Client:
        """Return the client, which is opened if necessary.

        Raises:
            As ``async with delayq.connect(...)``; or Closed, if it is closed meanwhile.
        """
        if self._client is not None:
            return self._client
        if self._opening is None:
            # A task of its own, because the caller may be interrupted while others wait; and an
            # empty context, or connections would keep alive what belongs to a request.
            self._opening = asyncio.Task(
                self._open(), loop=asyncio.get_running_loop(), context=Context()
            )
            self._opening.add_done_callback(self._has_opened)
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except DelayqError as error:
            raise own_copy(error) from error.__cause__
        except asyncio.CancelledError:
            if opening.cancelled():
                # The caller was not interrupted: another thread is closing the client.
                raise Closed("the client is closed") from None
            raise

    def declare(self, client: Client, new: deque[Declared[Any]]) -> None:
        """Open queues that were declared, in their order."""
        while new:
            declared = new.popleft()
            try:
                self.queue(client, declared)
            except DelayqError:
                # Raised again by its own calls. It does not concern the current one.
                continue

    def queue(self, client: Client, declared: Declared[Q_co]) -> Q_co:
        """Return an open queue, which is opened if necessary.

        Raises:
            BadName, ConfigurationError: It contradicts another queue of the client.
        """
        queue: Q_co | None = self._queues.get(declared)
        if queue is None:
            queue = self._queues[declared] = declared.open_on(client)
        return queue

    def observe(self, client: Client, observers: list[Observer]) -> None:
        """Notify these observers, and no others."""
        for observer in self.observers:
            client.unobserve(observer)
        for observer in observers:
            client.observe(observer)
        self.observers = observers

    async def aclose(self) -> None:
        """Close the client."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._client is not None:
            await self._client.aclose()

    async def _open(self) -> Client:
        client, self._unopened = self._unopened or self._new_client(), None
        self._client = await client.__aenter__()
        return client

    def _has_opened(self, opening: asyncio.Task[Client]) -> None:
        self._opening = None
        if not opening.cancelled():
            # Each caller that still waits gets the error.
            opening.exception()
