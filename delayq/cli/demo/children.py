"""The demo's two processes: ``python -m delayq.cli.demo.children producer|consumer QUEUE ...``.

Each process reports on stdout, one JSON array a line: ``[number, delay_us, due_us]`` for an offer,
``[number, at_us]`` for an arrival. The first line means that the process is ready. The parent never
writes to stdin; a process ends when its stdin is closed, which also happens if the parent is
killed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import delayq

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds between two reports. Reporting each message on its own would disturb the measurement.
_REPORT_EVERY = 0.1
# The number of concurrent callers. Each offers one message after the other.
_AT_A_TIME = 8
# The time over which the offers are spread, seconds, and the largest number of offers per second.
_SPREAD = 1.0
_PER_SECOND = 2000


async def consume(reports: list[list[int]], name: str) -> None:
    """Report when each message arrives, after a warm-up message from this process itself."""
    async with delayq.connect() as client:
        queue = client.delayed_queue(name)
        await queue.offer({"number": 0})
        async for message in queue:
            reports.append([message["number"], time.time_ns() // 1000])  # noqa: PERF401 - endless


async def produce(reports: list[list[int]], name: str, messages: str, max_delay: str) -> None:
    """Offer each message after a random delay."""
    async with delayq.connect() as client:
        queue = client.delayed_queue(name)
        reports.append([])
        schedule = _schedule(int(messages))
        await asyncio.gather(
            *(_offer(queue, schedule, float(max_delay), reports) for _ in range(_AT_A_TIME))
        )


def _schedule(messages: int) -> Iterator[tuple[int, float]]:
    """Yield the numbers from 1, each with the time at which to offer it."""
    step = max(_SPREAD / messages, 1 / _PER_SECOND)
    start = asyncio.get_running_loop().time()
    for number in range(1, messages + 1):
        yield number, start + number * step


async def _offer(
    queue: delayq.DelayedQueue[Any],
    schedule: Iterator[tuple[int, float]],
    max_delay: float,
    reports: list[list[int]],
) -> None:
    clock = asyncio.get_running_loop().time
    for number, moment in schedule:
        await asyncio.sleep(moment - clock())
        delay = round(random.uniform(0, max_delay), 3)
        receipt = await queue.offer({"number": number}, delay=delay)
        due_us = round(receipt.due_at.timestamp() * 1_000_000)
        reports.append([number, round(delay * 1_000_000), due_us])


async def main(role: str, *arguments: str) -> None:
    """Run the producer or consumer, and report at intervals, until it ends or stdin is closed."""
    reports: list[list[int]] = []
    work = asyncio.create_task(
        produce(reports, *arguments) if role == "producer" else consume(reports, *arguments)
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(sys.stdin)
        work.cancel()

    loop.add_reader(sys.stdin, stop)
    while not work.done():
        await asyncio.wait([work], timeout=_REPORT_EVERY)
        sys.stdout.writelines(f"{json.dumps(report)}\n" for report in reports)
        sys.stdout.flush()
        reports.clear()
    with suppress(asyncio.CancelledError):
        await work


def run(*arguments: str) -> None:
    """Run a child, and end the process with the error that stopped it, if any."""
    try:
        asyncio.run(main(*arguments))
    except delayq.DelayqError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run(*sys.argv[1:])
