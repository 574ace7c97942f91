"""When a caller goes away, nothing is lost, duplicated, or left behind. A message that is cancelled
while it runs is gone at once, and keeps its slots until it ends.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import warnings
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import anyio
import pytest
from redis.asyncio import Redis

import delayq
from delayq import LeaseLost, Limit, Offer, Worker
from delayq._engine import prefetch
from delayq._engine.store import RecheckReply, recheck
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.store import ReliableStore
from tests.support.depth import examples, nightly
from tests.support.reliable import bodies, claim_one, depths, leased, leases
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import Store
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq import Client, Message
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

    Orders = delayq.DelayedQueue[int]


async def cancel_many(
    wanted: int, call: Callable[[float], Any], offer: Callable[[int, float], Any]
) -> int:
    """Cancel so many calls, each of which is told how long to wait, while messages are offered.

    Return how many were offered: 0, 1, ...
    """
    chance = random.Random(1)
    cancelled = offered = 0
    while cancelled < wanted:
        waits = [chance.choice((60, 0, 0.0001, 0.0005, 0.002)) for _ in range(50)]
        calls = [asyncio.create_task(call(wait)) for wait in waits]
        delays = [chance.choice((0, chance.random() * 0.002)) for _ in range(10)]
        offers = [asyncio.create_task(offer(offered + n, delays[n])) for n in range(10)]
        offered += 10
        for task in calls:
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*offers)
        results = await asyncio.gather(*calls, return_exceptions=True)
        cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
    return offered


async def test_many_claims_that_are_cancelled_or_short_lose_nothing(
    client: Client, jobs: Jobs, store: Store
) -> None:
    got: list[Message[int]] = []

    async def claim(wait: float) -> None:
        got.extend(await jobs.claim(3, wait=wait))

    offered = await cancel_many(examples(20_000), claim, jobs.offer)
    # What is on its way back arrives.
    await until(lambda: leases(store), equals=len(got))
    while len(got) < offered:
        got += await jobs.claim(100, wait=20)
    # No message that was returned has counted an attempt.
    assert sorted(message.value for message in got) == list(range(offered))
    assert {message.attempt for message in got} == {1}
    assert client.statistics().waiting == 0


async def test_closing_is_quick_while_the_server_does_not_answer(own_server: PrivateServer) -> None:
    client = await delayq.connect(own_server.url).__aenter__()
    jobs, orders = client.reliable_queue("jobs"), client.delayed_queue("orders")
    message = await leased(jobs)
    waiting = [asyncio.create_task(call) for call in (jobs.claim(wait=60), orders.poll(60))]
    await until(lambda: client.statistics().waiting == 2)
    with own_server.paused():
        sent = [asyncio.create_task(call) for call in (jobs.offer(1), orders.offer(1))]
        sent.append(asyncio.create_task(message.ack()))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            await client.aclose()
        results = await asyncio.gather(*waiting, *sent, return_exceptions=True)
    assert [type(result) for result in results] == [delayq.Closed] * 2 + [delayq.OutcomeUnknown] * 3


@pytest.mark.parametrize("inside", [True, False], ids=["inside its block", "where its block ends"])
async def test_an_ack_whose_caller_is_cancelled_is_carried_out(
    server: PrivateServer, jobs: Jobs, store: Store, inside: bool
) -> None:
    """The message was handled, wherever the cancellation arrives."""
    for turns in (0, 1, 2, 5):
        await cancel_an_ack(server, await leased(jobs), turns, inside=inside)
        await until(lambda: bodies(store), equals=0)
        (await store.look()).demand_no_orphans()
    with anyio.CancelScope() as scope:
        async with await leased(jobs):
            scope.cancel()
    await until(lambda: bodies(store), equals=0)


async def cancel_an_ack(
    server: PrivateServer, message: Message[Any], turns: int, *, inside: bool
) -> None:
    handled = asyncio.Event()

    async def handle() -> None:
        async with message:
            handled.set()
            if inside:
                await message.ack()

    # No reply arrives before the cancellation.
    with server.paused():
        handler = asyncio.create_task(handle())
        await handled.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler


async def test_nothing_is_left_behind_by_a_client(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Closing leaves time enough for the last calls, those of the history among them.
    monkeypatch.setattr("delayq._engine.scheduler._GRACE", 30)
    tasks = len(asyncio.all_tasks())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with delayq.connect(server.url) as client:
            queue, orders = client.reliable_queue("jobs"), client.delayed_queue("orders")
            await orders.offer(1, 3600)
            await orders.offer(2)
            assert await orders.take() == 2
            await queue.offer(1, 3600)
            await queue.offer(2)
            async for message in queue:
                async with message:
                    break
            calls = (queue.claim(wait=60), orders.take())
            waiting = [asyncio.create_task(call) for call in calls]
            await until(lambda: client.statistics().waiting == 2)
        for task in waiting:
            with suppress(delayq.Closed):
                await task
        del message, waiting, task, calls
        await asyncio.sleep(0)
        gc.collect()
    assert len(asyncio.all_tasks()) == tasks
    async with Redis.from_url(server.url, decode_responses=True, socket_timeout=60) as observer:
        assert {entry["name"] for entry in await observer.client_list()} == {""}
        left = {f"delayq:{{jobs}}:{name}" for name in ("waiting", "bodies", "settings", "history")}
        left |= {DelayedKeys.of("orders").ordered, DelayedKeys.of("orders").timeout}
        # A fence is an empty mark of a call that was given up. It disappears in a minute.
        keys = {key for key in await observer.keys() if "_fence:" not in key}
        assert keys == left


async def settled(queue: Orders) -> list[int]:
    """Return everything that can still be taken, once nothing is on its way back any more."""
    await until(lambda: queue._dispatcher.is_idle)
    rest = await queue.drain()
    while await queue.pending.size():
        rest += await queue.drain()
    return rest


@pytest.mark.parametrize("wanted", [3_000, nightly(30_000)])
async def test_takes_that_are_cancelled_and_polls_that_are_short_lose_and_double_nothing(
    client: Client, queue: Orders, wanted: int
) -> None:
    got: list[int] = []

    async def take(wait: float) -> None:
        value = await (queue.take() if wait == 60 else queue.poll(wait))
        if value is not None:
            got.append(value)

    offered = await cancel_many(wanted, take, queue.offer)
    got += await settled(queue)
    assert sorted(got) == list(range(offered))
    assert client.statistics().waiting == 0


async def test_a_cancelled_take_blocks_no_connection(queue: Orders, raw: Any) -> None:
    async def blocked() -> int:
        return sum(client["cmd"].startswith("blmove") for client in await raw.client_list())

    taker = asyncio.create_task(queue.take())
    await until(blocked)
    await end(taker)
    await until(blocked, equals=0)  # lingers half a second for the next caller
    await queue.offer(1)
    assert await queue.take() == 1


async def test_closing_ends_each_waiting_call(client: Client, queue: Orders) -> None:
    async def loop() -> None:
        async for _ in queue:
            pass

    calls = ([queue.take(), queue.poll(3600), loop()] for _ in range(5))
    waiting = [asyncio.create_task(call) for call in chain.from_iterable(calls)]
    await until(lambda: client.statistics().waiting)
    async with asyncio.timeout(60):
        await client.aclose()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [delayq.Closed, delayq.Closed, type(None)] * 5


async def test_closing_that_takes_too_long_is_not_somebody_elses_cancellation(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller carries on, although work that was in flight had to be cancelled."""

    async def takes_long(_queue: object, _grace: float) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    monkeypatch.setattr("delayq._engine.scheduler._CLOSE_WITHIN", 0.01)
    monkeypatch.setattr("delayq._reliable.partition.Partition.aclose", takes_long)
    for name in ("jobs", "mails"):
        client.reliable_queue(name)
    await client.aclose()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_cancelled_drain_puts_back_what_it_had(queue: Orders) -> None:
    await queue.offer_many([(i, 0) for i in range(1000)])
    drain = asyncio.create_task(queue.drain())
    await asyncio.sleep(0.002)
    await end(drain)
    rest: list[int] = []

    async def count() -> int:
        # The last part may still be on its way back.
        rest.extend(await settled(queue))
        return len(rest)

    await until(count, equals=1000)
    assert sorted(rest) == list(range(1000))


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
        # Its id is free, and the worker knows by the time that it gets a reply.
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
        kind_and_keys = ("reliable", jobs._open.opened_partitions[0].keys.recheck_keys)
        (look,) = await recheck(client.session.server, [[kind_and_keys]])
        assert isinstance(look, RecheckReply)
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
