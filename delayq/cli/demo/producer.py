"""The demo's producer process: ``python -m delayq.cli.demo.producer QUEUE MESSAGES MAX_DELAY``."""

from __future__ import annotations

import asyncio
import random
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio

import delayq
from delayq.cli.demo.pipes import WARM_UP, run_child

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq.cli.demo.pipes import Parent

# The number of concurrent callers. Each offers one message after the other.
_AT_A_TIME = 8
# The time over which the offers are spread, seconds, and the largest number of offers per second.
_SPREAD = 1.0
_PER_SECOND = 2000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


async def produce(parent: Parent) -> None:
    """Warm up, wait for the start signal, offer each message after a random delay, and return."""
    name, messages, max_delay = sys.argv[1:]
    offered: list[tuple[int, int, int]] = []
    async with delayq.connect() as client, parent.telling("offered", offered):
        queue = client.delayed_queue(name)
        await queue.offer({"number": WARM_UP})
        parent.tell(ready=True)
        await parent.begun.wait()
        schedule = _schedule(int(messages))
        async with anyio.create_task_group() as tasks:
            for _ in range(_AT_A_TIME):
                tasks.start_soon(_offer, queue, schedule, float(max_delay), offered)


def _schedule(messages: int) -> Iterator[tuple[int, float]]:
    """Yield the numbers from 1, each with the time at which to offer it."""
    step = max(_SPREAD / messages, 1 / _PER_SECOND)
    start = asyncio.get_running_loop().time()
    for number in range(1, messages + 1):
        yield number, start + number * step


async def _offer(
    queue: delayq.DelayedQueue[Any], schedule: Iterator[tuple[int, float]], max_delay: float, offered: list[tuple[int, int, int]]
) -> None:
    clock = asyncio.get_running_loop().time
    for number, moment in schedule:
        await asyncio.sleep(moment - clock())
        delay = round(random.uniform(0, max_delay), 3)
        receipt = await queue.offer({"number": number}, delay=delay)
        offered.append((number, round(delay * 1_000_000), (receipt.due_at - _EPOCH) // _MICROSECOND))


if __name__ == "__main__":
    run_child(produce)
