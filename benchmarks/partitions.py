"""Measure a partitioned queue on a cluster: ``python -m benchmarks.partitions [options]``.

One process offers messages of 100 bytes, 1,000 at a time. Another then takes and acknowledges them
in a plain loop. This is done with one queue on one master of a cluster, with a partitioned queue
there, and with one on three masters. Runs are interleaved, and their medians are shown. "client" is
that process's processor time, "server" that of the busiest master, "waits" how long the client's
event loop had nothing to do, each in percent of the elapsed time. A client that never waits gains
nothing from another master.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import delayq
from benchmarks._report import Table, machine
from tests.support.clusters import TestCluster, admin
from tests.support.servers import find_kinds

if TYPE_CHECKING:
    from collections.abc import Sequence

VALUE = "x" * 98
SHARES = (" client %", " server %", " waits %")
COLUMNS = ("way                ", "  partitions", " offers/s", *SHARES, "   taken/s", *SHARES)


def ticks(pid: int) -> float:
    """Return the processor time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class TimedSelector(selectors.DefaultSelector):
    """A selector that records how long the event loop had nothing to do."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        started = time.perf_counter()
        try:
            return super().select(timeout)
        finally:
            self.waited += time.perf_counter() - started


async def work(
    selector: TimedSelector,
    url: str,
    what: str,
    partitions: int | None,
    count: int,
    pids: Sequence[int],
) -> dict[str, float]:
    async with delayq.connect(url) as client:
        queue: Any = client.reliable_queue("jobs", partitions=partitions)
        await queue.stats()
        before, waited = [ticks(pid) for pid in pids], selector.waited
        started, own = time.perf_counter(), time.process_time()
        if what == "offer":
            for at in range(0, count, 1000):
                await asyncio.gather(*(queue.offer(VALUE) for _ in range(min(1000, count - at))))
        else:
            left = count
            async for message in queue:
                async with message:
                    left -= 1
                if not left:
                    break
            await queue.stats()
        took = time.perf_counter() - started
        busiest = max(ticks(pid) - then for pid, then in zip(pids, before, strict=True))
        return {
            "rate": count / took,
            "client": (time.process_time() - own) / took * 100,
            "server": busiest / took * 100,
            "waits": (selector.waited - waited) / took * 100,
        }


def measured(*args: Any) -> dict[str, float]:
    """Run one sample in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.partitions", "--sample", json.dumps(args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--runs", type=int, default=5, help="number of interleaved runs; medians are reported"
    )
    parser.add_argument(
        "--messages", type=int, default=30_000, help="number of messages in each run"
    )
    parser.add_argument(
        "--partitions",
        type=int,
        default=16,
        help="number of partitions of the queue on three masters",
    )
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        selector = TimedSelector()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            print(json.dumps(runner.run(work(selector, *json.loads(options.sample)))))
        return
    kinds, _ = find_kinds()
    ways: list[tuple[str, int | None]] = [
        ("one queue", None),
        (f"{options.partitions} on one master", options.partitions),
        (f"{options.partitions} on three", options.partitions),
    ]
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {"offer": [], "take": []} for name, _ in ways
    }
    with TestCluster(kinds["valkey-9"], 3) as cluster, TestCluster(kinds["valkey-9"], 1) as alone:
        for _ in range(options.runs):
            for name, partitions in ways:
                where = cluster if name.endswith("three") else alone
                pids = [node.pid for node in where.nodes]
                for what in ("offer", "take"):
                    found[name][what].append(
                        measured(where.url, what, partitions, options.messages, pids)
                    )
                for node in where.nodes:
                    node.flush()
        with admin(alone.nodes[0]) as redis:
            about = {
                "machine": machine(redis),
                "what": (
                    f"{options.messages:,} messages of 100 bytes; one process; medians of"
                    f" {options.runs} interleaved runs"
                ),
            }
    table = Table(about, COLUMNS, as_json=options.json)
    for name, partitions in ways:
        row: dict[str, Any] = {"way": name, "partitions": partitions}
        cells = [name, str(partitions or "-")]
        for what, samples in found[name].items():
            for each in ("rate", "client", "server", "waits"):
                row[f"{what}_{each}"] = median(one[each] for one in samples)
            cells += [
                f"{row[f'{what}_rate']:,.0f}",
                f"{row[f'{what}_client']:.0f}",
                f"{row[f'{what}_server']:.0f}",
                f"{row[f'{what}_waits']:.0f}",
            ]
        table.add(row, *cells)
    table.end()


if __name__ == "__main__":
    main()
