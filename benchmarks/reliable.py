"""Measure a reliable queue: ``python -m benchmarks.reliable [--json] [--server URL] [--pending
10000 100000 1000000]``.

Messages of 100 bytes are all due. First, by how many are pending: the cost of claiming and
acknowledging a message, in batches of 100 under one lease each, interleaved on queues of all sizes;
medians over the rounds. "server" is the server's own time, "wall" that of this process, which
claims, and then acknowledges from 100 tasks at once. Then the throughput of one process,
interleaved; medians over the runs. Memory is how much the largest queue adds to ``used_memory``,
and how much of that is left once it is drained.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import delayq
from benchmarks._moves import BATCH, add_server_option, measured_server
from benchmarks._report import Table, machine
from delayq import Offer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LEASE = 3600
AT_A_TIME = 5_000
ROUNDS = 60
RUNS = 5
CALLERS, TASKS = 4, 100


class Bytes:
    """A codec whose values are payloads."""

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes) -> bytes:
        return data


Queue = delayq.ReliableQueue[bytes]


async def offer(queue: Queue, messages: int) -> None:
    for first in range(0, messages, AT_A_TIME):
        await queue.offer_many(
            [Offer(value=b"x" * 100) for _ in range(min(AT_A_TIME, messages - first))]
        )


async def claim_and_ack(queue: Queue) -> int:
    messages = await queue.claim(BATCH)
    await asyncio.gather(*(message.ack() for message in messages))
    return len(messages)


def used_memory(server: Any) -> int:
    server.execute_command("MEMORY", "PURGE")
    return int(server.info("memory")["used_memory"])


def server_us(server: Any) -> int:
    """Return how long scripts have taken so far, microseconds."""
    return int(server.info("commandstats").get("cmdstat_evalsha", {}).get("usec", 0))


# By size


async def by_size(server: Any, client: delayq.Client, sizes: list[int]) -> list[dict[str, Any]]:
    queues = {
        size: client.reliable_queue(f"pending {size}", codec=Bytes(), lease=LEASE) for size in sizes
    }
    per_message: dict[int, float] = {}
    for size, queue in queues.items():
        before = used_memory(server)
        await offer(queue, size)
        per_message[size] = (used_memory(server) - before) / size
    walls: dict[int, list[float]] = {size: [] for size in sizes}
    blocks: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size, queue in queues.items():
            spent, started = server_us(server), time.perf_counter()
            if await claim_and_ack(queue) != BATCH:
                raise AssertionError("not all messages were there")
            walls[size].append((time.perf_counter() - started) * 1e6 / BATCH)
            blocks[size].append((server_us(server) - spent) / BATCH)
            await offer(queue, BATCH)
    rows = []
    for size, queue in queues.items():
        full = used_memory(server)
        purged = await queue.purge()
        if purged != size:
            raise AssertionError("not all messages were left")
        leftover = per_message[size] * size - (full - used_memory(server))
        rows.append(
            {
                "pending": size,
                "server_us": median(blocks[size]),
                "wall_us": median(walls[size]),
                "bytes_each": per_message[size],
                "left_bytes": round(leftover),
            }
        )
    return rows


# The throughput of one process


async def by_offers(queue: Queue, messages: int) -> None:
    await offer(queue, messages)


async def by_claims(queue: Queue, messages: int, callers: int) -> None:
    remaining = messages

    async def call() -> None:
        nonlocal remaining
        while remaining > 0:
            # In two steps, because other callers count in the meantime.
            settled = await claim_and_ack(queue)
            remaining -= settled

    await asyncio.gather(*(call() for _ in range(callers)))


async def by_loop(queue: Queue, messages: int) -> None:
    remaining = messages
    done = asyncio.Event()

    async def handle() -> None:
        nonlocal remaining
        async for message in queue:
            async with message:
                pass
            remaining -= 1
            if not remaining:
                done.set()

    tasks = [asyncio.create_task(handle()) for _ in range(TASKS)]
    await done.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def rates(client: delayq.Client, messages: int) -> dict[str, float]:
    ways: dict[str, Callable[[Queue], Awaitable[None]]] = {
        "claim(100) and concurrent acks, one caller": lambda queue: by_claims(queue, messages, 1),
        f"claim(100) and concurrent acks, {CALLERS} callers": lambda queue: by_claims(
            queue, messages, CALLERS
        ),
        f"async for, async with message, {TASKS} tasks": lambda queue: by_loop(queue, messages),
    }
    offers = "offer_many"
    times: dict[str, list[float]] = {name: [] for name in (offers, *ways)}
    for run in range(RUNS):
        for place, (name, way) in enumerate(ways.items()):
            queue = client.reliable_queue(f"rate {run} {place}", codec=Bytes(), lease=LEASE)
            started = time.perf_counter()
            await by_offers(queue, messages)
            times[offers].append(time.perf_counter() - started)
            started = time.perf_counter()
            await way(queue)
            times[name].append(time.perf_counter() - started)
            await queue.aclose()
    return {name: messages / median(samples) for name, samples in times.items()}


async def measure(server: Any, url: str, options: argparse.Namespace) -> None:
    about = {
        "machine": machine(server),
        "measured": f"medians of {ROUNDS} batches of {BATCH}, interleaved",
    }
    async with delayq.connect(url) as client:
        columns = (
            "pending  ",
            " server us",
            " wall us",
            " times the first",
            " bytes each",
            " bytes left, drained",
        )
        table = Table(about, columns, as_json=options.json)
        rows = await by_size(server, client, options.pending)
        for row in rows:
            row["ratio"] = row["server_us"] / rows[0]["server_us"]
            cells = (
                f"{row['server_us']:.2f}",
                f"{row['wall_us']:.1f}",
                f"{row['ratio']:.2f}",
                f"{row['bytes_each']:.0f}",
            )
            table.add(row, f"{row['pending']}", *cells, f"{row['left_bytes']}")
        if not options.json:
            print()
        figures = await rates(client, options.messages)
        if not options.json:
            for way, rate in figures.items():
                print(f"{way:45}{rate:10,.0f}/s")
        else:
            table.rows += [{"way": way, "per_second": rate} for way, rate in figures.items()]
        table.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_server_option(parser)
    parser.add_argument(
        "--pending",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000],
        help="numbers of pending messages, measured in turn",
    )
    parser.add_argument(
        "--messages",
        type=int,
        default=40_000,
        help="number of messages that one process handles in a run",
    )
    options = parser.parse_args()
    with measured_server(options.server) as server:
        url = options.server or f"unix://{server.connection_pool.connection_kwargs['path']}"
        asyncio.run(measure(server, url, options))


if __name__ == "__main__":
    main()
