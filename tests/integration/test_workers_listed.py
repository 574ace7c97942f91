"""The list of the clients that work on a queue, and of what they handle."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import REGISTER
from delayq.admin.catalog import list_workers
from delayq.admin.doctor import diagnose
from tests.support.reliable_fixtures import faults
from tests.support.waiting import until
from tests.support.workers import Gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client
    from delayq.stats import WorkerInfo
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer

__all__ = ["faults"]

KEYS = ReliableKeys.of("jobs")
SECRET = "geheim"


@pytest.fixture
async def quick(server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A client that reports often, and counts for over an hour after each report."""
    monkeypatch.setattr("delayq._reliable.reports._COUNTS", 100_000)
    async with delayq.connect(server.url, resync_interval=0.05) as client:
        yield client


async def listed(client: Client, count: int = 1, name: str | None = "jobs") -> list[WorkerInfo]:
    """Wait until there are ``count`` workers, and return them."""
    workers: list[WorkerInfo] = []

    async def are_there() -> bool:
        workers[:] = await list_workers(client, name)
        return len(workers) == count

    await until(are_there)
    return workers


@pytest.mark.every_server
async def test_a_worker_shows_what_it_handles(client: Client, quick: Client, raw: Any) -> None:
    worker, begun, over = delayq.Worker(quick, concurrency=7), asyncio.Event(), asyncio.Event()

    @worker.listener("jobs", partitions=3)
    async def handle(value: Any) -> None:
        begun.set()
        await over.wait()

    async with worker:
        (idle,) = await listed(client)
        assert (idle.host, idle.pid) == (socket.gethostname(), os.getpid())
        assert (idle.queue, idle.version) == ("jobs", metadata.version("delayq"))
        assert (idle.slots, idle.running, idle.messages) == (7, 0, ())
        secrets: dict[str, Any] = {"headers": {SECRET: SECRET}, "group": SECRET}
        await client.reliable_queue("jobs").offer(SECRET, id="long", **secrets)
        await begun.wait()

        async def running() -> int:
            (worker_info,) = await list_workers(client, "jobs")
            return worker_info.running

        await until(running, equals=1)
        (busy,) = await list_workers(client, "jobs")
        assert [(message.id, message.attempt) for message in busy.messages] == [("long", 1)]
        assert busy.started_at <= busy.messages[0].since <= busy.seen_at
        # Nothing of a message but its id is told.
        assert SECRET.encode() not in b"".join(await raw.hvals(KEYS.worker_facts))
        over.set()
        await until(running, equals=0)


async def test_a_process_logs_and_tells_which_handler_has_blocked_its_event_loop(
    client: Client, quick: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("delayq.worker._loop_watch.INTERVAL", 0.05)
    monkeypatch.setattr("delayq.worker._loop_watch.BLOCKED_AFTER", 0.1)
    worker = delayq.Worker(quick, concurrency=5)

    def render() -> None:
        deadline = time.monotonic() + 30
        while "has been blocked" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)

    @worker.listener("jobs")
    async def charge(_: int) -> None:
        await asyncio.sleep(0)
        render()

    async with worker:
        await client.reliable_queue("jobs").offer(1)

        async def has_told() -> bool:
            return any(report.blocked for report in await list_workers(client, "jobs"))

        await until(has_told)
        (report,) = await list_workers(client, "jobs")
        assert report.blocked is not None
        assert report.blocked.code.startswith("charge (test_workers_listed.py, line ")
        texts = [finding.text async for finding in diagnose(client)]
        await until(lambda: "the event loop runs again after" in caplog.text)
    assert any(text.startswith("its event loop was blocked for") for text in texts)
    assert "by charge (test_workers_listed.py, line " in caplog.text
    assert "in render" in caplog.text


async def test_queues_share_the_slots_of_a_process(client: Client, quick: Client) -> None:
    worker, gate = delayq.Worker(quick, concurrency=1), Gate()
    worker.listener("jobs")(gate)
    worker.listener("mails")(gate)
    async with worker:
        await client.reliable_queue("mails").offer(1)

        async def slots() -> list[tuple[int, int, int]]:
            reports = await list_workers(client)
            return [(report.slots, report.process_slots, report.running) for report in reports]

        await until(slots, equals=[(1, 1, 0), (1, 1, 1)])

        async def free_for_jobs() -> int:
            (report,) = await list_workers(client, "jobs")
            return report.free

        await until(free_for_jobs, equals=0)
        gate.open()


@pytest.mark.every_server
@pytest.mark.usefixtures("_last_reports_arrive")
async def test_a_client_that_closes_is_gone_at_once(server: PrivateServer, client: Client) -> None:
    async with delayq.connect(server.url, resync_interval=3600) as theirs:
        taking = asyncio.create_task(theirs.reliable_queue("jobs").claim(wait=3600))
        await listed(client)
    assert await list_workers(client, "jobs") == []
    with pytest.raises(delayq.Closed):
        await taking


async def test_a_doctor_shows_what_workers_declare_and_the_server_does_not_have(
    client: Client, quick: Client
) -> None:
    await client.reliable_queue("jobs", max_size=1000, keep=60).stats()
    jobs = quick.reliable_queue("jobs", max_size=500, keep=60)
    taking = asyncio.create_task(jobs.claim(wait=3600))
    (worker,) = await listed(client)
    assert worker.declared == {"max_size": "500"}

    async def differences() -> list[tuple[str, str]]:
        checks = [each async for each in diagnose(client) if each.check == "reliable jobs"]
        return [(each.text, each.advice) for each in checks[1:]]

    (text, advice) = (await differences())[0]
    assert text.startswith("max_size is 1000 on the server, and 500 in the code of ")
    assert f":{os.getpid()}: the value on the server counts" in text
    assert advice == "delayq configure jobs --max-size 500, or change the code"
    await client.reliable_queue("jobs").configure(max_size=500)
    assert await differences() == []
    taking.cancel()


async def test_a_producer_is_no_worker(server: PrivateServer, client: Client, raw: Any) -> None:
    async with delayq.connect(server.url, resync_interval=0.05) as producer:
        await producer.reliable_queue("jobs").offer(1)
        await until(lambda: raw.exists(KEYS.history), equals=1)
        assert await list_workers(client, "jobs") == []


@pytest.mark.gate
async def test_a_worker_that_is_killed_disappears(server: PrivateServer, client: Client) -> None:
    program = f"""
import asyncio, delayq
async def main():
    async with delayq.connect({server.url!r}, resync_interval=0.1) as client:
        await client.reliable_queue("jobs").claim(wait=3600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            (worker_info,) = await listed(client)
            assert worker_info.pid == process.pid
        finally:
            process.kill()
    await listed(client, 0)


@pytest.mark.every_server
async def test_entries_of_the_dead_are_removed(quick: Client, raw: Any) -> None:
    dead = {f"dead {n}": 1 for n in range(25)}
    await raw.zadd(KEYS.workers, dead)
    await raw.hset(KEYS.worker_facts, mapping=dead)
    taking = asyncio.create_task(quick.reliable_queue("jobs").claim(wait=3600))

    async def only_one_is_left() -> bool:
        return (await raw.zcard(KEYS.workers), await raw.hlen(KEYS.worker_facts)) == (1, 1)

    await until(only_one_is_left)
    taking.cancel()


async def test_all_queues_are_listed_by_process(client: Client, quick: Client) -> None:
    names = ["b{}", "a", "x:workers"]
    taking = [asyncio.create_task(quick.reliable_queue(n).claim(wait=3600)) for n in names]
    workers = await listed(client, 3, name=None)
    assert [each.queue for each in workers] == sorted(names)
    for task in taking:
        task.cancel()


async def test_an_entry_that_is_unreadable_is_left_out(client: Client, raw: Any) -> None:
    for name, facts in {"a": b"junk", "b": b"{}", "c": b"[1]", "d": b"\xff"}.items():
        await raw.zadd(KEYS.workers, {name: 9e15})
        await raw.hset(KEYS.worker_facts, name, facts)
    await raw.zadd(KEYS.workers, {"e": 9e15})
    assert await list_workers(client, "jobs") == []


@pytest.mark.parametrize("fault", ["lost", "unsent", "full"])
async def test_a_report_that_fails_is_repeated(
    client: Client, quick: Client, faults: Faults, fault: str
) -> None:
    faults.fail(REGISTER, fault, times=2)
    taking = asyncio.create_task(quick.reliable_queue("jobs").claim(wait=3600))
    (worker_info,) = await listed(client)
    assert worker_info.slots == 0
    await until(lambda: faults.calls.count(REGISTER.name) > 2)
    taking.cancel()
    await listed(client, 0)


async def test_an_idle_worker_reports_with_every_fourth_re_check(
    client: Client, quick: Client, faults: Faults
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    taking = asyncio.create_task(quick.reliable_queue("jobs").claim(wait=3600))
    await listed(client)
    await until(lambda: faults.calls.count("recheck") > 40)
    # However late re-checks are, nearly four intervals pass between two reports.
    most = 3 + (loop.time() - began) / (3.6 * 0.05)
    assert 5 < faults.calls.count(REGISTER.name) < most
    taking.cancel()
