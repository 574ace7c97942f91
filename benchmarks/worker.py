"""Measure a worker: ``python -m benchmarks.worker [--json] [--messages 200000]``.

Messages of 100 bytes, all due, are handled to the last by a handler that does nothing, on a private
server: by a worker at several concurrencies, by one with a sync handler in threads, and by the
queue's own loop (``async for message in queue: async with message``), which acknowledges one
message after another. Then by handlers that wait for 1 ms and for 20 ms, 100 at a time; and, for
comparison, 100 tasks wait as often without any queue. Runs are interleaved, and their medians are
shown. "client us" is the process's processor time for a message, and "busy" the share of a
processor that it takes meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import delayq
from benchmarks._moves import add_server_option, measured_server
from benchmarks._report import Table, machine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

VALUE = "x" * 98  # 100 bytes as JSON
AT_A_TIME = 10_000
CONCURRENCY = 100
WITHOUT_QUEUE = "no queue, tasks wait"


class Countdown:
    """An event that is set once this many messages have been handled."""

    def __init__(self, messages: int) -> None:
        self.remaining = messages
        self.done = asyncio.Event()

    def count(self) -> None:
        self.remaining -= 1
        if not self.remaining:
            self.done.set()


async def by_worker(
    client: delayq.Client, messages: int, concurrency: int, seconds: float = 0.0
) -> None:
    """Handle messages with handlers that each wait for ``seconds``."""
    countdown = Countdown(messages)
    worker = delayq.Worker(client, concurrency=concurrency)

    @worker.listener("benchmark")
    async def handle(_value: str) -> None:
        if seconds:
            await asyncio.sleep(seconds)
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


async def without_queue(client: delayq.Client, messages: int, seconds: float) -> None:
    """Wait as often as those handlers do, in as many tasks, without any message."""
    del client
    remaining = iter(range(messages))

    async def wait() -> None:
        for _ in remaining:
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(wait())


WAYS: dict[str, tuple[Callable[[delayq.Client, int], Awaitable[None]], int]] = {
    # How to handle messages, and the number by which to divide their count.
    "worker, concurrency 1": (lambda client, messages: by_worker(client, messages, 1), 1),
    "worker, concurrency 100": (lambda client, messages: by_worker(client, messages, 100), 1),
    "worker, concurrency 1000": (lambda client, messages: by_worker(client, messages, 1000), 1),
    "worker, threads": (by_threads, 10),
    "the queue's loop": (by_loop, 10),
    **{
        f"{name}, {ms} ms": (partial(work, seconds=ms / 1000), part)
        for ms, part in ((1, 4), (20, 10))
        for name, work in (
            ("worker, handlers wait", partial(by_worker, concurrency=CONCURRENCY)),
            (WITHOUT_QUEUE, without_queue),
        )
    },
}


async def measure(url: str, way: str, messages: int) -> tuple[float, float]:
    """Handle all messages. Return how many per second, and the processor time of each, us."""
    handle, part = WAYS[way]
    messages //= part
    async with delayq.connect(url) as client:
        queue = client.reliable_queue("benchmark")
        for at in range(0, messages, AT_A_TIME):
            if not way.startswith(WITHOUT_QUEUE):
                await queue.offer_many(
                    delayq.Offer(value=VALUE) for _ in range(min(AT_A_TIME, messages - at))
                )
        started, cpu_started = time.perf_counter(), time.process_time()
        await handle(client, messages)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        stats = await queue.stats()
        if (stats.ready, stats.leased, stats.delayed) != (0, 0, 0):
            raise AssertionError(f"{way} left {stats}")
    return messages / seconds, cpu_seconds / messages * 1e6


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
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with measured_server(options.server) as server:
        about = {
            "machine": machine(server),
            "measured": f"{options.messages} messages; medians of {options.runs} runs",
        }
        connection = server.connection_pool.connection_kwargs
        url = options.server or f"unix://{connection['path']}"
        for _ in range(options.runs):
            for way in ways:
                runs[way].append(asyncio.run(measure(url, way, options.messages)))
    columns = ("way                        ", " messages/s", "   lowest", "  highest")
    table = Table(about, (*columns, " client us", "  busy", "  ratio"), as_json=options.json)
    medians = {
        way: tuple(map(statistics.median, zip(*of_way, strict=True)))
        for way, of_way in runs.items()
    }
    base = medians["the queue's loop"][0] if "the queue's loop" in medians else None
    for way, (rate, client_us) in medians.items():
        rates = [rate_of_run for rate_of_run, _ in runs[way]]
        row: dict[str, Any] = {
            "way": way,
            "messages_a_second": rate,
            "client_us": client_us,
            "runs": rates,
        }
        table.add(
            row,
            way,
            f"{rate:,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{client_us:.1f}",
            f"{rate * client_us / 1e6:.0%}",
            f"{rate / base:.1f}x" if base else "-",
        )
    table.end()


if __name__ == "__main__":
    main()
