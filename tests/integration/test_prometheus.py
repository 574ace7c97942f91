"""The metrics agree with what the queues themselves report."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import delayq
from delayq import Backoff, Offer, Reject, RetryAfter
from delayq._reliable.keys import ReliableKeys
from delayq.admin.acl import acl_rules
from delayq.integrations.prometheus import Metrics, serve
from tests.support.reliable_fixtures import LEASE
from tests.support.servers import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, DelayedQueue, ReliableQueue
    from delayq.admin.acl import Role
    from tests.support.servers import PrivateServer

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
LABELS = ("queue", "kind", "state", "le")


@pytest.fixture
async def jobs(client: Client) -> ReliableQueue[Any]:
    return client.reliable_queue("jobs", lease=LEASE, backoff=Backoff.fixed(3600), max_attempts=2)


@pytest.fixture
async def metrics(client: Client) -> AsyncIterator[Metrics]:
    async with Metrics(client, registry=CollectorRegistry(), interval=0) as metrics:
        yield metrics


async def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return the values by name and labels."""
    text = (await metrics.render())[0].decode()
    return {
        (
            sample.name,
            *(sample.labels[name] for name in LABELS if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_depths_are_the_stats_of_the_queue(
    metrics: Metrics, jobs: ReliableQueue[Any]
) -> None:
    await jobs.offer_many([Offer(1, delay=3600), Offer(2), Offer(3), Offer(4)])
    leased, rejected = await jobs.claim(2)
    await rejected.bury("no")
    stats, seen = await jobs.stats(), await samples(metrics)
    assert (stats.delayed, stats.ready, stats.leased, stats.dead) == (1, 1, 1, 1)
    for state in ("delayed", "ready", "leased", "dead"):
        assert seen["delayq_queue_messages", "jobs", "reliable", state] == getattr(stats, state)
    assert (
        0
        < stats.oldest_due_age
        <= seen["delayq_queue_oldest_due_age_seconds", "jobs", "reliable"]
        < stats.oldest_due_age + 20
    )
    assert seen["delayq_queue_paused", "jobs", "reliable"] == 0
    await leased.release()
    await jobs.pause()
    assert (await samples(metrics))["delayq_queue_paused", "jobs", "reliable"] == 1


async def test_a_queue_in_partitions_is_one_queue(client: Client, metrics: Metrics) -> None:
    jobs = client.reliable_queue("parts", partitions=4)
    await jobs.offer_many([Offer(number, delay=3600 * (number % 2)) for number in range(16)])
    (message,) = await jobs.claim(1, wait=5)
    await message.ack()
    await jobs._open.partitions[2].store.pause()
    seen, stats = await samples(metrics), await jobs.stats()
    assert (stats.delayed, stats.ready) == (8, 7)
    for state in ("delayed", "ready", "leased", "dead"):
        assert seen["delayq_queue_messages", "parts", "reliable", state] == getattr(stats, state)
    assert seen["delayq_offered_total", "parts", "reliable"] == 16
    assert seen["delayq_acked_total", "parts", "reliable"] == 1
    assert seen["delayq_queue_paused", "parts", "reliable"] == 1
    assert seen["delayq_lateness_seconds_count", "parts"] == 1
    assert (
        0
        < stats.oldest_due_age - seen["delayq_queue_oldest_due_age_seconds", "parts", "reliable"]
        < 20
    )
    assert not [key for key in seen if "parts/" in str(key)]


async def test_depths_of_a_delayed_queue(metrics: Metrics, queue: DelayedQueue[int]) -> None:
    await queue.offer_many([(1, 3600), (2, 3600), (3, 0), (4, 0), (5, 0)])
    await until(queue.ready.size)
    deliveries = queue.deliveries(LEASE)
    async for _ in deliveries:
        seen = await samples(metrics)
        assert (
            seen["delayq_queue_messages", "orders", "delayed", "delayed"]
            == await queue.pending.size()
            == 2
        )
        assert (
            seen["delayq_queue_messages", "orders", "delayed", "ready"] == await queue.ready.size()
        )
        assert (
            seen["delayq_queue_messages", "orders", "delayed", "leased"]
            == await queue.ready.leased()
            > 0
        )
        assert seen["delayq_delivered_total", "orders", "delayed"] == 1
        break
    await deliveries.aclose()  # type: ignore[attr-defined]


async def test_counters_count_what_happened(metrics: Metrics, jobs: ReliableQueue[Any]) -> None:
    await jobs.offer("done", id="once")
    assert await jobs.offer("again", id="once", on_duplicate="ignore") == "once"
    await jobs.offer_many([Offer("retry"), Offer("reject"), Offer("release")])
    for message in await jobs.claim(100):
        try:
            async with message:
                match message.value:
                    case "retry":
                        raise RetryAfter(3600)
                    case "reject":
                        raise Reject("no")
                    case "release":
                        await message.release()
        except delayq.LeaseLost:
            raise AssertionError(message.value) from None
    seen = await samples(metrics)
    found = {
        name: seen[f"delayq_{name}_total", "jobs", "reliable"]
        for name in ("offered", "delivered", "acked", "retried", "dead")
    }
    assert found == {"offered": 4, "delivered": 4, "acked": 1, "retried": 1, "dead": 1}
    assert seen["delayq_released_total", "jobs", "reliable"] == 1
    assert seen["delayq_lateness_seconds_count", "jobs"] == 4
    assert seen["delayq_lateness_seconds_bucket", "jobs", "+Inf"] == 4
    assert 0 <= seen["delayq_lateness_seconds_sum", "jobs"] < 60


async def test_a_worker_and_loops_count_too(
    client: Client, metrics: Metrics, jobs: ReliableQueue[Any]
) -> None:
    worker = delayq.Worker(client)

    @worker.listener("jobs", lease=LEASE, backoff=Backoff.fixed(3600), max_attempts=2)
    async def handle(value: int) -> None:
        if value == 3:
            raise ValueError

    await jobs.offer_many([Offer(value) for value in range(5)])
    await worker.run(burst=True)
    await jobs.offer_many([Offer(value) for value in range(5)])
    left = 5
    async for message in jobs:
        async with message:
            left -= 1
        if not left:
            break
    stats, seen = await jobs.stats(), await samples(metrics)
    assert stats.delayed == 1
    assert seen["delayq_delivered_total", "jobs", "reliable"] == 10
    assert seen["delayq_acked_total", "jobs", "reliable"] == 9
    assert seen["delayq_retried_total", "jobs", "reliable"] == 1


async def test_what_the_client_says_of_itself(
    client: Client, metrics: Metrics, queue: DelayedQueue[int]
) -> None:
    await queue.offer(1, 0.05)
    assert await queue.take() == 1
    seen, facts = await samples(metrics), client.statistics()
    assert seen[("delayq_connections",)] == facts.connections > 0
    assert seen[("delayq_queues",)] == 1
    assert seen[("delayq_timer_lag_seconds_count",)] == facts.timer_wakeups > 0
    assert 0 < seen[("delayq_timer_lag_seconds_sum",)] < 60
    assert seen["delayq_delivered_total", "orders", "delayed"] == 1
    assert seen["delayq_transfer_errors_total", "orders", "delayed"] == 0


async def test_a_thread_may_collect_and_finds_what_was_seen_last(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    registry = CollectorRegistry()
    async with Metrics(client, registry=registry, interval=0.05):
        await jobs.offer(1)
        found: list[bytes] = []

        def scrape() -> bool:
            thread = threading.Thread(target=lambda: found.append(generate_latest(registry)))
            thread.start()
            thread.join()
            return (
                b'delayq_queue_messages{kind="reliable",queue="jobs",state="ready"} 1.0'
                in found[-1]
            )

        await until(scrape)
    assert generate_latest(registry) == b""


async def test_a_server_that_is_away_holds_up_no_scrape(own_server: PrivateServer) -> None:
    async with delayq.connect(own_server.url) as client:
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1)
        async with Metrics(client, registry=CollectorRegistry(), interval=0) as metrics:
            own_server.pause()
            try:
                seen = await asyncio.wait_for(samples(metrics), 8)
            finally:
                own_server.resume()
    assert seen["delayq_offered_total", "jobs", "reliable"] == 1
    assert seen[("delayq_metrics_unanswered_total",)] == 1
    assert ("delayq_queue_messages", "jobs", "reliable", "ready") not in seen


@pytest.mark.parametrize("role", ["producer", "consumer"])
async def test_what_a_user_may_not_see_is_no_failure_and_not_asked_again(
    server: PrivateServer, role: Role
) -> None:
    # Otherwise an alert on failed calls would never clear.
    server.call(
        "ACL", "SETUSER", role, "reset", "on", ">secret", *acl_rules(role, reliable=["jobs"])
    )
    try:
        async with delayq.connect(
            server.url.replace("unix://", f"unix://{role}:secret@")
        ) as client:
            client.reliable_queue("jobs")
            async with Metrics(client, registry=CollectorRegistry(), interval=0) as metrics:
                before = client.statistics().errors
                seen = await samples(metrics)
                assert client.statistics().errors == before
    finally:
        server.call("ACL", "DELUSER", role)
    assert ("delayq_queue_messages", "jobs", "reliable", "ready") not in seen
    assert seen[("delayq_metrics_unanswered_total",)] == 0


async def test_what_is_refused_for_another_reason_is_asked_again(
    server: PrivateServer, metrics: Metrics, client: Client
) -> None:
    key = ReliableKeys.of("jobs").live[0]
    server.call("SET", key, "no sorted set")
    jobs = client.reliable_queue("jobs")
    seen = await samples(metrics)
    assert ("delayq_queue_messages", "jobs", "reliable", "ready") not in seen
    assert seen[("delayq_metrics_unanswered_total",)] == 1
    server.call("DEL", key)
    await jobs.offer(1)
    assert (await samples(metrics))["delayq_queue_messages", "jobs", "reliable", "ready"] == 1


async def test_they_are_served_at_a_port_while_the_event_loop_is_blocked(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    await jobs.offer(1)
    port = free_port()
    async with serve(client, port, registry=CollectorRegistry()):
        # The request blocks the event loop, so nothing else runs in the meantime.
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert 'delayq_queue_messages{kind="reliable",queue="jobs",state="ready"} 1.0' in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


async def test_it_is_an_asgi_application(metrics: Metrics, jobs: ReliableQueue[Any]) -> None:
    await jobs.offer(1)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(metrics), base_url="http://test"
    ) as browser:
        reply = await browser.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        assert 'delayq_offered_total{kind="reliable",queue="jobs"} 1.0' in reply.text
        other = await browser.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert other.headers["content-type"].startswith("application/openmetrics-text")
        assert other.text.endswith("# EOF\n")


async def test_a_closed_client_is_said(server: PrivateServer) -> None:
    client = delayq.connect(server.url)
    with pytest.raises(delayq.Closed):
        await Metrics(client, registry=CollectorRegistry()).__aenter__()


async def test_one_registry_takes_one_client(client: Client) -> None:
    registry = CollectorRegistry()
    async with Metrics(client, registry=registry):
        with pytest.raises(ValueError, match="Duplicated"):
            await Metrics(client, registry=registry).__aenter__()


@pytest.mark.parametrize("wrong", [{"interval": -1}, {"buckets": ()}, {"buckets": (2, 1)}])
def test_settings_that_cannot_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(delayq.BadInput):
        Metrics(delayq.connect("redis://127.0.0.1:1"), **wrong)


def names() -> set[str]:
    """Return the names of all series."""
    suffixes = {
        "counter": ("_total",),
        "histogram": ("_bucket", "_count", "_sum"),
        "summary": ("_count", "_sum"),
    }
    families = Metrics(
        delayq.connect("redis://127.0.0.1:1"), registry=CollectorRegistry()
    ).describe()
    return {
        family.name + suffix for family in families for suffix in suffixes.get(family.type, ("",))
    }


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    queries += [
        variable["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    used = {name for query in queries for name in re.findall(r"\bdelayq_\w+", query)}
    assert used
    assert used <= names()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len(set(ids))


def test_the_documentation_lists_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    listed = set(re.findall(r"^\| `(delayq_\w+)`", page, re.MULTILINE))
    families = Metrics(
        delayq.connect("redis://127.0.0.1:1"), registry=CollectorRegistry()
    ).describe()
    assert listed == {
        family.name + ("_total" if family.type == "counter" else "") for family in families
    }


async def test_who_is_cancelled_while_the_server_is_asked_first_leaves_nothing_registered(
    client: Client, jobs: ReliableQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, asked = CollectorRegistry(), asyncio.Event()

    async def never(**_: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(client, "queue_depths", never)
        entering = asyncio.create_task(Metrics(client, registry=registry, interval=0).__aenter__())
        await asyncio.wait_for(asked.wait(), 10)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
    assert not client._hooks.delivered
    async with Metrics(client, registry=registry, interval=0) as metrics:
        await jobs.offer(1)
        assert (await samples(metrics))["delayq_offered_total", "jobs", "reliable"] == 1
