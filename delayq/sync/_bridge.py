"""The bridge from synchronous objects to the asynchronous ones that do their work.

Methods of synchronous classes are made from the asynchronous ones. They exist at run time only.
Type checkers and editors read ``delayq/sync/__init__.pyi`` instead, which ``make stubs`` writes.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections import deque
from collections.abc import Iterable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from delayq._redis.connection import own_copy
from delayq.errors import Closed, DelayqError
from delayq.sync import _portal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from redis.asyncio import Redis, RedisCluster

    from delayq.client import Client
    from delayq.instrumentation import Observer

C = TypeVar("C", bound="type[Forwarder]")
F = TypeVar("F", bound="Callable[..., Any]")
Q = TypeVar("Q")
R = TypeVar("R")

# Synchronous classes lack these. Messages are taken by a worker, or by asynchronous code,
# which gives them back if it is cancelled.
_TAKING_METHODS = {"claim", "deliveries", "drain", "poll", "poll_many", "take"}
# Methods for the library itself, and those that have another name.
_INTERNAL_METHODS = {
    "aclose",
    "as_opened",
    "keep_codec",
    "key_sets",
    "relay_port",
    "result_payload",
    "through",
    "worker_port",
}


class SyncBridge:
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
        new_client: Creates the asynchronous client, again whenever it could not be opened.
        address: Its argument.
        """
        self.observers: list[Observer] = []
        self._closed = False
        self._new_client = new_client
        self._address = address
        # Queues that have been declared since the last call, in order.
        self._declared: deque[QueueRef[Any]] = deque()
        # The state of the process that made the last call. Used in its portal's loop only.
        self._portal: _portal.Portal | None = None
        self._client: Client | None = None
        self._opening: asyncio.Task[Client] | None = None
        self._notified: list[Observer] = []
        # In the order in which they were declared: each inherits settings from those before it.
        self._queues: WeakKeyDictionary[QueueRef[Any], Any] = WeakKeyDictionary()
        # The client that has checked the arguments is the first to be opened.
        self._unopened: Client | None = new_client(address)

    @property
    def endpoint(self) -> tuple[str, int | None] | None:
        """The client's endpoint; None if it is unknown."""
        client = self._client or self._unopened
        return None if client is None else client.endpoint

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        """Raise :class:`~delayq.Closed` if the client is closed."""
        if self._closed:
            raise Closed("the client is closed")

    def declare(self, open_on: Callable[[Client], Q]) -> QueueRef[Q]:
        """Declare a queue, which the next call opens.

        Args:
            open_on: Opens the queue on an asynchronous client.
        """
        queue = QueueRef(self, open_on)
        self._declared.append(queue)
        return queue

    def run(self, work: Callable[[Client], Coroutine[Any, Any, R]]) -> R:
        """Run work in the portal with the open client, and return its result.

        Raises:
            ConfigurationError: The caller is in the portal's own thread.
            Closed: The client is closed, or the interpreter exits.
        """
        self.check_open()
        portal = _portal.start()
        return portal.run(lambda: self._act(portal, work))

    async def await_run(self, work: Callable[[Client], Coroutine[Any, Any, R]]) -> R:
        """Run work in the portal for a caller in another event loop, and return its result.

        Raises:
            Closed: The client is closed, or the interpreter exits.
        """
        self.check_open()
        portal = _portal.start()
        return await portal.await_run(lambda: self._act(portal, work))

    def queue(self, client: Client, declared: QueueRef[Q]) -> Q:
        """Return an open queue, which is opened if necessary. Called in the portal's loop.

        Raises:
            BadName, ConfigurationError: It contradicts another queue of the client.
        """
        queue: Q | None = self._queues.get(declared)
        if queue is None:
            queue = self._queues[declared] = declared.open_on(client)
        return queue

    def close(self) -> None:
        """Close everything in this process. Later calls raise :class:`~delayq.Closed`."""
        self._closed = True
        if (portal := _portal.find()) is not None and portal.is_usable:
            portal.run(self._close)

    async def aclose(self) -> None:
        """Close the client of this process. Called in the portal's loop."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._client is not None:
            await self._client.aclose()

    def __del__(self) -> None:
        portal, client = self._portal, self._client
        if portal is not None and portal.is_usable:
            if client is not None:
                portal.spawn(client.aclose)
            # At last, because it may raise an exception.
            warnings.warn(
                "a synchronous client was not closed: use it as a context manager, or call close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    async def _act(
        self, portal: _portal.Portal, work: Callable[[Client], Coroutine[Any, Any, R]]
    ) -> R:
        self.check_open()
        if self._portal is not portal:
            self._enter(portal)
        client = self._client or await self._open()
        if self._declared:
            self._open_declared(client)
        if self._notified != self.observers:
            self._observe(client)
        return await work(client)

    def _enter(self, portal: _portal.Portal) -> None:
        """Begin to use the portal of another process: the first one, or a forked child."""
        if self._portal is not None:
            # Queues would inherit settings in another order otherwise.
            self._declared.extendleft(reversed([*self._queues]))
            self._queues = WeakKeyDictionary()
            if self._client is not None:
                # The private server of the parent, if there is one, is that of its children, too.
                self._address = self._client.private_server or self._address
            self._client = self._opening = None
            self._notified = []
        self._portal = portal
        portal.to_close.add(self)

    async def _open(self) -> Client:
        """Open the client, for all calls that wait for it.

        Raises:
            As ``async with delayq.connect(...)``; or Closed, if it is closed meanwhile.
        """
        if self._opening is None:
            # A task of its own, because the caller may be interrupted while others wait; and an
            # empty context, or connections would keep alive what belongs to a request.
            self._opening = asyncio.Task(
                self._connect(), loop=asyncio.get_running_loop(), context=Context()
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

    async def _connect(self) -> Client:
        client, self._unopened = self._unopened or self._new_client(self._address), None
        self._client = await client.__aenter__()
        return client

    def _has_opened(self, opening: asyncio.Task[Client]) -> None:
        self._opening = None
        if not opening.cancelled():
            # Each caller that still waits gets the error.
            opening.exception()

    def _open_declared(self, client: Client) -> None:
        """Open the queues that were declared since the last call, in their order."""
        while self._declared:
            declared = self._declared.popleft()
            try:
                self.queue(client, declared)
            except DelayqError:
                # Raised again by its own calls. It does not concern the current one.
                continue

    def _observe(self, client: Client) -> None:
        observers = [*self.observers]
        for observer in self._notified:
            client.unobserve(observer)
        for observer in observers:
            client.observe(observer)
        self._notified = observers

    async def _close(self) -> None:
        portal = self._portal
        if portal is not None and portal.is_usable:
            await self.aclose()
            portal.to_close.discard(self)
            self._portal = self._client = None


class QueueRef(Generic[Q]):
    """A queue that a synchronous client has declared.

    In each process, the queue is opened before the first call that follows its declaration.

    Attributes:
        open_on: Opens the queue on an asynchronous client.
    """

    def __init__(self, bridge: SyncBridge, open_on: Callable[[Client], Q]) -> None:
        self.open_on = open_on
        self._bridge = bridge

    def run(self, call: Callable[[Q], Coroutine[Any, Any, R]]) -> R:
        """Call the queue in its loop, and return the result."""
        return self._bridge.run(lambda client: call(self._bridge.queue(client, self)))


class Forwarder(Protocol):
    """A synchronous object whose methods are carried out by an asynchronous one."""

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Call the asynchronous object in its loop, and return the result."""


def forwards(asynchronous: type) -> Callable[[C], C]:
    """Give a class the public methods of an asynchronous one, besides those that it has itself."""

    def add_methods(synchronous: C) -> C:
        for name, function in _public_methods(asynchronous):
            if name not in vars(synchronous):
                method = signed_as(function)(_forwarder_of(name, function))
                method.__module__ = synchronous.__module__
                setattr(synchronous, name, method)
        return synchronous

    return add_methods


def signed_as(original: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function the name and signature of another, and its docstring if it has none."""

    def sign(function: F) -> F:
        # Without __wrapped__, for which inspect would call it a coroutine function.
        vars(function).update(__signature__=inspect.signature(original), signed_as=original)
        function.__name__, function.__qualname__ = original.__name__, original.__qualname__
        function.__annotations__ = original.__annotations__
        function.__doc__ = function.__doc__ or original.__doc__
        return function

    return sign


def _public_methods(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the methods of a class that a synchronous one has, too, in their order."""
    for base in owner.__mro__:
        for name, member in vars(base).items():
            is_here = not name.startswith("_") and name not in _TAKING_METHODS | _INTERNAL_METHODS
            if is_here and inspect.isfunction(member):
                yield name, member


def _forwarder_of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    is_async = inspect.iscoroutinefunction(function)
    # The positions and names of parameters that may be generators.
    iterables: set[int | str] = set()
    for position, parameter in enumerate(inspect.signature(function).parameters.values(), -1):
        if str(parameter.annotation).startswith(("Iterable[", "Collection[")):
            iterables |= {position, parameter.name}

    def forward(self: Forwarder, *args: Any, **kwargs: Any) -> Any:
        if iterables:
            args = tuple(_to_list(value, key in iterables) for key, value in enumerate(args))
            kwargs = {key: _to_list(value, key in iterables) for key, value in kwargs.items()}

        async def act(target: Any) -> Any:
            result = getattr(target, name)(*args, **kwargs)
            return await result if is_async else result

        return self._run(act)

    return forward


def _to_list(value: Any, is_iterable: bool) -> Any:
    """Return a value that another thread may iterate over.

    A generator would run there, without the database connection or the request of this thread.
    Anything that is to be refused is returned as it is.
    """
    if is_iterable and isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [*value]
    return value
