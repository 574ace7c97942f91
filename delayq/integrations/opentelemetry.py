"""Traces for OpenTelemetry: ``pip install 'delayq[otel]'``.

Follows version 1.30 of the semantic conventions for messaging.

::

    instrument(client)

Every offer then creates a span ``send <queue>``, in the current trace. Its context travels with the
message, in headers (``traceparent``). When the message is handled, perhaps hours later, that
creates a span ``process <queue>`` with a link to the first.

Redisson's format has no headers: offers to a delayed queue create spans, but nothing links them to
the consumer of the message.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from delayq._reliable.message import Message, RetryAfter, Snooze
from delayq.errors import DecodeError
from delayq.instrumentation import Observer, OfferEvent
from delayq.tasks import Call

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode
except ImportError as _error:
    raise ImportError("traces need opentelemetry-api: pip install 'delayq[otel]'") from _error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.trace import Span, TracerProvider

    from delayq.client import Client
    from delayq.sync import Client as SyncClient

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
    tracing = Tracing(tracer_provider)
    client.observe(tracing)
    return tracing


class Tracing(Observer):
    """The observer that creates the spans. Create one with :func:`instrument`."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("delayq", tracer_provider=tracer_provider)

    @contextmanager
    def sending(self, sending: OfferEvent) -> Iterator[None]:
        attributes = _attributes(sending.queue, "send")
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
        attributes = _attributes(queue, "process")
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
            except (RetryAfter, Snooze, asyncio.CancelledError, GeneratorExit):
                # Instructions, or a worker that is stopping: nothing has failed.
                raise
            except BaseException as error:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
                span.record_exception(error)
                raise


def _attributes(queue: str, operation: str) -> dict[str, Any]:
    return {
        "messaging.system": "delayq",
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


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
