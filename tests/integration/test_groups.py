"""Groups take turns, and limits are exact, whatever becomes of the messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delayq import Limit, Offer
from tests.support.reliable import claim_all, claim_one, get, values

if TYPE_CHECKING:
    from delayq import Client, ReliableQueue

pytestmark = pytest.mark.every_server


def of_group(group: str | None, *numbers: int, **fields: Any) -> list[Offer[int]]:
    return [Offer(number, group=group, **fields) for number in numbers]


async def claimed(queue: ReliableQueue[int]) -> list[int]:
    """Claim what may run, and keep it."""
    return [message.value for message in await queue.claim(10)]


async def one_by_one(queue: ReliableQueue[int]) -> list[int]:
    """Claim and acknowledge every due message, one at a time."""
    found = []
    while messages := await queue.claim():
        found.append(messages[0].value)
        await messages[0].ack()
    return found


async def test_a_message_knows_its_group(client: Client) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer(1, group="tenant 42/é%", id="a")
    assert (await get(jobs, "a")).group == "tenant 42/é%"
    message = await claim_one(jobs)
    assert message.group == "tenant 42/é%"
    await message.ack()
    await jobs.offer(2)
    assert (await claim_one(jobs)).group is None


async def test_groups_take_turns(client: Client) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer_many(of_group("a", *range(5)))
    await jobs.offer_many(of_group("b", *range(10, 13)))
    await jobs.offer_many(of_group(None, *range(20, 22)))
    assert await one_by_one(jobs) == [0, 10, 20, 1, 11, 21, 2, 12, 3, 4]


async def test_groups_take_turns_within_one_claim(client: Client) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer_many(of_group("a", *range(5)))
    await jobs.offer_many(of_group("b", *range(10, 13)))
    await jobs.offer_many(of_group(None, *range(20, 22)))
    assert await values(jobs, 6) == [0, 10, 20, 1, 11, 21]
    assert await values(jobs, 6) == [2, 12, 3, 4]


async def test_a_group_keeps_the_order_of_priorities_then_due_times(client: Client) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer_many([*of_group("a", 1, 2), *of_group("a", 3, priority=9)])
    await jobs.offer(4, 3600, group="a", priority=5)
    assert await one_by_one(jobs) == [3, 1, 2]
    stats = await jobs.stats()
    assert (stats.delayed, stats.ready, stats.leased) == (1, 0, 0)


async def test_no_more_messages_of_a_group_run_than_its_limit_allows(client: Client) -> None:
    jobs = client.reliable_queue("jobs", group_limit=Limit(concurrency=2))
    await jobs.offer_many(of_group("a", *range(5)))
    await jobs.offer_many(of_group("b", *range(10, 15)))
    first = await claim_all(jobs)
    assert [message.value for message in first] == [0, 10, 1, 11]
    assert await jobs.claim(10) == []
    await first[0].ack()
    assert await claimed(jobs) == [2]
    await first[1].nack(0)
    assert await claimed(jobs) == [12]
    await first[2].bury("why")
    assert await claimed(jobs) == [3]
    await first[3].snooze(3600)
    assert await claimed(jobs) == [13]


async def test_no_more_messages_of_a_queue_run_than_its_limit_allows(client: Client) -> None:
    jobs = client.reliable_queue("jobs", limit=Limit(concurrency=3))
    await jobs.offer_many(of_group("a", *range(5)))
    await jobs.offer_many(of_group(None, *range(10, 15)))
    first = await claim_all(jobs)
    assert [message.value for message in first] == [0, 10, 1]
    assert await jobs.claim(10) == []
    await first[0].ack()
    assert await claimed(jobs) == [11]


async def test_no_more_messages_start_than_the_rate_allows(client: Client) -> None:
    jobs = client.reliable_queue(
        "jobs", limit=Limit(rate=5, per=3600), group_limit=Limit(rate=2, per=3600)
    )
    for group in "abc":
        await jobs.offer_many(of_group(group, 1, 2, 3))
    assert len(await one_by_one(jobs)) == 5
