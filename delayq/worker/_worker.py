"""The worker: listeners on reliable queues, and their life from start to graceful stop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from delayq._durations import Duration, seconds
from delayq._settings import RETRIES, Settings
from delayq.client import Client, connect
from delayq.errors import Closed, ConfigurationError
from delayq.message import Message
from delayq.worker._dependencies import Scope
from delayq.worker._handling import Handling
from delayq.worker._listener import check_count, check_settings
from delayq.worker._pool import Lane, Pool
from delayq.worker._signals import signals_handled
from delayq.worker._signatures import is_async, name_of, plan_dependency, show
from delayq.worker._source import Source
from delayq.worker._threads import Threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    from delayq._settings import Expired, WhenFull
    from delayq.backoff import Backoff
    from delayq.codecs import Codec
    from delayq.partitioned_queue import PartitionedQueue
    from delayq.reliable_queue import ReliableQueue
    from delayq.worker._listener import Listener
    from delayq.worker._signatures import Dependency
    from delayq.worker._verdicts import OnError

F = TypeVar("F", bound="Callable[..., Any]")
M = TypeVar("M", bound="Callable[[Message[Any], Callable[[], Awaitable[None]]], Awaitable[None]]")

# A logger of its own: what a process tells of its life can be set apart from messages and queues.
_log = logging.getLogger("delayq.worker")


class Worker:
    """Handles messages of reliable queues: one listener for each queue.

    ::

        worker = delayq.Worker("redis://127.0.0.1:6379/0")

        @worker.listener("orders")
        async def close_order(order: Order) -> None: ...

        asyncio.run(worker.run())

    A message whose handler returns is acknowledged. One whose handler raises is tried again with the queue's backoff, and
    at last becomes a dead letter. Its lease is renewed while the handler runs; it is delivered at least once.
    """

    def __init__(
        self,
        client: Client | str | None = None,
        *,
        concurrency: int = 100,
        shutdown_timeout: Duration = 30.0,
        lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None = None,
    ) -> None:
        """Make a worker, without listeners yet.

        Args:
            client: Whose queues. An address, or None, as for :func:`delayq.connect`: then the worker opens a client for each
                run. So it does with a client that is not open yet. One that is open stays yours to close.
            concurrency: How many handlers run at a time, over all listeners.
            shutdown_timeout: How long a stop waits for the handlers that run, seconds or a timedelta.
            lifespan: Called with the worker; what it returns is entered when the client is open and before the first
                message, and left after the last.

        Raises:
            BadInput: A setting cannot work.
            ConfigurationError: The address or the lifespan cannot work.
        """
        check_count("concurrency", concurrency)
        _check_lifespan(lifespan)
        if client is not None and not isinstance(client, Client):
            # Only to see whether it can be one: a client is opened once, a worker runs any number of times.
            connect(client)
        self._given = client
        self._concurrency = concurrency
        self._shutdown_timeout = seconds(shutdown_timeout, "shutdown_timeout")
        self._lifespan = lifespan
        self._listeners: dict[str, Listener] = {}
        self._makers: dict[Any, Dependency] = {}
        self._middleware: list[Callable[[Message[Any], Callable[[], Awaitable[None]]], Awaitable[None]]] = []
        self._client: Client | None = None
        self._stop: _Stop | None = None
        self._background: asyncio.Task[None] | None = None

    @property
    def client(self) -> Client:
        """The client, while the worker runs.

        Raises:
            Closed: It does not run.
        """
        if self._client is None:
            raise Closed("the worker does not run")
        return self._client

    @property
    def shutdown_timeout(self) -> float:
        """How long a stop waits for the handlers that run, seconds."""
        return self._shutdown_timeout

    @property
    def needs_address(self) -> bool:
        """Whether the worker was given neither a client nor an address, and takes ``$DELAYQ_URL``."""
        return self._given is None

    # What it does

    def listener(
        self,
        queue: str,
        *,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        codec: Codec[Any] | None = None,
        on_error: OnError | None = None,
        lease: Duration = 30.0,
        max_attempts: int | None = 10,
        backoff: Backoff = RETRIES,
        dedup_window: Duration = 0.0,
        expired: Expired = "drop",
        max_size: int | None = None,
        when_full: WhenFull = "raise",
        max_payload: int = 512 * 1024,
        partitions: int | None = None,
    ) -> Callable[[F], F]:
        """Let a function handle the messages of a queue. It is returned as it is.

        Its first parameter gets the value, whose type is read from the annotation (see :func:`delayq.codecs.codec_for`);
        or the message, if it is a :class:`~delayq.Message`. Others are filled by their type: ``Message``, ``Client``,
        ``Worker``, or that of a :meth:`dependency`. A function that is no coroutine function runs in a thread.

        Args:
            queue: Its name.
            concurrency: How many of its handlers run at a time; as many as the worker's if None.
            timeout: How long a handler may take, seconds or a timedelta: then it is cancelled, and the message tried again.
            codec: How bytes become values, instead of what the annotation says.
            on_error: What to do about errors, by class, the most specific one first: a :class:`~delayq.Backoff` or a
                :class:`~delayq.RetryAfter` tries again, :class:`~delayq.Reject` never.
            lease: As for :meth:`delayq.Client.reliable_queue`, and so are all below.
            max_attempts: After so many a message becomes a dead letter; None: never.
            backoff: How long a message that failed waits for its next attempt.
            dedup_window: For how long after a message was handled its id still counts as taken.
            expired: What happens to a message past its ``ttl``: ``"drop"``, or ``"dead"`` for a dead letter.
            max_size: For who offers through the worker's client.
            when_full: The same.
            max_payload: The same.
            partitions: As many as the queue has: as for :meth:`delayq.Client.reliable_queue`. Its handlers serve all of
                them in turn.

        Raises:
            BadName, BadInput: A setting cannot work.
            ConfigurationError: The queue has a listener already, a parameter can be filled by nothing, an annotation
                cannot be read, or no codec knows the type.
        """
        checked = check_settings(
            queue,
            codec=codec,
            settings=Settings(lease, max_attempts, backoff, dedup_window, expired, max_size, when_full, max_payload),
            concurrency=self._concurrency if concurrency is None else concurrency,
            timeout=timeout,
            on_error=on_error,
            partitions=partitions,
        )

        def register(handler: F) -> F:
            self._check_idle()
            if queue in self._listeners:
                other = name_of(self._listeners[queue].handler)
                raise ConfigurationError(f"queue {queue!r} has a listener already: {other}; {name_of(handler)} is one too many")
            self._listeners[queue] = checked.of(handler, self._known())
            return handler

        return register

    @overload
    def dependency(self, function: F, /) -> F: ...
    @overload
    def dependency(self, function: None = None, /, *, once: bool = False) -> Callable[[F], F]: ...
    def dependency(self, function: F | None = None, /, *, once: bool = False) -> F | Callable[[F], F]:
        """Let a function make what handlers ask for by type: the type in its return annotation.

        It may be a coroutine function or not; or a generator of either kind that yields once, and what follows the
        ``yield`` takes down: it sees the handler's exception. Its parameters are filled as those of a handler. Register
        it before what asks for it.

        Args:
            function: When used without parentheses.
            once: Make it once, when the worker starts, and take it down when it ends. Otherwise it is made for each
                message whose handler asks for it, once.

        Raises:
            ConfigurationError: It has no return annotation, there is one of that type, or a parameter can be filled by nothing.
        """

        def register(function: F) -> F:
            self._check_idle()
            known = {kind for kind in self._known() if not once or kind not in self._makers or self._makers[kind].once}
            made = plan_dependency(function, known, once=once)
            if made.kind in self._known() or made.kind is Message:
                raise ConfigurationError(f"{name_of(function)}: there is a {show(made.kind)} already")
            self._makers[made.kind] = made
            return function

        return register if function is None else register(function)

    def middleware(self, around: M) -> M:
        """Let a coroutine function run around every handler: ``async def around(message, call_next)``.

        It awaits ``call_next()``, which runs the rest; the first that was registered is outermost. What it raises counts as
        the handler's error; what it does not let pass counts as success. A message that cannot be decoded does not get here.

        Raises:
            ConfigurationError: It is no coroutine function.
        """
        self._check_idle()
        if not is_async(around):
            raise ConfigurationError(f"{name_of(around)} is no middleware: async def {name_of(around)}(message, call_next)")
        self._middleware.append(around)
        return around

    # Its life

    async def run(
        self,
        *,
        burst: bool = False,
        started: Callable[[], object] | None = None,
        lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None = None,
    ) -> None:
        """Handle messages until :meth:`stop`, SIGTERM or SIGINT.

        Then it claims no more, waits for the handlers that run for ``shutdown_timeout``, cancels what is left, gives back
        every message that was not handled without counting an attempt, and returns. If the caller is cancelled, handlers are
        cancelled at once.

        A signal while the worker still starts cancels the start. A second signal cancels at once: the handlers, or a lifespan
        that is being left. A third one has its default action, which ends the process. Signals work in the main thread only.

        Args:
            burst: Return when nothing is due in any of the queues and no handler runs. What is delayed, as a message that
                is to be tried again, is not waited for; nor what other workers have.
            started: Called when everything is set up and messages are about to come.
            lifespan: Another one of this run, around the worker's own.

        Raises:
            ConfigurationError: There is no listener, it runs already, or a queue is open here with other settings.
            ServerUnavailable, ServerRefused: The client could not be opened. Once it is, the worker waits for the server.
            Closed: The client was closed meanwhile.
        """
        _check_lifespan(lifespan)
        stop = self._begin()
        with signals_handled(stop.signalled):
            await self._run(stop, lifespan, burst=burst, started=started)

    def stop(self) -> None:
        """Let :meth:`run` end as upon a signal. Call it in the event loop; it returns at once. Not running: does nothing."""
        if self._stop is not None:
            self._stop.ask(None)

    async def __aenter__(self) -> Self:
        """Run in the background, without signals, until the block ends. Raises as :meth:`run`."""
        stop = self._begin()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = self._run(stop, None, burst=False, started=lambda: started.set_result(None))
        task = asyncio.create_task(running, name="delayq worker run")
        try:
            await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        if not started.done():
            # It has ended before it began.
            await task
        self._background = task
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop, and wait for that.

        Raises:
            Closed: The client was closed meanwhile.
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
        if error is None:
            await task

    def __repr__(self) -> str:
        return f"<Worker of {', '.join(map(repr, self._listeners)) or 'nothing'}>"

    # Inside

    def _known(self) -> set[Any]:
        return {Client, Worker, *self._makers}

    def _check_idle(self) -> None:
        if self._stop is not None:
            raise ConfigurationError("the worker runs already")

    def _begin(self) -> _Stop:
        self._check_idle()
        if not self._listeners:
            raise ConfigurationError("the worker has no listener")
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
                self._client = await self._opened(stack)
                # First in, last out: a lifespan may use the client, a dependency what the lifespan has set up.
                for lifespan in (around, self._lifespan):
                    if lifespan is not None:
                        await stack.enter_async_context(lifespan(self))
                made: dict[Any, Any] = {Client: self._client, Worker: self}
                scope = Scope(self._makers, made, stack)
                for kind in [kind for kind, maker in self._makers.items() if maker.once]:
                    await scope.get(kind)
                with stop.working():
                    await self._work(stop, made, burst=burst, started=started)
        finally:
            self._client = self._stop = None

    async def _work(self, stop: _Stop, made: dict[Any, Any], *, burst: bool, started: Callable[[], object] | None) -> None:
        lanes = self._lanes(made, stop)
        try:
            pool = Pool(lanes, self._concurrency, burst=burst, stop=stop.ask)
            pool.start()
            if started is not None:
                started()
            _log.info(
                "the worker handles %s, up to %d messages at a time",
                ", ".join(f"queue {name!r}" for name in self._listeners),
                self._concurrency,
            )
            await self._until_stopped(pool, stop)
        finally:
            for lane in lanes:
                lane.handling.threads.close()

    async def _opened(self, stack: AsyncExitStack) -> Client:
        client = self._given if isinstance(self._given, Client) else connect(self._given)
        return await stack.enter_async_context(client) if client.is_new else client

    def _lanes(self, made: dict[Any, Any], stop: _Stop) -> list[Lane]:
        assert self._client is not None
        lanes = []
        for listener in self._listeners.values():
            settings = {name: getattr(listener.settings, name) for name in Settings.__dataclass_fields__}
            name, codec, count = listener.queue, listener.codec, listener.partitions
            queue: ReliableQueue[Any] | PartitionedQueue[Any] = (
                self._client.reliable_queue(name, codec=codec, **settings)
                if count is None
                else self._client.reliable_queue(name, codec=codec, partitions=count, **settings)
            )
            # More than the worker's own concurrency never run.
            concurrency = min(listener.concurrency, self._concurrency)
            threads = Threads(name, concurrency)
            handling = Handling(listener, self._middleware, self._makers, made, threads, stop.cancels_handlers)
            lanes.append(Lane(Source(queue), handling, concurrency))
        return lanes

    async def _until_stopped(self, pool: Pool, stop: _Stop) -> None:
        try:
            await stop.asked.wait()
            await pool.close()
            await pool.drain(self._shutdown_timeout, stop.at_once)
        finally:
            stop.handlers_cancelled = True
            await _to_its_end(pool.end())
        if stop.error is not None:
            raise stop.error


def _check_lifespan(lifespan: object) -> None:
    if lifespan is None:
        return
    if not callable(lifespan):
        raise ConfigurationError(f"lifespan is a function that takes the worker, not a {type(lifespan).__name__}")
    if inspect.isasyncgenfunction(lifespan) or inspect.isgeneratorfunction(lifespan):
        raise ConfigurationError(f"{name_of(lifespan)} yields: decorate it with @contextlib.asynccontextmanager")


async def _to_its_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine that takes a few seconds at most, however often the caller is cancelled meanwhile."""
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
    """Whether a run of the worker is to stop, and how.

    Attributes:
        asked: Set when it is to claim no more.
        at_once: Set when it is to cancel its handlers.
        error: With what the run ends.
        handlers_cancelled: Whether it has cancelled them.
    """

    def __init__(self, shutdown_timeout: float) -> None:
        self.asked: asyncio.Event = asyncio.Event()
        self.at_once: asyncio.Event = asyncio.Event()
        self.error: BaseException | None = None
        self.handlers_cancelled: bool = False
        self._shutdown_timeout = shutdown_timeout
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        # Cancels the run where it starts or ends, at a moment that is set when it is asked to stop.
        self._limit: asyncio.Timeout = asyncio.timeout(None)
        self._phase: Literal["starting", "working", "ending"] = "starting"

    @asynccontextmanager
    async def cancellable(self) -> AsyncIterator[None]:
        """Let :meth:`ask` and :meth:`signalled` cancel the block where it starts or ends; it then just ends."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        try:
            async with self._limit:
                if self.asked.is_set():
                    self._end_start()
                yield
        except TimeoutError:
            if not self._limit.expired():
                raise
            _log.warning("the worker was cancelled while it %s", "started" if self._phase == "starting" else "ended")
        finally:
            self._task = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Handle messages in the block: what stops it now ends it in order, and cancels nothing else."""
        self._phase = "working"
        if not self._limit.expired():
            self._limit.reschedule(None)
        try:
            yield
        finally:
            self._phase = "ending"

    def cancels_handlers(self) -> bool:
        """Whether handlers that are cancelled now are so because the run ends."""
        return self.handlers_cancelled or (self._task is not None and self._task.cancelling() > self._cancelling)

    def ask(self, error: BaseException | None) -> None:
        """Stop, with that error if there is one. A start has ``shutdown_timeout`` to finish, and is then cancelled."""
        self.error = self.error or error
        if not self.asked.is_set():
            self.asked.set()
            if self._phase == "starting" and self._task is not None:
                self._end_start()

    def signalled(self) -> None:
        """A signal came."""
        first = not self.asked.is_set()
        if first:
            _log.info("the worker stops")
            self.ask(None)
        else:
            self.at_once.set()
        # Nothing was claimed yet where it starts, so nothing is left undone.
        if self._phase == "starting" or (self._phase == "ending" and not first):
            self._cancel(0.0)

    def _end_start(self) -> None:
        self._cancel(self._shutdown_timeout)

    def _cancel(self, after: float) -> None:
        # Once: what the cancelled part does to clean up is not cancelled again.
        if self._task is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + after)
