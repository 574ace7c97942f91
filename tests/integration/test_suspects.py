"""A message whose worker died may have killed it, so it is redelivered alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import delayq
from tests.support.reliable import claim_one, offers
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import Store

if TYPE_CHECKING:
    from delayq import Client, Message
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", lease=LEASE, max_attempts=2)


async def crash(store: Store) -> None:
    """End all leases, as if the worker had died."""
    await store.let_pass(2 * LEASE)


async def crashed(queue: Jobs, store: Store, count: int) -> list[Message[Any]]:
    """Claim as many new messages at once, and crash."""
    await queue.offer_many(offers(count, ids=True))
    claimed = await queue.claim(count)
    await crash(store)
    return claimed


@pytest.mark.every_server
@pytest.mark.parametrize("most", [1, 3])
async def test_a_message_that_kills_dies_alone(client: Client, store: Store, most: int) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, max_attempts=most)
    assert len(await crashed(queue, store, 12)) == 12
    handled = []
    while messages := await queue.claim(100):
        (message,) = messages
        if message.value == 4:
            await crash(store)
        else:
            handled.append(message.value)
            await message.ack()
    assert sorted(handled) == [n for n in range(12) if n != 4]
    (letter,) = await queue.dead.list()
    # The first time, the message was in company, so that attempt does not count.
    assert (letter.id, letter.reason, letter.attempt) == ("4", "attempts", 1 + most)
    (await store.look()).demand_no_orphans()


async def test_suspects_come_one_at_a_time_from_all_queues(client: Client, raw: Any) -> None:
    queues = [client.reliable_queue(name, lease=LEASE) for name in ("one", "two")]
    for queue in queues:
        await crashed(queue, Store(raw, queue.name), 3)
    suspect = await claim_one(queues[0], 2)
    assert await queues[1].claim(2) == []
    await suspect.nack(3600)
    other = await claim_one(queues[1], 2, wait=60)
    # One that is cancelled makes way long before its lease would end.
    assert await queues[0].claim(2) == []
    assert await queues[1].cancel(other.id, running=True)
    last = await claim_one(queues[0], 2, wait=60)
    # So does one without a lease.
    await crash(Store(raw, "one"))
    assert (await claim_one(queues[0], 2)).value not in (suspect.value, last.value)


async def test_settling_a_suspect_frees_the_next_one(
    server: PrivateServer, jobs: Jobs, store: Store
) -> None:
    await crashed(jobs, store, 5)
    handled = []
    async with delayq.connect(server.url, resync_interval=3600) as other:
        async for message in other.reliable_queue("jobs", lease=LEASE, max_attempts=2):
            async with message:
                handled.append(message.value)
            if len(handled) == 5:
                break
    assert sorted(handled) == [0, 1, 2, 3, 4]


@pytest.mark.every_server
@pytest.mark.parametrize("count", [1, 2])
async def test_an_extended_lease_is_still_one_of_several_or_alone(
    jobs: Jobs, store: Store, count: int
) -> None:
    await jobs.offer_many(offers(count, ids=True))
    for message in await jobs.claim(count):
        await message.extend(LEASE)
    await crash(store)
    await claim_one(jobs, count)
    assert (await store.look()).attempts == {"0": (1, count - 1)}


@pytest.mark.every_server
async def test_a_message_claimed_alone_beside_others_is_one_of_several(
    jobs: Jobs, store: Store
) -> None:
    await jobs.offer_many(offers(2, ids=True))
    for _ in range(2):
        await claim_one(jobs)
    await crash(store)
    for key, forgiven in (("0", 0), ("1", 1)):
        suspect = await claim_one(jobs, 2)
        assert (await store.look()).attempts[key] == (1, forgiven)
        await suspect.ack()
