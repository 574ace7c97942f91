"""A loop with more messages at hand does not wait for its acks, and readers cannot tell."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING

import pytest

import delayq
from delayq import Offer
from delayq._engine.leases import Batch
from delayq._reliable.scripts import ACK
from tests.support.reliable import Jobs, depths, get
from tests.support.reliable_fixtures import LEASE
from tests.support.waiting import be_impatient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, Message
    from tests.integration.test_faults import Faults
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer

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
            # Stop in the middle of a batch, with answers outstanding.
            if done >= 100 and unanswered(queue) and message._ahead:
                if what == "the client":
                    break
                await queue.aclose()
    stats = await jobs.stats()
    assert (stats.leased, stats.ready) == (0, MANY - done)
    (await store.look()).demand_no_orphans()


async def test_unanswered_acks_are_bounded(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "max_unanswered", 20)
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
