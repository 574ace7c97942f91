"""One run of a worker: opens its queues, handles their messages, and ends in order."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from delayq._logging import about
from delayq._reliable.process_report import PROCESS
from delayq.errors import (
    Closed,
    ConfigurationError,
    DelayqError,
    ServerError,
    ServerUnavailable,
)
from delayq.worker._batches import BatchHandling
from delayq.worker._handling import Handling, TaskHandling
from delayq.worker._injection import Scope
from delayq.worker._loop_watch import loop_watched
from delayq.worker._pool import Pool
from delayq.worker._scale import scale_of
from delayq.worker._slots import Feed
from delayq.worker._threads import Threads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
    from contextlib import AsyncExitStack

    from delayq._reliable.consumer import WorkerPort
    from delayq._reliable.queue import ReliableQueue
    from delayq.client import Client
    from delayq.worker._listeners import Listener
    from delayq.worker._registry import IncludedTasks, Registry
    from delayq.worker._stopping import Stop

T = TypeVar("T")

# Apart from the records about messages and queues.
_log = logging.getLogger("delayq.worker")
# How long a stop may take until the log says what it waits for, seconds.
_EXPLAIN_AFTER = 1.0
# How often a server is asked how many keys it has evicted, seconds: one call for all queues.
_EVICTION_CHECK_INTERVAL = 60.0
# How long the server has to answer a probe, seconds: it is shorter than the probe itself waits.
_SERVER_ANSWERS_WITHIN = 1.5


class Run:
    """One run of a worker."""

    def __init__(
        self,
        registry: Registry,
        client: Client,
        stop: Stop,
        stack: AsyncExitStack,
        *,
        concurrency: int,
        shutdown_timeout: float,
        instances: dict[Any, Any],
    ) -> None:
        """Args:
        registry: The listeners and tasks, with their dependencies.
        client: The client whose queues are handled.
        stop: Says when to stop.
        stack: Closes what the run opens.
        concurrency: Number of handlers that run at a time.
        shutdown_timeout: How long a stop waits for running handlers, seconds.
        instances: The dependencies that exist for the whole run, by type.
        """
        self._registry = registry
        self._client = client
        self._stop = stop
        self._stack = stack
        self._concurrency = concurrency
        self._shutdown_timeout = shutdown_timeout
        self._instances = instances
        self._pool: Pool | None = None
        self._ports: dict[str, WorkerPort] = {}

    @property
    def is_claiming(self) -> bool:
        """Whether the worker claims messages. Other threads may read this."""
        return self._pool is not None and self._pool.is_claiming

    def stall(self, limit: float) -> str:
        """Return which claim loop has ended, or by how much over ``limit`` seconds the re-checks
        that wake the loops are late; "" if all is well.

        A loop may wait for handlers, for messages or for a server that is away. Other threads may
        call this.
        """
        if self._pool is None or not self._pool.is_claiming:
            return ""
        if ended := self._pool.ended:
            return f"messages of queue {ended[0]!r} are no longer claimed"
        with suppress(Closed):
            # A claim that waits for messages is woken by these re-checks, whatever else is lost.
            overdue = self._client.session.scheduler.overdue
            if overdue > limit:
                return f"queues have not been re-checked for {overdue:.0f} s"
        return ""

    def positions(self) -> dict[tuple[str, int], object]:
        """Return how far the claim loops have come that wait for nothing but a call of their own.

        Each position changes while its loop moves. The first part of a key is the queue's name.

        A call moves while it is tried again, because the server is away, and while its reply
        arrives, over a slow link.
        """
        if self._pool is None or not self._pool.is_claiming:
            return {}
        with suppress(Closed):
            moves = self._client.session.server.moves
            return {loop: (position, moves) for loop, position in self._pool.positions().items()}
        return {}

    def claim_failure(self) -> str:
        """Return which queue's messages cannot be claimed now, and why; "" if all can. Other
        threads may call this.
        """
        failing = None if self._pool is None else self._pool.failing
        return (
            f"messages of queue {failing[0]!r} cannot be claimed: {failing[1]}" if failing else ""
        )

    async def check_server(self) -> None:
        """Raise ServerError unless the server answers soon."""
        await _soon(self._client.session.server.open())

    async def scale(self, queue: str, window: float) -> dict[str, float]:
        """Return the figures of ``/scale`` for a queue that the worker handles.

        ``window`` is that of ``due_within``, in seconds. Raises ServerError.
        """

        async def ask() -> dict[str, float]:
            now_us = await self._client.session.server.time_us()
            return await scale_of(self._ports[queue].queue, now_us, window)

        return await _soon(ask())

    async def make_dependencies(self) -> None:
        """Make the dependencies that are made once in a run."""
        dependencies = self._registry.dependencies
        scope = Scope(dependencies, self._instances, self._stack)
        for kind in [kind for kind, dependency in dependencies.items() if dependency.once]:
            await scope.get(kind)

    async def start_relays(self, *, burst: bool) -> None:
        """Start the relays. A burst begins when what is in their outboxes is relayed."""
        if self._registry.relays:
            # A relay would store them in one partition if they are new.
            for name, settings in self._registry.settings().items():
                queue = self._client.reliable_queue(name, **settings.options)
                with suppress(ServerError):
                    await queue.relay_port().partitions()
        for relay in self._registry.relays:
            _log.info("the worker relays the outbox %s to %s", relay.name, self._client.label)
            if burst:
                await relay.drain(self._client)
            await self._stack.enter_async_context(relay.running(self._client))

    async def work(self, *, burst: bool, started: Callable[[], object] | None) -> None:
        """Handle messages until the stop, then wait for running handlers, and cancel the others."""
        pool = self._pool = self._open_pool(burst=burst)
        self._stack.enter_context(loop_watched())
        PROCESS.slots += self._concurrency
        self._stack.callback(self._release_slots)
        stop = self._stop
        try:
            pool.start()
            if started is not None:
                started()
            if burst and not self._registry.queues:
                self._stop.request(None)
            _log.info(
                "the worker handles %s, up to %d messages at a time",
                ", ".join(f"queue {name!r}" for name in self._registry.queues)
                or "nothing but outboxes",
                self._concurrency,
            )
            await stop.requested.wait()
            await pool.close()
            explaining = asyncio.get_running_loop().call_later(_EXPLAIN_AFTER, self._explain, pool)
            try:
                await pool.drain(self._shutdown_timeout, stop.urgent)
            finally:
                explaining.cancel()
        finally:
            stop.handlers_cancelled = True
            await _to_its_end(pool.end())
        if stop.error is not None:
            raise stop.error

    def _release_slots(self) -> None:
        PROCESS.slots -= self._concurrency

    def _open_pool(self, *, burst: bool) -> Pool:
        feeds = [self._open_listener(listener) for listener in self._registry.listeners.values()]
        feeds += [self._open_tasks(included) for included in self._registry.included.values()]
        pool = Pool(feeds, self._concurrency, burst=burst, stop=self._stop.request)
        for feed in feeds:
            self._stack.enter_context(feed.port.report_slots(partial(pool.free, feed)))
        ports = [feed.port for feed in feeds]
        self._ports = {port.name: port for port in ports}
        background = self._client.session.background
        watch = background.spawn(watch_evictions(self._client, ports), "evictions")
        self._stack.callback(watch.cancel)
        return pool

    def _open_listener(self, listener: Listener) -> Feed:
        settings = listener.settings
        queue: ReliableQueue[Any] = self._client.reliable_queue(
            settings.queue, codec=listener.codec, **settings.settings.options
        )
        if settings.codec is None:
            # The codec is for this handler: producers on this client may offer any JSON.
            queue.keep_codec()
        concurrency, threads = self._open_threads(settings.queue, settings.concurrency)
        if settings.batch is None:
            handling = self._handling(listener, threads)
            return Feed(self._port(queue, concurrency), handling.handle, threads, concurrency)
        registry = self._registry
        batches = BatchHandling(
            listener,
            registry.middleware,
            registry.dependencies,
            self._instances,
            threads,
            self._stop.cancels_handlers,
            concurrency,
        )
        port = self._port(queue, batches.capacity)
        return Feed(port, batches.handle, threads, batches.capacity, batches)

    def _open_tasks(self, included: IncludedTasks) -> Feed:
        name, registry = included.queue, self._registry
        queue: ReliableQueue[Any] = self._client.reliable_queue(
            name, codec=included.codec(), **included.settings()
        )
        queue.keep_codec()
        concurrency, threads = self._open_threads(name, included.concurrency)
        handlings = {
            task: self._handling(listener, threads)
            for task, listener in included.listeners(registry.injectable).items()
        }
        if not handlings:
            raise ConfigurationError(
                f"queue {name!r} is included, but has no task: import the modules that register"
                " them"
            )
        unreadable = self._handling(included.unreadable(), threads)
        task_options = {task.name: task.task_options for task in included.by_name().values()}
        port = self._port(queue, concurrency)
        handling = TaskHandling(port, handlings, unreadable, task_options)
        return Feed(port, handling.handle, threads, concurrency)

    def _port(self, queue: ReliableQueue[Any], concurrency: int) -> WorkerPort:
        port = queue.worker_port(concurrency)
        port.is_stopping = self._stop.requested.is_set
        return port

    def _open_threads(self, queue: str, concurrency: int | None) -> tuple[int, Threads]:
        """Return how many handlers of a queue run at a time, and their threads."""
        # No more than the worker's own concurrency ever run.
        concurrency = min(concurrency or self._concurrency, self._concurrency)
        threads = Threads(queue, concurrency)
        self._stack.callback(threads.close)
        return concurrency, threads

    def _handling(self, listener: Listener, threads: Threads) -> Handling:
        return Handling(
            listener,
            self._registry.middleware,
            self._registry.dependencies,
            self._instances,
            threads,
            self._stop.cancels_handlers,
        )

    def _explain(self, pool: Pool) -> None:
        """Log what a stop waits for."""
        _log.info(
            "the worker waits for running handlers, up to %g s: %d",
            self._shutdown_timeout,
            pool.running,
        )


async def _soon(question: Awaitable[T]) -> T:
    """Return what a server answers while a probe waits. Raises ServerError."""
    try:
        async with asyncio.timeout(_SERVER_ANSWERS_WITHIN):
            return await question
    except TimeoutError:
        raise ServerUnavailable(f"no reply within {_SERVER_ANSWERS_WITHIN:g} s") from None


async def _to_its_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine to its end, however often the caller is cancelled in the meantime."""
    task = asyncio.create_task(coroutine)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError


# Servers that evict keys when their memory is short


async def watch_evictions(client: Client, ports: Sequence[WorkerPort]) -> None:
    """Warn if the server may evict keys, and put back what waits where no worker finds it: now,
    whenever the server has evicted more, and again if that failed.
    """
    infos = await _server_infos(client)
    _warn_of_policy(infos)
    while True:
        is_mended = True
        for port in ports:
            try:
                await _mend(port)
            except DelayqError:
                # As long as a server has no memory left, it refuses that.
                is_mended = False
        if not infos:
            # This user may not read them.
            return
        evictions, is_due = _evictions(infos), False
        while not is_due:
            await asyncio.sleep(_EVICTION_CHECK_INTERVAL)
            infos = await _server_infos(client) or infos
            is_due = not is_mended or _evictions(infos) != evictions


async def _server_infos(client: Client) -> list[dict[str, str]]:
    with suppress(DelayqError):
        return await client.session.server.info()
    return []


def _evictions(infos: Iterable[Mapping[str, str]]) -> list[str | None]:
    return [info.get("evicted_keys") for info in infos]


def _warn_of_policy(infos: Iterable[Mapping[str, str]]) -> None:
    for policy in {info.get("maxmemory_policy", "noeviction") for info in infos} - {"noeviction"}:
        _log.warning(
            "the server may drop messages when its memory is short: its maxmemory-policy is %s. Set"
            " it to noeviction, in its configuration file or in the console of a managed service",
            policy,
        )


async def _mend(port: WorkerPort) -> None:
    for store in await port.stores():
        if missing := await store.missing_keys():
            await store.mend()
            _log.error(
                "queue %r: %s, because the server has evicted keys. What waits was put back",
                port.name,
                missing,
                extra=about(port.name),
            )
