"""A caller that goes away loses no message and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from tests.support.depth import nightly
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client

    Orders = delayq.DelayedQueue[int]


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
    chance = random.Random(1)
    got: list[int] = []
    cancelled = 0
    offered = 0

    async def take() -> None:
        got.append(await queue.take())

    async def poll() -> None:
        value = await queue.poll(chance.choice((0, 0.0001, 0.0005, 0.001, 0.002)))
        if value is not None:
            got.append(value)

    while cancelled < wanted:
        takers = [asyncio.create_task(take()) for _ in range(50)]
        polls = [asyncio.create_task(poll()) for _ in range(60)]
        delays = [chance.choice((0, chance.random() * 0.002)) for _ in range(10)]
        offers = [asyncio.create_task(queue.offer(offered + i, delays[i])) for i in range(10)]
        offered += 10
        for taker in takers:
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            taker.cancel()
        await asyncio.gather(*offers, *polls)
        results = await asyncio.gather(*takers, return_exceptions=True)
        cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)

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
