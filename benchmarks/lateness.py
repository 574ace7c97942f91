"""Measure how late messages arrive: ``python -m benchmarks.lateness [--json] [--plot FILE] [--runs
5]``.

Lateness runs from a message's due time to the first line of its handler, in ms, by the clock of one
machine. "spread": 2,000 messages, offered beforehand, are due at random within 10 s. "steady": a
producer process offers 10,000 a second, each due a second later, for 5 s, to a consumer that waits
for them; a reliable queue's messages are handled in ``async with`` blocks. The consumer has the
garbage collector leave out the modules that it has imported, as ``delayq worker`` does. The floor
is the best anyone can do: one timer, one script that takes due messages, no queue; with the event
loop's own timer, and with a timerfd. Every sample is a process of its own. Samples are interleaved,
and the medians of the runs are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from typing import Any

import delayq
from benchmarks._by_hand import on_time
from benchmarks._moves import add_server_option, measured_server
from benchmarks._report import BLUE, GREEN, ORANGE, VERMILION, Table, machine, plotter, save
from benchmarks._samples import (
    LOOPS,
    await_ready,
    medians,
    quantile,
    result,
    run_in,
    say_ready,
    start,
)

SPREAD, SPREAD_S, LEAD_S = 2000, 10.0, 0.5
STEADY, STEADY_S, STEADY_DELAY_S, PACE_S = 10_000, 5.0, 1.0, 0.01
WAYS = {
    "floor, loop's timer": VERMILION,
    "floor, timerfd": ORANGE,
    "DelayedQueue": BLUE,
    "ReliableQueue": GREEN,
}


def random_delays(seconds: float) -> list[float]:
    chance, count = random.Random(), int(SPREAD / SPREAD_S * seconds)
    return [LEAD_S + chance.uniform(0, seconds) for _ in range(count)]


async def floor(url: str, way: str, seconds: float) -> list[float]:
    """Run one timer and one script. Return the latenesses in ms."""
    return await on_time(url, random_delays(seconds), timerfd=way.endswith("timerfd"))


async def spread(url: str, way: str, seconds: float) -> list[float]:
    delays = random_delays(seconds)
    async with delayq.connect(url) as client:
        late: list[float] = []
        if way == "DelayedQueue":
            queue: delayq.DelayedQueue[int] = client.delayed_queue("late")
            receipts = await queue.offer_many(list(enumerate(delays)))
            due = [receipt.due_at.timestamp() for receipt in receipts]
            async for number in queue:
                late.append((time.time() - due[number]) * 1000)
                if len(late) == len(delays):
                    break
        else:
            jobs: delayq.ReliableQueue[int] = client.reliable_queue("late")
            await jobs.offer_many([delayq.Offer(n, delay=delay) for n, delay in enumerate(delays)])
            async for message in jobs:
                late.append((time.time() - message.due_at.timestamp()) * 1000)
                await message.ack()
                if len(late) == len(delays):
                    break
    return late


async def produce(url: str, way: str, seconds: float) -> list[float]:
    """Offer at a steady rate.

    Return each due time, seconds since the epoch, or nothing where the consumer knows it.
    """
    at_once, due = int(STEADY * PACE_S), list[float]()
    async with delayq.connect(url) as client:
        queue: delayq.DelayedQueue[int] = client.delayed_queue("steady")
        jobs: delayq.ReliableQueue[int] = client.reliable_queue("steady")
        started = time.monotonic()
        for turn in range(int(seconds / PACE_S)):
            await asyncio.sleep(started + turn * PACE_S - time.monotonic())
            numbers = range(turn * at_once, (turn + 1) * at_once)
            if way == "DelayedQueue":
                receipts = await queue.offer_many([(n, STEADY_DELAY_S) for n in numbers])
                due += [receipt.due_at.timestamp() for receipt in receipts]
            else:
                await jobs.offer_many([delayq.Offer(n, delay=STEADY_DELAY_S) for n in numbers])
    return due


def leave_out_modules() -> None:
    """Have the garbage collector leave out the modules that were imported."""
    gc.collect()
    gc.freeze()


async def consume(url: str, way: str, seconds: float) -> list[float]:
    """Take what is produced from when this says that it is ready.

    Return the latenesses in ms; for a delayed queue, the arrival times, seconds since the epoch.
    """
    count = int(STEADY * seconds)
    async with delayq.connect(url) as client:
        if way == "DelayedQueue":
            queue: delayq.DelayedQueue[int] = client.delayed_queue("steady")
            await queue.poll(timeout=0)
            leave_out_modules()
            say_ready()
            at, remaining = [0.0] * count, count
            async for number in queue:
                at[number] = time.time()
                remaining -= 1
                if not remaining:
                    break
            return at
        jobs: delayq.ReliableQueue[int] = client.reliable_queue("steady")
        await jobs.claim(1)
        leave_out_modules()
        say_ready()
        late = list[float]()
        async for message in jobs:
            async with message:
                late.append((time.time() - message.due_at.timestamp()) * 1000)
            if len(late) == count:
                break
        return late


ROLES = {"spread": spread, "floor": floor, "produce": produce, "consume": consume}


def figures(late: list[float]) -> dict[str, float]:
    late.sort()
    p50, p90, p99 = (quantile(late, part) for part in (0.5, 0.9, 0.99))
    return {
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": late[-1],
        "early": sum(lateness < 0 for lateness in late),
    }


def run_sample(
    server: Any, url: str, load: str, way: str, loop: str, seconds: float | None = None
) -> dict[str, float]:
    """Run a load for this long, by default for as long as the benchmark does."""
    server.flushall()
    if seconds is None:
        seconds = SPREAD_S if load == "spread" else STEADY_S
    arguments = {"url": url, "way": way, "loop": loop, "seconds": seconds}
    if load == "spread":
        role = "floor" if way.startswith("floor") else "spread"
        return figures(result(start("lateness", role=role, **arguments)))
    consumer = start("lateness", role="consume", **arguments)
    await_ready(consumer)
    producer = start("lateness", role="produce", **arguments)
    due, came = result(producer), result(consumer)
    return figures(
        [(at - due_at) * 1000 for at, due_at in zip(came, due, strict=True)] if due else came
    )


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    spread = [row for row in rows if row["load"] == "spread"]
    figure, axes = plt.subplots(figsize=(8.6, 0.5 * len(spread) + 1.5))
    for place, row in enumerate(spread):
        colour = WAYS[row["way"]]
        axes.plot(
            [row["p50"], row["p99"]],
            [place, place],
            color=colour,
            linewidth=5,
            solid_capstyle="butt",
            alpha=0.45,
        )
        axes.plot([row["p50"]], [place], marker="o", color=colour)
        axes.annotate(
            f"{row['p50']:.2f}",
            (row["p50"], place),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
        axes.annotate(
            f"{row['p99']:.2f}",
            (row["p99"], place),
            (4, -3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_yticks(range(len(spread)), [f"{row['way']}, {row['loop']}" for row in spread])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("from the due time to the handler, ms: median (dot) to 99th percentile")
    figure.suptitle("From the due time to the handler", x=0.012, ha="left", fontweight="bold")
    figure.subplots_adjust(left=0.24, right=0.95, top=0.86, bottom=0.2)
    save(figure, file, footer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also plot the results to FILE (.svg or .png); needs matplotlib",
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="number of interleaved runs; the median is reported"
    )
    parser.add_argument("--load", choices=["spread", "steady"], help="measure only this load")
    add_server_option(parser)
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        sample = json.loads(options.sample)
        role, loop, arguments = ROLES[sample.pop("role")], sample.pop("loop"), sample
        json.dump(run_in(loop, lambda: role(**arguments)), sys.stdout)
        return
    plt = plotter() if options.plot else None
    loads = [options.load] if options.load else ["spread", "steady"]
    samples = [
        (load, way, loop)
        for load in loads
        for way in WAYS
        for loop in LOOPS
        if load == "spread" or not way.startswith("floor")
        if sys.platform == "linux" or way != "floor, timerfd"
    ]
    with measured_server(options.server) as server:
        about = {
            "machine": machine(server),
            "measured": (
                f"{SPREAD:,} messages within {SPREAD_S:g} s; {STEADY:,} per second for {STEADY_S:g}"
                f" s; ms from due to handled; medians of {options.runs} interleaved runs"
            ),
        }
        columns = (
            "load  ",
            "way                ",
            "loop   ",
            "  p50",
            "   p90",
            "   p99",
            "    max",
            "early",
        )
        url = options.server or "unix://" + server.connection_pool.connection_kwargs["path"]
        runs: dict[tuple[str, str, str], list[dict[str, float]]] = {
            sample: [] for sample in samples
        }
        for _ in range(options.runs):
            for sample in samples:
                runs[sample].append(run_sample(server, url, *sample))
        table = Table(about, columns, as_json=options.json)
        for (load, way, loop), values in runs.items():
            row = medians(values)
            cells = (
                f"{row['p50']:.2f}",
                f"{row['p90']:.2f}",
                f"{row['p99']:.2f}",
                f"{row['max']:.2f}",
                f"{row['early']:.0f}",
            )
            table.add({"load": load, "way": way, "loop": loop} | row, load, way, loop, *cells)
    table.end()
    if plt:
        draw(
            plt,
            options.plot,
            table.rows,
            f"{about['machine']}. {SPREAD:,} messages; medians of {options.runs} runs.",
        )


if __name__ == "__main__":
    main()
