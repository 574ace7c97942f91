"""A loop with more messages at hand does not wait for its acks, and readers cannot tell."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import delayq
from delayq import Offer
from delayq._engine.leases import Batch
from delayq._reliable.store import ACK
from tests.support.reliable import Jobs, bodies, depths, get
from tests.support.reliable_fixtures import LEASE, take
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from delayq import Client, Message
    from tests.integration.test_faults import Faults
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer

# Batches grow quickly: of this many messages, most are not the last at hand, but some are.
MANY = 250


async def fill(queue: Jobs, count: int = MANY) -> None:
    await queue.offer_many([Offer(value=n, id=f"job {n}") for n in range(count)])


async def filled(queue: Jobs, count: int = 60) -> AsyncIterator[Message[int]]:
    """Offer messages, handle them in a loop, and yield each right after its block."""
    await fill(queue, count)
    async for message in handled(queue, count):
        yield message


async def handled(queue: Jobs, count: int) -> AsyncIterator[Message[int]]:
    async for message in first(queue, count):
        async with message:
            pass
        yield message


async def first(queue: Jobs, count: int) -> AsyncIterator[Message[int]]:
    """Yield ``count`` messages of a loop that is left after the last one."""
    async with aclosing(loop(queue)) as messages:
        async for message in messages:
            yield message
            count -= 1
            if not count:
                break


def unanswered(queue: Jobs) -> int:
    return queue._open.partitions[0].settling.unanswered


def loop(queue: Jobs) -> AsyncGenerator[Message[int], None]:
    return queue.__aiter__()  # type: ignore[return-value]


async def handle_all(queue: Jobs, count: int = MANY) -> int:
    """Handle messages in a loop, and return how many blocks did not wait for their ack."""
    without_waiting = 0
    async for message in first(queue, count):
        before = unanswered(queue)
        async with message:
            pass
        without_waiting += unanswered(queue) > before
    return without_waiting


async def test_most_acks_of_a_loop_are_not_waited_for(jobs: Jobs) -> None:
    await fill(jobs)
    assert await handle_all(jobs) > MANY / 2


async def test_after_the_loop_nothing_is_leased(jobs: Jobs) -> None:
    await fill(jobs)
    await handle_all(jobs)
    assert await depths(jobs) == (0, 0, 0, 0)


async def test_acks_of_a_loop_share_calls(jobs: Jobs, faults: Faults) -> None:
    await fill(jobs, 300)
    await handle_all(jobs, 300)
    await jobs.stats()
    assert 1 <= faults.calls.count(ACK.name) <= 60


@pytest.mark.parametrize(
    "handling", [0, 1, 3], ids=lambda turns: f"handlers that take {turns} turns"
)
async def test_handlers_that_give_way_lose_no_ack(jobs: Jobs, store: Store, handling: int) -> None:
    await fill(jobs)
    async for message in first(jobs, MANY):
        async with message:
            for _ in range(handling):
                await asyncio.sleep(0)
    assert (await jobs.stats()).leased == 0
    stored = await store.look()
    stored.demand_no_orphans()
    assert stored.bodies == {}


async def see_by_get(queue: Jobs, message: Message[int]) -> bool:
    return await queue.get(message.id) is not None


async def see_by_list(queue: Jobs, message: Message[int]) -> bool:
    return message.id in {each.id for each in await queue.list("leased", limit=1000)}


@pytest.mark.parametrize("see", [see_by_get, see_by_list], ids=lambda see: see.__name__)
async def test_right_after_its_block_a_message_is_gone(
    jobs: Jobs, see: Callable[[Jobs, Message[int]], Awaitable[bool]]
) -> None:
    async for message in filled(jobs):
        assert not await see(jobs, message)


async def test_stats_count_down_with_every_block(jobs: Jobs) -> None:
    left = 60
    async for _ in filled(jobs, left):
        left -= 1
        stats = await jobs.stats()
        assert stats.ready + stats.leased == left


async def test_peek_and_purge_do_not_count_messages_just_handled(jobs: Jobs) -> None:
    await fill(jobs, 60)
    async for message in handled(jobs, 40):
        assert message.id not in {each.id for each in await jobs.peek(100)}
        if (await jobs.stats()).ready + (await jobs.stats()).leased == 20:
            # A purge drops leased messages too: all except those that were handled.
            assert await jobs.purge() == 20
    assert (await jobs.stats()).leased == 0


@pytest.mark.parametrize("many", [False, True], ids=["offer", "offer_many"])
async def test_the_id_of_a_message_is_free_after_its_block(jobs: Jobs, many: bool) -> None:
    async for message in filled(jobs):
        # The delay is longer than the test, so the message does not come again here.
        if many:
            offer = Offer(value=0, id=message.id, delay=LEASE)
            assert await jobs.offer_many([offer]) == [message.id]
        else:
            assert await jobs.offer(0, LEASE, id=message.id) == message.id
    assert (await jobs.stats()).delayed == 60


async def test_handling_one_makes_room_for_one(client: Client) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, max_size=100)
    await fill(queue, 100)
    async for _ in handled(queue, 60):
        await queue.offer(0, LEASE)


async def test_an_explicit_ack_is_waited_for(jobs: Jobs, store: Store) -> None:
    await fill(jobs, 60)
    async for message in first(jobs, 60):
        async with message:
            await message.ack()
            assert unanswered(jobs) == 0
        if not message.value % 20:
            assert message.id not in (await store.look()).bodies


async def test_the_ack_of_the_last_message_at_hand_is_waited_for(jobs: Jobs, store: Store) -> None:
    """A loop that waits for more messages leaves no ack unanswered."""
    await fill(jobs)
    last_ones = 0
    async for message in first(jobs, MANY):
        ahead = message._ahead
        is_last = ahead is None or not (ahead or ahead.fetching)
        async with message:
            pass
        if is_last:
            last_ones += 1
            assert unanswered(jobs) == 0
            assert message.id not in (await store.look()).bodies
    assert last_ones >= 3


async def test_between_two_large_batches_no_ack_is_waited_for(jobs: Jobs) -> None:
    await fill(jobs)
    last_ones = 0
    async for message in first(jobs, MANY):
        ahead = message._ahead
        assert ahead is not None
        if ahead.fetching and not ahead:
            last_ones += 1
            before = unanswered(jobs)
            async with message:
                pass
            assert unanswered(jobs) == before + 1
        else:
            async with message:
                pass
    assert last_ones >= 1


async def test_a_message_that_was_claimed_alone_is_waited_for(jobs: Jobs, store: Store) -> None:
    await fill(jobs, 5)
    for message in await jobs.claim(5):
        async with message:
            pass
        assert unanswered(jobs) == 0
        assert message.id not in (await store.look()).bodies


async def lose_while_handled(jobs: Jobs, server: PrivateServer, *, at_hand: bool) -> str:
    """Drop a message from another client while its block runs, and return its id."""
    await fill(jobs, 20)
    async with delayq.connect(server.url) as other, aclosing(loop(jobs)) as messages:
        async for message in messages:
            if bool(message._ahead) is at_hand:
                async with message:
                    assert await other.reliable_queue("jobs").purge() > 0
                return message.id
            async with message:
                pass
    pytest.fail("there is no such message")


async def test_a_lost_lease_is_logged_where_the_ack_is_not_waited_for(
    jobs: Jobs, server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    lost = await lose_while_handled(jobs, server, at_hand=True)
    await jobs.stats()
    assert f"queue 'jobs': the lease of message '{lost}' was lost" in caplog.text


async def test_a_lost_lease_is_raised_where_the_ack_is_waited_for(
    jobs: Jobs, server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(delayq.LeaseLost):
        await lose_while_handled(jobs, server, at_hand=False)
    assert "was lost" not in caplog.text


async def test_a_success_logs_nothing(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    await fill(jobs)
    await handle_all(jobs)
    await jobs.stats()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_acks_that_fail_are_logged_and_their_messages_come_again(
    client: Client,
    faults: Faults,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE)
    await fill(queue, 30)
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.05)
    faults.plan = lambda name, _n: "unsent" if name == ACK.name else None
    unwatched = 0
    async for message in queue:
        # The last message at hand would raise.
        if message._ahead:
            async with message:
                pass
            unwatched += 1
        else:
            await message.release()
        if unwatched == 10:
            break
    await queue._open.partitions[0].settling.flush()
    faults.plan = lambda _name, _n: None
    failed = set(
        re.findall(r"message '(job \d+)' was handled, but may be redelivered", caplog.text)
    )
    assert len(failed) == 10
    # The messages are redelivered after their leases, as second attempts.
    await store.let_pass(2 * LEASE)
    again = set[str]()
    async with asyncio.timeout(30):
        while not again >= failed:
            for message in await queue.claim(100, wait=10):
                if message.attempt == 2:
                    again.add(message.id)
                await message.ack()


async def test_an_ack_whose_reply_is_lost_is_repeated_silently(
    jobs: Jobs, faults: Faults, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(jobs)
    faults.plan = lambda name, n: "lost" if name == ACK.name and n in (2, 4) else None
    await handle_all(jobs)
    await jobs.stats()
    assert await bodies(store) == 0
    assert "lost" not in caplog.text
    assert "again" not in caplog.text


async def test_a_look_waits_for_acks_that_are_repeated(jobs: Jobs, faults: Faults) -> None:
    faults.plan = lambda name, n: "unsent" if name == ACK.name and n % 2 else None
    async for message in filled(jobs):
        assert await jobs.get(message.id) is None


@pytest.mark.usefixtures("_last_reports_arrive")
async def test_closing_a_client_sends_acks(server: PrivateServer, jobs: Jobs, store: Store) -> None:
    done = 0
    async with delayq.connect(server.url) as client:
        queue = client.reliable_queue("jobs", lease=LEASE)
        async for message in filled(queue, MANY):
            done += 1
            # Stop in the middle of a batch, with answers outstanding.
            if done >= 100 and unanswered(queue) and message._ahead:
                break
    stats = await jobs.stats()
    assert (stats.leased, stats.ready) == (0, MANY - done)
    (await store.look()).demand_no_orphans()


async def test_closing_the_queue_sends_its_acks(jobs: Jobs, store: Store) -> None:
    await fill(jobs)
    done = 0
    async for message in jobs:
        async with message:
            done += 1
        if done >= 100 and unanswered(jobs) and message._ahead:
            await jobs.aclose()
    stored = await store.look()
    assert (stored.leases, len(stored.bodies)) == ({}, MANY - done)


async def test_unanswered_acks_are_bounded(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "most_unanswered", 20)
    # Batches have to grow first.
    most = max([unanswered(jobs) async for _ in filled(jobs, MANY)])
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
    depth = await jobs.stats()
    assert (depth.delayed, depth.ready, depth.leased) == (6, 0, 0)


async def test_blocks_in_tasks_of_their_own_settle_all_messages(jobs: Jobs) -> None:
    await fill(jobs)

    async def handle(message: Message[int]) -> None:
        async with message:
            await asyncio.sleep(0.001)

    handling = [asyncio.create_task(handle(each)) async for each in first(jobs, MANY)]
    await asyncio.gather(*handling)
    await until(lambda: depths(jobs), equals=(0, 0, 0, 0))


async def test_a_block_that_ends_after_its_loop_waits_for_its_ack(jobs: Jobs) -> None:
    """The messages at hand went back when the loop was left."""
    await fill(jobs, 50)
    # The first batches are small; the last message here is in the middle of a large one.
    taken = await take(jobs, 20)
    await jobs.purge("all")
    with pytest.raises(delayq.LeaseLost):
        async with taken[-1]:
            pass
