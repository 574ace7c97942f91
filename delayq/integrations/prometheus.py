"""Metrics for Prometheus: ``pip install 'delayq[prometheus]'``.

::

    async with delayq.connect() as client, Metrics(client) as metrics:
        text = await metrics.render()

The client counts its own actions all the time, at next to no cost. The number of waiting messages
has to be requested from the server, which happens on every call of :meth:`Metrics.render`, and
every ``interval`` seconds. The ``collect()`` of prometheus_client, which may be called in another
thread and cannot wait, returns the latest values.
"""

from __future__ import annotations

import asyncio
import platform
import re
from bisect import bisect_left
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import anyio
from anyio import to_thread

from delayq._version import __version__
from delayq.admin.delays import explain_delay
from delayq.admin.reliable import ReliableInspector
from delayq.errors import BadInput, DelayqError, ServerError, ServerRefused
from delayq.instrumentation import Observer
from delayq.integrations._failures import failure_of, type_name
from delayq.stats import COUNTED_STATES

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        SummaryMetricFamily,
    )
    from prometheus_client.exposition import choose_encoder
except ImportError as _error:
    raise ImportError(
        "metrics need prometheus-client: pip install 'delayq[prometheus]'"
    ) from _error

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        MutableMapping,
        Sequence,
    )
    from typing import Self

    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from delayq.client import Client
    from delayq.stats import ClientStats, QueueDepth, QueueStats

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""The default of ``buckets``, seconds."""

# Error types told apart for each queue: classes made at run time must not fill Prometheus.
_MOST_ERRORS = 50
_OTHER_TYPES = "other"
# The longest a scrape waits for the server, seconds: Prometheus gives up after 10.
_TIMEOUT = 3.0
# The reason is looked for once messages have been due for this time, seconds; it takes some calls.
_LATE = 60.0
# The number of late queues whose reason is looked for.
_MOST_EXPLAINED = 10
# The servers' wording, for calls and within scripts. Any other refusal may not recur.
_NOT_PERMITTED = re.compile(r"^NOPERM|ACL failure in script|can't run this command")
_QUEUE = ("queue", "kind")

# By field of QueueStats; its errors are those of transfers.
_COUNTERS = {
    "offered": "Messages stored by this process.",
    "delivered": "Messages handed out in this process.",
    "acked": "Messages acknowledged by this process.",
    "retried": "Messages that failed in this process and will be retried.",
    "dead": "Messages that this process moved to the dead letters.",
    "released": "Messages that this process gave back without handling them.",
    "expired": "Messages that this process found to be past their time to live.",
    "lease_ended": "Messages of a delayed queue whose lease this process found to have ended.",
    "quarantined": "Unreadable records of a delayed queue that this process quarantined.",
    "transfer_errors": "Checks for due messages that failed.",
}
# By field of ClientStats.
_OF_CLIENT = {
    "timers": (GaugeMetricFamily, "Armed wake-ups."),
    "connections": (GaugeMetricFamily, "Open connections to the server."),
    "connections_opened": (CounterMetricFamily, "Connections opened so far."),
    "round_trips": (CounterMetricFamily, "Commands sent to the server."),
    "errors": (CounterMetricFamily, "Calls to the server that failed."),
    "queues": (GaugeMetricFamily, "Queues open in this process."),
}


# Once, because reading delayq's own version takes a millisecond.
_BUILD = GaugeMetricFamily(
    "delayq_build_info", "1, with the versions in use.", labels=["version", "python"]
)
_BUILD.add_metric([__version__, platform.python_version()], 1)


class Metrics:
    """The metrics of one client.

    Enter it while the client is open. It is also an ASGI application, for ``/metrics``.

    It covers the queues that are open on the client: open those you want to see.
    """

    def __init__(
        self,
        client: Client,
        *,
        interval: float = 15.0,
        registry: CollectorRegistry | None = None,
        buckets: Sequence[float] = BUCKETS,
    ) -> None:
        """Args:
        client: The client to observe.
        interval: Seconds between counts of messages; 0: only in :meth:`render` and :meth:`refresh`.
        registry: The registry to use; prometheus_client's own if None. Each client needs its own.
        buckets: Upper bounds of the histograms, seconds, in ascending order.

        Raises:
            BadInput: ``interval`` is negative, or ``buckets`` are not in ascending order.
        """
        if interval < 0 or not buckets or list(buckets) != sorted(set(buckets)):
            raise BadInput("interval must be at least 0, and buckets must increase")
        self._client = client
        self._interval = interval
        self._registry = REGISTRY if registry is None else registry
        self._observer = _Observer(buckets)
        self._unanswered = 0
        # Queues that we may not inspect. Asking again would add a line to the server's log.
        self._refused: set[tuple[str, str]] = set()
        # Replaced as a whole, because another thread may be reading it.
        self._metrics: tuple[Metric, ...] = ()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Register the metrics, and start refreshing them.

        Raises:
            ValueError: The registry already contains delayq's metrics.
            Closed: The client is not open.
        """
        self._client.statistics()
        self._registry.register(cast("Collector", self))
        self._client.observe(self._observer)
        try:
            await self.refresh()
        except BaseException:
            # __aexit__ is not called for a block that was not entered.
            self._retire()
            raise
        if self._interval:
            self._task = asyncio.create_task(self._keep_fresh(), name="delayq metrics")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._retire()
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def refresh(self) -> None:
        """Update the metrics now.

        Waits three seconds for a server that does not answer, then leaves out its figures.

        Raises:
            Closed: The client is closed.
        """
        deadline = asyncio.get_running_loop().time() + _TIMEOUT
        try:
            async with asyncio.timeout_at(deadline):
                stats = await self._client.queue_depths(exclude=self._refused)
        except TimeoutError:
            stats = {}
            self._unanswered += 1
        depths = {}
        for key, outcome in stats.items():
            if isinstance(outcome, ServerRefused) and _NOT_PERMITTED.search(str(outcome)):
                self._refused.add(key)
            elif isinstance(outcome, ServerError):
                self._unanswered += 1
            else:
                depths[key] = outcome
        reasons = await self._reasons(depths, deadline)
        queues = self._client.queue_statistics()
        self._metrics = (
            *_depths(depths),
            _delays(reasons),
            *_counters(queues),
            *self._observer.metrics([queue.name for queue in queues if queue.kind == "reliable"]),
            *_of_client(self._client.statistics(), self._unanswered),
            _BUILD,
        )

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Update the metrics, and return all of the registry as text, with the content type.

        Args:
            accept: The ``Accept`` header, which selects Prometheus' own format or OpenMetrics.

        Raises:
            Closed: The client is closed.
        """
        await self.refresh()
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        """Return the latest metrics. Safe to call from any thread."""
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        """Return metrics without values, from which the registry learns their names."""
        observed = _Observer(BUCKETS).metrics(())
        gauges = (*_depths({}), _delays({}))
        return (*gauges, *_counters([]), *observed, *_of_client(None, 0), _BUILD)

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer an ASGI request with :meth:`render`; with status 503 if the client is closed."""
        del receive
        accept = b",".join(value for name, value in scope.get("headers", ()) if name == b"accept")
        try:
            status, (body, content_type) = 200, await self.render(accept.decode("latin-1"))
        except DelayqError as error:
            status, body, content_type = 503, str(error).encode(), "text/plain; charset=utf-8"
        headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope.get("method") == "HEAD" else body}
        )

    async def _reasons(
        self, depths: Mapping[tuple[str, str], QueueDepth], deadline: float
    ) -> dict[str, str]:
        """Return why the messages of reliable queues are late, for the first ones that are late."""
        late = [
            name
            for (kind, name), depth in depths.items()
            if kind == "reliable" and depth.oldest_due_age >= _LATE
        ]
        reasons: dict[str, str] = {}
        try:
            async with asyncio.timeout_at(deadline):
                for name in late[:_MOST_EXPLAINED]:
                    inspector = ReliableInspector.of(self._client, name)
                    await inspector.all_stores()
                    delay = await explain_delay(inspector, depths["reliable", name], str)
                    reasons[name] = delay.reason
        except (TimeoutError, ServerError):
            self._unanswered += 1
        return reasons

    def _retire(self) -> None:
        self._registry.unregister(cast("Collector", self))
        self._client.unobserve(self._observer)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.refresh()
            except DelayqError:
                # The client is closed.
                return


def exposition(accept: str = "") -> tuple[bytes, str]:
    """Return the latest metrics of prometheus_client's own registry, and their content type.

    Any thread may call this. ``HealthServer("0.0.0.0:8080", metrics=exposition)`` serves them with
    the answers to probes, for a ``Worker(lifespan=lambda worker: Metrics(worker.client))``.

    Args:
        accept: The ``Accept`` header, which selects Prometheus' own format or OpenMetrics.
    """
    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type


@asynccontextmanager
async def serve(
    client: Client,
    port: int,
    *,
    host: str = "127.0.0.1",
    interval: float = 5.0,
    registry: CollectorRegistry | None = None,
    buckets: Sequence[float] = BUCKETS,
) -> AsyncIterator[Metrics]:
    """Serve the metrics of a client over HTTP on a separate port, for programs without a web
    server, such as workers.

    ::

        worker = delayq.Worker(lifespan=lambda worker: serve(worker.client, 9100))

    ``delayq worker --metrics-port`` does this. A thread answers even while the loop is blocked.

    Args:
        client: The client to observe. It must be open.
        port: The TCP port.
        host: The address to listen on; ``""`` for all. Anyone who reaches it can read queue names.
        interval: As for :class:`Metrics`, like all the following.
        registry: The registry to serve.
        buckets: The upper bounds of the histograms, seconds.

    Raises:
        OSError: The port is taken, or the address does not belong to this machine.
        BadInput, ValueError, Closed: As for :class:`Metrics`.
    """
    registry = REGISTRY if registry is None else registry
    async with Metrics(client, interval=interval, registry=registry, buckets=buckets) as metrics:
        server, _ = start_http_server(port, host, registry)
        try:
            yield metrics
        finally:
            # The server checks every half second whether to stop.
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(server.shutdown)
            server.server_close()


class _Histogram:
    """Counts of seconds, by queue. prometheus_client's own takes several times as long to count."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._names = (*map(str, map(float, bounds)), "+Inf")
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, queue: str, seconds: float) -> None:
        counts = self._counts.get(queue)
        if counts is None:
            counts = self._begin(queue)
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[queue] += seconds

    def family(self, queues: Sequence[str]) -> HistogramMetricFamily:
        """Return the counts of ``queues``, even if there are none yet: Prometheus takes no increase
        from a series that was not there before. Those of other queues are forgotten.
        """
        for queue in {*self._counts}.difference(queues):
            del self._counts[queue], self._sums[queue]
        for queue in queues:
            if queue not in self._counts:
                self._begin(queue)
        family = HistogramMetricFamily(self._name, self._text, labels=["queue"])
        for queue, counts in self._counts.items():
            buckets = [
                (name, float(count))
                for name, count in zip(self._names, accumulate(counts), strict=True)
            ]
            family.add_metric([queue], buckets=buckets, sum_value=self._sums[queue])
        return family

    def _begin(self, queue: str) -> list[int]:
        self._sums[queue] = 0.0
        counts = self._counts[queue] = [0] * len(self._names)
        return counts


class _Observer(Observer):
    """Observes how late messages are handed out, how long they are handled, and what fails."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._lateness = _Histogram(
            "delayq_lateness_seconds",
            "Seconds between the due time of a message of a reliable queue and its delivery.",
            buckets,
        )
        self._durations = _Histogram(
            "delayq_handling_seconds",
            "Seconds for which a message of a reliable queue was handled, failures included.",
            buckets,
        )
        self._failures: dict[str, dict[str, int]] = {}

    def delivered(self, queue: str, late: float) -> None:
        self._lateness.observe(queue, late)

    def handled(self, queue: str, seconds: float, error: BaseException | None) -> None:
        self._durations.observe(queue, seconds)
        if error is not None and (failure := failure_of(error)) is not None:
            counts = self._failures.setdefault(queue, {_OTHER_TYPES: 0})
            name = type_name(failure)
            if name not in counts and len(counts) > _MOST_ERRORS:
                name = _OTHER_TYPES
            counts[name] = counts.get(name, 0) + 1

    def metrics(self, queues: Sequence[str]) -> list[Metric]:
        """Return what was observed of ``queues``, and zeros for those that nothing happened to.

        Other queues are closed, and forgotten, as their counters are.
        """
        failures = CounterMetricFamily(
            "delayq_failures",
            "Messages whose handling failed in this process, by the class of the error.",
            labels=["queue", "error"],
        )
        self._failures = {name: self._failures[name] for name in queues if name in self._failures}
        for queue in queues:
            for name, count in self._failures.get(queue, {_OTHER_TYPES: 0}).items():
                failures.add_metric([queue, name], count)
        return [self._lateness.family(queues), self._durations.family(queues), failures]


def _depths(stats: dict[tuple[str, str], QueueDepth]) -> list[Metric]:
    messages = GaugeMetricFamily(
        "delayq_queue_messages", "Messages on the server, by state.", labels=[*_QUEUE, "state"]
    )
    age = GaugeMetricFamily(
        "delayq_queue_oldest_due_age_seconds",
        "Seconds for which the oldest ready message has been due.",
        labels=_QUEUE,
    )
    paused = GaugeMetricFamily("delayq_queue_paused", "1 while the queue is paused.", labels=_QUEUE)
    for (kind, name), facts in stats.items():
        for state in COUNTED_STATES:
            messages.add_metric([name, kind, state], getattr(facts, state))
        age.add_metric([name, kind], facts.oldest_due_age)
        paused.add_metric([name, kind], facts.paused)
    return [messages, age, paused]


def _delays(reasons: Mapping[str, str]) -> Metric:
    delays = GaugeMetricFamily(
        "delayq_queue_late",
        "1 while messages have been due for a minute, with the reason why they wait.",
        labels=[*_QUEUE, "reason"],
    )
    for name, reason in reasons.items():
        delays.add_metric([name, "reliable", reason], 1)
    return delays


def _counters(queues: Iterable[QueueStats]) -> list[Metric]:
    waiting = GaugeMetricFamily(
        "delayq_queue_waiting",
        "1 while a consumer in this process waits for a message.",
        labels=_QUEUE,
    )
    in_flight = GaugeMetricFamily(
        "delayq_queue_in_flight", "Messages being handled in this process.", labels=_QUEUE
    )
    slots = GaugeMetricFamily(
        "delayq_queue_slots",
        "Messages that workers in this process handle at a time, at most; 0 without a worker.",
        labels=_QUEUE,
    )
    free_slots = GaugeMetricFamily(
        "delayq_queue_free_slots",
        "Messages that workers in this process could handle now, beside those that they do.",
        labels=_QUEUE,
    )
    counters = {
        name: CounterMetricFamily(f"delayq_{name}", text, labels=_QUEUE)
        for name, text in _COUNTERS.items()
    }
    for queue in queues:
        labels = (queue.name, queue.kind)
        waiting.add_metric(labels, queue.waiting)
        in_flight.add_metric(labels, queue.in_flight)
        slots.add_metric(labels, queue.slots)
        free_slots.add_metric(labels, queue.free_slots)
        for name, family in counters.items():
            family.add_metric(labels, getattr(queue, name.removeprefix("transfer_")))
    return [*counters.values(), waiting, in_flight, slots, free_slots]


def _of_client(stats: ClientStats | None, unanswered: int) -> list[Metric]:
    lag = SummaryMetricFamily(
        "delayq_timer_lag_seconds", "Seconds by which the event loop wakes the timer late."
    )
    failed = CounterMetricFamily(
        "delayq_metrics_unanswered",
        "Times the server did not report how many messages a queue has.",
    )
    families = {name: of(f"delayq_{name}", text) for name, (of, text) in _OF_CLIENT.items()}
    if stats is not None:
        lag.add_metric((), count_value=stats.timer_wakeups, sum_value=stats.timer_lag)
        failed.add_metric((), unanswered)
        for name, family in families.items():
            family.add_metric((), getattr(stats, name))
    return [lag, *families.values(), failed]
