"""A trace leads from the request that offers a message to its handler, hours later."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import SpanKind, StatusCode

import delayq
from delayq import Backoff, Offer, Reject, RetryAfter
from delayq.integrations.opentelemetry import instrument, instrument_metrics
from tests.support.reliable import claim_one, offers
from tests.support.reliable_fixtures import LEASE
from tests.support.workers import raising

if TYPE_CHECKING:
    from delayq import Client, DelayedQueue
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer


CONVENTIONAL = {
    value
    for module in (messaging_attributes, server_attributes, error_attributes)
    for name, value in vars(module).items()
    if name.isupper()
}


class Traces:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def traces(client: Client) -> Traces:
    traces = Traces()
    instrument(client, traces.provider)
    return traces


SETTINGS: dict[str, Any] = {"lease": LEASE, "backoff": Backoff.fixed(3600), "max_attempts": 2}


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", **SETTINGS)


def links(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes without the prefix ``messaging.``."""
    return {key.removeprefix("messaging."): value for key, value in (span.attributes or {}).items()}


def about(client: Client) -> dict[str, Any]:
    """Return the attributes that tell of the server and the queue."""
    assert client.endpoint is not None
    address, port = client.endpoint
    shared = {"system": "delayq", "destination.name": "jobs", "server.address": address}
    return shared if port is None else shared | {"server.port": port}


async def test_a_trace_links_request_offer_and_handler(
    client: Client, traces: Traces, jobs: Jobs
) -> None:
    tracer = traces.provider.get_tracer("shop")
    with tracer.start_as_current_span("POST /orders") as request:
        id_ = await jobs.offer({"order": 1}, delay=7200)
    worker = delayq.Worker(client)

    @worker.listener("jobs", **SETTINGS)
    async def handle(value: dict[str, int]) -> None:
        with tracer.start_as_current_span("close order"):
            assert value == {"order": 1}

    # Skip the delay instead of waiting for it.
    await jobs.reschedule(id_, 0)
    await worker.run(burst=True)

    send, process = traces.one("send jobs"), traces.one("process jobs")
    inner = traces.one("close order")
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert send.kind is SpanKind.PRODUCER
    shared = about(client) | {"message.id": id_}
    assert all(each in CONVENTIONAL or "delayq" in each for each in send.attributes or {})
    scope = send.instrumentation_scope
    assert scope is not None
    assert scope.schema_url == Schemas.V1_44_0.value
    assert attributes(send) == shared | {
        "operation.name": "send",
        "operation.type": "send",
        "delayq.message.delay": 7200.0,
    }
    assert (process.kind, process.parent) == (SpanKind.CONSUMER, None)
    assert links(process) == [span_id(send)]
    assert process.links[0].context.trace_id == request.get_span_context().trace_id
    assert attributes(process) == shared | {
        "operation.name": "process",
        "operation.type": "process",
        "delayq.message.delivery_attempt": 1,
    }
    assert inner.parent is not None
    assert inner.parent.span_id == span_id(process)
    assert process.status.status_code is StatusCode.UNSET
    assert not trace.get_current_span().get_span_context().is_valid


async def test_the_task_of_a_message_is_named(client: Client, traces: Traces) -> None:
    tasks = delayq.Tasks("mails")
    tasks.bind(client)
    send = tasks.task(name="send_mail")(lambda: None)
    worker = delayq.Worker(client)
    worker.include(tasks)
    await send.offer()
    await client.reliable_queue("mails").offer({"task": "gone"})
    await worker.run(burst=True)
    named = {attributes(span).get("delayq.task") for span in traces.named("process mails")}
    assert named == {"send_mail", None}


async def test_a_loop_is_traced_and_leaves_nothing_behind(client: Client, traces: Traces) -> None:
    jobs = client.reliable_queue("jobs", partitions=2, backoff=Backoff.fixed(0))
    await jobs.offer_many([Offer(number, headers={"mine": "kept"}) for number in range(3)])
    seen = 0
    async for message in jobs:
        async with message:
            assert trace.get_current_span().get_span_context().is_valid
            assert message.headers["mine"] == "kept"
            seen += 1
            # A retry links to the same offer.
            if seen == 1:
                raise RetryAfter(0)
        assert not trace.get_current_span().get_span_context().is_valid
        if seen == 4:
            break
    send = traces.one("send jobs")
    assert attributes(send)["batch.message_count"] == 3
    assert "messaging.message.id" not in (send.attributes or {})
    spans = traces.named("process jobs")
    assert [links(span) for span in spans] == [[span_id(send)]] * 4
    attempts = [attributes(span)["delayq.message.delivery_attempt"] for span in spans]
    assert sorted(attempts) == [1, 1, 1, 2]


FAILURES = (
    (ValueError("no"), StatusCode.ERROR, "ValueError"),
    (Reject("no"), StatusCode.ERROR, "delayq.Reject"),
    (RetryAfter(60), StatusCode.UNSET, None),
    (asyncio.CancelledError(), StatusCode.UNSET, None),
)


@pytest.mark.parametrize("by_worker", [True, False])
async def test_a_span_of_a_failed_handler_records_the_error(
    client: Client, traces: Traces, by_worker: bool
) -> None:
    for n, (error, status, kind) in enumerate(FAILURES):
        jobs = client.reliable_queue(f"jobs-{n}", **SETTINGS)
        await jobs.offer(1)
        if by_worker:
            worker = delayq.Worker(client)
            worker.listener(jobs.name, **SETTINGS)(raising(error))
            await worker.run(burst=True)
        else:
            with suppress(ValueError, asyncio.CancelledError):
                async with await claim_one(jobs):
                    raise error
        span = traces.one(f"process {jobs.name}")
        assert span.status.status_code is status, error
        assert attributes(span).get("error.type") == kind
        assert [event.name for event in span.events] == (["exception"] if kind else [])
    if by_worker:
        # A message that cannot be read.
        await client.reliable_queue("jobs").offer("no number")
        worker = delayq.Worker(client)
        worker.listener("jobs", **SETTINGS)(takes_a_number)
        await worker.run(burst=True)
        span = traces.one("process jobs")
        assert attributes(span)["error.type"] == "delayq.errors.DecodeError"
        assert links(span) == [span_id(traces.one("send jobs"))]


async def takes_a_number(value: int) -> None:
    raise AssertionError


async def test_a_delayed_queue_traces_only_offers(traces: Traces, queue: DelayedQueue[int]) -> None:
    receipt = await queue.offer(1, 3600)
    await queue.offer_many([(2, 3600), (3, 3600)])
    one, many = traces.named("send orders")
    assert attributes(one)["message.id"] == receipt.id
    assert attributes(many)["batch.message_count"] == 2
    assert one.kind is SpanKind.CLIENT
    assert await queue.pending.read_all() == [1, 2, 3]


async def test_tracing_begins_before_the_client_opens_and_ends_on_demand(
    server: PrivateServer,
) -> None:
    traces, client = Traces(), delayq.connect(server.url)
    hooks = instrument(client, traces.provider)
    async with client:
        jobs = client.reliable_queue("jobs")
        own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await jobs.offer(1, headers={"traceparent": own})
        client.unobserve(hooks)
        await jobs.offer(2)
        first, second = await jobs.claim(2)
    # A context of the user's own stays.
    assert (first.headers, second.headers) == ({"traceparent": own}, {})
    assert traces.one("send jobs")


Points = dict[str, list[tuple[dict[str, Any], float]]]


def measured(reader: InMemoryMetricReader) -> Points:
    """Return by metric the attributes, and the number of messages or calls."""
    data = reader.get_metrics_data()
    scopes = [
        scope for each in (data.resource_metrics if data else ()) for scope in each.scope_metrics
    ]
    return {
        metric.name: [
            (attributes(point), point.value if isinstance(point, NumberDataPoint) else point.count)
            for point in metric.data.data_points
        ]
        for scope in scopes
        for metric in scope.metrics
    }


async def test_metrics_follow_the_conventions_and_are_off_unless_asked_for(
    client: Client, jobs: Jobs, traces: Traces
) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    await jobs.offer(0)
    assert measured(reader) == {}
    measuring = instrument_metrics(client, provider)
    await jobs.offer_many(offers(3))
    with pytest.raises(delayq.BadInput):
        await jobs.offer(1, headers=[("a", "b")])  # type: ignore[arg-type]
    errors = [None, ValueError("no"), RetryAfter(3600), Reject("no")]
    for message, error in zip(await jobs.claim(4), errors, strict=True):
        with suppress(ValueError):
            async with message:
                if error is not None:
                    raise error
    client.unobserve(measuring)
    await jobs.offer(5)

    seen = measured(reader)
    known = {value for name, value in vars(messaging_metrics).items() if name.isupper()}
    assert set(seen) <= known
    shared = about(client)
    send = shared | {"operation.name": "send"}
    refused = {"error.type": "delayq.errors.BadInput"}
    process = shared | {"operation.name": "process"}
    typed = {"operation.type": "send"}
    assert seen == {
        "messaging.client.sent.messages": [(send, 3), (send | refused, 1)],
        "messaging.client.operation.duration": [(send | typed, 1), (send | typed | refused, 1)],
        "messaging.client.consumed.messages": [(shared | {"operation.name": "receive"}, 4)],
        "messaging.process.duration": [
            (process, 2),
            (process | {"error.type": "ValueError"}, 1),
            (process | {"error.type": "delayq.Reject"}, 1),
        ],
    }


async def test_an_offer_fails_unless_it_is_cancelled(
    client: Client, jobs: Jobs, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.offer(1, id="one")
    with pytest.raises(delayq.DuplicateMessage):
        await jobs.offer(2, id="one")
    # Wrong headers are refused as without traces.
    with pytest.raises(delayq.BadInput, match="headers must be a mapping"):
        await jobs.offer(1, headers=[("a", "b")])  # type: ignore[arg-type]
    reader = InMemoryMetricReader()
    instrument_metrics(client, MeterProvider([reader]))
    sending = AsyncMock(side_effect=asyncio.CancelledError)
    monkeypatch.setattr(type(jobs._sender), "send", sending)
    with pytest.raises(asyncio.CancelledError):
        await jobs.offer(1)
    errors = [attributes(span).get("error.type") for span in traces.named("send jobs")]
    failed = ["delayq.errors.DuplicateMessage", "delayq.errors.BadInput"]
    assert errors == [None, *failed, None]
    seen = measured(reader)
    assert {"error.type" in each for points in seen.values() for each, _ in points} == {False}


async def test_the_other_kinds_of_client_name_their_server_too(server: PrivateServer) -> None:
    traces = Traces()

    def offer() -> str:
        with delayq.sync.connect(server.url) as client:
            instrument(client, traces.provider)
            client.reliable_queue("jobs").offer(1)
            assert client.endpoint is not None
            return client.endpoint[0]

    ends = [await asyncio.to_thread(offer)]
    async with delayq.connect("embedded:") as client:
        instrument(client, traces.provider)
        await client.reliable_queue("jobs").offer(1)
        assert client.endpoint is not None
        ends.append(client.endpoint[0])
    assert [attributes(span)["server.address"] for span in traces.named("send jobs")] == ends
    assert Path(ends[1]).is_absolute(), "the path of its socket"
    for address, endpoint in (
        ("redis://cache.example:7000/1", ("cache.example", 7000)),
        ("rediss://user:secret@cache.example", ("cache.example", 6379)),
        ("unix:///run/redis.sock", ("/run/redis.sock", None)),
        ("redis+cluster://a.example:7001,b.example:7002", ("a.example", 7001)),
        ("redis+sentinel://a.example:26379/main/0", None),
    ):
        assert delayq.connect(address).endpoint == endpoint
