"""When a caller of a reliable queue goes away, nothing is lost, duplicated, or left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from redis.asyncio import Redis

import delayq
from delayq import Offer
from tests.support.depth import examples
from tests.support.reliable import bodies, claim_all, leased, leases
from tests.support.reliable_fixtures import LEASE
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client, Message
    from tests.support.reliable import Jobs
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer


async def rest(queue: Jobs, store: Store, held: int) -> list[Message[Any]]:
    """Claim everything that is left, once no message is on its way back."""
    await until(lambda: leases(store), equals=held)
    return await claim_all(queue)


def demand_once(messages: list[Message[Any]], count: int) -> None:
    """Assert that each value came once, and that no returned message has counted an attempt."""
    assert sorted(message.value for message in messages) == list(range(count))
    assert {message.attempt for message in messages} == {1}


async def test_many_cancelled_claims_lose_nothing(client: Client, jobs: Jobs, store: Store) -> None:
    wanted = examples(20_000)
    chance = random.Random(1)
    got: list[Message[int]] = []
    cancelled = offered = 0

    async def claim() -> None:
        got.extend(await jobs.claim(3, wait=60))

    while cancelled < wanted:
        claims = [asyncio.create_task(claim()) for _ in range(50)]
        offers = [asyncio.create_task(jobs.offer(offered + i)) for i in range(10)]
        offered += 10
        for task in claims:
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*offers)
        results = await asyncio.gather(*claims, return_exceptions=True)
        cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)

    got += await rest(jobs, store, len(got))
    demand_once(got, offered)
    assert client.statistics().waiting == 0


async def test_many_short_claims_beside_offers_lose_nothing(jobs: Jobs, store: Store) -> None:
    chance = random.Random(2)
    got: list[Message[int]] = []
    claims, messages = examples(20_000), examples(6_000)

    async def claim(count: int) -> None:
        for _ in range(count):
            got.extend(await jobs.claim(1, wait=chance.choice((0, 0.0001, 0.0005, 0.001, 0.002))))

    async def offer() -> None:
        for at in range(0, messages, 10):
            await jobs.offer_many(
                [Offer(value=at + i, delay=chance.random() * 0.002) for i in range(10)]
            )
            if chance.random() < 0.2:
                await asyncio.sleep(0.001)

    await asyncio.gather(offer(), *(claim(claims // 20) for _ in range(20)))
    got += await rest(jobs, store, len(got))
    demand_once(got, messages)


async def test_workers_that_come_and_go_handle_all(server: PrivateServer, store: Store) -> None:
    chance = random.Random(4)
    handled: list[int] = []
    async with delayq.connect(server.url) as one, delayq.connect(server.url) as two:
        queues = [
            client.reliable_queue("jobs", lease=LEASE, max_attempts=1) for client in (one, two)
        ]

        async def work(queue: Jobs) -> None:
            async for message in queue:
                async with message:
                    if chance.random() < 0.5:
                        await asyncio.sleep(0)
                    handled.append(message.value)

        for start in range(0, 1_200, 30):
            workers = [asyncio.create_task(work(queue)) for queue in queues for _ in range(3)]
            await queues[0].offer_many([Offer(value=start + i) for i in range(30)])
            await asyncio.sleep(chance.random() * 0.003)
            await end(*workers)
        last = asyncio.create_task(work(queues[0]))
        await until(lambda: set(handled) == set(range(1_200)))
        await end(last)
        # Each message has a single attempt: a counted cancellation would make a dead letter.
        assert (await queues[0].stats()).dead == 0
    stored = await store.look()
    stored.demand_no_orphans()
    assert stored.bodies == {}


async def test_a_cancelled_offer_is_stored_whole_or_not_at_all(jobs: Jobs, store: Store) -> None:
    chance = random.Random(3)
    finished = set()

    async def offer(value: int) -> None:
        await jobs.offer(value)
        finished.add(value)

    for base in range(0, 2000, 20):
        offers = [asyncio.create_task(offer(base + i)) for i in range(20)]
        for task in offers:
            if chance.random() < 0.5:
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                task.cancel()
        await asyncio.gather(*offers, return_exceptions=True)
    stored = [message.value for message in await rest(jobs, store, 0)]
    assert len(stored) == len(set(stored))
    assert finished <= set(stored)


async def test_closing_is_quick_while_the_server_does_not_answer(own_server: PrivateServer) -> None:
    client = await delayq.connect(own_server.url).__aenter__()
    queue = client.reliable_queue("jobs")
    message = await leased(queue)
    claim = asyncio.create_task(queue.claim(wait=60))
    await until(lambda: client.statistics().waiting)
    with own_server.paused():
        offer, ack = asyncio.create_task(queue.offer(1)), asyncio.create_task(message.ack())
        await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            await client.aclose()
        results = await asyncio.gather(claim, offer, ack, return_exceptions=True)
    unknown = delayq.OutcomeUnknown
    assert [type(result) for result in results] == [delayq.Closed, unknown, unknown]


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

    # No answer arrives before the cancellation.
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
            queue = client.reliable_queue("jobs")
            await queue.offer(1, 3600)
            await queue.offer(2)
            async for message in queue:
                async with message:
                    break
            waiting = asyncio.create_task(queue.claim(wait=60))
            await until(lambda: client.statistics().waiting)
        with suppress(delayq.Closed):
            await waiting
        del message, waiting
        await asyncio.sleep(0)
        gc.collect()
    assert len(asyncio.all_tasks()) == tasks
    async with Redis.from_url(server.url, socket_timeout=60) as observer:
        assert {entry["name"] for entry in await observer.client_list()} == {""}
        left = {b"waiting", b"bodies", b"settings", b"history"}
        assert set(await observer.keys()) == {b"delayq:{jobs}:" + name for name in left}
