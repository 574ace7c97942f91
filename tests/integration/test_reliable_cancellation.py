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
from delayq._redisson.keys import DelayedKeys
from tests.support.depth import examples
from tests.support.reliable import bodies, leased, leases
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client, Message
    from tests.support.reliable import Jobs
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer


async def test_many_claims_that_are_cancelled_or_short_lose_nothing(
    client: Client, jobs: Jobs, store: Store
) -> None:
    wanted = examples(20_000)
    chance = random.Random(1)
    got: list[Message[int]] = []
    cancelled = offered = 0

    async def claim() -> None:
        got.extend(await jobs.claim(3, wait=chance.choice((60, 0, 0.0001, 0.0005, 0.002))))

    while cancelled < wanted:
        claims = [asyncio.create_task(claim()) for _ in range(50)]
        delays = [chance.choice((0, chance.random() * 0.002)) for _ in range(10)]
        offers = [asyncio.create_task(jobs.offer(offered + n, delays[n])) for n in range(10)]
        offered += 10
        for task in claims:
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*offers)
        results = await asyncio.gather(*claims, return_exceptions=True)
        cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)

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
