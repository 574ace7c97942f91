"""Leases beside Java, and queues without an ordered list: Java notices neither."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.pairs import TEXT
from tests.interop.settings import with_current
from tests.interop.test_redisson import (
    DEADLINE,
    Log,
    for_java,
    for_python,
    nothing_is_left,
    random_messages,
)

if TYPE_CHECKING:
    import delayq
    from tests.interop.redisson import Redisson
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.java

MESSAGES = 2000


@with_current
async def test_what_java_offers_is_leased_and_what_fails_comes_to_java(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """Every third delivery is refused: it waits in a record that Java moves and takes."""
    log, messages = Log(TEXT), random_messages(TEXT, MESSAGES)
    java = await redisson.open(name, TEXT.java)
    queue: delayq.DelayedQueue[Any] = client.delayed_queue(name, codec=TEXT.codec)
    refused = 0
    acks: list[asyncio.Task[None]] = []
    deliveries = queue.deliveries(lease=60)
    left, delays = await java.offer(for_java(TEXT, messages)), [delay for _, delay in messages]
    due = {
        TEXT.codec.encode(value): when + delay
        for (value, _), when, delay in zip(messages, left, delays, strict=True)
    }
    handled = 0
    async for delivery in deliveries:
        handled += 1
        if handled % 3 == 0:
            refused += 1
            await delivery.nack(2)
            log.due[TEXT.codec.encode(delivery.value)] = due[TEXT.codec.encode(delivery.value)]
        else:
            acks.append(asyncio.create_task(delivery.ack()))
        if handled == MESSAGES:
            break
    await asyncio.gather(*acks)
    # From here on, only Java is there.
    await queue.aclose()
    log.came_to_java(await asyncio.wait_for(java.take(refused), DEADLINE))
    await nothing_is_left(server)
    log.check()
    await java.detach()


@with_current
async def test_java_delivers_what_python_offered_without_an_ordered_list(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    log, messages = Log(TEXT), random_messages(TEXT, MESSAGES)
    java = await redisson.open(name, TEXT.java)
    taken = asyncio.create_task(java.take(MESSAGES))
    queue: delayq.DelayedQueue[Any] = client.delayed_queue(
        name, codec=TEXT.codec, ordered_list=False
    )
    for (value, _), receipt in zip(
        messages, await queue.offer_many(for_python(messages)), strict=True
    ):
        log.offered_by_python(value, receipt)
    assert await java.ask("size") == 0
    await queue.aclose()
    log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
    await nothing_is_left(server)
    log.check()
    await java.detach()
