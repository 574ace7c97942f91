"""Measure a partitioned queue on a cluster: ``python -m benchmarks.partitions [options]``.

One or several processes offer messages of 100 bytes, 1,000 at a time. As many then take and
acknowledge them in a plain loop. This is done with one queue on one master of a cluster, with a
partitioned queue there, and with one on three masters, for each number of processes. Runs are
interleaved, and their medians are shown.

"client", "servers" and "busiest" are the processor time for one message in µs: that of all clients,
of all masters, and of the busiest of these. If they stay the same as clients are added, the rate
grows with the number of clients until a master, or the machine, has no more time left. So
"possible/s" is the rate where each process has a processor to itself: a second divided by the time
that a message costs the busiest process.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import delayq
from benchmarks._report import Table, machine
from benchmarks._samples import await_ready, be_sample, end_input, result, say_ready, start
from tests.support.clusters import TestCluster, admin
from tests.support.servers import first_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

MASTERS = 3
VALUE = "x" * 98
FIGURES = ("rate", "client", "servers", "busiest", "possible")
TIMES = (" client", " servers", " busiest", " possible/s")
COLUMNS = ("way                 ", " clients", " offers/s", *TIMES, "  taken/s", *TIMES)


def masters(count: int) -> TestCluster:
    """Return a cluster that keeps nothing on disk."""
    return TestCluster(first_kind(), count, options=("--appendonly", "no", "--save", ""))


def server_us(cluster: TestCluster) -> list[float]:
    """Return the processor time that each node has used so far, µs."""
    totals = []
    for node in cluster.nodes:
        with admin(node) as redis:
            cpu = redis.info("cpu")
        totals.append((cpu["used_cpu_user"] + cpu["used_cpu_sys"]) * 1e6)
    return totals


async def work(url: str, operation: str, partitions: int | None, count: int) -> dict[str, float]:
    """Offer or take ``count`` messages once the input ends.

    Returns the seconds that it took, and the processor time, µs.
    """
    async with delayq.connect(url) as client:
        queue: Any = client.reliable_queue("jobs", partitions=partitions)
        await queue.stats()
        say_ready()
        await asyncio.to_thread(sys.stdin.read)
        started, cpu_started = time.perf_counter(), time.process_time()
        if operation == "offer":
            for at in range(0, count, 1000):
                await asyncio.gather(*(queue.offer(VALUE) for _ in range(min(1000, count - at))))
        else:
            remaining = count
            async for message in queue:
                async with message:
                    remaining -= 1
                if not remaining:
                    break
            await queue.stats()
        return {
            "took": time.perf_counter() - started,
            "client": (time.process_time() - cpu_started) * 1e6,
        }


def measured(
    cluster: TestCluster, operation: str, partitions: int | None, count: int, clients: int = 1
) -> dict[str, float]:
    """Offer or take ``count`` messages in each of several processes that begin together.

    Returns :data:`FIGURES`: messages per second, and µs per message.
    """
    processes = [
        start(
            "partitions",
            role="work",
            url=cluster.url,
            operation=operation,
            partitions=partitions,
            count=count,
        )
        for _ in range(clients)
    ]
    for process in processes:
        await_ready(process)
    before = server_us(cluster)
    for process in processes:
        end_input(process)
    outcomes = [result(process) for process in processes]
    spent = [now - earlier for now, earlier in zip(server_us(cluster), before, strict=True)]
    done = count * clients
    client, busiest = sum(outcome["client"] for outcome in outcomes) / done, max(spent) / done
    return {
        "rate": done / max(outcome["took"] for outcome in outcomes),
        "client": client,
        "servers": sum(spent) / done,
        "busiest": busiest,
        "possible": 1e6 / max(client / clients, busiest),
    }


def sampled(
    cluster: TestCluster, partitions: int | None, count: int, clients: int = 1
) -> dict[str, float]:
    """Offer messages and take them. Returns the figures of both, as ``offer rate`` and so on."""
    figures = {
        f"{operation} {name}": figure
        for operation in ("offer", "take")
        for name, figure in measured(cluster, operation, partitions, count, clients).items()
    }
    for node in cluster.nodes:
        node.flush()
    return figures


def ways(partitions: int, clients: Sequence[int]) -> list[tuple[str, bool, int | None, int]]:
    """Return the name of each way to measure, whether it has several masters, the number of
    partitions, and the number of clients.
    """
    return [
        ("one queue", False, None, 1),
        (f"{partitions} on one master", False, partitions, 1),
        *((f"{partitions} on {MASTERS} masters", True, partitions, count) for count in clients),
        *(("one queue", False, None, count) for count in clients if count > 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--runs", type=int, default=5, help="number of interleaved runs; medians are reported"
    )
    parser.add_argument(
        "--messages", type=int, default=30_000, help="number of messages of each client in a run"
    )
    parser.add_argument(
        "--partitions",
        type=int,
        default=16,
        help="number of partitions of the queue",
    )
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        help="numbers of client processes to compare",
    )
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        be_sample(options.sample, {"work": work})
        return
    measuring = ways(options.partitions, options.clients)
    samples: list[list[dict[str, float]]] = [[] for _ in measuring]
    with masters(MASTERS) as spread_cluster, masters(1) as single_cluster:
        for _ in range(options.runs):
            for runs, (_, is_spread, partitions, clients) in zip(samples, measuring, strict=True):
                cluster = spread_cluster if is_spread else single_cluster
                runs.append(sampled(cluster, partitions, options.messages, clients))
        with admin(single_cluster.nodes[0]) as redis:
            about = {
                "machine": machine(redis),
                "what": (
                    f"{options.messages:,} messages of 100 bytes for each client; medians of"
                    f" {options.runs} interleaved runs; times in µs per message"
                ),
            }
    table = Table(about, COLUMNS, as_json=options.json)
    for runs, (way, _, partitions, clients) in zip(samples, measuring, strict=True):
        figures = {
            f"{operation} {name}": median(run[f"{operation} {name}"] for run in runs)
            for operation in ("offer", "take")
            for name in FIGURES
        }
        cells = [
            f"{figure:,.0f}" if name.endswith(("rate", "possible")) else f"{figure:.1f}"
            for name, figure in figures.items()
        ]
        row = {"way": way, "partitions": partitions, "clients": clients} | figures
        table.add(row, way, str(clients), *cells)
    table.end()


if __name__ == "__main__":
    main()
