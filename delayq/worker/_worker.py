"""The worker: listeners on reliable queues, and their life from start to graceful stop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from delayq._durations import Duration, seconds
from delayq._functions import is_async, name_of, show, spell_out
from delayq._reliable.message import Message
from delayq._reliable.settings import ListenerOptions, Settings, check_names
from delayq.client import Client, connect
from delayq.errors import Closed, ConfigurationError
from delayq.worker._batches import BatchHandling
from delayq.worker._dependencies import Scope
from delayq.worker._evictions import look_for_evictions
from delayq.worker._handling import Handling
from delayq.worker._listener import check_count, check_settings, listen
from delayq.worker._pool import Pool
from delayq.worker._signals import signals_handled
from delayq.worker._signatures import plan_dependency
from delayq.worker._slots import Feed
from delayq.worker._tasks import Included, TaskHandling
from delayq.worker._threads import Threads

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Iterator,
    )
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self, Unpack

    from delayq._reliable.queue import ReliableQueue
    from delayq.codecs import Codec
    from delayq.tasks import Tasks
    from delayq.worker._handling import CallNext, Middleware
    from delayq.worker._listener import Listener
    from delayq.worker._retries import OnError
    from delayq.worker._signatures import Dependency

F = TypeVar("F", bound="Callable[..., Any]")
M = TypeVar("M", bound="Callable[[Message[Any], CallNext], Awaitable[None]]")

# Apart from the records about messages and queues.
_log = logging.getLogger("delayq.worker")
# How long a stop may take until the log says what it waits for, seconds.
_EXPLAIN_AFTER = 1.0


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
        self._given = client
        self._concurrency = concurrency
        self._shutdown_timeout = seconds(shutdown_timeout, "shutdown_timeout")
        self._lifespan = lifespan
        self._listeners: dict[str, Listener] = {}
        self._makers: dict[Any, Dependency] = {}
        self._middleware: list[Middleware] = []
        self._included: dict[str, Included] = {}
        self._client: Client | None = None
        self._stop: _Stop | None = None
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
        return [*self._listeners, *self._included]

    @property
    def needs_address(self) -> bool:
        """Whether the worker was given neither a client nor an address, and uses
        ``$DELAYQ_URL``.
        """
        return self._given is None

    @property
    def server(self) -> Client | str | None:
        """The client or the address that the worker was given; None if it was given neither."""
        return self._given

    def declared_settings(self) -> dict[str, dict[str, str]]:
        """Return the settings that the worker declares for each queue, as the server stores them.

        Raises:
            ConfigurationError: Tasks of one queue declare different ones.
        """
        given = {name: listener.settings.settings for name, listener in self._listeners.items()}
        given |= {name: Settings(**tasks.settings()) for name, tasks in self._included.items()}
        return {name: settings.declared() for name, settings in given.items()}

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
        checked = check_settings(
            queue,
            codec=codec,
            settings=Settings(**settings),
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
            if queue in self._included:
                raise ConfigurationError(
                    f"queue {queue!r} has tasks, so it can have no listener: {name_of(handler)}"
                    " needs a queue of its own"
                )
            if queue in self._listeners:
                other = name_of(self._listeners[queue].handler)
                raise ConfigurationError(
                    f"queue {queue!r} already has a listener: {other}; {name_of(handler)} would be"
                    " a second one"
                )
            self._listeners[queue] = listen(
                checked, handler, self._known() if batch is None else self._known_to_batches()
            )
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
        name = tasks.name
        if name in self._listeners:
            other = name_of(self._listeners[name].handler)
            raise ConfigurationError(
                f"queue {name!r} has a listener, {other}, so it can have no tasks"
            )
        before = self._included.get(name, Included(name))
        included = Included(name, (*before.groups, tasks), concurrency or before.concurrency)
        included.settings()
        included.listeners(self._known())
        self._included[name] = included

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
            known = {
                kind
                for kind in self._known()
                if not once or kind not in self._makers or self._makers[kind].once
            }
            made = plan_dependency(function, known, once=once)
            if made.kind in self._known() or made.kind is Message:
                raise ConfigurationError(
                    f"{name_of(function)}: there already is a dependency of type {show(made.kind)}"
                )
            self._makers[made.kind] = made
            return function

        return register if function is None else register(function)

    def middleware(self, around: M) -> M:
        """Register a coroutine function that runs around every handler.

        ::

            @worker.middleware
            async def around(message: delayq.Message, call_next: delayq.worker.CallNext) -> None:
                await call_next()

        It awaits ``call_next()``, which runs the rest. The middleware that was registered first is
        outermost. An error that it raises counts as the handler's error; an error that it
        suppresses counts as success. Messages that cannot be decoded do not reach it.

        Raises:
            ConfigurationError: ``around`` is not a coroutine function.
        """
        self._check_idle()
        if not is_async(around):
            raise ConfigurationError(
                f"{name_of(around)} is not a middleware: write async def {name_of(around)}(message,"
                " call_next)"
            )
        self._middleware.append(around)
        return around

    # Life cycle

    async def run(
        self,
        *,
        burst: bool = False,
        started: Callable[[], object] | None = None,
        lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None = None,
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
                worker waits for messages that are due but held back by a limit. It does not wait
                for delayed messages, such as those that are to be tried again, nor for messages
                that other workers have, or that are paused.
            started: Called when everything is set up and messages are about to arrive.
            lifespan: An additional lifespan for this run, around the worker's own.

        Raises:
            ConfigurationError: There is no listener, the worker is running already, or a queue is
                open here with other settings.
            ServerUnavailable, ServerRefused: The client could not be opened. Once it is open, the
                worker waits for the server; a burst raises ServerRefused if it goes on refusing.
            Closed: The client was closed in the meantime.
        """
        _check_lifespan(lifespan)
        stop = self._begin()
        with signals_handled(stop.signalled):
            await self._run(stop, lifespan, burst=burst, started=started)

    def stop(self) -> None:
        """Make :meth:`run` end as it does on a signal.

        Call this in the event loop; it returns at once. Does nothing if the worker is not running.
        """
        if self._stop is not None:
            self._stop.ask(None)

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
            _note(task)
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
            _note(task)
        if error is None:
            await task

    def __repr__(self) -> str:
        return f"<Worker of {', '.join(map(repr, self.queues)) or 'nothing'}>"

    # Internals

    def _tasks(self) -> list[Tasks]:
        return [tasks for included in self._included.values() for tasks in included.groups]

    def _known(self) -> set[Any]:
        return {Client, Worker, *self._makers}

    def _known_to_batches(self) -> set[Any]:
        """Return the types that can be made without a message."""
        need: set[Any] = {Message}
        # A dependency is registered after those that it asks for.
        for kind, maker in self._makers.items():
            if any(parameter.kind in need for parameter in maker.takes):
                need.add(kind)
        return self._known() - need

    def _check_idle(self) -> None:
        if self._stop is not None:
            raise ConfigurationError("the worker is already running")

    def _begin(self) -> _Stop:
        self._check_idle()
        if not self.queues:
            raise ConfigurationError("the worker has no listener and no tasks")
        self._stop = _Stop(self._shutdown_timeout)
        return self._stop

    async def _run(
        self,
        stop: _Stop,
        around: Callable[[Worker], AbstractAsyncContextManager[object]] | None,
        *,
        burst: bool,
        started: Callable[[], object] | None,
    ) -> None:
        try:
            async with stop.cancellable(), AsyncExitStack() as stack:
                self._client = client = await self._opened(stack)
                for tasks in self._tasks():
                    tasks.bind(client)
                    stack.callback(tasks.unbind, client)
                # First in, last out: a dependency may use anything that a lifespan has set up.
                for lifespan in (around, self._lifespan):
                    if lifespan is not None:
                        await stack.enter_async_context(lifespan(self))
                made: dict[Any, Any] = {Client: client, Worker: self}
                scope = Scope(self._makers, made, stack)
                for kind in [kind for kind, maker in self._makers.items() if maker.once]:
                    await scope.get(kind)
                with stop.working():
                    feeds = self._feeds(stop, made, stack)
                    pool = Pool(feeds, self._concurrency, burst=burst, stop=stop.ask)
                    for feed in feeds:
                        stack.enter_context(feed.port.report_slots(partial(pool.free, feed)))
                    ports = [feed.port for feed in feeds]
                    background = client.session.background
                    looking = background.spawn(look_for_evictions(client, ports), "evictions")
                    stack.callback(looking.cancel)
                    await self._work(stop, pool, started=started)
        finally:
            self._client = self._stop = None

    async def _work(
        self,
        stop: _Stop,
        pool: Pool,
        *,
        started: Callable[[], object] | None,
    ) -> None:
        try:
            pool.start()
            if started is not None:
                started()
            _log.info(
                "the worker handles %s, up to %d messages at a time",
                ", ".join(f"queue {name!r}" for name in self.queues),
                self._concurrency,
            )
            await stop.asked.wait()
            await pool.close()
            explaining = asyncio.get_running_loop().call_later(_EXPLAIN_AFTER, self._explain, pool)
            try:
                await pool.drain(self._shutdown_timeout, stop.at_once)
            finally:
                explaining.cancel()
        finally:
            stop.handlers_cancelled = True
            await _to_its_end(pool.end())
        if stop.error is not None:
            raise stop.error

    def _explain(self, pool: Pool) -> None:
        """Log what a stop waits for."""
        _log.info(
            "the worker waits for running handlers, up to %g s: %d",
            self._shutdown_timeout,
            pool.running,
        )

    async def _opened(self, stack: AsyncExitStack) -> Client:
        client = self._given if isinstance(self._given, Client) else connect(self._given)
        return await stack.enter_async_context(client) if client.is_new else client

    def _feeds(self, stop: _Stop, made: dict[Any, Any], stack: AsyncExitStack) -> list[Feed]:
        feeds = []
        for name, listener in self._listeners.items():
            given = listener.settings
            queue: ReliableQueue[Any] = self.client.reliable_queue(
                name, codec=listener.codec, **given.settings.options
            )
            if given.codec is None:
                # The codec is for this handler: producers on this client may offer any JSON.
                queue.keep_codec()
            concurrency, threads = self._places(name, given.concurrency, stack)
            handling = self._handling(listener, made, threads, stop)
            if isinstance(handling, BatchHandling):
                handling.gather(concurrency)
                concurrency = handling.places
            port, own = queue.worker_port(concurrency), given.batch is not None
            feeds.append(Feed(port, handling, concurrency, has_own_slots=own))
        for name, included in self._included.items():
            feeds.append(self._feed_of_tasks(name, included, stop, made, stack))
        return feeds

    def _feed_of_tasks(
        self,
        name: str,
        included: Included,
        stop: _Stop,
        made: dict[Any, Any],
        stack: AsyncExitStack,
    ) -> Feed:
        queue: ReliableQueue[Any] = self.client.reliable_queue(
            name, codec=included.codec(), **included.settings()
        )
        queue.keep_codec()
        concurrency, threads = self._places(name, included.concurrency, stack)
        handlings = {
            task: self._handling(listener, made, threads, stop)
            for task, listener in included.listeners(self._known()).items()
        }
        if not handlings:
            raise ConfigurationError(
                f"queue {name!r} is included, but has no task: import the modules that register"
                " them"
            )
        treatments = {task.name: task.treatment for task in included.tasks().values()}
        unreadable = self._handling(included.unreadable(), made, threads, stop)
        port = queue.worker_port(concurrency)
        handling = TaskHandling(port, handlings, unreadable, treatments, threads)
        return Feed(port, handling, concurrency)

    def _places(
        self, name: str, concurrency: int | None, stack: AsyncExitStack
    ) -> tuple[int, Threads]:
        """Return how many handlers of a queue run at a time, and their threads."""
        # No more than the worker's own concurrency ever run.
        most = min(concurrency or self._concurrency, self._concurrency)
        threads = Threads(name, most)
        stack.callback(threads.close)
        return most, threads

    def _handling(
        self, listener: Listener, made: dict[Any, Any], threads: Threads, stop: _Stop
    ) -> Handling:
        kind = Handling if listener.settings.batch is None else BatchHandling
        return kind(listener, self._middleware, self._makers, made, threads, stop.cancels_handlers)


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


def _note(task: asyncio.Task[None]) -> None:
    """Look at how a task has ended, of which an error was logged already."""
    if task.done() and not task.cancelled():
        task.exception()


async def _to_its_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine to its end, however often the caller is cancelled in the meantime."""
    task = asyncio.create_task(coroutine)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


class _Stop:
    """Tracks whether a run of the worker should stop, and how.

    Attributes:
        asked: Set when the run should stop claiming.
        at_once: Set when the run should cancel its handlers.
        error: The error with which the run ends, if any.
        handlers_cancelled: Whether the run has cancelled its handlers.
    """

    def __init__(self, shutdown_timeout: float) -> None:
        self.asked: asyncio.Event = asyncio.Event()
        self.at_once: asyncio.Event = asyncio.Event()
        self.error: BaseException | None = None
        self.handlers_cancelled: bool = False
        self._shutdown_timeout = shutdown_timeout
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        # Cancels the run while it starts or ends, once it is asked to stop.
        self._limit: asyncio.Timeout = asyncio.timeout(None)
        self._phase: Literal["starting", "working", "ending"] = "starting"

    @asynccontextmanager
    async def cancellable(self) -> AsyncIterator[None]:
        """Let :meth:`ask` and :meth:`signalled` end the block while it starts or ends."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        try:
            async with self._limit:
                if self.asked.is_set():
                    self._cancel(self._shutdown_timeout)
                yield
        except TimeoutError:
            if not self._limit.expired():
                raise
            _log.warning(
                "the worker was cancelled while %s",
                "starting" if self._phase == "starting" else "stopping",
            )
        finally:
            self._task = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Handle messages in the block. A stop now ends it in order, and cancels nothing else."""
        self._phase = "working"
        if not self._limit.expired():
            self._limit.reschedule(None)
        try:
            yield
        finally:
            self._phase = "ending"

    def cancels_handlers(self) -> bool:
        """Return whether handlers that are cancelled now are cancelled because the run ends."""
        return self.handlers_cancelled or (
            self._task is not None and self._task.cancelling() > self._cancelling
        )

    def ask(self, error: BaseException | None) -> None:
        """Stop the run, with an error if one is given.

        A start has ``shutdown_timeout`` to finish, and is then cancelled.
        """
        if error is not None and self.error is None:
            _log.error("the worker stops: %s", error)
        self.error = self.error or error
        if not self.asked.is_set():
            self.asked.set()
            if self._phase == "starting":
                self._cancel(self._shutdown_timeout)

    def signalled(self) -> None:
        """Act on a signal."""
        first = not self.asked.is_set()
        if first:
            _log.info("the worker is stopping")
            self.ask(None)
        else:
            self.at_once.set()
        # Nothing has been claimed yet during a start, so nothing is left undone.
        if self._phase == "starting" or (self._phase == "ending" and not first):
            self._cancel(0.0)

    def _cancel(self, after: float) -> None:
        # Only once: the cleanup in the cancelled part is not cancelled again.
        if self._task is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + after)
