"""The metrics agree with what the queues themselves report."""

from __future__ import annotations

import asyncio
import json
import platform
import re
import shutil
import subprocess
import time
from contextlib import suppress
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
from tests.integration.test_acl import granted
from tests.support.reliable import claim_one, offers
from tests.support.reliable_fixtures import LEASE
from tests.support.servers import free_port
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, DelayedQueue
    from delayq.admin.acl import Role
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
MESSAGES = "delayq_queue_messages"
FAILURES = "delayq_failures_total"
PROMTOOL = shutil.which("promtool")
ONE_READY = MESSAGES + '{kind="reliable",queue="jobs",state="ready"} 1.0'
LABELS = ("queue", "kind", "state", "reason", "error", "le")
SETTINGS: dict[str, Any] = {"lease": LEASE, "backoff": Backoff.fixed(3600), "max_attempts": 2}


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", **SETTINGS)


@pytest.fixture(autouse=True)
def _complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the figures be complete, even if the server takes a while."""
    monkeypatch.setattr("delayq.integrations.prometheus._TIMEOUT", 60)


@pytest.fixture
async def metrics(client: Client) -> AsyncIterator[Metrics]:
    async with Metrics(client, registry=CollectorRegistry(), interval=0) as metrics:
        yield metrics


Samples = dict[tuple[str, ...], float]


async def samples(metrics: Metrics) -> Samples:
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


def totals(seen: Samples, queue: str, *names: str, kind: str = "reliable") -> dict[str, float]:
    return {name: seen[f"delayq_{name}_total", queue, kind] for name in names}


def depths(seen: Samples, queue: str, kind: str = "reliable") -> dict[str, float]:
    return {key[3]: value for key, value in seen.items() if key[:3] == (MESSAGES, queue, kind)}


async def test_depths_are_the_stats_of_the_queue(metrics: Metrics, jobs: Jobs) -> None:
    await jobs.offer_many([Offer(1, delay=3600), Offer(2), Offer(3), Offer(4)])
    leased, rejected = await jobs.claim(2)
    await rejected.bury("no")
    stats, seen = await jobs.stats(), await samples(metrics)
    assert depths(seen, "jobs") == {"delayed": 1, "ready": 1, "leased": 1, "dead": 1}
    age = seen["delayq_queue_oldest_due_age_seconds", "jobs", "reliable"]
    assert 0 < stats.oldest_due_age <= age
    assert seen["delayq_queue_paused", "jobs", "reliable"] == 0
    await leased.release()
    await jobs.pause()
    assert (await samples(metrics))["delayq_queue_paused", "jobs", "reliable"] == 1


async def test_messages_that_are_late_come_with_the_reason(
    metrics: Metrics, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.integrations.prometheus._LATE", 0.0001)
    await jobs.offer(1)
    assert (await samples(metrics))["delayq_queue_late", "jobs", "reliable", "no_consumers"] == 1
    await claim_one(jobs)
    assert not [key for key in await samples(metrics) if key[0] == "delayq_queue_late"]


async def test_a_closed_queue_has_no_series(client: Client, metrics: Metrics, jobs: Jobs) -> None:
    await jobs.offer_many(offers(1))
    with suppress(LookupError):
        async with await claim_one(jobs):
            raise LookupError
    assert (await samples(metrics))["delayq_handling_seconds_count", "jobs"] == 1
    await jobs.aclose()
    assert not [key for key in await samples(metrics) if "jobs" in key]
    await client.reliable_queue("jobs", **SETTINGS).offer(2)
    seen = await samples(metrics)
    for name in ("delayq_handling_seconds_count", "delayq_lateness_seconds_count"):
        assert seen[name, "jobs"] == 0
    assert {seen[key] for key in seen if key[:2] == (FAILURES, "jobs")} == {0}


async def test_depths_of_a_delayed_queue(metrics: Metrics, queue: DelayedQueue[int]) -> None:
    await queue.offer_many([(1, 3600), (2, 3600), (3, 0), (4, 0), (5, 0)])
    await until(queue.ready.size)
    deliveries = queue.deliveries(LEASE)
    async for delivery in deliveries:
        seen = depths(await samples(metrics), "orders", "delayed")
        assert seen["delayed"] == await queue.pending.size() == 2
        assert seen["ready"] == await queue.ready.size()
        assert seen["leased"] == await queue.ready.leased() > 0
        async with delivery:
            within = await samples(metrics)
        assert within["delayq_queue_in_flight", "orders", "delayed"] == 1
        break
    await deliveries.aclose()  # type: ignore[attr-defined]
    seen_now = await samples(metrics)
    assert totals(seen_now, "orders", "delivered", kind="delayed") == {"delivered": 1}


async def test_counters_count_what_happened(metrics: Metrics, jobs: Jobs) -> None:
    await jobs.offer("done", id="once")
    assert await jobs.offer("again", id="once", on_duplicate="ignore") == "once"
    await jobs.offer_many([Offer("retry"), Offer("reject"), Offer("release")])
    for message in await jobs.claim(100):
        async with message:
            match message.value:
                case "retry":
                    raise RetryAfter(3600)
                case "reject":
                    raise Reject("no")
                case "release":
                    await message.release()
    seen = await samples(metrics)
    expected = {"offered": 4, "delivered": 4, "acked": 1, "retried": 1, "dead": 1, "released": 1}
    assert totals(seen, "jobs", *expected) == expected
    # What went back was not handled.
    assert seen["delayq_handling_seconds_count", "jobs"] == 3
    assert seen["delayq_lateness_seconds_count", "jobs"] == 4
    assert seen["delayq_lateness_seconds_bucket", "jobs", "+Inf"] == 4
    assert 0 <= seen["delayq_lateness_seconds_sum", "jobs"] < 60


class CardDeclined(Exception):
    """The error of a handler."""


async def test_durations_and_failures_of_handlers_are_counted(metrics: Metrics, jobs: Jobs) -> None:
    errors = [None, CardDeclined(), RetryAfter(3600), Reject("no"), KeyError("x"), KeyError("y")]
    # Many kinds of errors do not make many series.
    errors += [type(f"Error{n}", (Exception,), {})() for n in range(60)]
    await jobs.offer_many(offers(len(errors)))
    for message, error in zip(await jobs.claim(100), errors, strict=True):
        with suppress(Exception):
            async with message:
                if error is not None:
                    raise error
    # A message that is cancelled has not failed.
    await jobs.offer(1, id="a")
    message = await claim_one(jobs)
    with pytest.raises(delayq.MessageCancelled):  # noqa: PT012
        async with message:
            assert await jobs.cancel("a", running=True)
            await asyncio.Event().wait()
    seen = await samples(metrics)
    assert seen["delayq_handling_seconds_count", "jobs"] == len(errors) + 1
    assert 0 < seen["delayq_handling_seconds_sum", "jobs"] < 600
    assert seen["delayq_queue_in_flight", "jobs", "reliable"] == 0
    counts = failures(seen, "jobs")
    assert (len(counts), sum(counts.values()), counts["other"]) == (51, len(errors) - 2, 13)
    kinds = {f"{__name__}.CardDeclined": 1, "KeyError": 2, "delayq.Reject": 1}
    assert kinds.items() <= counts.items()


def failures(seen: Samples, queue: str) -> dict[str, float]:
    return {key[2]: value for key, value in seen.items() if key[:2] == (FAILURES, queue)}


async def test_metrics_of_a_worker_count_its_slots_and_failures(
    client: Client, metrics: Metrics
) -> None:
    worker = delayq.Worker(client, concurrency=2)
    running, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def handle(value: int) -> None:
        running.release()
        await go_on.wait()
        raise CardDeclined

    def slots(seen: Samples, queue: str) -> list[float]:
        kinds = ("in_flight", "slots", "free_slots")
        return [seen[f"delayq_queue_{kind}", queue, "reliable"] for kind in kinds]

    worker.listener("batches", batch=3, **SETTINGS)(lambda values: None)
    seen = []
    for queue in ("a", "b"):
        worker.listener(queue, **SETTINGS)(handle)
    async with worker:
        for queue in ("a", "b"):
            await client.reliable_queue(queue).offer(1)
            await running.acquire()
            seen.append(await samples(metrics))
        go_on.set()
    one, full, after = *seen, await samples(metrics)
    assert slots(one, "a") == [1, 2, 1]
    assert [slots(full, queue)[2] for queue in ("a", "b")] == [0, 0]
    assert slots(full, "batches")[2] > 0
    assert slots(after, "a") == [0, 0, 0]
    assert failures(after, "a") == {f"{__name__}.CardDeclined": 1, "other": 0}
    assert after["delayq_handling_seconds_count", "a"] == 1


async def test_reporting_a_failure_to_the_server_is_no_part_of_the_time_it_took(
    jobs: Jobs, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1.0
    monkeypatch.setattr("delayq.instrumentation.time.perf_counter", lambda: now)
    nack = delayq.Message.nack

    async def nack_slowly(*arguments: Any, **more: Any) -> None:
        nonlocal now
        now += 100
        await nack(*arguments, **more)

    monkeypatch.setattr(delayq.Message, "nack", nack_slowly)
    await jobs.offer(1)
    with suppress(CardDeclined):
        async with await claim_one(jobs):
            now += 1
            raise CardDeclined
    assert now == 102
    assert (await samples(metrics))["delayq_handling_seconds_sum", "jobs"] == 1


async def test_every_metric_is_there_before_anything_happens(
    metrics: Metrics, jobs: Jobs, queue: DelayedQueue[int]
) -> None:
    """Prometheus would miss the first increase of a series that begins with it."""
    await jobs.stats()
    seen = await samples(metrics)
    # This one tells of trouble by being there.
    assert names() - {"delayq_queue_late"} <= {key[0] for key in seen}
    assert seen["delayq_handling_seconds_count", "jobs"] == 0
    assert (failures(seen, "jobs"), failures(seen, "orders")) == ({"other": 0}, {})


async def test_the_client_reports_its_own_figures(
    client: Client, metrics: Metrics, queue: DelayedQueue[int]
) -> None:
    await queue.offer(1, 0.5)
    assert await queue.take() == 1
    seen, facts = await samples(metrics), client.statistics()
    assert seen[("delayq_connections",)] == facts.connections > 0
    assert seen[("delayq_queues",)] == 1
    assert seen[("delayq_timer_lag_seconds_count",)] == facts.timer_wakeups > 0
    assert 0 < seen[("delayq_timer_lag_seconds_sum",)] < 60
    assert seen["delayq_delivered_total", "orders", "delayed"] == 1
    assert seen["delayq_transfer_errors_total", "orders", "delayed"] == 0


async def test_a_server_that_is_away_holds_up_no_scrape(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with delayq.connect(own_server.url) as client:
        await client.reliable_queue("jobs").offer(1)
        async with Metrics(client, registry=CollectorRegistry(), interval=0) as metrics:
            with own_server.paused():
                monkeypatch.setattr("delayq.integrations.prometheus._TIMEOUT", 0.5)
                seen = await asyncio.wait_for(samples(metrics), 60)
    assert seen["delayq_offered_total", "jobs", "reliable"] == 1
    assert seen[("delayq_metrics_unanswered_total",)] == 1
    assert depths(seen, "jobs") == {}


async def test_reasons_are_looked_for_in_what_is_left_of_the_time(
    client: Client, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.reliable_queue("jobs").offer(1)
    figures = await client.queue_depths()

    async def depths_at_the_last_moment(*_: object, **__: object) -> object:
        time.sleep(0.3)
        return figures

    monkeypatch.setattr(delayq.Client, "queue_depths", depths_at_the_last_moment)
    for name, seconds in (("_LATE", 0), ("_TIMEOUT", 0.2)):
        monkeypatch.setattr(f"delayq.integrations.prometheus.{name}", seconds)
    assert (await samples(metrics))["delayq_metrics_unanswered_total",] == 1


async def test_a_lack_of_rights_is_not_a_failure(server: PrivateServer) -> None:
    # Otherwise an alert on failed calls would never clear.
    roles: tuple[Role, ...] = ("producer", "consumer")
    for role in roles:
        async with (
            granted(server, acl_rules(role, reliable=["jobs"])) as url,
            delayq.connect(url) as client,
        ):
            client.reliable_queue("jobs")
            async with Metrics(client, registry=CollectorRegistry(), interval=0) as metrics:
                before = client.statistics().errors
                seen = await samples(metrics)
                assert client.statistics().errors == before
        assert depths(seen, "jobs") == {}
        assert seen[("delayq_metrics_unanswered_total",)] == 0


async def test_metrics_ask_again_after_other_refusals(
    server: PrivateServer, metrics: Metrics, client: Client
) -> None:
    key = ReliableKeys.of("jobs").waiting[0]
    server.call("SET", key, "no sorted set")
    jobs = client.reliable_queue("jobs")
    seen = await samples(metrics)
    assert depths(seen, "jobs") == {}
    assert seen[("delayq_metrics_unanswered_total",)] == 1
    server.call("DEL", key)
    await jobs.offer(1)
    assert depths(await samples(metrics), "jobs")["ready"] == 1


async def test_a_port_serves_metrics_while_the_event_loop_is_blocked(
    client: Client, jobs: Jobs
) -> None:
    await jobs.offer(1)
    port, registry = free_port(), CollectorRegistry()
    async with serve(client, port, registry=registry):
        # The request blocks the event loop, so nothing else runs in the meantime.
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert ONE_READY in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")
    # A thread of an application's own gets the latest figures.
    async with Metrics(client, registry=registry, interval=0.05):
        await jobs.offer(2)

        async def scrape() -> bool:
            text = (await asyncio.to_thread(generate_latest, registry)).decode()
            return ONE_READY.replace("1.0", "2.0") in text

        await until(scrape)
    assert generate_latest(registry) == b""


async def test_the_metrics_are_served_by_an_asgi_application(metrics: Metrics, jobs: Jobs) -> None:
    await jobs.offer(1)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(metrics), base_url="http://test"
    ) as browser:
        reply = await browser.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        build = f'delayq_build_info{{python="{platform.python_version()}",version="'
        assert build in reply.text
        assert 'delayq_offered_total{kind="reliable",queue="jobs"} 1.0' in reply.text
        other = await browser.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert other.headers["content-type"].startswith("application/openmetrics-text")
        assert other.text.endswith("# EOF\n")


async def test_settings_that_cannot_work_are_refused(client: Client) -> None:
    closed = delayq.connect("redis://127.0.0.1:1")
    with pytest.raises(delayq.Closed):
        await Metrics(closed, registry=CollectorRegistry()).__aenter__()
    registry = CollectorRegistry()
    async with Metrics(client, registry=registry):
        with pytest.raises(ValueError, match="Duplicated"):
            await Metrics(client, registry=registry).__aenter__()
    wrong: Any
    for wrong in ({"interval": -1}, {"buckets": ()}, {"buckets": (2, 1)}):
        with pytest.raises(delayq.BadInput):
            Metrics(closed, **wrong)


def families() -> list[Any]:
    unopened = delayq.connect("redis://127.0.0.1:1")
    return list(Metrics(unopened, registry=CollectorRegistry()).describe())


def names() -> set[str]:
    """Return the names of all series."""
    of_histograms = ("_bucket", "_count", "_sum")
    suffixes = {"counter": ("_total",), "histogram": of_histograms, "summary": of_histograms[1:]}
    return {
        family.name + suffix for family in families() for suffix in suffixes.get(family.type, ("",))
    }


def test_dashboard_alerts_and_documentation_name_the_metrics_that_exist() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    variables = [each for each in dashboard["templating"]["list"] if each["type"] == "query"]
    queries = [*dashboard_queries(), *(variable["query"] for variable in variables)]
    used = {name for query in queries for name in re.findall(r"\bdelayq_\w+", query)}
    assert set() < used <= names()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)

    rules = (MONITORING / "alerts.yml").read_text()
    used = set(re.findall(r"\bdelayq_\w+", rules))
    # A text may name a histogram as a whole.
    assert set() < used <= names() | {family.name for family in families()} | {FAILURES}
    alerts = set(re.findall(r"alert: (\w+)", rules))
    tests = (MONITORING / "alerts_test.yml").read_text()
    assert alerts == set(re.findall(r"Delayq[A-Z]\w+", tests))
    page = (ROOT / "docs" / "operations.md").read_text()
    assert alerts == set(re.findall(r"^\| `(Delayq\w+)`", page, re.MULTILINE))

    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert set(re.findall(r"^\| `(delayq_\w+)`", page, re.MULTILINE)) == {
        family.name + ("_total" if family.type == "counter" else "") for family in families()
    }


def dashboard_queries() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    return [query["expr"] for panel in dashboard["panels"] for query in panel.get("targets", ())]


@pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not on the PATH: on Debian, apt install prometheus"
)
async def test_prometheus_itself_accepts_rules_queries_and_metrics(
    metrics: Metrics, jobs: Jobs, tmp_path: Path
) -> None:
    def check(*command: str, text: bytes = b"") -> str:
        done = subprocess.run(
            [str(PROMTOOL), *command], cwd=MONITORING, input=text, capture_output=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout + done.stderr)
        return done.stdout.decode()

    check("check", "rules", "alerts.yml")
    check("test", "rules", "alerts_test.yml")
    check("check", "config", "prometheus.yml")
    queries = [query.replace("$queue", ".*") for query in dashboard_queries()]
    rules = [
        {"record": f"query_{n}", "expr": query.replace("$__rate_interval", "5m")}
        for n, query in enumerate(queries)
    ]
    # JSON is YAML, too.
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in check("check", "rules", str(path))
    await jobs.stats()
    check("check", "metrics", text=(await metrics.render())[0])


async def test_registering_metrics_that_is_cancelled_leaves_nothing_registered(
    client: Client, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, asked = CollectorRegistry(), asyncio.Event()

    async def never(**_: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(client, "queue_depths", never)
        async with running(Metrics(client, registry=registry, interval=0).__aenter__()):
            await asyncio.wait_for(asked.wait(), 60)
    assert not client._hooks.delivered
    async with Metrics(client, registry=registry, interval=0) as metrics:
        await jobs.offer(1)
        assert totals(await samples(metrics), "jobs", "offered") == {"offered": 1}
