"""A message whose worker died may have killed it, so it is redelivered alone and takes no other
message down with it.
"""
# ruff: noqa: F401, F811 - fixtures

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from tests.support.reliable_fixtures import LEASE, raw, store
from tests.support.reliable_store import Store

if TYPE_CHECKING:
    from delayq import Client, Message, ReliableQueue
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server


@pytest.fixture
async def jobs(client: Client) -> ReliableQueue[Any]:
    return client.reliable_queue("jobs", lease=LEASE, max_attempts=2)


async def crash(store: Store) -> None:
    """End all leases, as if the worker had died."""
    await store.let_pass(2 * LEASE)


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_a_message_that_kills_its_worker_dies_and_its_neighbours_are_handled(
    client: Client, raw: Any, most: int
) -> None:
    queue, store = (
        client.reliable_queue("mails", lease=LEASE, max_attempts=most),
        Store(raw, "mails"),
    )
    await queue.offer_many([Offer("bad" if n == 4 else "good", id=f"m{n}") for n in range(12)])
    assert len(await queue.claim(100)) == 12
    await crash(store)
    handled = []
    for _ in range(200):
        messages = await queue.claim(100)
        if not messages:
            break
        assert len(messages) == 1
        if messages[0].value == "bad":
            await crash(store)
        else:
            handled.append(messages[0].id)
            await messages[0].ack()
    assert sorted(handled) == sorted(f"m{n}" for n in range(12) if n != 4)
    (letter,) = await queue.dead.list()
    # The first time, the message was in company, so that attempt does not count.
    assert (letter.id, letter.reason, letter.attempt) == ("m4", "attempts", 1 + most)
    (await store.look()).demand_no_orphans()


async def test_one_suspect_is_at_work_at_a_time_and_others_pass_it(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    await jobs.offer_many([Offer(n) for n in range(3)])
    await jobs.claim(3)
    await crash(store)
    (suspect,) = await jobs.claim(3)
    assert await jobs.claim(3) == []
    await jobs.offer("new")
    assert [message.value for message in await jobs.claim(3)] == ["new"]
    await suspect.ack()
    assert len(await jobs.claim(3)) == 1


async def test_a_suspect_that_lost_its_lease_makes_way_for_the_next(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    await jobs.offer_many([Offer(n) for n in range(2)])
    await jobs.claim(2)
    await crash(store)
    (first,) = await jobs.claim(2)
    await crash(store)
    (second,) = await jobs.claim(2)
    assert {first.value, second.value} == {0, 1}


async def test_suspects_of_all_queues_of_a_client_come_one_at_a_time(
    client: Client, raw: Any
) -> None:
    queues = [client.reliable_queue(name, lease=LEASE) for name in ("one", "two")]
    for queue in queues:
        await queue.offer_many([Offer(n) for n in range(2)])
        await queue.claim(2)
    for queue in queues:
        await crash(Store(raw, queue.name))
    (suspect,) = await queues[0].claim(2)
    assert await queues[1].claim(2) == []
    await suspect.nack(3600)
    assert len(await queues[1].claim(2, wait=5)) == 1


async def test_a_waiting_client_gets_the_next_suspect_as_soon_as_one_is_settled(
    server: PrivateServer, jobs: ReliableQueue[Any], store: Store
) -> None:
    await jobs.offer_many([Offer(n) for n in range(5)])
    await jobs.claim(5)
    await crash(store)
    handled = []
    async with delayq.connect(server.url, resync_interval=3600) as other:
        async for message in other.reliable_queue("jobs", lease=LEASE, max_attempts=2):
            async with message:
                handled.append(message.value)
            if len(handled) == 5:
                break
    assert sorted(handled) == [0, 1, 2, 3, 4]


async def test_a_suspect_that_is_given_back_is_one_again(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    await jobs.offer_many([Offer(n, id=str(n)) for n in range(2)])
    await jobs.claim(2)
    await crash(store)
    (message,) = await jobs.claim(2)
    assert message.attempt == 2
    await message.release()
    assert message.id in (await store.look()).suspects
    seen = await jobs.get(message.id)
    assert seen is not None
    assert (seen.state, seen.attempt, seen.due_at) == ("ready", 1, message.due_at)
    (again,) = await jobs.claim(2)
    assert again.attempt == 2


async def test_an_attempt_that_was_lost_in_company_does_not_count_when_a_handler_fails(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    await jobs.offer_many([Offer(n) for n in range(2)])
    await jobs.claim(2)
    await crash(store)
    (message,) = await jobs.claim(2)
    await message.nack(0)
    assert await jobs.dead.size() == 0
    await (await jobs.claim(1))[0].ack()
    (again,) = await jobs.claim(1)
    assert again.attempt == 3
    await again.nack(0)
    assert [letter.attempt for letter in await jobs.dead.list()] == [3]


async def test_suspects_are_ready_in_stats_and_lists_and_can_be_cancelled_and_rescheduled(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    await jobs.offer_many([Offer(n, id=str(n)) for n in range(4)])
    messages: list[Message[Any]] = await jobs.claim(4)
    await crash(store)
    (suspect,) = await jobs.claim(1)
    assert suspect.id == "0"
    # The next claim finds the other suspects, but may not take any of them.
    assert await jobs.claim(4) == []
    assert [message.id for message in await jobs.list("ready")] == ["1", "2", "3"]
    assert [message.id for message in await jobs.list("ready", offset=1, limit=1)] == ["2"]
    stats = await jobs.stats()
    assert (stats.delayed, stats.ready, stats.leased) == (0, 3, 1)
    assert stats.oldest_due_age > LEASE
    assert await jobs.cancel("1")
    assert await jobs.reschedule("2", 60)
    await messages[3].ack()
    assert [message.id for message in await jobs.list("delayed")] == ["2"]
    (await store.look()).demand_no_orphans()
