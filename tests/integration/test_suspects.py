"""What a crash interrupted comes back at once; what was lost twice comes alone, as a suspect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import delayq
from tests.support.reliable import claim_one, offers
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import Store

if TYPE_CHECKING:
    from delayq import Client
    from delayq._engine.suspects import Suspects
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer


@pytest.fixture(autouse=True)
async def suspects(client: Client) -> Suspects[Any]:
    """Let other messages come beside a suspect at once: time does not pass for clients here."""
    suspects: Suspects[Any] = client.reliable_queue("any")._open.services.suspects
    suspects.others_wait_for = 0
    return suspects


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", lease=LEASE, max_attempts=2)


async def crash(queue: Jobs, store: Store) -> None:
    """End all leases, as if the worker had died."""
    await store.let_pass(2 * LEASE)
    queue._open.services.suspects._at_work.clear()


async def crashed_twice(queue: Jobs, store: Store, count: int) -> None:
    """Claim as many new messages at once, and crash; and once more."""
    await queue.offer_many(offers(count, ids=True))
    for _ in range(2):
        assert len(await queue.claim(count)) == count
        await crash(queue, store)


@pytest.mark.every_server
@pytest.mark.parametrize(("most", "used"), [(1, 3), (3, 3), (4, 4), (7, 7)])
async def test_a_message_that_kills_dies_alone(
    client: Client, store: Store, most: int, used: int
) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, max_attempts=most)
    await crashed_twice(queue, store, 12)
    handled = []
    while messages := await queue.claim(100):
        (message,) = messages
        if message.value == 4:
            await crash(queue, store)
        else:
            handled.append(message.value)
            await message.ack()
    assert sorted(handled) == [n for n in range(12) if n != 4]
    (letter,) = await queue.dead.list()
    # The first two times, it might have been a neighbour: these attempts count once it was alone.
    assert (letter.id, letter.reason, letter.attempt) == ("4", "attempts", used)
    (await store.look()).demand_no_orphans()


async def test_suspects_come_one_at_a_time_from_all_queues(client: Client, raw: Any) -> None:
    queues = [client.reliable_queue(name, lease=LEASE) for name in ("one", "two")]
    for queue in queues:
        await crashed_twice(queue, Store(raw, queue.name), 3)
    suspect = await claim_one(queues[0], 2)
    assert await queues[1].claim(2) == []
    await suspect.nack(3600)
    other = await claim_one(queues[1], 2, wait=60)
    # One that is cancelled makes way long before its lease would end.
    assert await queues[0].claim(2) == []
    assert await queues[1].cancel(other.id, running=True)
    last = await claim_one(queues[0], 2, wait=60)
    # So does one without a lease.
    await crash(queues[0], Store(raw, "one"))
    assert (await claim_one(queues[0], 2)).value not in (suspect.value, last.value)


async def test_settling_a_suspect_frees_the_next_one(
    server: PrivateServer, jobs: Jobs, store: Store
) -> None:
    await crashed_twice(jobs, store, 5)
    handled = []
    async with delayq.connect(server.url, resync_interval=3600) as other:
        async for message in other.reliable_queue("jobs", lease=LEASE, max_attempts=2):
            async with message:
                handled.append(message.value)
            if len(handled) == 5:
                break
    assert sorted(handled) == [0, 1, 2, 3, 4]


@pytest.mark.every_server
async def test_what_a_worker_says_of_a_message_ends_suspicion(jobs: Jobs, store: Store) -> None:
    await crashed_twice(jobs, store, 2)
    await (await claim_one(jobs, 2)).snooze(0)
    # It is no suspect any more, so it may come beside one.
    assert [(await claim_one(jobs, 2)).id for _ in range(2)] == ["1", "0"]
    await crash(jobs, store)
    await claim_one(jobs)
    stored = await store.look()
    assert stored.lost == {"0": 1, "1": 3}
    assert stored.attempts == {"0": (3, 3), "1": (3, 3)}


async def test_a_client_takes_nothing_beside_a_suspect_until_it_has_survived_for_a_while(
    client: Client, store: Store, suspects: Suspects[Any]
) -> None:
    jobs = client.reliable_queue("jobs", lease=LEASE)
    suspects.others_wait_for = 0.5
    await crashed_twice(jobs, store, 1)
    await jobs.offer(2, id="neighbour")
    assert (await claim_one(jobs, 2)).id == "0"
    # It kills at once, if at all: then its neighbours are still on the server.
    assert await jobs.claim(2) == []
    assert (await claim_one(jobs, 2, wait=60)).id == "neighbour"
    # Then it may have been the neighbour, so next time the suspect stays alone for a whole lease.
    await crash(jobs, store)
    suspect = await claim_one(jobs, 2)
    assert (suspect.id, suspect.attempt, await jobs.claim(2, wait=0.6)) == ("0", 4, [])
    await suspect.ack()
    assert (await claim_one(jobs, 2, wait=60)).id == "neighbour"


@pytest.mark.every_server
async def test_only_a_message_lost_alone_is_a_suspect(client: Client, raw: Any) -> None:
    queues = [client.reliable_queue(name, lease=LEASE, max_attempts=1) for name in ("one", "two")]
    stores = [Store(raw, queue.name) for queue in queues]
    await queues[0].offer(1, id="lone", max_attempts=2)
    for _ in range(2):
        # Renewing a lease brings no neighbour.
        await (await claim_one(queues[0], 50)).extend(LEASE)
        await crash(queues[0], stores[0])
    assert await queues[0].claim(50) == []
    (letter,) = await queues[0].dead.list()
    assert (letter.id, letter.attempt) == ("lone", 2)
    # The second one comes, from another queue, while the first one is at work.
    for attempt in (1, 2):
        for queue in queues:
            if attempt == 1:
                await queue.offer(2)
            assert (await claim_one(queue, 50)).attempt == attempt
        for queue, store in zip(queues, stores, strict=True):
            await crash(queue, store)
