"""Workers: their registration of listeners, and their life from start to graceful stop."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar, overload

from delayq._durations import Duration, seconds
from delayq._functions import name_of, spell_out
from delayq._reliable.settings import HandleSettings, ListenerOptions, check_names
from delayq.client import Client, connect
from delayq.errors import Closed, ConfigurationError
from delayq.worker._health import RunHealth
from delayq.worker._listeners import check_count, check_settings
from delayq.worker._registry import Registry
from delayq.worker._run import Run
from delayq.worker._stopping import Stop, signals_handled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self, Unpack

    from delayq._reliable.message import Message
    from delayq.codecs import Codec
    from delayq.tasks import Tasks
    from delayq.worker._handling import CallNext
    from delayq.worker._health import HealthServer
    from delayq.worker._listeners import OnError
    from delayq.worker._registry import AnyOutbox

F = TypeVar("F", bound="Callable[..., Any]")
M = TypeVar("M", bound="Callable[[Message[Any], CallNext], Awaitable[None]]")
E = TypeVar("E")


class Worker:
    """Handles messages of reliable queues, with one listener for each queue.

    ::

        worker = delayq.Worker("redis://127.0.0.1:6379/0")

        @worker.listener("orders")
        async def close_order(order: Order) -> None: ...

        asyncio.run(worker.run())

    A message whose handler returns is acknowledged. If the handler raises, the message is tried
    again with the queue's backoff, and finally becomes a dead letter. The lease is renewed while
    the handler runs. A message is delivered at least once.
    """

    def __init__(
        self,
        client: Client | str | None = None,
        *,
        concurrency: int = 100,
        shutdown_timeout: Duration = 30.0,
        lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None = None,
    ) -> None:
        """Create a worker, which has no listeners yet.

        Args:
            client: The client whose queues are handled. With an address, or None, as for
                :func:`delayq.connect`, the worker opens a client for each run. It also opens a
                client that is not open yet. A client that is already open stays yours to close.
            concurrency: Number of handlers that run at a time, across all listeners.
            shutdown_timeout: How long a stop waits for running handlers, in seconds or as a
                timedelta.
            lifespan: Called with the worker. The context manager it returns is entered when the
                client is open and before the first message, and left after the last one.

        Raises:
            BadInput: A setting is invalid.
            ConfigurationError: The address or the lifespan is invalid.
        """
        check_count("concurrency", concurrency)
        _check_lifespan(lifespan)
        if client is not None and not isinstance(client, Client):
            # To check the address: a client is opened once, but a worker any number of times.
            connect(client)
        self._server = client
        self._concurrency = concurrency
        self._shutdown_timeout = seconds(shutdown_timeout, "shutdown_timeout")
        self._lifespan = lifespan
        self._registry = Registry(frozenset({Client, Worker}))
        self._client: Client | None = None
        self._stop: Stop | None = None
        self._background: asyncio.Task[None] | None = None

    @property
    def client(self) -> Client:
        """The client, while the worker is running.

        Raises:
            Closed: The worker is not running.
        """
        if self._client is None:
            raise Closed("the worker is not running")
        return self._client

    @property
    def shutdown_timeout(self) -> float:
        """How long a stop waits for running handlers, in seconds."""
        return self._shutdown_timeout

    @property
    def concurrency(self) -> int:
        """The number of handlers that run at a time."""
        return self._concurrency

    @property
    def queues(self) -> list[str]:
        """The names of the queues that the worker handles."""
        return self._registry.queues

    @property
    def needs_address(self) -> bool:
        """Whether the worker was given neither a client nor an address, and uses
        ``$DELAYQ_URL``.
        """
        return self._server is None

    @property
    def server(self) -> Client | str | None:
        """The client or the address that the worker was given; None if it was given neither."""
        return self._server

    def declared_settings(self) -> dict[str, dict[str, str]]:
        """Return the settings that the worker declares for each queue, as the server stores them.

        Raises:
            ConfigurationError: Tasks of one queue declare different ones.
        """
        return self._registry.declared_settings()

    # Registration

    @spell_out(ListenerOptions)
    def listener(
        self,
        queue: str,
        *,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        codec: Codec[Any] | None = None,
        on_error: OnError | None = None,
        batch: int | None = None,
        linger: Duration | None = None,
        **settings: Unpack[ListenerOptions],
    ) -> Callable[[F], F]:
        """Register a function as the handler of a queue's messages.

        The function is returned unchanged.

        Its first parameter receives the value, whose type is read from the annotation (see
        :func:`delayq.codecs.codec_for`), or the message, if it is annotated as a
        :class:`~delayq.Message`. Other parameters are filled by type: ``Message``, ``Client``,
        ``Worker``, or the type of a :meth:`dependency`. A function that is not a coroutine function
        runs in a thread.

        Args:
            queue: The queue's name.
            concurrency: Number of this queue's handlers that run at a time; None for as many as the
                worker runs.
            timeout: How long a handler may take, in seconds or as a timedelta, unless the message
                was offered with a ``timeout`` of its own. After that it is cancelled, and the
                message is tried again.
            codec: How bytes become values, instead of the way the annotation implies.
            on_error: How to treat errors, by class, the most specific one first: a
                :class:`~delayq.Backoff` or a :class:`~delayq.RetryAfter` tries again, a
                :class:`~delayq.Snooze` does so without counting the attempt, and
                :class:`~delayq.Reject` never does.
            batch: The function takes a list of up to this many values, or messages, at a time. By
                default, one such call runs at a time.
            linger: How long a batch that is not full waits for more messages, in seconds or as a
                timedelta; 0.1 s by default.
            **settings: As for :meth:`delayq.Client.reliable_queue`. The handlers serve all
                ``partitions`` of the queue in turn; ``when_full`` and ``max_payload`` apply to
                messages that are offered through the worker's client.

        Raises:
            BadName, BadInput: A setting is invalid.
            ConfigurationError: The queue has a listener already, a parameter cannot be filled, an
                annotation cannot be read, or no codec knows the type.
        """
        check_names("listener", settings, ListenerOptions)
        listener_settings = check_settings(
            queue,
            codec=codec,
            settings=HandleSettings(**settings),
            concurrency=(
                (self._concurrency if batch is None else 1) if concurrency is None else concurrency
            ),
            timeout=timeout,
            on_error=on_error,
            batch=batch,
            linger=linger,
        )

        def register(handler: F) -> F:
            self._check_idle()
            self._registry.add_listener(listener_settings, handler)
            return handler

        return register

    def include(self, tasks: Tasks, *, concurrency: int | None = None) -> None:
        """Call these tasks when messages of their queue say so.

        Tasks of one queue that were created apart can be included one after the other. Register a
        dependency before the tasks that ask for it are included. While the worker runs, the tasks
        are bound to its client.

        Args:
            tasks: The tasks. Those that are registered with it before the worker runs are called as
                well.
            concurrency: Number of calls from this queue that run at a time; None for as many as the
                worker runs.

        Raises:
            BadInput: A setting is invalid.
            ConfigurationError: The queue has a listener, two tasks have the same name, different
                settings are given for the queue, a parameter cannot be filled, an annotation cannot
                be read, or no codec knows the type of an argument.
        """
        self._check_idle()
        if concurrency is not None:
            check_count("concurrency", concurrency)
        self._registry.include(tasks, concurrency)

    @overload
    def dependency(self, function: F, /) -> F: ...
    @overload
    def dependency(self, function: None = None, /, *, once: bool = False) -> Callable[[F], F]: ...
    def dependency(
        self, function: F | None = None, /, *, once: bool = False
    ) -> F | Callable[[F], F]:
        """Register a function that makes the objects handlers ask for by type: the type in its
        return annotation.

        It may be a plain function, a coroutine function, or a generator of either kind that yields
        once. The code after the ``yield`` tears the object down, and sees the handler's exception.
        The parameters are filled like those of a handler. Register a dependency before anything
        that asks for it.

        Args:
            function: The function, when used without parentheses.
            once: Make the object once, when the worker starts, and tear it down when the worker
                ends. Otherwise it is made for each message whose handler asks for it, once.

        Raises:
            ConfigurationError: The function has no return annotation, there is a dependency of that
                type already, or a parameter cannot be filled.
        """

        def register(function: F) -> F:
            self._check_idle()
            self._registry.add_dependency(function, once=once)
            return function

        return register if function is None else register(function)

    def relay(self, outbox: AnyOutbox[E], engine: E, *, durability: str | None = None) -> None:
        """Store the messages of an outbox in their queues, for as long as the worker runs.

        Several workers may relay one outbox. A burst begins with the rows that are there. A worker
        may have nothing else to do.

        Args:
            outbox: A :class:`delayq.outbox.Outbox`.
            engine: Its database: an ``Engine`` or ``AsyncEngine`` of SQLAlchemy.
            durability: How safe messages must be before their rows are deleted, as for
                :meth:`delayq.ReliableQueue.offer`.

        Raises:
            ConfigurationError: The database is neither PostgreSQL nor SQLite.
            BadInput: ``durability`` is invalid.
        """
        self._check_idle()
        self._registry.relays.append(outbox.relay(engine, durability=durability))

    def middleware(self, function: M) -> M:
        """Register a coroutine function that runs around every handler.

        ::

            @worker.middleware
            async def around(message: delayq.Message, call_next: delayq.worker.CallNext) -> None:
                await call_next()

        It awaits ``call_next()``, which runs the rest. The middleware that was registered first is
        outermost. An error that it raises counts as the handler's error; an error that it
        suppresses counts as success. Messages that cannot be decoded do not reach it.

        Raises:
            ConfigurationError: ``function`` is not a coroutine function.
        """
        self._check_idle()
        self._registry.add_middleware(function)
        return function

    # Life cycle

    async def run(
        self,
        *,
        burst: bool = False,
        started: Callable[[], object] | None = None,
        lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None = None,
        health: HealthServer | None = None,
    ) -> None:
        """Handle messages until :meth:`stop`, SIGTERM or SIGINT.

        The worker then stops claiming, waits up to ``shutdown_timeout`` for the handlers that are
        running, cancels those that are left, gives back every message that was not handled, without
        counting an attempt, and returns. If the caller is cancelled, handlers are cancelled at
        once.

        A signal while the worker is still starting cancels the start. A second signal cancels at
        once: the handlers, or a lifespan that is being left. A third one has its default action,
        which ends the process. Signals work in the main thread only.

        Args:
            burst: Return when nothing is due in any of the queues and no handler is running. The
                worker waits for messages that are due but kept back by a limit. It does not wait
                for delayed messages, such as those that are to be tried again, nor for messages
                that other workers have, or that are paused.
            started: Called when everything is set up and messages are about to arrive.
            lifespan: An additional lifespan for this run, around the worker's own.
            health: Answers probes and autoscalers from the beginning of the run to its end.

        Raises:
            ConfigurationError: There is no listener, the worker is running already, a queue is open
                here with other settings, an outbox cannot be read, or the address of ``health``
                is taken.
            ServerUnavailable, ServerRefused: The client could not be opened. Once it is open, the
                worker waits for the server; a burst raises ServerRefused if it goes on refusing.
            Closed: The client was closed in the meantime.
        """
        _check_lifespan(lifespan)
        stop = self._begin()
        with signals_handled(stop.signalled):
            await self._run(stop, lifespan, burst=burst, started=started, server=health)

    def stop(self) -> None:
        """Make :meth:`run` end as it does on a signal.

        Call this in the event loop; it returns at once. Does nothing if the worker is not running.
        """
        if self._stop is not None:
            self._stop.request(None)

    async def __aenter__(self) -> Self:
        """Run in the background, without signals, until the block ends.

        Raises the same errors as :meth:`run`.
        """
        stop = self._begin()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = self._run(stop, None, burst=False, started=lambda: started.set_result(None))
        task = asyncio.create_task(running, name="delayq worker run")
        try:
            await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            _retrieve_error(task)
            raise
        if not started.done():
            # The run has ended before it began.
            await task
        self._background = task
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the worker, and wait until it has stopped.

        Raises:
            Closed: The client was closed in the meantime.
        """
        task, self._background = self._background, None
        assert task is not None
        self.stop()
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        finally:
            _retrieve_error(task)
        if error is None:
            await task

    def __repr__(self) -> str:
        return f"<Worker of {', '.join(map(repr, self.queues)) or 'nothing'}>"

    # Internals

    def _check_idle(self) -> None:
        if self._stop is not None:
            raise ConfigurationError("the worker is already running")

    def _begin(self) -> Stop:
        self._check_idle()
        if not self.queues and not self._registry.relays:
            raise ConfigurationError("the worker has no listener and no tasks")
        self._stop = Stop(self._shutdown_timeout)
        return self._stop

    async def _run(
        self,
        stop: Stop,
        outer_lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None,
        *,
        burst: bool,
        started: Callable[[], object] | None,
        server: HealthServer | None = None,
    ) -> None:
        try:
            async with stop.cancellable(), AsyncExitStack() as stack:
                health = None
                if server is not None:
                    health = RunHealth(self.queues, stop)
                    await stack.enter_async_context(server.serving(health))
                client = self._server if isinstance(self._server, Client) else connect(self._server)
                if client.is_new:
                    await stack.enter_async_context(client)
                self._client = client
                for included in self._registry.included.values():
                    for tasks in included.groups:
                        tasks.bind(client)
                        stack.callback(tasks.unbind, client)
                # First in, last out: a dependency may use anything that a lifespan has set up.
                for lifespan in (outer_lifespan, self._lifespan):
                    if lifespan is not None:
                        await stack.enter_async_context(lifespan(self))
                run = Run(
                    self._registry,
                    client,
                    stop,
                    stack,
                    concurrency=self._concurrency,
                    shutdown_timeout=self._shutdown_timeout,
                    instances={Client: client, Worker: self},
                )
                if health is not None:
                    health.run = run
                await run.make_dependencies()
                await run.start_relays(burst=burst)
                with stop.working():
                    await run.work(burst=burst, started=started)
        finally:
            self._client = self._stop = None


def _check_lifespan(lifespan: object) -> None:
    if lifespan is None:
        return
    if not callable(lifespan):
        raise ConfigurationError(
            f"lifespan must be a function that takes the worker, not a {type(lifespan).__name__}"
        )
    if inspect.isasyncgenfunction(lifespan) or inspect.isgeneratorfunction(lifespan):
        raise ConfigurationError(
            f"{name_of(lifespan)} is a generator: decorate it with @contextlib.asynccontextmanager"
        )


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Keep asyncio from logging the error of a task, which was logged already."""
    if task.done() and not task.cancelled():
        task.exception()
