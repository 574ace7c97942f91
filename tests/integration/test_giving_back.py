"""Giving back reaches the server whatever else happens at that moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from tests.links import Links

if TYPE_CHECKING:
    from tests.servers import PrivateServer


async def everything(url: str) -> list[Any]:
    """What another client finds."""
    async with delayq.connect(url) as client:
        return await client.delayed_queue("orders").drain()


async def test_what_a_drain_has_taken_goes_back_when_the_client_closes_before_it_returns(own_server: PrivateServer) -> None:
    async with Links(own_server) as links:
        client = delayq.connect(links.url)
        await client.__aenter__()
        queue = client.delayed_queue("orders")
        await queue.offer_many([(n, 0) for n in range(150)])
        counting, count_due = asyncio.Event(), queue._open.count_due

        async def count() -> int:
            links.delay(150)
            counting.set()
            return await count_due()

        queue._open.count_due = count  # type: ignore[method-assign]
        draining = asyncio.create_task(queue.drain())
        await counting.wait()
        await client.aclose()
        with pytest.raises(delayq.Closed):
            await draining
    assert await everything(own_server.url) == [*range(150)]


async def test_a_client_that_closes_waits_for_a_queue_that_is_closing(own_server: PrivateServer) -> None:
    async with Links(own_server, round_trip=100) as links:
        client = delayq.connect(links.url)
        await client.__aenter__()
        queue = client.delayed_queue("orders")
        await queue.offer_many([(n, 0) for n in range(150)])
        values = aiter(queue)
        first = await anext(values)
        # The first try does not arrive.
        links.half_open(new=False)
        closing = asyncio.create_task(queue.aclose())
        await asyncio.sleep(0)
        await client.aclose()
        # Not cancelled.
        await closing
    assert [first, *await everything(own_server.url)] == [*range(150)]
