"""Why messages are late is told by the first cause that applies, and by what would help."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from delayq import Backoff, Limit, Offer, Worker, connect
from delayq.admin.catalog import FoundQueue
from delayq.admin.delays import explain_delay
from delayq.admin.doctor import Finding, diagnose
from delayq.admin.failures import find_wave
from delayq.admin.reliable import ReliableInspector
from delayq.admin.wording import describe_group_state
from delayq.cli.queues import read_all
from delayq.cli.top import Monitor
from delayq.errors import ServerRefused
from delayq.stats import BlockedLoop, WorkerInfo
from tests.support.waiting import until
from tests.support.workers import Gate

if TYPE_CHECKING:
    from delayq import Client
    from delayq.admin.delays import Delay
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

NOW = datetime(2030, 1, 1, tzinfo=UTC)

pytestmark = pytest.mark.usefixtures("_workers_stay_listed")


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", lease=60)


async def delay_of(client: Client, age: float = 1) -> Delay:
    """Return why messages are late, as if the oldest of them had been due for ``age`` seconds."""
    inspector = ReliableInspector.of(client, "jobs")
    depth = replace(await inspector.stats(), oldest_due_age=age)
    return await explain_delay(inspector, depth, lambda s: f"{s:g} s")


@pytest.mark.parametrize(
    ("limit", "words", "raised"),
    [
        (Limit(concurrency=2), "2 at a time", Limit(concurrency=3)),
        (Limit(rate=2, per=60), "2 in 60 s", Limit(rate=9, per=60)),
        (Limit(rate=2, per=60), "2 in 60 s", None),
    ],
)
async def test_a_queue_may_be_at_its_limit_until_that_is_raised_or_lifted(
    client: Client, jobs: Jobs, limit: Limit, words: str, raised: Limit | None
) -> None:
    await jobs.configure(limit=limit)
    await jobs.offer_many([Offer(n) for n in range(5)])
    assert len(await jobs.claim(5)) == 2
    # This claim waits for a slot.
    assert not await jobs.claim(5)
    delay = await delay_of(client)
    assert delay.cause == f"at its limit of {words}"
    assert not delay.is_wrong
    assert "delayq configure jobs --limit" in delay.advice
    await jobs.configure(limit=raised)
    assert "limit" not in (await delay_of(client)).cause


async def test_groups_are_held_back_by_new_limits_before_a_claim_has_seen_them(
    client: Client, jobs: Jobs
) -> None:
    async def state(group: str) -> str:
        return describe_group_state(await jobs.groups.get(group), datetime.now(UTC))

    await jobs.configure(group_limit=Limit(rate=2, per=60))
    await jobs.offer_many([Offer(n, group="acme") for n in range(5)])
    for message in await jobs.claim(5):
        await message.ack()
    assert "group 'acme'" in (await delay_of(client)).cause
    assert await state("acme") == "at its limit"
    await jobs.configure(group_limit=Limit(rate=9, per=60))
    assert (await delay_of(client)).cause == "no consumers"
    assert await state("acme") == "due"
    await jobs.configure(group_limit=Limit(rate=1, per=60))
    assert "is at its limit of 1 in 60 s" in (await delay_of(client)).cause
    assert await state("acme") == "at its limit"
    await jobs.groups.pause("acme")
    assert (await jobs.groups.get("acme")).next_at is None


async def test_groups_may_be_at_their_limits_held_up_or_paused(client: Client, jobs: Jobs) -> None:
    await jobs.configure(group_limit=Limit(concurrency=2))
    await jobs.offer_many([Offer(n, group="acme") for n in range(20)])
    await jobs.offer_many([Offer(n, group="bob") for n in range(3)])
    await jobs.groups.pause("bob")
    assert len(await jobs.claim(10)) == 2
    cause = (await delay_of(client)).cause
    assert cause == (
        "group 'acme', with 18 ready, is at its limit of 2 at a time; group 'bob', with 3 ready, is"
        " paused"
    )
    await jobs.offer_many([Offer(n, group=f"group {n}") for n in range(4)])
    for n in range(4):
        await jobs.groups.pause(f"group {n}")
    assert (await delay_of(client)).cause.endswith("; and 3 more groups")
    # More workers would take this one.
    await jobs.offer("without a group")
    assert "group" not in (await delay_of(client)).cause


async def test_a_queue_may_be_paused_or_its_workers_missing_or_busy(
    client: Client, jobs: Jobs
) -> None:
    await jobs.offer_many([Offer(n) for n in range(5)])
    await jobs.pause()
    assert (await delay_of(client)).cause == "the queue is paused"
    await jobs.resume()
    delay = await delay_of(client)
    assert (delay.cause, delay.is_wrong) == ("no consumers", True)
    gate, worker = Gate(), Worker(client, concurrency=2)
    worker.listener("jobs", lease=60)(gate)
    async with worker:
        while len(gate.inside) < 2:
            await asyncio.sleep(0.01)
        delay = await delay_of(client)
        assert (delay.cause, delay.is_wrong) == ("all 2 slots of workers are in use", False)
        gate.open()


async def test_one_group_may_use_the_slots_that_others_wait_for(client: Client, jobs: Jobs) -> None:
    await jobs.configure(group_limit=Limit(rate=90, per=60))
    gate, worker = Gate(), Worker(client, concurrency=2)
    worker.listener("jobs", lease=60)(gate)
    async with worker:
        await jobs.offer_many([Offer(n, group="-a QUEUE") for n in range(5)])
        await until(lambda: len(gate.inside) == 2)
        assert (await delay_of(client)).cause == "all 2 slots of workers are in use"
        await jobs.offer("waits", group="bob")
        delay = await delay_of(client)
        assert delay.cause.startswith("group '-a QUEUE' uses all 2 slots of workers, while other")
        assert "delayq groups limit jobs -- '-a QUEUE' 1,90/60s;" in delay.advice
        await jobs.groups.set_limit("-a QUEUE", Limit(1))
        assert "limit" not in (await delay_of(client)).advice
        gate.open()


async def test_top_explains_what_is_late(
    client: Client, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.cli.queues._LATE", 0.0001)
    monitor = Monitor(client, [FoundQueue("reliable", "jobs")])
    await jobs.offer(1)
    (line,) = await monitor.read()
    assert line.cause == "no consumers"
    (message,) = await jobs.claim()
    await message.ack()
    (line,) = await monitor.read()
    assert (line.state[0], line.cause) == ("empty", "")


async def test_a_wave_of_failures_is_told_before_messages_die(
    server: PrivateServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspector = ReliableInspector.of(client, "jobs")

    async def text_of_wave() -> str:
        wave = await find_wave(inspector)
        return wave.text if wave else ""

    async with connect(server.url, resync_interval=0.05) as theirs:
        jobs = theirs.reliable_queue("jobs", backoff=Backoff.fixed(600), max_attempts=9)
        await jobs.offer_many([Offer(n) for n in range(12)])
        assert not await text_of_wave()
        for message in await jobs.claim(12):
            await message.nack(error=ConnectionError("refused by 10.0.0.1"))
        await until(text_of_wave)
        # The rate falls with time.
        wave = re.compile(r"(failing: )?\d retries a minute: ConnectionError")
        assert wave.fullmatch(await text_of_wave())
        with monkeypatch.context() as patch:
            patch.setattr(ReliableInspector, "now", AsyncMock(side_effect=ServerRefused("no time")))
            assert wave.fullmatch(await text_of_wave())
        findings = [finding async for finding in diagnose(client)]
        (advice,) = [finding.advice for finding in findings if wave.fullmatch(finding.text)]
        assert "delayq pause jobs" in advice
        assert "delayq bury jobs --error ConnectionError" in advice
        (line,) = await Monitor(client, [FoundQueue("reliable", "jobs")]).read()
        assert line.state[0] == "failing"
        assert wave.fullmatch(line.cause)
        # Neither late queues nor failing ones hide it.
        for name, value in (("queues._LATE", 0.0001), ("queues._MOST_EXPLAINED", 0)):
            monkeypatch.setattr(f"delayq.cli.{name}", value)
        monkeypatch.setattr("delayq.cli.top._MOST_EXPLAINED", 2)
        for name in ("late", "later"):
            await theirs.reliable_queue(name).offer(1)
        lines = await Monitor(client, []).read()
        assert [line.queue.name for line in lines if line.state[0] == "failing"] == ["jobs"]
        rows = await read_all(client)
        assert "retries a minute" in {queue.name: cause for queue, _, cause in rows}["jobs"]


async def findings_of(client: Client, queue: str) -> list[Finding]:
    return [each async for each in diagnose(client) if each.check == f"reliable {queue}"]


async def test_a_doctor_tells_of_which_errors_messages_die_and_how_they_come_back(
    server: PrivateServer, client: Client
) -> None:
    async with connect(server.url, resync_interval=0.05) as theirs:
        jobs, rejected = theirs.reliable_queue("jobs"), theirs.reliable_queue("rejected")
        await jobs.offer_many([Offer(n) for n in range(30)])
        await rejected.offer_many([Offer(n) for n in range(10)])
        refused = type("Refused" * 20, (ConnectionError,), {"__module__": "builtins"})
        for message in await jobs.claim(30):
            await message.bury("no use", KeyError("url") if message.value < 12 else refused())
        for message in await rejected.claim(10):
            await message.bury("no such address")
        await until(partial(find_wave, ReliableInspector.of(client, "jobs")))
        await until(partial(find_wave, ReliableInspector.of(client, "rejected")))
    error = refused.__name__[:80]
    queue, wave = await findings_of(client, "jobs")
    assert queue.text.endswith(f"30 dead: of the newest 25, 18 {error}..., 7 KeyError")
    assert "delayq dead list jobs --group-by error" in queue.advice
    assert wave.text.endswith(f"dead letters a minute: {refused.__name__}")
    assert "delayq pause jobs; then: delayq resume jobs; " in wave.advice
    assert f"delayq dead redrive jobs --error {error} (" in wave.advice
    await client.reliable_queue("jobs").pause()
    assert "pause" not in (await findings_of(client, "jobs"))[1].advice
    queue, wave = await findings_of(client, "rejected")
    assert queue.text.endswith("10 dead: 10 no such address")
    assert "delayq dead redrive rejected --error TEXT, or --reason TEXT" in wave.advice


def listed(now: datetime, facts: dict[str, Any]) -> Any:
    """Return a method that lists one worker, who has reported just now."""
    worker = WorkerInfo(
        queue="jobs",
        host="web",
        pid=7,
        version="1",
        slots=10,
        running=0,
        messages=(),
        started_at=now,
        seen_at=now,
        interval=20,
    )

    async def workers(_: ReliableInspector) -> list[WorkerInfo]:
        return [replace(worker, **facts)]

    return workers


@pytest.mark.parametrize(
    ("facts", "cause", "is_wrong"),
    [
        (
            {"process_slots": 10, "free": 0},
            "all slots of workers are in use, 10 of them by other queues",
            False,
        ),
        (
            {"free": 10, "blocked": BlockedLoop("charge (app.py, line 12)", 8.0, 20.0, NOW)},
            "charge (app.py, line 12) blocked the event loop of process 7 on web for 8 s",
            True,
        ),
        (
            {"free": 10, "seen_at": NOW - timedelta(seconds=45)},
            "no worker has reported for 45 s",
            True,
        ),
        ({"free": 10}, "workers listen, but take nothing", True),
        (
            {"free": 0, "blocked": BlockedLoop("once (app.py, line 7)", 1.2, 1.2, NOW)},
            "all slots of workers are in use",
            False,
        ),
    ],
)
async def test_workers_may_be_unable_to_take_messages(
    client: Client,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any],
    cause: str,
    is_wrong: bool,
) -> None:
    await jobs.offer(1)

    async def now(_: ReliableInspector) -> datetime:
        return NOW

    monkeypatch.setattr(ReliableInspector, "now", now)
    monkeypatch.setattr(ReliableInspector, "workers", listed(NOW, facts))
    delay = await delay_of(client, 50)
    assert delay.cause.startswith(cause)
    assert delay.is_wrong is is_wrong
