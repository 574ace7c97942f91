"""The next batch is fetched while one is handled, and wherever a loop ends, nothing is lost. A loop
with more messages at hand does not wait for its acks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer, Worker
from delayq._engine.prefetch import WITHIN, Prefetched
from delayq._reliable.message import Message
from delayq._reliable.scripts import ACK, RELEASE
from tests.support.depth import nightly
from tests.support.reliable import Jobs, depths, get
from tests.support.reliable_fixtures import LEASE
from tests.support.tasks import running
from tests.support.waiting import be_impatient, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from delayq import Client
    from tests.integration.test_faults import Faults
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer


COUNT = 1000
SEEDS = [0, nightly(1), nightly(2)]


class Way:
    """One way to loop over a queue, behind an interface that all ways share."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, client: Client) -> Any:
        if self.name == "messages":
            return client.reliable_queue("jobs", lease=LEASE)
        return client.delayed_queue("jobs")

    async def fill(self, queue: Any, count: int = COUNT) -> None:
        offers = [Offer(n) if self.name == "messages" else (n, 0) for n in range(count)]
        await queue.offer_many(offers)

    async def filled(self, client: Client) -> Any:
        queue = self.open(client)
        await self.fill(queue)
        return queue

    async def loop(self, queue: Any, handled: list[int]) -> AsyncGenerator[int, None]:
        """Handle each message, and yield it afterwards."""
        deliveries = self.name == "deliveries"
        async with aclosing(queue.deliveries(lease=LEASE) if deliveries else aiter(queue)) as each:
            async for message in each:
                if self.name == "values":
                    handled.append(message)
                else:
                    async with message:
                        handled.append(message.value)
                yield handled[-1]

    async def consume(
        self, queue: Any, handled: list[int], pauses: Callable[[], bool] = lambda: True
    ) -> None:
        """Handle messages until cancelled, and let others run after each that ``pauses``."""
        async with aclosing(self.loop(queue, handled)) as loop:
            async for _ in loop:
                if pauses():
                    await asyncio.sleep(0)

    async def waiting(self, queue: Any) -> int:
        """Count the messages that wait on the server and have not been handed out."""
        if self.name == "messages":
            return int((await queue.stats()).ready)
        return int(await queue.pending.size()) + int(await queue.ready.size())

    async def are_back(self, queue: Any, count: int) -> None:
        """Wait until as many messages wait on the server as were not handled."""
        await until(lambda: self.waiting(queue), equals=count)

    async def rest(self, queue: Any, count: int) -> list[int]:
        """Return the remaining messages in order, once ``count`` of them are back."""
        await self.are_back(queue, count)
        if self.name != "messages":
            return list(await queue.drain())
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
    monkeypatch.setattr("delayq._engine.prefetch._WORTH_FETCHING", 2)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat handling as quick however busy the machine is, so that batches grow."""
    monkeypatch.setattr("delayq._engine.prefetch.WITHIN", 1e6)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def some_handled(chance: random.Random, handled: list[int]) -> None:
    """Wait until some more messages have been handled, then for a few turns."""
    wanted = min(len(handled) + chance.randrange(40), COUNT)
    async with asyncio.timeout(60):
        # Check on every turn, because a thousand messages are handled in no time.
        while len(handled) < wanted:
            await asyncio.sleep(0)
    await turns(chance.randrange(30))


def next_end(chance: random.Random, handled: list[int]) -> int:
    """Choose where a loop ends: often within a large batch, sometimes at the edge of one."""
    steps = (1, 31, 32, 63, 64, 95, chance.randrange(1, 300))
    return min(COUNT, len(handled) + chance.choice(steps))


@pytest.mark.usefixtures("_quick")
async def test_small_batches_leave_the_rest_and_a_large_one_has_the_next(
    client: Client, way: Way
) -> None:
    queue, handled = await way.filled(client), list[int]()
    # Batches of 1 and 10; the third, of 100, is large.
    fetched = {8: 11, 12: 11 + 100 + 100}
    async with aclosing(way.loop(queue, handled)) as loop:
        async for _ in loop:
            if len(handled) in fetched:
                await way.are_back(queue, COUNT - fetched[len(handled)])
            if len(handled) == COUNT:
                break
        assert handled == list(range(COUNT))
        # The loop waits for more.
        following = asyncio.ensure_future(anext(loop))
        await until(lambda: client.statistics().waiting)
        await way.fill(queue, 1)
        assert await asyncio.wait_for(following, 60) == 0


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_loop_that_is_left_or_whose_queue_closes_returns_the_rest(
    client: Client, way: Way, seed: int
) -> None:
    chance, handled = random.Random(seed), list[int]()
    queue = await way.filled(client)
    while len(handled) < COUNT:
        leave_at, closes = next_end(chance, handled), chance.random() < 0.5
        async with aclosing(way.loop(queue, handled)) as loop:
            async for _ in loop:
                if len(handled) >= leave_at:
                    await turns(chance.randrange(4))
                    if not closes:
                        break
                    await queue.aclose()
        assert len(handled) == leave_at
        queue = way.open(client) if closes else queue
        await way.are_back(queue, COUNT - len(handled))
    assert handled == list(range(COUNT))


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_loop_that_is_cancelled_or_whose_queue_is_closed_elsewhere_returns_the_rest(
    client: Client, way: Way, seed: int
) -> None:
    chance = random.Random(100 + seed)
    queue, handled = await way.filled(client), list[int]()
    moments = 0
    while len(handled) < COUNT:
        pauses, closes = lambda: chance.random() < 0.05, chance.random() < 0.5
        async with running(way.consume(queue, handled, pauses)) as (consumer,):
            await some_handled(chance, handled)
            if chance.random() < 0.3:
                # Not only at the end of a turn.
                await asyncio.sleep(chance.random() * 0.002)
            if closes:
                await queue.aclose()
                await asyncio.wait_for(consumer, 60)
        queue = way.open(client) if closes else queue
        moments += 1
        await way.are_back(queue, COUNT - len(handled))
    assert handled == list(range(COUNT))
    assert moments > 1


@pytest.mark.usefixtures("early")
async def test_a_loop_may_be_cancelled_at_any_turn(client: Client, way: Way) -> None:
    """Before, during and after each step of the first batches."""
    queue, handled = await way.filled(client), list[int]()
    for count in range(60):
        async with running(way.consume(queue, handled)):
            await turns(count)
        await way.are_back(queue, COUNT - len(handled))
    assert handled + await way.rest(queue, COUNT - len(handled)) == list(range(COUNT))


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("consumer", ["loop", "worker", "batches"])
async def test_a_message_that_expires_while_fetched_ahead_is_not_handled(
    client: Client, consumer: str
) -> None:
    ttl, handled, late = 0.5, list[int](), list[list[int]]()
    queue = client.reliable_queue("jobs", expired="dead")
    await queue.offer(0)
    await queue.offer_many([Offer(n, ttl=ttl) for n in range(1, 30)])
    over = time.monotonic() + ttl

    async def handle(values: list[int]) -> None:
        if time.monotonic() > over:
            late.append(values)
        handled.extend(values)
        # The first ones are quick, so that the others are fetched ahead. The client's clock lags by
        # the time of a quick call.
        if len(handled) > 10:
            await asyncio.sleep(max(0.0, over + 0.2 - time.monotonic()))

    worker = Worker(client, concurrency=1)
    if consumer == "loop":

        async def consume() -> None:
            async for message in queue:
                async with message:
                    await handle([message.value])

    elif consumer == "worker":

        @worker.listener("jobs", expired="dead")
        async def one(value: int) -> None:
            await handle([value])

    else:
        worker.listener("jobs", expired="dead", batch=5)(handle)
    async with running(consume() if consumer == "loop" else worker.run()):
        async with asyncio.timeout(60):
            while await depths(queue) != (0, 0, 0, 30 - len(handled)):
                await asyncio.sleep(0.01)
    # A pause of this process may come between the check and the handler, once.
    assert len(late) <= 1


@pytest.mark.parametrize("blocks", [False, True])
async def test_messages_behind_a_slow_handler_go_back(
    client: Client, way: Way, blocks: bool
) -> None:
    queue, handled = await way.filled(client), list[int]()
    async with aclosing(way.loop(queue, handled)) as loop:
        async for _ in loop:
            if len(handled) == 300 and blocks:
                # Until it is over, this process can give nothing back.
                time.sleep(2 * WITHIN)
            elif len(handled) == 300 + blocks:
                break
        # The handler of the last one is still running.
        await way.are_back(queue, COUNT - len(handled))
    assert handled + await way.rest(queue, COUNT - len(handled)) == list(range(COUNT))


@pytest.mark.parametrize("end", ["left", "cancelled"])
async def test_what_one_loop_returns_reaches_the_other(client: Client, way: Way, end: str) -> None:
    queue, one, two = await way.filled(client), list[int](), list[int]()

    async def leave() -> None:
        async with aclosing(way.loop(queue, one)) as loop:
            async for _ in loop:
                if len(one) == 100 and end == "left":
                    return
                await asyncio.sleep(0)

    async with running(way.consume(queue, two)):
        async with running(leave()) as (leaver,):
            await until(lambda: len(one) >= 100)
            if end == "left":
                await leaver
        await until(lambda: len(one) + len(two) >= COUNT)
    assert sorted(one + two) == list(range(COUNT))
    assert await way.rest(queue, 0) == []


# Batches grow quickly: of this many messages, most are not the last at hand, but some are.
MANY = 250


async def fill(queue: Jobs, count: int = MANY) -> None:
    await queue.offer_many([Offer(value=n, id=f"job {n}") for n in range(count)])


async def first(queue: Jobs, count: int) -> AsyncIterator[Message[int]]:
    """Yield ``count`` messages of a loop that is left after the last one."""
    async with aclosing(queue.__aiter__()) as messages:  # type: ignore[type-var]
        async for message in messages:
            yield message
            count -= 1
            if not count:
                break


async def handled(queue: Jobs, count: int) -> AsyncIterator[Message[int]]:
    """Offer messages, handle them in a loop, and yield each right after its block."""
    await fill(queue, count)
    async for message in first(queue, count):
        async with message:
            pass
        yield message


def unanswered(queue: Jobs) -> int:
    return queue._open.partitions[0].acknowledger.in_flight


async def test_most_acks_of_a_loop_are_not_waited_for_and_share_calls(
    jobs: Jobs, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    # Those whose reply is lost are repeated silently.
    faults.plan = lambda name, n: "lost" if name == ACK.name and n in (2, 4) else None
    await fill(jobs)
    without_waiting = 0
    async for message in first(jobs, MANY):
        before = unanswered(jobs)
        async with message:
            if message.value % 10 == 0:
                await asyncio.sleep(0)
        without_waiting += unanswered(jobs) > before
    assert without_waiting > MANY / 4
    assert await depths(jobs) == (0, 0, 0, 0)
    assert 1 <= faults.calls.count(ACK.name) <= 100
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_what_is_at_hand_stays_there_while_an_ack_is_awaited(
    jobs: Jobs, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.prefetch.WITHIN", 0.5)
    ack, slow = Message.ack, list[int]()

    async def ack_slowly(message: Message[int]) -> None:
        slow.append(message.value)
        await asyncio.sleep(0.75)
        await ack(message)

    await fill(jobs)
    async for message in first(jobs, MANY):
        if slow:
            assert RELEASE.name not in faults.calls
            break
        async with message:
            if message.value and message._ahead:
                message.then(Offer(MANY, delay=3600, group="g", headers={}))
                monkeypatch.setattr(Message, "ack", ack_slowly)
    assert slow


async def test_right_after_its_block_a_message_is_gone(jobs: Jobs, faults: Faults) -> None:
    # So it is if its ack has to be repeated.
    faults.plan = lambda name, n: "unsent" if name == ACK.name and n % 2 else None
    left = 60
    async for message in handled(jobs, left):
        left -= 1
        assert await jobs.get(message.id) is None
        assert message.id not in {row.id for row in await jobs.list("leased", limit=1000)}
        assert message.id not in {row.id for row in await jobs.peek(100)}
        stats = await jobs.stats()
        assert stats.ready + stats.leased == left
        if left == 20:
            # A purge drops leased messages too: all except those that were handled.
            assert await jobs.purge() == 20
            break
    assert await depths(jobs) == (0, 0, 0, 0)


async def test_the_id_of_a_message_and_its_room_are_free_after_its_block(client: Client) -> None:
    jobs: Jobs = client.reliable_queue("jobs", lease=LEASE, max_size=60)
    async for message in handled(jobs, 60):
        # The delay is longer than the test, so the message does not come again here.
        if message.value % 2:
            offer = Offer(value=0, id=message.id, delay=LEASE)
            assert await jobs.offer_many([offer]) == [message.id]
        else:
            assert await jobs.offer(0, LEASE, id=message.id) == message.id
    assert (await jobs.stats()).delayed == 60


async def test_the_ack_of_the_last_message_at_hand_is_waited_for(jobs: Jobs, store: Store) -> None:
    """A loop that waits for more messages leaves no ack unanswered."""
    await fill(jobs)
    last_ones = between = 0
    async for message in first(jobs, MANY):
        ahead = message._ahead
        is_last = ahead is None or not (ahead or ahead.is_fetching)
        is_between = ahead is not None and ahead.is_fetching and not ahead
        before = unanswered(jobs)
        async with message:
            # One that is explicit is waited for in any case.
            if message.value % 20 == 19:
                await message.ack()
                assert unanswered(jobs) == 0
        if is_last:
            last_ones += 1
            assert unanswered(jobs) == 0
            assert message.id not in (await store.look()).bodies
        elif is_between and message.value % 20 != 19:
            # Between two large batches, none is.
            between += 1
            assert unanswered(jobs) == before + 1
    assert last_ones >= 3
    assert between >= 1
    # Nor is a message at hand that was claimed alone.
    await fill(jobs, 5)
    for message in await jobs.claim(5):
        async with message:
            pass
        assert unanswered(jobs) == 0
        assert message.id not in (await store.look()).bodies


@pytest.mark.parametrize("at_hand", [True, False], ids=["more at hand", "the last"])
async def test_a_lost_lease_is_logged_where_the_ack_is_not_waited_for_and_else_raised(
    jobs: Jobs, server: PrivateServer, caplog: pytest.LogCaptureFixture, at_hand: bool
) -> None:
    await fill(jobs, 20)
    async with delayq.connect(server.url) as other:
        async for message in first(jobs, 20):
            if bool(message._ahead) is at_hand:
                # Another client drops the message while its block runs.
                with nullcontext() if at_hand else pytest.raises(delayq.LeaseLost):
                    async with message:
                        assert await other.reliable_queue("jobs").purge() > 0
                break
            async with message:
                pass
        else:
            pytest.fail("there is no such message")
    await jobs.stats()
    logged = f"queue 'jobs': the lease of message '{message.id}' was lost" in caplog.text
    assert logged is at_hand


async def test_acks_that_fail_are_logged_and_their_messages_come_again(
    jobs: Jobs,
    faults: Faults,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(jobs, 30)
    be_impatient(monkeypatch, 0.05)
    faults.plan = lambda name, _n: "unsent" if name == ACK.name else None
    unwatched = 0
    async for message in jobs:
        # The last message at hand would raise.
        if message._ahead:
            async with message:
                pass
            unwatched += 1
        else:
            await message.release()
        if unwatched == 10:
            break
    await jobs._open.partitions[0].acknowledger.flush()
    faults.plan = lambda _name, _n: None
    words = r"message '(job \d+)' was handled, but may be redelivered"
    failed = set(re.findall(words, caplog.text))
    assert len(failed) == 10
    # The messages are redelivered after their leases, as second attempts.
    await store.let_pass(2 * LEASE)
    again = set[str]()
    async with asyncio.timeout(30):
        while not again >= failed:
            for message in await jobs.claim(100, wait=10):
                if message.attempt == 2:
                    again.add(message.id)
                await message.ack()


@pytest.mark.parametrize("what", ["the client", "the queue"])
@pytest.mark.usefixtures("_last_reports_arrive")
async def test_closing_sends_acks(
    server: PrivateServer, jobs: Jobs, store: Store, what: str
) -> None:
    done = 0
    async with delayq.connect(server.url) as client:
        queue = client.reliable_queue("jobs", lease=LEASE)
        async for message in handled(queue, MANY):
            done += 1
            # Stop in the middle of a batch, with replies outstanding.
            if done >= 100 and unanswered(queue) and message._ahead:
                if what == "the client":
                    break
                await queue.aclose()
    stats = await jobs.stats()
    assert (stats.leased, stats.ready) == (0, MANY - done)
    (await store.look()).demand_no_orphans()


async def test_unanswered_acks_are_bounded(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetched, "max_unanswered", 20)
    # Batches have to grow first.
    most = max([unanswered(jobs) async for _ in handled(jobs, MANY)])
    assert 0 < most <= 20


async def test_a_handler_that_raises_is_nacked_although_more_is_at_hand(client: Client) -> None:
    jobs: Jobs = client.reliable_queue("jobs", lease=LEASE, backoff=delayq.Backoff.fixed(3600))
    await fill(jobs, 60)
    async for message in first(jobs, 60):
        try:
            async with message:
                1 / (message.value % 10)
        except ZeroDivisionError:
            assert (await get(jobs, message.id)).state == "delayed"
    assert await depths(jobs) == (6, 0, 0, 0)


async def test_a_block_that_ends_after_its_loop_waits_for_its_ack(jobs: Jobs) -> None:
    """The messages at hand went back when the loop was left."""
    await fill(jobs, 50)
    # The first batches are small; the last message here is in the middle of a large one.
    *_, last = [message async for message in first(jobs, 20)]
    await jobs.purge("all")
    with pytest.raises(delayq.LeaseLost):
        async with last:
            pass
