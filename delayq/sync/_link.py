"""The link between a synchronous client and the asynchronous one that does its work."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delayq.errors import Closed
from delayq.sync import _portal
from delayq.sync._opened import Opened

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from redis.asyncio import Redis, RedisCluster

    from delayq.client import Client
    from delayq.instrumentation import Observer
    from delayq.sync._opened import Declared


T = TypeVar("T")
Q = TypeVar("Q")
R = TypeVar("R")


class Link:
    """Opens an asynchronous client in the portal of each process that makes a call.

    Attributes:
        observers: The observers that the client shall notify.
    """

    def __init__(
        self,
        new_client: Callable[[str | Redis | RedisCluster | None], Client],
        address: str | Redis | RedisCluster | None,
    ) -> None:
        """Args:
        new_client: Creates the asynchronous client.
        address: Its argument.
        """
        self.observers: list[Observer] = []
        self._closed = False
        self._opened: Opened | None = None
        self._portal: _portal.Portal | None = None
        self._new_client = new_client
        self._address = address
        # Queues that have been declared since the last call, in order.
        self._declared: deque[Declared[Any]] = deque()
        # The one that has checked the arguments is the first to be opened.
        self._unopened: Client | None = new_client(address)

    @property
    def endpoint(self) -> tuple[str, int | None] | None:
        """The client's endpoint; None if it is unknown."""
        known = self._opened or self._unopened
        return None if known is None else known.endpoint

    @property
    def closed(self) -> bool:
        return self._closed

    def declare(self, open_on: Callable[[Client], Q]) -> Door[Q]:
        """Declare a queue, which the next call opens.

        Args:
            open_on: Opens the queue on an asynchronous client.
        """
        self.check_open()
        door = Door(self, open_on)
        self._declared.append(door)
        return door

    def run(self, work: Callable[[Opened, Client], Coroutine[Any, Any, R]]) -> R:
        """Run work in the portal with what is open there, and return its result.

        Raises:
            ConfigurationError: The caller is in the portal's own thread.
            Closed: The client is closed, or the interpreter exits.
        """
        self.check_open()
        portal = _portal.start()
        return portal.run(lambda: self._act(portal, work))

    async def await_run(self, work: Callable[[Opened, Client], Coroutine[Any, Any, R]]) -> R:
        """Run work in the portal for a caller in another event loop, and return its result.

        Raises:
            Closed: The client is closed, or the interpreter exits.
        """
        self.check_open()
        portal = _portal.start()
        return await portal.await_run(lambda: self._act(portal, work))

    def close(self) -> None:
        """Close everything in this process. Later calls raise :class:`~delayq.Closed`."""
        self._closed = True
        if (portal := _portal.find()) is not None and portal.is_usable:
            portal.run(self._close)

    def check_open(self) -> None:
        """Raise :class:`~delayq.Closed` if the client is closed."""
        if self._closed:
            raise Closed("the client is closed")

    def __del__(self) -> None:
        portal, opened = self._portal, self._opened
        if opened is not None and portal is not None and portal.is_usable:
            portal.to_close.discard(opened.aclose)
            portal.spawn(opened.aclose)
            # At last, because it may raise an exception.
            warnings.warn(
                "a synchronous client was not closed: use it as a context manager, or call close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    async def _act(
        self, portal: _portal.Portal, work: Callable[[Opened, Client], Coroutine[Any, Any, R]]
    ) -> R:
        """Do work with what is open. Called in the portal's loop."""
        opened = self._open_in(portal)
        client = await opened.client()
        if self._declared:
            opened.declare(client, self._declared)
        if opened.observers != self.observers:
            opened.observe(client, [*self.observers])
        return await work(opened, client)

    def _open_in(self, portal: _portal.Portal) -> Opened:
        """Return what belongs to this process. Called in the portal's loop."""
        self.check_open()
        opened = self._opened
        if opened is None or self._portal is not portal:
            if opened is not None:
                # After a fork. Queues would inherit settings in another order otherwise.
                self._declared.extendleft(reversed(opened.declared))
                # The private server of the parent, if there is one, is that of its children, too.
                self._address = opened.private_server or self._address
            # It does not refer to this object, or else a client that is dropped would stay open.
            new_client = partial(self._new_client, self._address)
            opened = self._opened = Opened(self._unopened, new_client)
            self._unopened, self._portal = None, portal
            portal.to_close.add(opened.aclose)
        return opened

    async def _close(self) -> None:
        opened, portal = self._opened, self._portal
        if opened is not None and portal is not None and portal.is_usable:
            await opened.aclose()
            portal.to_close.discard(opened.aclose)
            self._opened = None


class Door(Generic[Q]):
    """A queue that a synchronous client has declared.

    In each process, the queue is opened before the first call that follows its declaration.

    Attributes:
        open_on: Opens the queue on an asynchronous client.
    """

    def __init__(self, link: Link, open_on: Callable[[Client], Q]) -> None:
        self.open_on = open_on
        self._link = link

    def run(self, call: Callable[[Q], Coroutine[Any, Any, R]]) -> R:
        """Call the queue in its loop, and return the result."""

        async def work(opened: Opened, client: Client) -> R:
            return await call(opened.queue(client, self))

        return self._link.run(work)


def here(values: Iterable[T]) -> Iterable[T]:
    """Return values that another thread may iterate over.

    A generator would run there, without the database connection or the request of this thread.
    Anything that is to be refused is returned as it is.
    """
    is_refused = isinstance(values, str | bytes) or not isinstance(values, Iterable)
    return values if is_refused else [*values]
