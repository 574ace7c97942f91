"""Without an ordered list, everything but Redisson's views works as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import delayq

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from delayq import Client, DelayedQueue
    from tests.support.servers import PrivateServer

TIMEOUT, ORDERED = "redisson_delay_queue_timeout:{orders}", "redisson_delay_queue:{orders}"


@pytest.fixture
async def queue(client: Client) -> DelayedQueue[int]:
    return client.delayed_queue("orders", ordered_list=False)


@pytest.mark.every_server
async def test_only_the_sorted_set_is_written(queue: DelayedQueue[int], raw: Redis) -> None:
    first, *_ = await queue.offer_many([(1, 60), (2, 30)])
    assert sorted(await raw.keys()) == [TIMEOUT.encode()]
    assert await first.reschedule(10)
    assert await first.cancel()
    assert await queue.pending.read_all() == [2]


@pytest.mark.every_server
async def test_records_listed_by_others_leave_their_list_too(
    queue: DelayedQueue[int], server: PrivateServer, raw: Redis
) -> None:
    """Sharing the queue with a process that keeps the list is not advised, but works."""
    async with delayq.connect(server.url) as other:
        listing: DelayedQueue[int] = other.delayed_queue("orders")
        await listing.offer_many([(n, 60 + n) for n in range(5)])
        await queue.offer(5, 30)
        assert await queue.pending.size() == 6
        assert await listing.pending.size() == 5
        assert await queue.pending.poll_many(2) == [5, 0]
        assert await queue.pending.poll_last_and_offer_first_to("elsewhere") == 4
        assert await queue.pending.remove(2)
        assert await listing.pending.read_all() == [1, 3]
        assert await raw.zcard(TIMEOUT) == 2


async def test_a_queue_has_a_list_or_none(client: Client, queue: DelayedQueue[int]) -> None:
    with pytest.raises(delayq.ConfigurationError, match="ordered_list=False"):
        client.delayed_queue("orders")
    await queue.aclose()
    client.delayed_queue("orders")
