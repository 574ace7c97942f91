"""A trace leads from the request that offers a message to its handler, hours later."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import delayq
from delayq import Backoff, Offer, Reject, RetryAfter
from delayq.integrations.opentelemetry import instrument
from tests.support.reliable import claim_one, offers
from tests.support.reliable_fixtures import LEASE
from tests.support.workers import raising

if TYPE_CHECKING:
    from delayq import Client, DelayedQueue
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer


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


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return the attributes without the prefix ``messaging.``."""
    return {key.removeprefix("messaging."): value for key, value in (span.attributes or {}).items()}


async def test_request_offer_handler_are_linked(client: Client, traces: Traces, jobs: Jobs) -> None:
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
    shared = {"system": "delayq", "destination.name": "jobs", "message.id": id_}
    assert all(key.startswith("messaging.") for key in send.attributes or {})
    assert attributes(send) == shared | {
        "operation.name": "send",
        "operation.type": "send",
        "delayq.message.delay": 7200.0,
    }
    assert process.kind is SpanKind.CONSUMER
    assert process.parent is None
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


async def test_a_loop_is_traced_and_leaves_nothing_behind(traces: Traces, jobs: Jobs) -> None:
    await jobs.offer_many([Offer(number, headers={"mine": "kept"}) for number in range(3)])
    seen = 0
    async for message in jobs:
        async with message:
            assert trace.get_current_span().get_span_context().is_valid
            assert message.headers["mine"] == "kept"
            seen += 1
        assert not trace.get_current_span().get_span_context().is_valid
        if seen == 3:
            break
    send = traces.one("send jobs")
    assert attributes(send)["batch.message_count"] == 3
    assert "messaging.message.id" not in (send.attributes or {})
    assert [links(span) for span in traces.named("process jobs")] == [[span_id(send)]] * 3


async def test_a_context_of_the_users_own_stays(traces: Traces, jobs: Jobs) -> None:
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await jobs.offer(1, headers={"traceparent": own})
    async with await claim_one(jobs) as message:
        assert message.headers["traceparent"] == own
    assert links(traces.one("process jobs")) == [0xB7AD6B7169203331]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ValueError("no"), StatusCode.ERROR, "ValueError"),
        (Reject("no"), StatusCode.ERROR, "Reject"),
        (RetryAfter(60), StatusCode.UNSET, None),
        (asyncio.CancelledError(), StatusCode.UNSET, None),
    ],
)
@pytest.mark.parametrize("by_worker", [True, False])
async def test_what_failed_is_told(
    client: Client,
    traces: Traces,
    jobs: Jobs,
    error: BaseException,
    status: StatusCode,
    kind: str | None,
    by_worker: bool,
) -> None:
    await jobs.offer(1)
    if by_worker:
        worker = delayq.Worker(client)
        worker.listener("jobs", **SETTINGS)(raising(error))
        await worker.run(burst=True)
    else:
        with suppress(ValueError, asyncio.CancelledError):
            async with await claim_one(jobs):
                raise error
    span = traces.one("process jobs")
    assert span.status.status_code is status
    assert attributes(span).get("error.type") == kind
    assert [event.name for event in span.events] == (["exception"] if kind else [])


async def test_unreadable_messages_fail_a_span(client: Client, traces: Traces, jobs: Jobs) -> None:
    await jobs.offer("no number")
    worker = delayq.Worker(client)

    @worker.listener("jobs", **SETTINGS)
    async def handle(value: int) -> None:
        raise AssertionError

    await worker.run(burst=True)
    span = traces.one("process jobs")
    assert attributes(span)["error.type"] == "DecodeError"
    assert links(span) == [span_id(traces.one("send jobs"))]


async def test_a_retry_links_to_the_same_offer(client: Client, own_server: PrivateServer) -> None:
    traces = Traces()
    async with delayq.connect(own_server.url) as other:
        instrument(other, traces.provider)
        jobs = other.reliable_queue("jobs", backoff=Backoff.fixed(0))
        await jobs.offer(1)
        attempts = []
        for _ in range(2):
            (message,) = await jobs.claim(wait=20)
            async with message:
                attempts.append(message.attempt)
                if len(attempts) == 1:
                    raise RetryAfter(0)
    assert attempts == [1, 2]
    assert [links(span) for span in traces.named("process jobs")] == [
        [span_id(traces.one("send jobs"))]
    ] * 2
    spans = traces.named("process jobs")
    assert [attributes(span)["delayq.message.delivery_attempt"] for span in spans] == [1, 2]


async def test_a_delayed_queue_traces_only_offers(traces: Traces, queue: DelayedQueue[int]) -> None:
    receipt = await queue.offer(1, 3600)
    await queue.offer_many([(2, 3600), (3, 3600)])
    one, many = traces.named("send orders")
    assert attributes(one)["message.id"] == receipt.id
    assert attributes(many)["batch.message_count"] == 2
    assert one.kind is SpanKind.CLIENT
    assert await queue.pending.read_all() == [1, 2, 3]


async def test_an_offer_that_fails_is_a_failed_span(traces: Traces, jobs: Jobs) -> None:
    await jobs.offer(1, id="one")
    with pytest.raises(delayq.DuplicateMessage):
        await jobs.offer(2, id="one")
    assert attributes(traces.named("send jobs")[1])["error.type"] == "DuplicateMessage"


async def test_partitions_are_traced(client: Client, traces: Traces) -> None:
    jobs = client.reliable_queue("parts", partitions=4)
    await jobs.offer_many(offers(8))
    handled = 0
    while handled < 8:
        for message in await jobs.claim(8, wait=5):
            async with message:
                handled += 1
    await jobs.offer(8)
    send, single = traces.named("send parts")
    assert attributes(single)["destination.name"] == "parts"
    assert [links(span) for span in traces.named("process parts")] == [[span_id(send)]] * 8


async def test_wrong_headers_are_refused_as_without_traces(jobs: Jobs, traces: Traces) -> None:
    with pytest.raises(delayq.BadInput, match="headers must be a mapping"):
        await jobs.offer(1, headers=[("a", "b")])  # type: ignore[arg-type]
    assert attributes(traces.one("send jobs"))["error.type"] == "BadInput"


async def test_it_ends_when_told(client: Client, jobs: Jobs) -> None:
    traces = Traces()
    client.unobserve(instrument(client, traces.provider))
    await jobs.offer(1)
    async with await claim_one(jobs) as message:
        assert message.headers == {}
    assert not traces.named("send jobs")


async def test_a_client_may_be_instrumented_before_it_is_open(server: PrivateServer) -> None:
    traces, client = Traces(), delayq.connect(server.url)
    instrument(client, traces.provider)
    async with client:
        await client.reliable_queue("jobs").offer(1)
    assert re.fullmatch("send jobs", traces.one("send jobs").name)
