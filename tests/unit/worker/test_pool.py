"""When a worker claims messages, and when it handles them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from delayq.worker._pool import Pool
from delayq.worker._slots import Feed

BATCH = 10


async def test_the_next_claim_leaves_before_handlers_that_may_never_wait_begin() -> None:
    """So the server works while they do."""
    events: list[str | int] = []
    has_handled_all, is_done = asyncio.Event(), asyncio.Event()
    claimed_count = 0

    async def claim(count: int, wait: float | None) -> list[tuple[int, int]]:
        nonlocal claimed_count
        del wait
        # The task that makes the call begins.
        await asyncio.sleep(0)
        events.append("claim")
        if claimed_count:
            await has_handled_all.wait()
            has_handled_all.clear()
        numbers = range(claimed_count, claimed_count + min(count, BATCH))
        claimed_count += len(numbers)
        return [(number, number) for number in numbers]

    async def handle(number: Any) -> None:
        events.append(number)
        if number == claimed_count - 1:
            has_handled_all.set()
        if number == 5 * BATCH:
            is_done.set()

    port: Any = SimpleNamespace(
        name="jobs",
        claim=claim,
        most_at_once=BATCH,
        is_contested=False,
        wrap=lambda number, _: number,
        ahead=None,
        give_back=lambda _: None,
    )
    threads: Any = SimpleNamespace(hanging=0)
    feed = Feed(port, handle, threads, BATCH)
    pool = Pool([feed], BATCH, burst=False, stop=lambda _: None)
    pool.start()
    async with asyncio.timeout(10):
        await is_done.wait()
    await pool.close()
    # How long handlers take is known once the first ones have ended.
    for batch in range(1, 5):
        begins_at = events.index(batch * BATCH)
        assert events[:begins_at].count("claim") == batch + 2, events
