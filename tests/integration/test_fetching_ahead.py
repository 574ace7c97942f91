"""The next batch is fetched while one is handled.

Wherever a loop ends, nothing is lost or duplicated, and order is kept.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._background import Background
from delayq._engine.waiters import Supply, Waiters
from tests.support.reliable_fixtures import LEASE
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from delayq import Client
    from tests.support.servers import PrivateServer

COUNT = 1000


class Way:
    """One way to loop over a queue, behind an interface that all ways share."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, client: Client) -> Any:
        return (
            client.reliable_queue("jobs", lease=LEASE)
            if self.name == "messages"
            else client.delayed_queue("jobs")
        )

    async def fill(self, queue: Any, count: int = COUNT) -> None:
        if self.name == "messages":
            await queue.offer_many([Offer(value=n) for n in range(count)])
        else:
            await queue.offer_many([(n, 0) for n in range(count)])

    async def loop(self, queue: Any, handled: list[int]) -> AsyncGenerator[int, None]:
        """Handle each message, and yield it afterwards."""
        if self.name == "values":
            async with aclosing(queue.__aiter__()) as values:
                async for value in values:
                    handled.append(value)
                    yield value
            return
        messages = queue.__aiter__() if self.name == "messages" else queue.deliveries(lease=LEASE)
        async with aclosing(messages):
            async for message in messages:
                async with message:
                    handled.append(message.value)
                yield handled[-1]

    async def waiting(self, queue: Any) -> int:
        """Count the messages that wait on the server and have not been handed out."""
        if self.name == "messages":
            stats = await queue.stats()
            ready: int = stats.ready
            return ready
        pending: int = await queue.pending.size()
        due: int = await queue.ready.size()
        return pending + due

    async def rest(self, queue: Any, count: int) -> list[int]:
        """Return the remaining messages in order, once ``count`` of them are back."""
        await until(lambda: self.waiting(queue), equals=count)
        if self.name != "messages":
            drained: list[int] = await queue.drain()
            return drained
        left: list[int] = []
        while some := await queue.claim(100):
            # As far as these messages know, they have never been handed out.
            assert {message.attempt for message in some} == {1}
            left += [message.value for message in some]
            await asyncio.gather(*(message.ack() for message in some))
        return left


@pytest.fixture(params=["values", "deliveries", "messages"])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch ahead from the second batch on, so that every loop reaches that point."""
    monkeypatch.setattr("delayq._engine.prefetch._MANY", 2)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat handling as quick however busy the machine is, so that batches double."""
    monkeypatch.setattr("delayq._engine.prefetch._WITHIN", 1e6)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# Behaviour


@pytest.mark.usefixtures("_quick")
async def test_the_next_batch_comes_while_one_is_handled(client: Client, way: Way) -> None:
    queue, handled = way.open(client), list[int]()
    await way.fill(queue)
    async with aclosing(way.loop(queue, handled)) as loop:
        async for _ in loop:
            # Batches of 1, 2, 4, 8 and 16; the sixth, of 32, is large.
            if len(handled) == 32:
                await until(lambda: way.waiting(queue), equals=COUNT - 31 - 32 - 32)
                break
    assert handled + await way.rest(queue, COUNT - 32) == list(range(COUNT))


@pytest.mark.usefixtures("_quick")
async def test_small_batches_leave_what_they_do_not_want_to_others(
    client: Client, way: Way
) -> None:
    queue, handled = way.open(client), list[int]()
    await way.fill(queue)
    async with aclosing(way.loop(queue, handled)) as loop:
        async for _ in loop:
            # The first message of the batch of 16.
            if len(handled) == 16:
                assert await way.waiting(queue) == COUNT - 31
                break
    assert handled + await way.rest(queue, COUNT - 16) == list(range(COUNT))


@pytest.mark.usefixtures("_quick")
async def test_a_loop_gets_all_in_order_and_then_waits_for_more(client: Client, way: Way) -> None:
    queue, handled = way.open(client), list[int]()
    await way.fill(queue)
    async with aclosing(way.loop(queue, handled)) as loop:
        async for _ in loop:
            if len(handled) == COUNT:
                break
        assert handled == list(range(COUNT))
        following = asyncio.ensure_future(anext(loop))
        await until(lambda: client.statistics().waiting)
        await way.fill(queue, 1)
        assert await asyncio.wait_for(following, 20) == 0


# Leaving a loop


@pytest.mark.parametrize("seed", range(3))
async def test_wherever_a_loop_is_left_the_rest_goes_back_in_order(
    client: Client, way: Way, seed: int
) -> None:
    chance = random.Random(seed)
    queue, handled = way.open(client), list[int]()
    await way.fill(queue)
    while len(handled) < COUNT:
        # Often within a large batch, sometimes at the edge of one.
        leave_at = min(
            COUNT, len(handled) + chance.choice((1, 31, 32, 63, 64, 95, chance.randrange(1, 300)))
        )
        async with aclosing(way.loop(queue, handled)) as loop:
            async for _ in loop:
                if len(handled) >= leave_at:
                    await turns(chance.randrange(4))
                    break
        if len(handled) < COUNT:
            await until(lambda: way.waiting(queue), equals=COUNT - len(handled))
    assert handled == list(range(COUNT))
    assert await way.rest(queue, 0) == []


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("seed", range(3))
async def test_whenever_its_task_is_cancelled_the_rest_goes_back_in_order(
    client: Client, way: Way, seed: int
) -> None:
    chance = random.Random(100 + seed)
    queue, handled = way.open(client), list[int]()
    await way.fill(queue)

    async def consume() -> None:
        async with aclosing(way.loop(queue, handled)) as loop:
            async for _ in loop:
                if chance.random() < 0.05:
                    await asyncio.sleep(0)

    moments = 0
    while len(handled) < COUNT:
        consumer = asyncio.create_task(consume())
        start, most = len(handled), chance.randrange(40)
        async with asyncio.timeout(20):
            # Check on every turn, because a thousand messages are handled in no time.
            while len(handled) < min(start + most, COUNT):
                await asyncio.sleep(0)
        await turns(chance.randrange(30))
        if chance.random() < 0.3:
            # Not only at the end of a turn.
            await asyncio.sleep(chance.random() * 0.002)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        moments += 1

        await until(lambda: way.waiting(queue), equals=COUNT - len(handled))
    assert handled == list(range(COUNT))
    assert await way.rest(queue, 0) == []
    assert moments > 1


@pytest.mark.usefixtures("early")
async def test_cancelled_between_any_two_turns_a_loop_keeps_what_it_had(
    client: Client, way: Way
) -> None:
    """The loop is cancelled before, during and after each step of the first batches; nothing here
    is random.
    """
    queue, handled = way.open(client), list[int]()
    await way.fill(queue)

    async def consume() -> None:
        async with aclosing(way.loop(queue, handled)) as loop:
            async for _ in loop:
                await asyncio.sleep(0)

    for count in range(60):
        consumer = asyncio.create_task(consume())
        await turns(count)
        consumer.cancel()
        with suppress(asyncio.CancelledError):
            await consumer

        await until(lambda: way.waiting(queue), equals=COUNT - len(handled))
    assert handled + await way.rest(queue, COUNT - len(handled)) == list(range(COUNT))


@pytest.mark.parametrize("seed", range(2))
async def test_a_queue_closed_inside_the_loop_ends_it_and_has_the_rest(
    client: Client, way: Way, seed: int
) -> None:
    chance, handled = random.Random(200 + seed), list[int]()
    await way.fill(way.open(client))
    while len(handled) < COUNT:
        queue = way.open(client)
        close_at = min(
            COUNT, len(handled) + chance.choice((1, 31, 32, 63, 64, 95, chance.randrange(1, 300)))
        )
        async with aclosing(way.loop(queue, handled)) as loop:
            async for _ in loop:
                if len(handled) == close_at:
                    await turns(chance.randrange(4))
                    await queue.aclose()
        assert len(handled) == close_at
    assert handled == list(range(COUNT))
    assert await way.rest(way.open(client), 0) == []


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("seed", range(2))
async def test_a_queue_closed_by_somebody_else_ends_the_loop_and_has_the_rest(
    client: Client, way: Way, seed: int
) -> None:
    chance, handled = random.Random(300 + seed), list[int]()
    await way.fill(way.open(client))
    while len(handled) < COUNT:
        queue = way.open(client)

        async def consume(queue: Any = queue) -> None:
            async with aclosing(way.loop(queue, handled)) as loop:
                async for _ in loop:
                    if chance.random() < 0.05:
                        await asyncio.sleep(0)

        consumer = asyncio.create_task(consume())
        start, most = len(handled), chance.randrange(40)
        async with asyncio.timeout(20):
            # Check on every turn, because a thousand messages are handled in no time.
            while len(handled) < min(start + most, COUNT):
                await asyncio.sleep(0)
        await turns(chance.randrange(30))
        await queue.aclose()
        await asyncio.wait_for(consumer, 20)
    assert handled == list(range(COUNT))
    assert await way.rest(way.open(client), 0) == []


async def test_a_client_closed_inside_the_loop_leaves_the_rest_to_the_next(
    server: PrivateServer, way: Way
) -> None:
    handled: list[int] = []
    async with delayq.connect(server.url) as client:
        queue = way.open(client)
        await way.fill(queue)
        async for _ in way.loop(queue, handled):
            if len(handled) == 200:
                await client.aclose()
    assert handled == list(range(200))
    async with delayq.connect(server.url) as client:
        assert await way.rest(way.open(client), COUNT - 200) == list(range(200, COUNT))


# Two loops at once


async def test_two_loops_over_one_queue_share_all_of_it_each_in_order(
    client: Client, way: Way
) -> None:
    queue = way.open(client)
    await way.fill(queue)
    both: tuple[list[int], list[int]] = ([], [])

    async def consume(handled: list[int]) -> None:
        async with aclosing(way.loop(queue, handled)) as loop:
            async for _ in loop:
                await asyncio.sleep(0)

    consumers = [asyncio.create_task(consume(handled)) for handled in both]
    await until(lambda: sum(map(len, both)) >= COUNT)
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    assert sorted(both[0] + both[1]) == list(range(COUNT))
    assert all(handled == sorted(handled) and handled for handled in both)
    assert await way.rest(queue, 0) == []


@pytest.mark.parametrize("end", ["left", "cancelled"])
async def test_what_one_loop_gives_back_reaches_the_other(
    client: Client, way: Way, end: str
) -> None:
    queue = way.open(client)
    await way.fill(queue)
    one: list[int] = []
    two: list[int] = []

    async def leave() -> None:
        async with aclosing(way.loop(queue, one)) as loop:
            async for _ in loop:
                if len(one) == 100 and end == "left":
                    return
                await asyncio.sleep(0)

    async def stay() -> None:
        async with aclosing(way.loop(queue, two)) as loop:
            async for _ in loop:
                await asyncio.sleep(0)

    leaver, stayer = asyncio.create_task(leave()), asyncio.create_task(stay())
    if end == "cancelled":
        await until(lambda: len(one) >= 100)
        leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await until(lambda: len(one) + len(two) >= COUNT)
    stayer.cancel()
    await asyncio.gather(stayer, return_exceptions=True)
    assert sorted(one + two) == list(range(COUNT))
    assert await way.rest(queue, 0) == []


# Step by step


class Callers:
    """The callers of a queue, with the test playing the server."""

    def __init__(self) -> None:
        self.background = Background()
        self.back: list[int] = []

        class Services:
            background = self.background
            server = None
            timer = None

        services: Any = Services()
        self.waiters: Waiters[int] = Waiters(services, ask=lambda _insist: None)
        self.supply: Supply[int] = self.waiters.add_source(
            "jobs", lambda: None, hand_back=self._hand_back
        )

    def answer(self, items: Sequence[int]) -> None:
        self.supply.begin(100)
        self.supply.end(items)
        self.supply.over()

    def _hand_back(self, items: Sequence[int]) -> Any:
        self.back += items
        return SimpleNamespace(is_done=True)

    def close(self) -> None:
        """Close with calls that the server answers at once."""
        last: Any = SimpleNamespace(send=lambda _queue, calls: list(calls))
        self.waiters.close(last)


@pytest.fixture
async def callers() -> AsyncIterator[Callers]:
    callers = Callers()
    yield callers
    await callers.background.aclose()


@pytest.mark.parametrize("goes_on", [False, True], ids=["and is left", "and goes on"])
async def test_what_came_in_the_turn_in_which_the_queue_closed_goes_back(
    callers: Callers, goes_on: bool
) -> None:
    batches = callers.waiters.batches()
    batch = asyncio.ensure_future(anext(batches, None))
    await turns(3)
    callers.answer([1])
    # The loop's task has not run since.
    callers.close()
    got = await batch
    if goes_on:
        assert got is None, "a loop ends when its queue closes"
    await batches.aclose()
    assert callers.back == [1]
