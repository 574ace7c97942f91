"""A message that is cancelled while it runs is gone at once, and keeps its slots until it ends."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

import delayq
from delayq import LeaseLost, Limit, Offer, Worker
from delayq._engine import prefetch
from delayq._engine.store import Resynced, resync
from delayq._reliable.store import ReliableStore
from tests.support.reliable import claim_one, depths
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import Store
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client
    from tests.support.servers import PrivateServer

ONE = Limit(concurrency=1)
LIMITS: tuple[dict[str, Any], ...] = ({"limit": ONE}, {"group_limit": ONE})


@pytest.mark.every_server
@pytest.mark.parametrize("settings", LIMITS)
@pytest.mark.parametrize("kind", ["coroutine", "function", "batch", "batch function"])
async def test_a_cancelled_message_keeps_its_slots_until_its_handler_has_ended(
    client: Client, settings: Any, kind: str
) -> None:
    jobs = client.reliable_queue("jobs", lease=LEASE, **settings)
    begun: list[int] = []
    gate, door = asyncio.Event(), threading.Event()
    worker = Worker(client, concurrency=5)

    async def handle(value: int) -> None:
        begun.append(value)
        try:
            await asyncio.sleep(60 if value == 1 else 0)
        finally:
            # It rolls back.
            await gate.wait()

    def handle_in_thread(value: int) -> None:
        begun.append(value)
        door.wait(60)

    async def handle_all(values: list[int]) -> None:
        for value in values:
            await handle(value)

    def handle_all_in_thread(values: list[int]) -> None:
        for value in values:
            handle_in_thread(value)

    if kind.startswith("batch"):
        handler = handle_all if kind == "batch" else handle_all_in_thread
        worker.listener("jobs", lease=LEASE, batch=1)(handler)
    else:
        worker.listener("jobs", lease=LEASE)(handle if kind == "coroutine" else handle_in_thread)
    await jobs.offer_many([Offer(1, id="a", group="g"), Offer(2, id="b", group="g")])
    async with worker:
        await until(lambda: begun == [1])
        assert await jobs.cancel("a", running=True)
        assert await jobs.get("a") is None
        assert await depths(jobs) == (0, 1, 0, 0)
        # Its id is free, and the worker knows by the time that it gets an answer.
        await jobs.offer(3, id="a", group="g")
        await until(lambda: bool(jobs._open.notifications.cancelled))
        assert await jobs.claim(5) == []
        assert begun == [1]
        gate.set()
        door.set()
        await until(lambda: begun == [1, 2, 3])
        await until(lambda: not jobs._open.acks_in_flight)


@pytest.mark.every_server
@pytest.mark.parametrize("settings", LIMITS)
async def test_a_worker_that_dies_frees_the_slots_of_a_cancelled_message_at_the_end_of_its_lease(
    client: Client, raw: Any, settings: Any
) -> None:
    jobs, store = client.reliable_queue("jobs", lease=LEASE, **settings), Store(raw, "jobs")
    await jobs.offer_many([Offer(1, id="a", group="g"), Offer(2, id="b", group="g")])
    await claim_one(jobs)
    assert await jobs.cancel("a", running=True)
    assert await jobs.claim(5) == []
    await store.let_pass(2 * LEASE)
    assert {group.waiting for group in await jobs.groups.list()} == {1}
    last = await claim_one(jobs, 5)
    assert last.id == "b"
    await last.ack()
    stored = await store.look()
    assert not any((stored.positions, stored.group_members, stored.group_turns))
    assert await raw.keys("*:kept_slots") == []


@pytest.mark.every_server
async def test_an_ordered_group_goes_on_at_the_end_of_the_lease_of_a_cancelled_message(
    server: PrivateServer,
) -> None:
    async with delayq.connect(server.url, resync_interval=600) as client:
        jobs = client.reliable_queue("jobs", lease=1, group_limit=Limit(ordered=True))
        await jobs.offer_many([Offer(1, id="a", group="g"), Offer(2, id="b", group="g")])
        await claim_one(jobs)
        await jobs.cancel("a", running=True)
        kind_and_keys = ("reliable", jobs._open.opened_partitions[0].keys.re_checked)
        (look,) = await resync(client.session.server, [[kind_and_keys]])
        assert isinstance(look, Resynced)
        assert 0 <= look.queues[0].wait_us <= 1_000_000
        # Nothing else tells this client to look.
        assert (await claim_one(jobs, wait=120)).id == "b"


@pytest.mark.every_server
@pytest.mark.parametrize("settings", LIMITS)
@pytest.mark.parametrize("stays", [True, False])
async def test_a_cancelled_message_that_was_claimed_ahead_keeps_no_slots(
    client: Client, raw: Any, monkeypatch: pytest.MonkeyPatch, settings: Any, stays: bool
) -> None:
    # On a slow machine, nothing goes back too early.
    monkeypatch.setattr(prefetch, "WITHIN", 60.0)
    many: dict[str, Any] = {name: Limit(concurrency=100) for name in settings}
    jobs = client.reliable_queue("jobs", lease=LEASE, **many)
    await jobs.offer_many([Offer(n, group="g") for n in range(1000)])
    cancelled: list[bool] = []
    async for message in jobs:
        await message.ack()
        ahead = [each[1].id for reader in jobs._open.dispatcher._holders for each in reader.ahead]
        if ahead and not cancelled:
            cancelled = await jobs.cancel_many(map(bytes.decode, ahead), running=True)
            assert await raw.keys("*:kept_slots")
        if (not stays and cancelled) or not (await jobs.stats()).ready:
            break
    assert all(cancelled)
    await until(lambda: raw.keys("*:kept_slots"), equals=[])


async def test_a_message_without_a_block_has_ended_once_its_holder_is_told(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the slots of another one could not be freed."""
    jobs = client.reliable_queue("jobs", lease=LEASE, limit=Limit(concurrency=2))
    await jobs.offer_many([Offer(1, id="a"), Offer(2, id="b")])
    first, second = await jobs.claim(2)
    await jobs.purge("all")
    await jobs.offer(3)
    assert await jobs.claim(5) == []
    with monkeypatch.context() as patch:
        patch.setattr(ReliableStore, "free_slots", AsyncMock(side_effect=OSError("planned")))
        with pytest.raises(LeaseLost):
            await first.ack()
        await until(lambda: "the slots of 1 cancelled messages" in caplog.text)
    with pytest.raises(LeaseLost):
        await second.ack()
    assert (await claim_one(jobs, 5, wait=60)).value == 3


async def test_a_message_that_is_cancelled_as_its_handler_ends_frees_its_slots(
    client: Client, server: PrivateServer
) -> None:
    jobs = client.reliable_queue("jobs", lease=3600, limit=ONE)
    await jobs.offer_many([Offer(1, id="a"), Offer(2)])
    worker, begun = Worker(client), list[int]()

    @worker.listener("jobs", lease=3600)
    async def handle(value: int) -> None:
        begun.append(value)
        if value == 1:
            # The event loop stands still meanwhile, so the notice comes behind the ack.
            with delayq.sync.connect(server.url) as other:
                assert other.reliable_queue("jobs").cancel("a", running=True)

    async with worker:
        await until(lambda: begun == [1, 2])
