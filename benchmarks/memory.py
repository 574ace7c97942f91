"""Measure the memory of pending messages: ``python -m benchmarks.memory [options]``.

The figures show how much a pending message adds to the server's ``used_memory``, for both kinds of
queue and for the same payloads as members of one sorted set: by payload size, with 100,000 pending;
and by how many are pending, with 100 bytes. All connections except the main process's are closed
before and after. They also show how much all messages together add to the resident memory of
another process that waits for a message of that queue meanwhile. Samples are interleaved, and the
medians of the runs are shown.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis as AsyncRedis

import delayq
from benchmarks._moves import address, measured_server
from benchmarks._report import BLUE, GREEN, SKY, VERMILION, Table, machine, plotter, save
from benchmarks._samples import (
    await_ready,
    be_sample,
    medians,
    new_parser,
    result,
    say_ready,
    start,
)
from delayq.codecs import BytesCodec

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOOR, UNLISTED = "ZADD, one sorted set", "DelayedQueue, no ordered list"
LAYOUTS = {
    FLOOR: (VERMILION, "v", ":"),
    "DelayedQueue": (BLUE, "o", "-"),
    UNLISTED: (SKY, "^", "--"),
    "ReliableQueue": (GREEN, "s", "-"),
}
SIZES, SIZE, COUNT, LARGEST_COUNT = (20, 100, 1000), 100, 100_000, 1_000_000
COUNTS = (10_000, COUNT, LARGEST_COUNT)
AT_A_TIME = 5000
NAME = "memory"
# Seconds until the server and the waiting process have settled.
SETTLE = 0.5


def resident() -> float:
    """Return this process's memory, bytes; where the system does not report it, the most that it
    ever had.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def far_messages(count: int, size: int) -> Iterator[list[tuple[bytes, float]]]:
    """Yield distinct payloads, and when they are due: in an hour or two, in whole seconds."""
    chance = random.Random(1)
    for first in range(0, count, AT_A_TIME):
        numbers = range(first, min(first + AT_A_TIME, count))
        yield [
            (f"{number:016}".encode().ljust(size, b"x"), float(chance.randint(3600, 7200)))
            for number in numbers
        ]


async def store(url: str, layout: str, count: int, size: int) -> None:
    if layout == FLOOR:
        async with AsyncRedis.from_url(url) as redis:
            now = time.time()
            for messages in far_messages(count, size):
                # As a queue would score them: whole microseconds.
                await redis.zadd(
                    NAME, {payload: int((now + delay) * 1e6) for payload, delay in messages}
                )
            stored: int = await redis.zcard(NAME)
    else:
        async with delayq.connect(url) as client:
            if layout == "ReliableQueue":
                jobs = client.reliable_queue(NAME, codec=BytesCodec())
                for messages in far_messages(count, size):
                    await jobs.offer_many(
                        [delayq.Offer(payload, delay=delay) for payload, delay in messages]
                    )
                stored = (await jobs.stats()).delayed
            else:
                queue = client.delayed_queue(
                    NAME, codec=BytesCodec(), ordered_list=layout != UNLISTED
                )
                for messages in far_messages(count, size):
                    await queue.offer_many(messages)
                stored = await queue.pending.size()
    if stored != count:
        raise AssertionError(f"{stored} of {count} messages are stored")


async def wait(url: str, layout: str) -> float:
    """Wait for a message until the input ends.

    Return how much that has added to this process's memory, bytes.
    """
    async with delayq.connect(url) as client:
        if layout == "ReliableQueue":
            waiting: Any = asyncio.create_task(
                client.reliable_queue(NAME, codec=BytesCodec()).claim(1, wait=3600)
            )
        else:
            queue = client.delayed_queue(NAME, codec=BytesCodec(), ordered_list=layout != UNLISTED)
            waiting = asyncio.create_task(queue.take())
        await asyncio.sleep(SETTLE)
        before = resident()
        say_ready()
        await asyncio.to_thread(sys.stdin.read)
        added = resident() - before
        if waiting.done():
            raise AssertionError("a message came early")
        waiting.cancel()
    return added


def used_memory(server: Any) -> int:
    time.sleep(SETTLE)
    return int(server.info("memory")["used_memory"])


def measure(server: Any, url: str, layout: str, count: int, size: int) -> dict[str, float]:
    server.execute_command("FLUSHALL", "SYNC")
    before, added = used_memory(server), 0.0
    if layout == FLOOR:
        result(start("memory", role="store", url=url, layout=layout, count=count, size=size))
    else:
        waiter = start("memory", role="wait", url=url, layout=layout)
        await_ready(waiter)
        result(
            start("memory", role="store", url=url, layout=layout, count=count, size=size),
            within=600,
        )
        time.sleep(SETTLE)
        added = result(waiter)
    return {"server_bytes": (used_memory(server) - before) / count, "process_kib": added / 1024}


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    figure, (left_plot, right_plot) = plt.subplots(1, 2, figsize=(11.4, 4.0), width_ratios=[3, 2])
    sizes = sorted({row["size"] for row in rows if row["pending"] == COUNT})
    for place, (layout, (colour, marker, dashes)) in enumerate(LAYOUTS.items()):
        rows_by_size = {
            (row["pending"], row["size"]): row["server_bytes"]
            for row in rows
            if row["layout"] == layout
        }
        at = [group + 0.2 * (place - 1.5) for group in range(len(sizes))]
        bars = left_plot.bar(
            at, [rows_by_size[COUNT, size] for size in sizes], width=0.2, color=colour, label=layout
        )
        left_plot.bar_label(
            bars, [f"{rows_by_size[COUNT, size]:,.0f}" for size in sizes], padding=2, fontsize=7
        )
        points = sorted(
            (pending, value) for (pending, size), value in rows_by_size.items() if size == SIZE
        )
        right_plot.semilogx(
            *zip(*points, strict=True), color=colour, marker=marker, linestyle=dashes, label=layout
        )
    left_plot.set_xticks(range(len(sizes)), [f"{size:,} B" for size in sizes])
    left_plot.grid(axis="x", visible=False)
    left_plot.set_axisbelow(True)
    left_plot.yaxis.set_major_formatter("{x:,.0f}")
    left_plot.set_title(f"by payload, {COUNT:,} pending", loc="left", fontsize=9.5)
    left_plot.legend(edgecolor="white", framealpha=1, fontsize=8)
    right_plot.set_ylim(bottom=0)
    right_plot.minorticks_off()
    right_plot.xaxis.set_major_formatter("{x:,.0f}")
    right_plot.set_title(f"by number of pending messages of {SIZE} B", loc="left", fontsize=9.5)
    figure.suptitle(
        "Server memory per pending message, bytes", x=0.012, ha="left", fontweight="bold"
    )
    figure.subplots_adjust(left=0.06, right=0.98, top=0.83, bottom=0.15, wspace=0.14)
    save(figure, file, footer)


def main() -> None:
    # The same bytes are stored each time, so a few runs are enough.
    parser = new_parser(__doc__, runs=3)
    parser.add_argument(
        "--quick", action="store_true", help=f"skip {LARGEST_COUNT:,} pending messages"
    )
    options = parser.parse_args()
    if options.sample:
        be_sample(options.sample, {"store": store, "wait": wait})
        return
    plt = plotter() if options.plot else None
    shapes = [(COUNT, size) for size in SIZES]
    shapes += [
        (count, SIZE)
        for count in COUNTS
        if count != COUNT and not (options.quick and count == LARGEST_COUNT)
    ]
    samples = [(layout, *shape) for shape in shapes for layout in LAYOUTS]
    runs: dict[tuple[str, int, int], list[dict[str, float]]] = {sample: [] for sample in samples}
    with measured_server(options.server) as server:
        url = address(server, options.server)
        about = {
            "machine": machine(server),
            "measured": (
                f"bytes per pending message; medians of {options.runs} interleaved runs; process:"
                " what the messages add to a process that waits for the first one"
            ),
        }
        # The server keeps every script that it has seen, so let it see all before anything is
        # counted.
        for layout in LAYOUTS:
            measure(server, url, layout, 1000, SIZE)
        for _ in range(options.runs):
            for (layout, count, size), values in runs.items():
                values.append(measure(server, url, layout, count, size))
    columns = (
        "layout                       ",
        "   pending",
        " payload B",
        " server B each",
        " over payload",
        " process KiB",
    )
    table = Table(about, columns, as_json=options.json)
    for (layout, count, size), values in runs.items():
        row = medians(values)
        facts = {
            "layout": layout,
            "pending": count,
            "size": size,
            "over": row["server_bytes"] - size,
        }
        added = "-" if layout == FLOOR else f"{row['process_kib']:,.0f}"
        table.add(
            facts | row,
            layout,
            f"{count:,}",
            f"{size:,}",
            f"{row['server_bytes']:.0f}",
            f"{facts['over']:.0f}",
            added,
        )
    table.end()
    if plt:
        draw(
            plt,
            options.plot,
            table.rows,
            f"{about['machine']}. Medians of {options.runs} interleaved runs.",
        )


if __name__ == "__main__":
    main()
