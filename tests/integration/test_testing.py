"""Tests that move time forward, on real servers."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._embedded import server as embedded
from delayq._embedded.server import EmbeddedServer
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack
from delayq._reliable.keys import ReliableKeys
from delayq.testing import Clock, advance, running, settled
from tests.support.depth import in_gate, nightly
from tests.support.programs import run_python
from tests.support.reliable import claim_one, get, leased, values
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from delayq import Client, DelayedQueue
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

HOUR = timedelta(hours=1)
# So long that tests can stop a minute before it: they take less than that themselves.
JOBS: dict[str, Any] = {"dedup_window": 3600, "backoff": delayq.Backoff.fixed(3600)}
needs_embedded = pytest.mark.skipif(not embedded.available(), reason="no server to start")


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[Client]:
    # Only the jump itself wakes waiting calls.
    async with delayq.connect(server.url, resync_interval=3600) as client:
        yield client


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", **JOBS)


# A delayed queue


@pytest.mark.every_server
async def test_only_due_messages_become_ready_in_their_order(
    client: Client, queue: DelayedQueue[int], jobs: Jobs
) -> None:
    await queue.offer_many([(3, 7200), (1, 3600), (4, 7300), (2, 3600)])
    await advance(client, 3540)
    assert await queue.drain() == []
    await advance(client, timedelta(seconds=3660))
    assert await queue.ready.read_all() == [1, 2, 3]
    assert await queue.drain() == [1, 2, 3]
    assert await queue.pending.read_all() == [4]
    # Equal moments.
    await queue.offer_many([(n, 60) for n in range(300)])
    await jobs.offer_many([delayq.Offer(value=n, delay=60, id=f"{999 - n}") for n in range(100)])
    for step in (17, 19.000001, 24):
        await advance(client, step)
    assert await queue.drain() == list(range(300))
    assert await values(jobs) == list(range(100))


class Waiting:
    """Calls that wait for a message of each kind."""

    def __init__(self, client: Client) -> None:
        self.orders: DelayedQueue[int] = client.delayed_queue("orders")
        self.jobs = client.reliable_queue("jobs", **JOBS)
        self._calls = [
            asyncio.create_task(self.orders.take()),
            asyncio.create_task(values(self.jobs, 1, wait=60)),
        ]

    async def wake(self, mover: Client) -> None:
        """Offer what is due in an hour, and move the time of another client by that."""
        await mover.delayed_queue("orders").offer(1, 3600)
        await mover.reliable_queue("jobs", **JOBS).offer(2, 3600, priority=3)
        await advance(mover, 1800)
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in self._calls)
        await advance(mover, 1801)
        assert await asyncio.wait_for(asyncio.gather(*self._calls), 20) == [1, [2]]


@pytest.mark.every_server
async def test_a_change_of_groups_wakes_waiting_calls_of_all_clients(
    server: PrivateServer, client: Client
) -> None:
    await Waiting(client).wake(client)
    async with delayq.connect(server.url, resync_interval=3600) as other:
        await Waiting(other).wake(client)


@pytest.mark.every_server
async def test_leases_of_deliveries_and_the_queues_own_expiry_end(
    client: Client, queue: DelayedQueue[int]
) -> None:
    await queue.offer(1)
    async for delivery in queue.deliveries(lease=3600):
        await advance(client, 3540)
        assert await queue.ready.leased() == 1
        await advance(client, 61)
        with pytest.raises(delayq.LeaseLost):
            await delivery.ack()
        break
    assert await queue.take() == 1
    await queue.offer(1, 7200)
    await queue.pending.expire(3600)
    await advance(client, 3500)
    assert await queue.pending.size() == 1
    await advance(client, 101)
    assert await queue.pending.size() == 0


# A reliable queue


@pytest.mark.every_server
async def test_leases_end_and_attempts_count_on(client: Client) -> None:
    jobs = client.reliable_queue("jobs", lease=3600, **JOBS)
    first = await leased(jobs)
    await advance(client, 3540)
    assert await jobs.claim() == []
    await advance(client, 60)
    second = await claim_one(jobs)
    assert second.attempt == 2
    assert second.due_at == first.due_at - HOUR
    with pytest.raises(delayq.LeaseLost):
        await first.ack()
    await second.release()
    third = await claim_one(jobs)
    assert (third.attempt, third.due_at) == (2, second.due_at)


@pytest.mark.every_server
async def test_windows_backoffs_and_times_to_live_pass(client: Client, jobs: Jobs) -> None:
    await jobs.offer("a", id="one")
    assert await values(jobs) == ["a"]
    await jobs.offer("short", 3, ttl=60)
    await jobs.offer("long", 2, ttl=9000)
    await advance(client, 3540)
    with pytest.raises(delayq.DuplicateMessage):
        await jobs.offer("b", id="one")
    long = await claim_one(jobs)
    assert long.value == "long"
    with pytest.raises(RuntimeError):
        async with long:
            raise RuntimeError("not yet")
    await advance(client, 60)
    await jobs.offer("c", id="one")
    assert await values(jobs) == ["c"]
    await advance(client, 3480)
    assert await jobs.claim() == []
    await advance(client, 61)
    assert (await claim_one(jobs)).attempt == 2


@pytest.mark.every_server
async def test_moments_that_the_server_reports_move_too(client: Client, jobs: Jobs) -> None:
    before = await client.server_time()
    await (await leased(jobs, "dead")).bury("broken")
    await jobs.offer(b"\xff".decode("latin-1"), 7200, id="a", headers={"h": "line\nline"}, ttl=9000)
    seen = await get(jobs, "a")
    (letter,) = await jobs.dead.list()
    await advance(client, HOUR)
    moved = await get(jobs, "a")
    assert (moved.value, moved.headers) == ("\xff", {"h": "line\nline"})
    assert seen.enqueued_at - moved.enqueued_at == HOUR
    assert seen.due_at - moved.due_at == HOUR
    (moved_letter,) = await jobs.dead.list()
    assert letter.died_at - moved_letter.died_at == HOUR
    assert letter.enqueued_at - moved_letter.enqueued_at == HOUR
    assert moved_letter.value == "dead"
    clock = Clock(client)
    await clock.advance(HOUR)
    await clock.advance(60)
    assert timedelta(seconds=3660) <= await clock.now() - before < timedelta(seconds=3700)


async def test_the_due_time_of_a_buried_message_moves_too(
    client: Client, jobs: Jobs, raw: Any
) -> None:
    async def due_us() -> float:
        letter = await raw.hget(ReliableKeys.of("jobs").dead_messages, "a")
        return float(json.loads(letter.partition(b"\n")[0])["due"])

    await jobs.offer(1, 7200, id="a")
    await jobs.bury("a", 'why "due":"1"')
    due_before = await due_us()
    await advance(client, HOUR)
    assert due_before - await due_us() == HOUR // timedelta(microseconds=1)


async def test_messages_due_for_ages_can_still_be_handled(client: Client, jobs: Jobs) -> None:
    async def ages_pass() -> None:
        for _ in range(4):
            await advance(client, 19 * 365 * timedelta(days=1))

    await jobs.offer("old", ttl=40 * 365 * 86_400)
    await ages_pass()
    assert (await leased(jobs, "new")).value == "new"
    await jobs.offer("a", 1)
    await advance(client, 1)
    message = await claim_one(jobs)
    await ages_pass()
    # Both leases have ended.
    assert [message.value for message in await jobs.claim(5)] == ["new", "a"]
    assert message.attempt == 1


async def test_time_moves_only_forward_for_one_queue_or_all_queues_of_a_client(
    server: PrivateServer, client: Client
) -> None:
    one = client.reliable_queue("one")
    other: DelayedQueue[Any] = client.delayed_queue("other")
    await one.offer(1, 60)
    await other.offer(2, 60)
    async with delayq.connect(server.url) as others:
        theirs = others.reliable_queue("theirs")
        await theirs.offer(3, 60)
        await advance(one, 60)
        assert await values(one) == [1]
        assert await other.drain() == []
        await advance(client, 60)
        assert await other.drain() == [2]
        assert await values(theirs) == []
    by: Any
    for by in (-1, float("nan"), "1", timedelta(days=8000)):
        with pytest.raises(delayq.BadInput):
            await advance(client, by)


# A private server


@needs_embedded
async def test_on_a_private_server_everything_moves() -> None:
    async with running(name_mapper="app:{}".format) as client:
        jobs = client.reliable_queue("jobs")
        orders: DelayedQueue[Any] = client.delayed_queue("orders")
        tagged: DelayedQueue[Any] = client.delayed_queue("{t}:orders")
        await jobs.offer(1, 60)
        await orders.offer(2, 60)
        await tagged.offer(3, 60)
        for queue in (jobs, orders, tagged):
            await queue.aclose()
        await advance(client, 60)
        assert await values(client.reliable_queue("jobs")) == [1]
        assert await client.delayed_queue("orders").drain() == [2]
        assert await client.delayed_queue("{t}:orders").drain() == [3]


@needs_embedded
async def test_a_server_serves_many_tests_and_is_empty_for_each_unless_its_data_are_kept(
    tmp_path: Path,
) -> None:
    with EmbeddedServer(None) as server:
        for _ in range(2):
            async with running(server) as client:
                assert (await client.reliable_queue("jobs").stats()).delayed == 0
                async with delayq.connect(server.url, resync_interval=3600) as other:
                    # Queues that only others have open move for their readers, too.
                    await Waiting(other).wake(client)
                await client.reliable_queue("jobs").offer(1, 60)
    with (
        EmbeddedServer(tmp_path / "data") as server,
        pytest.raises(delayq.ConfigurationError, match="empties its server"),
    ):
        async with running(server):
            pass


# Waiting until everything is settled


async def test_settled_waits_for_the_workers(client: Client, jobs: Jobs) -> None:
    handled: list[Any] = []

    async def work() -> None:
        async for message in jobs:
            async with message:
                await asyncio.sleep(0.02)
                handled.append(message.value)

    worker = asyncio.create_task(work())
    await settled(client)
    await jobs.offer_many([delayq.Offer(value=n, delay=60 * n) for n in range(4)])
    await settled(jobs)
    assert handled == [0]
    await advance(client, 180)
    await settled(client)
    assert handled == [0, 1, 2, 3]
    await jobs.aclose()
    await worker


async def test_a_test_that_leaves_messages_behind_names_them(
    client: Client, jobs: Jobs, queue: DelayedQueue[int], raw: Any
) -> None:
    async def names(words: str, of: Any) -> None:
        with pytest.raises(TimeoutError, match=words):
            await settled(of, timeout=0.05)

    await jobs.offer(1)
    await jobs.offer(2)
    await jobs.claim()
    await names("'jobs' has 1 ready and 1 leased", jobs)
    await queue.offer(1)
    await names("'orders' has", queue)
    await until(queue.ready.size)
    await names(r"'jobs' has .*; 'orders' has 1 ready, 0 leased|'orders' .*; 'jobs'", client)
    async for delivery in queue.deliveries():
        await names("0 ready, 1 leased", queue)
        await delivery.ack()
        break
    await settled(queue)
    # A due message that no client has seen yet.
    keys = DelayedKeys.of("orders")
    await raw.zadd(keys.timeout, {pack(b"ABCDEFGH", b"1", 8): 1})
    await names("just came due", queue)
    assert await queue.take() == 1
    await settled(queue)


# The pytest plugin


_TESTS = """
from datetime import timedelta
import pytest
from delayq.testing import settled

@pytest.mark.parametrize("turn", [1, 2])
async def test_it(delayq_client, delayq_clock, turn):
    jobs = delayq_client.reliable_queue("jobs")
    assert (await jobs.stats()).delayed == 0
    await jobs.offer("a", delay=3600)
    await delayq_clock.advance(timedelta(hours=1))
    [message] = await jobs.claim()
    await message.ack()
    await settled(delayq_client)
"""


_BACKEND = '@pytest.fixture\ndef anyio_backend():\n    return "asyncio"\n'


def run_pytest(folder: Path, tests: str, *options: str) -> str:
    """Run tests in a process of their own. Return what pytest says."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["delayq.testing.pytest_plugin"]\n')
    (folder / "test_it.py").write_text(tests)
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"--rootdir={folder}")
    return run_python(*command, str(folder), cwd=folder).stdout


@needs_embedded
@pytest.mark.parametrize(
    ("plugin", "way"), [("anyio", "mark"), in_gate("asyncio", "auto"), nightly("asyncio", "mark")]
)
def test_the_fixtures_work_with_both_plugins(tmp_path: Path, plugin: str, way: str) -> None:
    options = ["-W", "error", "-o", "asyncio_default_fixture_loop_scope=function"]
    tests = _TESTS + (_BACKEND if plugin == "anyio" else "")
    if way == "mark":
        tests = tests.replace("async def", f"@pytest.mark.{plugin}\nasync def")
    else:
        options += ["-o", f"{plugin}_mode=auto"]
    output = run_pytest(tmp_path, tests, *options)
    assert "2 passed" in output, output


@pytest.mark.gate
def test_without_a_plugin_for_async_tests_the_fixture_says_so(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "def test_it(delayq_client): pass\n", "-p", "no:asyncio")
    assert "delayq_client works only in async tests" in output
