"""Traces and metrics for OpenTelemetry: ``pip install 'delayq[otel]'``.

Follows version 1.44 of the semantic conventions for messaging.

::

    instrument(client)

Every offer then creates a span ``send <queue>``, in the current trace. Its context travels with the
message, in headers (``traceparent``). When the message is handled, perhaps hours later, that
creates a span ``process <queue>`` with a link to the first.

Redisson's format has no headers: offers to a delayed queue create spans, but nothing links them to
the consumer of the message.

:func:`instrument_metrics` measures the same events.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from delayq._version import __version__
from delayq.errors import DecodeError
from delayq.instrumentation import Observer, OfferEvent
from delayq.integrations._failures import failure_of, type_name
from delayq.tasks import Call

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode
except ImportError as _error:
    raise ImportError(
        "traces and metrics need opentelemetry-api: pip install 'delayq[otel]'"
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from delayq._reliable.message import Message
    from delayq.client import Client
    from delayq.sync import Client as SyncClient

_SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
# The conventions' own, seconds.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
# Attributes specific to delayq, named as the conventions require.
_DELAY = "messaging.delayq.message.delay"
_ATTEMPT = "messaging.delayq.message.delivery_attempt"
_TASK = "messaging.delayq.task"


def instrument(
    client: Client | SyncClient, tracer_provider: TracerProvider | None = None
) -> Tracing:
    """Trace messages offered and handled through ``client``, whether it is open or not.

    To stop, pass the result to ``client.unobserve``.

    Args:
        client: The client to trace.
        tracer_provider: The provider that receives the spans; the global one if None.
    """
    tracing = Tracing(client, tracer_provider)
    client.observe(tracing)
    return tracing


def instrument_metrics(
    client: Client | SyncClient, meter_provider: MeterProvider | None = None
) -> Measuring:
    """Measure messages offered and handled through ``client``, whether it is open or not.

    To stop, pass the result to ``client.unobserve``.

    Args:
        client: The client to measure.
        meter_provider: The provider that receives the measurements; the global one if None.
    """
    measuring = Measuring(client, meter_provider)
    client.observe(measuring)
    return measuring


class Tracing(Observer):
    """The observer that creates the spans. Create one with :func:`instrument`."""

    def __init__(
        self, client: Client | SyncClient, tracer_provider: TracerProvider | None = None
    ) -> None:
        self._client = client
        self._tracer = trace.get_tracer("delayq", __version__, tracer_provider, schema_url=_SCHEMA)

    @contextmanager
    def sending(self, sending: OfferEvent) -> Iterator[None]:
        attributes = _attributes(self._client, sending.queue, "send")
        if sending.batch:
            attributes["messaging.batch.message_count"] = sending.count
        if sending.delay is not None:
            attributes[_DELAY] = sending.delay
        # A span is a producer's only if its context travels with the message.
        kind = SpanKind.PRODUCER if sending.kind == "reliable" else SpanKind.CLIENT
        with self._span(f"send {sending.queue}", kind, attributes) as span:
            propagate.inject(sending.headers)
            yield
            if not sending.batch:
                span.set_attribute("messaging.message.id", sending.ids[0])

    @contextmanager
    def handling(self, queue: str, message: Message[Any]) -> Iterator[None]:
        attributes = _attributes(self._client, queue, "process")
        attributes["messaging.message.id"] = message.id
        attributes[_ATTEMPT] = message.attempt
        if (task := _task_of(message)) is not None:
            attributes[_TASK] = task
        with self._span(f"process {queue}", SpanKind.CONSUMER, attributes, links=_links(message)):
            yield

    @contextmanager
    def _span(
        self, name: str, kind: SpanKind, attributes: dict[str, Any], links: list[Link] | None = None
    ) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            name,
            kind=kind,
            attributes=attributes,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                if (failure := failure_of(error)) is not None:
                    span.set_attribute("error.type", type_name(failure))
                    span.set_status(Status(StatusCode.ERROR, type_name(failure)))
                    span.record_exception(error)
                raise


class Measuring(Observer):
    """The observer that takes the measurements. Create one with :func:`instrument_metrics`."""

    def __init__(
        self, client: Client | SyncClient, meter_provider: MeterProvider | None = None
    ) -> None:
        self._client = client
        meter = metrics.get_meter("delayq", __version__, meter_provider, _SCHEMA)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were offered."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were handed out."
        )
        self._calls = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of calls that offer messages.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self._handling = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of handling a message.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )

    @contextmanager
    def sending(self, sending: OfferEvent) -> Iterator[None]:
        attributes = self._attributes(sending.queue, "send")
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            _add_failure(attributes, error)
            raise
        finally:
            self._calls.record(time.perf_counter() - started, attributes)
            del attributes["messaging.operation.type"]
            self._sent.add(sending.count, attributes)

    def delivered(self, queue: str, late: float) -> None:
        del late
        attributes = self._attributes(queue, "receive")
        del attributes["messaging.operation.type"]
        self._consumed.add(1, attributes)

    def handled(self, queue: str, seconds: float, error: BaseException | None) -> None:
        attributes = self._attributes(queue, "process")
        del attributes["messaging.operation.type"]
        if error is not None:
            _add_failure(attributes, error)
        self._handling.record(seconds, attributes)

    def _attributes(self, queue: str, operation: str) -> dict[str, Any]:
        return _attributes(self._client, queue, operation)


def _attributes(client: Client | SyncClient, queue: str, operation: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": "delayq",
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }
    if (endpoint := client.endpoint) is not None:
        host, port = endpoint
        attributes["server.address"] = host
        if port is not None:
            attributes["server.port"] = port
    return attributes


def _add_failure(attributes: dict[str, Any], error: BaseException) -> None:
    if (failure := failure_of(error)) is not None:
        attributes["error.type"] = type_name(failure)


def _task_of(message: Message[Any]) -> str | None:
    """Return the name of the task that a message calls, if it calls one."""
    try:
        value = message.value
    except DecodeError:
        return None
    return value.task if isinstance(value, Call) else None


def _links(message: Message[Any]) -> list[Link]:
    try:
        headers = message.headers
    except DecodeError:
        return []
    # Do not extract into the current context: a message without a context of its own has no link.
    context = trace.get_current_span(
        propagate.extract(headers, context=Context())
    ).get_span_context()
    return [Link(context)] if context.is_valid else []
