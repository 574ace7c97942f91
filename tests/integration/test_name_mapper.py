"""Queue names are mapped in the same way as by a Redisson client's NameMapper."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq.admin.doctor import diagnose

if TYPE_CHECKING:
    from delayq import DelayedQueue, ReliableQueue
    from tests.support.servers import PrivateServer


async def test_the_mapper_comes_before_the_rule_of_braces(server: PrivateServer, raw: Any) -> None:
    async with delayq.connect(server.url, name_mapper="prod:{}".format) as client:
        queue: DelayedQueue[int] = client.delayed_queue("orders")
        assert queue.name == "orders"
        await queue.offer(1, 60)
        await queue.offer(2)
        assert await asyncio.wait_for(queue.take(), 60) == 2
        assert await queue.pending.poll_last_and_offer_first_to("other") == 1
        assert await raw.lrange("prod:other", 0, -1) == [b"1"]
        await queue.offer(3, 60)
        assert sorted(await raw.keys("redisson*")) == [
            b"redisson_delay_queue:{prod:orders}",
            b"redisson_delay_queue_timeout:{prod:orders}",
        ]
        tagged: DelayedQueue[int] = client.delayed_queue("{t1}:orders")
        await tagged.offer(4, 60)
        assert await raw.exists("redisson_delay_queue:prod:{t1}:orders")


async def test_a_doctor_finds_mapped_queues_that_are_stuck(server: PrivateServer) -> None:
    async with delayq.connect(server.url, name_mapper="prod:{}".format) as client:
        jobs: ReliableQueue[int] = client.reliable_queue("jobs", partitions=3)
        await jobs.offer_many([delayq.Offer(n) for n in range(3)])
        await jobs.pause()
        orders: DelayedQueue[int] = client.delayed_queue("orders")
        await orders.offer(1, 60)
        checks = {each.check: each async for each in diagnose(client, overdue=0)}
        assert checks["reliable prod:jobs"].level == "wrong"
        assert "3 ready" in checks["reliable prod:jobs"].text
        assert "1 delayed" in checks["delayed prod:orders"].text


async def test_a_mapped_name_must_be_a_good_one(server: PrivateServer) -> None:
    mapped: Any
    for mapped in ("", "a{b", None):
        async with delayq.connect(server.url, name_mapper=lambda _: mapped) as client:  # noqa: B023
            with pytest.raises(delayq.BadName):
                client.delayed_queue("orders")


async def test_two_names_that_share_keys_are_not_open_on_one_client(client: delayq.Client) -> None:
    queue = client.delayed_queue("orders")
    with pytest.raises(delayq.BadName, match="shares its keys with 'orders'"):
        client.delayed_queue("{orders}")
    await queue.aclose()
    client.delayed_queue("{orders}")
