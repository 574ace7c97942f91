"""Figures for docs/redisson.md: shares, and Java's losses when its connections are killed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import delayq
from tests.interop import report
from tests.interop.live import DEADLINE, SPREAD, Live, Log, random_messages
from tests.interop.pairs import TEXT
from tests.interop.settings import with_newest
from tests.support.waiting import until

pytestmark = [pytest.mark.java, pytest.mark.nightly]

MOST_MS = 2000
KILLS = 40


@with_newest
@pytest.mark.parametrize(
    ("pause_ms", "threads", "count"), [(0, 1, SPREAD), (2, 1, 2000), (2, 4, 4000)]
)
async def test_java_and_python_both_get_a_share_of_the_messages(
    live: Live, pause_ms: int, threads: int, count: int
) -> None:
    """One loop in Python beside ``threads`` loops in Java."""
    log, messages = Log(), random_messages(TEXT, count, most=MOST_MS)
    java = await live.open()
    to_java = list[tuple[Any, int]]()
    takes = [asyncio.create_task(java.consume(to_java, pause=pause_ms)) for _ in range(threads)]
    to_python = 0
    async with delayq.connect(live.server.url) as client:
        queue = client.delayed_queue(live.name, codec=TEXT.codec)

        async def consume() -> None:
            nonlocal to_python
            async for value in queue:
                log.came(value, float("inf"))
                to_python += 1
                if pause_ms:
                    await asyncio.sleep(pause_ms / 1000)

        consumer = asyncio.create_task(consume())
        await log.offer_by_python(queue, messages)
        # When they stop, no message is in flight to either.
        await until(lambda: to_python + len(to_java) >= count, DEADLINE)
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
    await java.stop()
    await asyncio.wait_for(asyncio.gather(*takes), DEADLINE)
    log.came_to_java(to_java)
    await java.detach()
    await live.drained()
    log.check()
    assert 0 < to_python < count
    summary = (
        f"one loop in Python beside {threads} in Java took {to_python / count:.0%} of {count:,}"
    )
    report.LINES[f"{live.redisson}: with {pause_ms} ms for each message, {summary}"] = None


@with_newest
async def test_java_alone_loses_what_it_pops_for_a_connection_that_is_killed(live: Live) -> None:
    """This tests no promise of ours: the figure shows what to expect of consumers in Java."""
    count = SPREAD
    log, messages = Log(), random_messages(TEXT, count, most=MOST_MS)
    java = await live.open()
    await log.offer_by_java(java, messages)
    takes = [asyncio.create_task(java.consume()) for _ in range(4)]
    for _ in range(KILLS):
        await asyncio.sleep(MOST_MS / 1000 / KILLS)
        live.server.call("CLIENT", "KILL", "TYPE", "normal")
    await live.drained()
    await java.stop()
    log.came_to_java(*await asyncio.gather(*takes))
    await java.detach()
    summary = f"alone: {KILLS} times cut, it lost {len(log.missing())} of {count:,}"
    report.LINES[f"{live.redisson} {summary}"] = None
