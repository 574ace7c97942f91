"""Measure a worker: ``python -m benchmarks.worker [--json] [--messages 200000]``.

Messages of 100 bytes, all due, are handled to the last by a handler that does nothing, on a private
server: by a worker at several concurrencies, by one with a sync handler in threads, and by the
queue's own loop (``async for message in queue: async with message``), which acknowledges one
message after another. Runs are interleaved, and their medians are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

import delayq
from benchmarks._moves import add_server_option, measured_server
from benchmarks._report import Table, machine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

VALUE = "x" * 98  # 100 bytes as JSON
AT_A_TIME = 10_000


class Countdown:
    """An event that is set once this many messages have been handled."""

    def __init__(self, messages: int) -> None:
        self.remaining = messages
        self.done = asyncio.Event()

    def count(self) -> None:
        self.remaining -= 1
        if not self.remaining:
            self.done.set()


async def by_worker(client: delayq.Client, messages: int, concurrency: int) -> None:
    countdown = Countdown(messages)
    worker = delayq.Worker(client, concurrency=concurrency)

    @worker.listener("benchmark")
    async def handle(_value: str) -> None:
        countdown.count()

    async with worker:
        await countdown.done.wait()


async def by_threads(client: delayq.Client, messages: int) -> None:
    countdown = Countdown(messages)
    worker = delayq.Worker(client)
    loop = asyncio.get_running_loop()

    @worker.listener("benchmark")
    def handle(_value: str) -> None:
        loop.call_soon_threadsafe(countdown.count)

    async with worker:
        await countdown.done.wait()


async def by_loop(client: delayq.Client, messages: int) -> None:
    remaining = messages
    async for message in client.reliable_queue("benchmark"):
        async with message:
            _ = message.value
        remaining -= 1
        if not remaining:
            return


WAYS: dict[str, tuple[Callable[[delayq.Client, int], Awaitable[None]], int]] = {
    # How to handle messages, and the number by which to divide their count.
    "worker, concurrency 1": (lambda client, messages: by_worker(client, messages, 1), 1),
    "worker, concurrency 100": (lambda client, messages: by_worker(client, messages, 100), 1),
    "worker, concurrency 1000": (lambda client, messages: by_worker(client, messages, 1000), 1),
    "worker, threads": (by_threads, 10),
    "the queue's loop": (by_loop, 10),
}


async def measure(url: str, way: str, messages: int) -> float:
    """Handle all messages, and return how many per second."""
    handle, part = WAYS[way]
    messages //= part
    async with delayq.connect(url) as client:
        queue = client.reliable_queue("benchmark")
        for at in range(0, messages, AT_A_TIME):
            await queue.offer_many(
                delayq.Offer(value=VALUE) for _ in range(min(AT_A_TIME, messages - at))
            )
        started = time.perf_counter()
        await handle(client, messages)
        seconds = time.perf_counter() - started
        stats = await queue.stats()
        if (stats.ready, stats.leased, stats.delayed) != (0, 0, 0):
            raise AssertionError(f"{way} left {stats}")
    return messages / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_server_option(parser)
    parser.add_argument("--messages", type=int, default=200_000, help="number of due messages")
    parser.add_argument(
        "--runs", type=int, default=5, help="number of interleaved runs; the median is reported"
    )
    parser.add_argument(
        "--way", action="append", choices=list(WAYS), help="measure only this way; repeatable"
    )
    options = parser.parse_args()
    ways = options.way or list(WAYS)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    with measured_server(options.server) as server:
        about = {
            "machine": machine(server),
            "measured": f"{options.messages} messages; medians of {options.runs} runs",
        }
        connection = server.connection_pool.connection_kwargs
        url = options.server or f"unix://{connection['path']}"
        for _ in range(options.runs):
            for way in ways:
                rates[way].append(asyncio.run(measure(url, way, options.messages)))
    table = Table(
        about,
        ("way                     ", " messages/s", "   lowest", "  highest", "     ratio"),
        as_json=options.json,
    )
    medians = {way: statistics.median(of_way) for way, of_way in rates.items()}
    base = medians.get("the queue's loop")
    for way, rate in medians.items():
        row: dict[str, Any] = {"way": way, "messages_a_second": rate, "runs": rates[way]}
        ratio = f"{rate / base:.1f}x" if base else "-"
        table.add(
            row, way, f"{rate:,.0f}", f"{min(rates[way]):,.0f}", f"{max(rates[way]):,.0f}", ratio
        )
    table.end()


if __name__ == "__main__":
    main()
