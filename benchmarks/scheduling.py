"""Measure the timer wheel against sleeping and polling: ``python -m benchmarks.scheduling [--json
FILE] [--most 1000000]``.

These are ways to run something later while others are pending: up to 2,000 come due, scattered over
5 s, and the rest in an hour or two. In memory: delayq's timer wheel, ``loop.call_later``, and a
task with ``asyncio.sleep`` per message. On a private server, with payloads of 100 bytes: polling a
sorted set, and delayq's DelayedQueue. Every sample runs in a process of its own. The ways are
interleaved, and the medians over the runs are shown.

Lateness is the actual time minus the due time. "add" is the processor time of adding one; "CPU" is
all the processor time of the process while the messages came due, without the server's. Memory is
that of the process, and of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

import delayq
from benchmarks._moves import fill
from benchmarks._report import BLUE, GREEN, ORANGE, SKY, VERMILION, Table, machine, plotter, save
from delayq._embedded.server import EmbeddedServer
from delayq._redisson.keys import DelayedKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

DUE = 2000
# Within this time 2,000 are added, even where each call is awaited.
LEAD = 2.0
SPREAD = 5.0
# Messages that are later than this are given up.
PATIENCE = 60.0
KEY = "benchmark"
TEXT = "x" * 62
POP = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1000)
if #due > 0 then redis.call('ZREM', KEYS[1], unpack(due)) end
return due
"""


@dataclass
class Sample:
    """The measurements of one process: how late each message was, and the costs."""

    late: list[float]
    added: int
    add_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory: float = 0.0
    commands: int = 0

    def figures(self) -> dict[str, float]:
        late = sorted(self.late)
        return {
            "p50": late[len(late) // 2] * 1000,
            "p99": late[int(len(late) * 0.99)] * 1000,
            "longest": late[-1] * 1000,
            "add_us": self.add_seconds / self.added * 1e6,
            "cpu_seconds": self.cpu_seconds,
            "process_bytes": self.memory / self.added,
            "commands": self.commands / len(late),
        }


def peak() -> float:
    """Return the most memory that this process ever had, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def delays(count: int) -> tuple[list[float], list[float]]:
    """Return the delays of those that come due, from now, and of the others."""
    chance, near = random.Random(1), min(count, DUE)
    return [LEAD + chance.uniform(0, SPREAD) for _ in range(near)], [
        chance.uniform(3600, 7200) for _ in range(count - near)
    ]


# In memory


async def in_memory(
    count: int, add: Callable[[float, Callable[[], None] | None], object]
) -> Sample:
    """Measure ``add(due, callback)``, which runs a callback when ``time.monotonic()`` reaches
    ``due``; None means a no-op.
    """
    near, far = delays(count)
    sample = Sample([], count)
    done = asyncio.Event()

    def fired(due: float) -> Callable[[], None]:
        def call() -> None:
            sample.late.append(time.monotonic() - due)
            if len(sample.late) == len(near):
                done.set()

        return call

    memory, cpu = peak(), time.process_time()
    now = time.monotonic()
    handles = [add(now + delay, None) for delay in far]
    # Add the far ones first and let all their immediate work finish, so that they do not delay the
    # near ones.
    await asyncio.sleep(0)
    now = time.monotonic()
    handles += [add(now + delay, fired(now + delay)) for delay in near]
    await asyncio.sleep(0)
    sample.add_seconds, sample.memory = time.process_time() - cpu, peak() - memory
    cpu = time.process_time()
    await asyncio.wait_for(done.wait(), PATIENCE)
    sample.cpu_seconds = time.process_time() - cpu
    return sample


def do_nothing(_timeout: object = None) -> None:
    pass


async def wheel(_url: str, count: int) -> Sample:
    timer = delayq.HashedWheelTimer()

    def add(due: float, callback: Callable[[], None] | None) -> object:
        return timer.new_timeout(
            do_nothing if callback is None else lambda _timeout: callback(), due - time.monotonic()
        )

    return await in_memory(count, add)


async def call_later(_url: str, count: int) -> Sample:
    loop = asyncio.get_running_loop()
    return await in_memory(
        count, lambda due, callback: loop.call_later(due - time.monotonic(), callback or do_nothing)
    )


async def sleep(_url: str, count: int) -> Sample:
    async def schedule_one(due: float, callback: Callable[[], None] | None) -> None:
        await asyncio.sleep(due - time.monotonic())
        if callback is not None:
            callback()

    return await in_memory(
        count, lambda due, callback: asyncio.create_task(schedule_one(due, callback))
    )


# On the server


async def by_polling(url: str, count: int, interval: float, *, by_script: bool = False) -> Sample:
    near, _ = delays(count)
    sample = Sample([], len(near))
    async with AsyncRedis.from_url(url) as server:
        pop = server.register_script(POP)
        await pop([KEY], [0])
        memory, cpu = peak(), time.process_time()
        first = time.time()
        for due in [first + delay for delay in near]:
            await server.zadd(KEY, {json.dumps({"due": due, "text": TEXT}): due})
        sample.add_seconds, sample.memory = time.process_time() - cpu, peak() - memory
        cpu = time.process_time()
        deadline = time.monotonic() + PATIENCE
        while len(sample.late) < len(near) and time.monotonic() < deadline:
            sample.commands += 1
            if by_script:
                members: Any = await pop([KEY], [time.time()])
            else:
                members = await server.zrangebyscore(KEY, "-inf", time.time(), 0, 1000)
            for member in members:
                # With several pollers, the one that removes a member owns it.
                if not by_script:
                    sample.commands += 1
                    await server.zrem(KEY, member)
                sample.late.append(time.time() - json.loads(member)["due"])
            await asyncio.sleep(interval)
        sample.cpu_seconds = time.process_time() - cpu
    return sample


async def by_delayq(url: str, count: int) -> Sample:
    near, _ = delays(count)
    sample = Sample([], len(near))
    async with delayq.connect(url) as client:
        queue = client.delayed_queue(KEY)
        await queue.poll()
        memory, cpu = peak(), time.process_time()
        first = time.time()
        for due in [first + delay for delay in near]:
            await queue.offer({"due": due, "text": TEXT}, at=datetime.fromtimestamp(due, UTC))
        sample.add_seconds, sample.memory = time.process_time() - cpu, peak() - memory
        before, cpu = client.statistics().round_trips, time.process_time()
        async with asyncio.timeout(PATIENCE):
            async for message in queue:
                sample.late.append(time.time() - message["due"])
                if len(sample.late) == len(near):
                    break
        sample.cpu_seconds = time.process_time() - cpu
        sample.commands = client.statistics().round_trips - before
    return sample


@dataclass(frozen=True)
class Way:
    """A way to run something later."""

    name: str
    run: Callable[[str, int], Coroutine[Any, Any, Sample]]
    layout: str = ""
    look: tuple[str, str, str] = ("", "", "")


WAYS = {
    "wheel": Way("timer wheel", wheel, look=(BLUE, "s", "-")),
    "call_later": Way("loop.call_later", call_later, look=(SKY, "^", "--")),
    "sleep": Way("a task with asyncio.sleep each", sleep, look=(ORANGE, "v", "--")),
    "poll1": Way(
        "polling, 1 s",
        lambda url, count: by_polling(url, count, 1.0),
        "zset",
        (VERMILION, "o", "-"),
    ),
    "poll100": Way(
        "polling, 100 ms",
        lambda url, count: by_polling(url, count, 0.1),
        "zset",
        (VERMILION, "x", "--"),
    ),
    "script100": Way(
        "polling by script, 100 ms",
        lambda url, count: by_polling(url, count, 0.1, by_script=True),
        "zset",
        (VERMILION, "+", ":"),
    ),
    "delayq": Way("delayq DelayedQueue", by_delayq, "delayq", (GREEN, "D", "-")),
}


def fill_far(server: Any, way: Way, count: int) -> None:
    """Store the messages that do not come due."""
    _, far = delays(count)
    now = time.time()
    if way.layout == "delayq":
        fill(
            server,
            DelayedKeys.of(KEY),
            len(far),
            java_ids=False,
            due=lambda place: int((now + far[place]) * 1000),
            payload=lambda _place: b'"' + b"x" * 98 + b'"',
        )
        return
    for at in range(0, len(far), 1000):
        due = [now + delay for delay in far[at : at + 1000]]
        server.zadd(KEY, {json.dumps({"due": moment, "text": TEXT}): moment for moment in due})


def measure(server: Any, url: str, name: str, count: int) -> dict[str, float]:
    """Run one sample in a process of its own."""
    way = WAYS[name]
    server_bytes = 0.0
    if way.layout:
        # Not in the background: memory freed later would be missing from the figures below.
        server.execute_command("FLUSHALL", "SYNC")
        before = server.info("memory")["used_memory"]
        fill_far(server, way, count)
        far = max(0, count - DUE)
        server_bytes = (server.info("memory")["used_memory"] - before) / far if far else 0.0
    command = [sys.executable, "-m", "benchmarks.scheduling", "--sample", name, str(count), url]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=4 * PATIENCE)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures | {"server_bytes": server_bytes}


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(10.4, 4.4))
    titles = {
        "p99": "lateness p99, ms",
        "cpu_seconds": "CPU of the process in 7 s, s",
        "bytes": "bytes per message",
    }
    for panel, (figure_name, title) in zip(panels, titles.items(), strict=True):
        for way in WAYS.values():
            of_way = [row for row in rows if row["way"] == way.name]
            points = [
                (row["pending"], row["server_bytes"] or row["process_bytes"])
                for row in of_way
                if row["pending"] >= 100_000
            ]
            if figure_name != "bytes":
                points = [(row["pending"], row[figure_name]) for row in of_way]
            if points:
                colour, marker, dashes = way.look
                panel.loglog(
                    *zip(*points, strict=True),
                    color=colour,
                    marker=marker,
                    linestyle=dashes,
                    label=way.name,
                )
        panel.minorticks_off()
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.tick_params(axis="x", labelrotation=25)
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.set_title(title, loc="left", fontsize=9.5)
        panel.set_xlabel("messages pending")
    figure.suptitle(
        "Running something later: a timer wheel, sleeping, polling",
        x=0.012,
        ha="left",
        fontweight="bold",
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.94),
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    figure.subplots_adjust(left=0.07, right=0.98, top=0.76, bottom=0.21, wspace=0.28)
    save(figure, file, footer)


COLUMNS = (
    "  pending",
    "way                           ",
    "  p50 ms",
    "  p99 ms",
    "  max ms",
    " CPU s",
    " add us",
    " process B each",
    " server B each",
    " commands each",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures to FILE as JSON; - prints them instead of the table",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also plot the results to FILE (.svg or .png); needs matplotlib",
    )
    parser.add_argument(
        "--most", type=int, default=1_000_000, help="largest number of pending messages"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="number of interleaved runs; medians are reported"
    )
    parser.add_argument(
        "--ways",
        metavar="A,B",
        default=",".join(WAYS),
        help=f"measure only these: {', '.join(WAYS)}",
    )
    parser.add_argument(
        "--sample",
        nargs=3,
        metavar=("WAY", "PENDING", "URL"),
        help="measure one sample in this process and print it as JSON",
    )
    options = parser.parse_args()
    if options.sample:
        way, count, url = options.sample
        print(json.dumps(asyncio.run(WAYS[way].run(url, int(count))).figures()))
        return
    names = [name.strip() for name in options.ways.split(",")]
    if unknown := [name for name in names if name not in WAYS]:
        parser.error(f"unknown ways: {', '.join(unknown)}")
    plt = plotter() if options.plot else None
    load = os.getloadavg()[0]
    with (
        EmbeddedServer(None) as embedded,
        Redis.from_url(embedded.url, socket_timeout=600) as server,
    ):
        about = {
            "machine": f"{machine(server)}; load before: {load:.2f}",
            "measured": (
                f"up to {DUE} due, scattered over {SPREAD:g} s, the rest in an hour or two;"
                f" messages of 100 bytes; medians of {options.runs} interleaved runs"
            ),
        }
        table = Table(about, COLUMNS, as_json=options.json == "-")
        count = 100
        while count <= options.most:
            values: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for _ in range(options.runs):
                for name, runs in values.items():
                    runs.append(measure(server, embedded.url, name, count))
            for name, runs in values.items():
                add_row(
                    table,
                    count,
                    WAYS[name],
                    {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]},
                )
            count *= 10
    table.end()
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(about | {"rows": table.rows}, indent=1) + "\n")
    if plt:
        draw(
            plt,
            options.plot,
            table.rows,
            f"{about['machine']}. Medians of {options.runs} interleaved runs.",
        )


def add_row(table: Table, count: int, way: Way, figures: dict[str, float]) -> None:
    row = {"pending": count, "way": way.name} | figures
    # With only a few messages, their memory is lost in the noise.
    is_large = count >= 100_000
    table.add(
        row,
        str(count),
        way.name,
        f"{figures['p50']:.2f}",
        f"{figures['p99']:.2f}",
        f"{figures['longest']:.2f}",
        f"{figures['cpu_seconds']:.2f}",
        f"{figures['add_us']:.2f}",
        f"{figures['process_bytes']:,.0f}"
        if is_large and figures["process_bytes"] and not way.layout
        else "-",
        f"{figures['server_bytes']:,.0f}" if is_large and way.layout else "-",
        f"{figures['commands']:.3f}" if way.layout else "-",
    )


if __name__ == "__main__":
    main()
