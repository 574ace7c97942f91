"""connect() and the client for code that is not asynchronous."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from delayq import client as asynchronous
from delayq._checks import check_flag, check_max_payload
from delayq._engine import durability as durabilities
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.queue import MAX_PAYLOAD
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.settings import HandleOptions, HandleSettings, check_names
from delayq.codecs import JsonCodec
from delayq.codecs.protocol import check_codec
from delayq.sync._bridge import SyncBridge, forwards, signed_as
from delayq.sync._queues import DelayedQueue, ReliableQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from typing import Self, Unpack

    from redis.asyncio import Redis, RedisCluster

    from delayq._redisson.queue import DelayedQueue as AsyncDelayedQueue
    from delayq._reliable.queue import ReliableQueue as AsyncReliableQueue
    from delayq.codecs import Codec
    from delayq.instrumentation import Observer
    from delayq.tasks import Tasks

R = TypeVar("R")
P = ParamSpec("P")


@signed_as(asynchronous.connect)
def connect(
    address: str | Redis | RedisCluster | None = None,
    *,
    name_mapper: Callable[[str], str] | None = None,
    tasks: Iterable[Tasks] = (),
    **options: Any,
) -> Client:
    """Create a client for code that is not asynchronous.

    It connects in a ``with`` statement, or with its first call: so it may be a global variable of a
    module, and be created before the process forks.

    Args:
        address: As for :func:`delayq.connect`, like all arguments but ``tasks``.
        name_mapper: Maps a queue's name to its name on the server.
        tasks: Tasks to bind to the client until it is closed: ``offer_sync`` goes through it.
        **options: ``resync_interval``, ``max_connections`` and ``retry_for``.

    Raises:
        ConfigurationError: There is no address, or it cannot be parsed.
        BadInput: ``resync_interval``, ``max_connections`` or ``retry_for`` is invalid.
    """
    new_client = partial(asynchronous.connect, name_mapper=name_mapper, **options)
    return Client(new_client, address, name_mapper, tuple(tasks))


@forwards(asynchronous.Client)
class Client:
    """A connection to one server, and the queues on it, for code that is not asynchronous.

    Create one with :func:`delayq.sync.connect`, as many as you like: all clients of a process share
    one thread, in which an event loop does their work. Any number of threads may use a client at a
    time. After a fork, the child uses it over connections of its own.

    Each method does what the method of :class:`delayq.Client` with the same name does, and raises
    the same errors. If an exception is raised in a thread that waits for a call, such as
    ``KeyboardInterrupt``, the call is cancelled, and a note on the exception tells what became of
    it.
    """

    def __init__(
        self,
        new_client: Callable[[str | Redis | RedisCluster | None], asynchronous.Client],
        address: str | Redis | RedisCluster | None,
        name_mapper: Callable[[str], str] | None,
        tasks: Sequence[Tasks],
    ) -> None:
        self._name_mapper = name_mapper
        self._bridge = SyncBridge(new_client, address)
        self._tasks = tasks
        for group in tasks:
            group.bind(self)

    def __enter__(self) -> Self:
        """Open the client now: make a first call to the server.

        Raises:
            ServerUnavailable, ServerRefused: The server does not answer, or denies access.
            EmbeddedServerError: The private server did not start.
            Closed: The client has been closed.
        """
        self.run(_do_nothing)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @signed_as(asynchronous.Client.delayed_queue)
    def delayed_queue(
        self,
        name: str,
        *,
        codec: Codec[Any] | None = None,
        max_payload: int = MAX_PAYLOAD,
        ordered_list: bool = True,
        durability: str = "memory",
    ) -> DelayedQueue[Any]:
        """Declare a queue, which the next call opens.

        Args:
            name: As for :meth:`delayq.Client.delayed_queue`, like the other arguments.
            codec: Converts values to bytes and back.
            max_payload: The largest encoded value allowed, bytes.
            ordered_list: Whether pending messages are also kept in offer order.
            durability: How safe an offer must be before it returns.

        Raises:
            BadName, BadInput: As for :meth:`delayq.Client.delayed_queue`.
            Closed: The client is closed.
        """
        self._bridge.check_open()
        check_flag(ordered_list, "ordered_list")
        check_codec(codec)
        check_max_payload(max_payload)
        durabilities.parse(durability)
        DelayedKeys.of(name, self._name_mapper)

        def open_on(client: asynchronous.Client) -> AsyncDelayedQueue[Any]:
            return client.delayed_queue(
                name,
                codec=JsonCodec() if codec is None else codec,
                max_payload=max_payload,
                ordered_list=ordered_list,
                durability=durability,
            )

        return DelayedQueue(name, self._bridge.declare(open_on))

    @signed_as(asynchronous.Client.reliable_queue)
    def reliable_queue(
        self,
        name: str,
        *,
        codec: Codec[Any] | None = None,
        **settings: Unpack[HandleOptions],
    ) -> ReliableQueue[Any]:
        """Declare a queue, which the next call opens.

        Args:
            name: As for :meth:`delayq.Client.reliable_queue`, like the settings.
            codec: Converts values to bytes and back.
            **settings: All of them may be left out.

        Raises:
            BadName, BadInput: As for :meth:`delayq.Client.reliable_queue`.
            Closed: The client is closed.
        """
        self._bridge.check_open()
        check_names("reliable_queue", settings, HandleOptions)
        HandleSettings(**settings).check()
        check_codec(codec)
        ReliableKeys.of(name, self._name_mapper)

        def open_on(client: asynchronous.Client) -> AsyncReliableQueue[Any]:
            return client.reliable_queue(name, codec=codec, **settings)

        return ReliableQueue(name, self._bridge.declare(open_on))

    def run(
        self,
        function: Callable[Concatenate[asynchronous.Client, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a coroutine function with an asynchronous client, and return its result.

        The client is the one that does the work of this one. The function runs in its event loop,
        and in a copy of the caller's context.

        Args:
            function: Called with a :class:`delayq.Client`, which stays open.
            args: Further arguments.
            kwargs: Further arguments.

        Raises:
            ServerUnavailable, ServerRefused, EmbeddedServerError: As on opening the client.
            Closed: The client is closed.
            ConfigurationError: The caller is in the thread that does the clients' work.
        """
        return self._bridge.run(lambda client: function(client, *args, **kwargs))

    async def arun(
        self,
        function: Callable[Concatenate[asynchronous.Client, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a coroutine function as :meth:`run` does, for code in any other event loop.

        Nothing there is blocked. For programs whose code is partly asynchronous, such as Django
        with views of both kinds: they share one client. If the caller is cancelled, the function is
        cancelled.

        Args:
            function: Called with a :class:`delayq.Client`, which stays open.
            args: Further arguments.
            kwargs: Further arguments.

        Raises:
            ServerUnavailable, ServerRefused, EmbeddedServerError: As on opening the client.
            Closed: The client is closed.
        """
        return await self._bridge.await_run(lambda client: function(client, *args, **kwargs))

    @property
    def endpoint(self) -> tuple[str, int | None] | None:
        """The server's host and port, or the path of its socket and None; None if unknown."""
        return self._bridge.endpoint

    def observe(self, observer: Observer) -> None:
        """Notify ``observer`` of what happens to messages, from the next call on.

        It is called in the thread that does the clients' work, in a copy of the caller's context.
        """
        self._bridge.observers.append(observer)

    def unobserve(self, observer: Observer) -> None:
        """Stop notifying ``observer``, from the next call on. Does nothing if it is unknown."""
        bridge = self._bridge
        bridge.observers = [item for item in bridge.observers if item is not observer]

    def close(self) -> None:
        """Close every queue and connection of this process, as :meth:`delayq.Client.aclose` does.

        Later calls raise :class:`~delayq.Closed`. Closing twice does nothing. A client that is not
        closed is closed when the interpreter exits.
        """
        for group in self._tasks:
            group.unbind(self)
        self._bridge.close()

    def __repr__(self) -> str:
        return f"<delayq.sync.Client {'closed' if self._bridge.closed else 'open'}>"

    def _run(self, call: Callable[[asynchronous.Client], Coroutine[Any, Any, R]]) -> R:
        return self._bridge.run(call)


async def _do_nothing(_: asynchronous.Client) -> None:
    """Let the client be opened."""
