"""A loop with more messages at hand does not wait for its acks: readers cannot tell, and the log
reports what went wrong.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._reliable.store import ACK
from tests.support.reliable_fixtures import LEASE, faults, jobs, raw, store
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from delayq import Client, Message, ReliableQueue
    from tests.integration.test_faults import Faults
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer

__all__ = ["faults", "jobs", "raw", "store"]

# Batches grow by doubling: of this many messages, most are not the last at hand, but some are.
MANY = 250


async def fill(queue: ReliableQueue[int], count: int = MANY) -> None:
    await queue.offer_many([Offer(value=n, id=f"job {n}") for n in range(count)])


def unanswered(queue: ReliableQueue[int]) -> int:
    return queue._open.partitions[0].settling.unanswered


def loop(queue: ReliableQueue[int]) -> AsyncGenerator[Message[int], None]:
    return queue.__aiter__()  # type: ignore[return-value]


async def handle_all(queue: ReliableQueue[int], count: int = MANY) -> int:
    """Handle ``count`` messages in a plain loop, and return how many blocks ended without waiting
    for their ack.
    """
    handled = without_waiting = 0
    async for message in queue:
        before = unanswered(queue)
        async with message:
            pass
        without_waiting += unanswered(queue) > before
        handled += 1
        if handled == count:
            break
    return without_waiting


async def test_most_acks_of_a_loop_are_not_waited_for(jobs: ReliableQueue[int]) -> None:
    await fill(jobs)
    assert await handle_all(jobs) > MANY / 2


async def test_after_the_loop_nothing_is_leased(jobs: ReliableQueue[int]) -> None:
    await fill(jobs)
    await handle_all(jobs)
    assert await jobs.stats() == delayq.QueueDepth(
        delayed=0, ready=0, leased=0, dead=0, oldest_due_age=0
    )


async def test_acks_of_a_loop_share_calls(jobs: ReliableQueue[int], faults: Faults) -> None:
    await fill(jobs, 300)
    await handle_all(jobs, 300)
    await jobs.stats()
    assert 1 <= faults.calls.count(ACK.name) <= 60


@pytest.mark.parametrize(
    "handling", [0, 1, 3], ids=lambda turns: f"handlers that take {turns} turns"
)
async def test_handlers_that_give_way_lose_no_ack(
    jobs: ReliableQueue[int], store: Store, handling: int
) -> None:
    await fill(jobs)
    handled = 0
    async for message in jobs:
        async with message:
            for _ in range(handling):
                await asyncio.sleep(0)
        handled += 1
        if handled == MANY:
            break
    assert (await jobs.stats()).leased == 0
    stored = await store.look()
    stored.demand_no_orphans()
    assert stored.bodies == {}


async def see_by_get(queue: ReliableQueue[int], message: Message[int]) -> bool:
    return await queue.get(message.id) is not None


async def see_by_list(queue: ReliableQueue[int], message: Message[int]) -> bool:
    return message.id in {each.id for each in await queue.list("leased", limit=1000)}


@pytest.mark.parametrize("see", [see_by_get, see_by_list], ids=lambda see: see.__name__)
async def test_whoever_looks_right_after_the_block_sees_nothing_of_the_message(
    jobs: ReliableQueue[int], see: Callable[[ReliableQueue[int], Message[int]], Awaitable[bool]]
) -> None:
    await fill(jobs, 60)
    left = 60
    async for message in jobs:
        async with message:
            pass
        assert not await see(jobs, message)
        left -= 1
        if not left:
            break


async def test_stats_count_down_with_every_block(jobs: ReliableQueue[int]) -> None:
    await fill(jobs, 60)
    left = 60
    async for message in jobs:
        async with message:
            pass
        left -= 1
        stats = await jobs.stats()
        assert stats.ready + stats.leased == left
        if not left:
            break


async def test_peek_and_purge_count_without_what_was_just_handled(jobs: ReliableQueue[int]) -> None:
    await fill(jobs, 60)
    async with aclosing(loop(jobs)) as messages:
        seen = 0
        async for message in messages:
            async with message:
                pass
            seen += 1
            assert message.id not in {each.id for each in await jobs.peek(100)}
            if seen == 40:
                # A purge drops leased messages too: all except those that were handled.
                assert await jobs.purge() == 20
                break
    assert (await jobs.stats()).leased == 0


@pytest.mark.parametrize("many", [False, True], ids=["offer", "offer_many"])
async def test_the_id_of_a_message_is_free_where_its_block_ends(
    jobs: ReliableQueue[int], many: bool
) -> None:
    await fill(jobs, 60)
    handled = 0
    async for message in jobs:
        async with message:
            pass
        # The delay is longer than the test, so the message does not come again here.
        if many:
            assert await jobs.offer_many([Offer(value=0, id=message.id, delay=LEASE)]) == [
                message.id
            ]
        else:
            assert await jobs.offer(0, LEASE, id=message.id) == message.id
        handled += 1
        if handled == 60:
            break
    assert (await jobs.stats()).delayed == 60


async def test_handling_one_makes_room_for_one(client: Client) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, max_size=100)
    await fill(queue, 100)
    handled = 0
    async for message in queue:
        async with message:
            pass
        await queue.offer(0, LEASE)
        handled += 1
        if handled == 60:
            break


async def test_an_explicit_ack_is_waited_for(jobs: ReliableQueue[int], store: Store) -> None:
    await fill(jobs, 60)
    handled = 0
    async for message in jobs:
        async with message:
            await message.ack()
            assert unanswered(jobs) == 0
        handled += 1
        if handled == 60:
            break
        if not handled % 20:
            assert message.id not in (await store.look()).bodies


async def test_the_ack_of_the_last_message_at_hand_is_waited_for(
    jobs: ReliableQueue[int], store: Store
) -> None:
    """All earlier acks are answered by then, too: a loop that waits for more messages leaves
    nothing unanswered behind.
    """
    await fill(jobs)
    handled = last_ones = 0
    async for message in jobs:
        is_last = not message._ahead
        async with message:
            pass
        handled += 1
        if is_last:
            last_ones += 1
            assert unanswered(jobs) == 0
            assert message.id not in (await store.look()).bodies
        if handled == MANY:
            break
    assert last_ones >= 3


async def test_a_message_that_was_claimed_alone_is_waited_for(
    jobs: ReliableQueue[int], store: Store
) -> None:
    await fill(jobs, 5)
    for message in await jobs.claim(5):
        async with message:
            pass
        assert unanswered(jobs) == 0
        assert message.id not in (await store.look()).bodies


async def lose_while_handled(
    client: Client, jobs: ReliableQueue[int], server: PrivateServer, *, at_hand: bool
) -> str:
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


async def test_a_lease_that_was_lost_is_logged_where_nobody_waits(
    client: Client,
    jobs: ReliableQueue[int],
    server: PrivateServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = await lose_while_handled(client, jobs, server, at_hand=True)
    await jobs.stats()
    assert f"queue 'jobs': the lease of message '{lost}' was lost" in caplog.text


async def test_a_lease_that_was_lost_is_raised_where_the_ack_is_waited_for(
    client: Client,
    jobs: ReliableQueue[int],
    server: PrivateServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(delayq.LeaseLost):
        await lose_while_handled(client, jobs, server, at_hand=False)
    assert "was lost" not in caplog.text


async def test_where_all_goes_well_nothing_is_logged(
    jobs: ReliableQueue[int], caplog: pytest.LogCaptureFixture
) -> None:
    await fill(jobs)
    await handle_all(jobs)
    await jobs.stats()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_acks_that_fail_are_logged_and_their_messages_come_again(
    client: Client,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.05)
    # Long enough for a busy machine to handle all messages, yet short enough to wait for.
    queue = client.reliable_queue("jobs", lease=3.0)
    await fill(queue, 30)
    failing = True
    faults.plan = lambda name, _n: "unsent" if name == ACK.name and failing else None
    handled = unwatched = 0
    async for message in queue:
        # The last message at hand would raise.
        if message._ahead:
            async with message:
                pass
            unwatched += 1
        else:
            await message.release()
        handled += 1
        if unwatched == 10:
            break
    await queue._open.partitions[0].settling.flush()
    failing = False
    failed = set(
        re.findall(r"message '(job \d+)' was handled, but may be redelivered", caplog.text)
    )
    assert len(failed) == 10
    # The messages are redelivered after their leases, as second attempts.
    again: set[str] = set()
    async with asyncio.timeout(30):
        async for message in queue:
            async with message:
                if message.attempt == 2:
                    again.add(message.id)
            if again >= failed:
                break
    assert again >= failed


async def test_an_ack_whose_answer_is_lost_is_repeated_and_nothing_is_said(
    jobs: ReliableQueue[int], faults: Faults, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(jobs)
    faults.plan = lambda name, n: "lost" if name == ACK.name and n in (2, 4) else None
    await handle_all(jobs)
    await jobs.stats()
    assert (await store.look()).bodies == {}
    assert "lost" not in caplog.text
    assert "again" not in caplog.text


async def test_whoever_looks_waits_for_acks_that_are_repeated(
    jobs: ReliableQueue[int], faults: Faults
) -> None:
    await fill(jobs, 60)
    faults.plan = lambda name, n: "unsent" if name == ACK.name and n % 2 else None
    handled = 0
    async for message in jobs:
        async with message:
            pass
        assert await jobs.get(message.id) is None
        handled += 1
        if handled == 60:
            break


async def test_leaving_the_client_sends_what_was_acknowledged(
    server: PrivateServer, jobs: ReliableQueue[int], store: Store
) -> None:
    async with delayq.connect(server.url) as client:
        queue = client.reliable_queue("jobs", lease=LEASE)
        await fill(queue)
        handled = 0
        async for message in queue:
            async with message:
                handled += 1
            # Stop in the middle of a batch, with answers outstanding.
            if handled >= 100 and unanswered(queue) and message._ahead:
                break
    stats = await jobs.stats()
    assert (stats.leased, stats.ready) == (0, MANY - handled)
    (await store.look()).demand_no_orphans()


async def test_closing_the_queue_sends_what_was_acknowledged(
    client: Client, jobs: ReliableQueue[int], store: Store
) -> None:
    await fill(jobs)
    handled = 0
    async for message in jobs:
        async with message:
            handled += 1
        if handled >= 100 and unanswered(jobs) and message._ahead:
            await jobs.aclose()
    stored = await store.look()
    assert (stored.leases, len(stored.bodies)) == ({}, MANY - handled)


async def test_a_server_that_does_not_answer_holds_up_the_loop_before_memory_fills(
    server: PrivateServer, jobs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._reliable.acks._MOST_UNANSWERED", 20)
    await fill(jobs)
    # Batches have to grow first.
    most = handled = 0
    async for message in jobs:
        async with message:
            pass
        most = max(most, unanswered(jobs))
        handled += 1
        if handled == MANY:
            break
    assert 0 < most <= 20


async def test_a_handler_that_raises_is_nacked_although_more_is_at_hand(
    jobs: ReliableQueue[int],
) -> None:
    await fill(jobs, 60)
    handled = 0
    async for message in jobs:
        try:
            async with message:
                1 / (message.value % 10)
        except ZeroDivisionError:
            seen = await jobs.get(message.id)
            assert seen is not None
            assert seen.state == "delayed"
        handled += 1
        if handled == 60:
            break
    assert (await jobs.stats()).delayed == 6


async def test_a_worker_of_an_own_task_for_each_message_settles_all_of_them(
    jobs: ReliableQueue[int],
) -> None:
    """Tasks that take their time are not affected by messages at hand: each block ends on its
    own.
    """
    await fill(jobs)
    handling: set[asyncio.Task[Any]] = set()
    taken = 0

    async def handle(message: Message[int]) -> None:
        async with message:
            await asyncio.sleep(0.001)

    async for message in jobs:
        handling.add(asyncio.create_task(handle(message)))
        taken += 1
        if taken == MANY:
            break
    await asyncio.gather(*handling)

    async def none_left() -> bool:
        stats = await jobs.stats()
        return not (stats.ready or stats.leased)

    await until(none_left)


async def test_a_block_that_ends_after_its_loop_was_left_waits_for_its_ack(
    client: Client, jobs: ReliableQueue[int]
) -> None:
    """The messages at hand went back when the loop was left."""
    await fill(jobs, 50)
    taken: list[Message[int]] = []
    async with aclosing(jobs.__aiter__()) as messages:  # type: ignore[type-var]
        async for message in messages:
            taken.append(message)
            # The first batches are small; this message is in the middle of a large one.
            if len(taken) == 20:
                break
    await jobs.purge("all")
    with pytest.raises(delayq.LeaseLost):
        async with taken[-1]:
            pass
