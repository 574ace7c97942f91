"""Leases beside Java, and queues without an ordered list: Java notices neither."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.live import DEADLINE, Live, Log, random_messages
from tests.interop.pairs import TEXT
from tests.interop.settings import newest_current_first

if TYPE_CHECKING:
    import delayq

pytestmark = pytest.mark.java

MESSAGES = 1_000


@newest_current_first
async def test_what_java_offers_is_leased_and_what_fails_comes_to_java(live: Live) -> None:
    """Every third delivery is refused: it waits in a record that Java moves and takes."""
    log, messages = Log(), random_messages(TEXT, MESSAGES)
    java = await live.open()
    queue = live.queue()
    acks: list[asyncio.Task[None]] = []
    refusing: list[delayq.Delivery[Any]] = []
    deliveries = queue.deliveries(lease=3600)
    offered = Log()
    await offered.offer_by_java(java, messages)
    handled = 0
    async for delivery in deliveries:
        handled += 1
        if handled % 3 == 0:
            refusing.append(delivery)
            key = TEXT.codec.encode(delivery.value)
            log.due[key] = offered.due[key]
        else:
            acks.append(asyncio.create_task(delivery.ack()))
        if handled == MESSAGES:
            break
    # Refused at the end: none comes back while this loop still takes messages.
    await asyncio.gather(*acks, *(delivery.nack(2) for delivery in refusing))
    # From here on, only Java is there.
    await queue.aclose()
    log.came_to_java(await asyncio.wait_for(java.take(len(refusing)), DEADLINE))
    await live.drained()
    log.check()
    await java.detach()


@newest_current_first
async def test_java_delivers_what_python_offered_without_an_ordered_list(live: Live) -> None:
    log, messages = Log(), random_messages(TEXT, MESSAGES)
    java = await live.open()
    taken = asyncio.create_task(java.take(MESSAGES))
    queue = live.queue(ordered_list=False)
    await log.offer_by_python(queue, messages)
    assert await java.ask("size") == 0
    await queue.aclose()
    log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
    await live.drained()
    log.check()
    await java.detach()
