"""Measure the loss of messages when a server dies: ``python -m benchmarks.durability [options]``.

Tasks offer to a ReliableQueue, each offering its next message when the previous one is
acknowledged. After some seconds the server is killed (SIGKILL), restarted, and asked which of the
acknowledged messages it has. *failover*: a replica is stopped for the last second, as if its link
hung; then the master is killed and the replica promoted. "lost" are acknowledged offers that are
gone; "unconfirmed" are offers whose promise was not kept, as their callers were told. Killing a
process leaves the system's memory alone: a power failure would additionally take everything that
was not synced to disk.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from contextlib import suppress
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

import delayq
from benchmarks._report import Table, machine
from tests.support.clusters import admin, wait_for
from tests.support.servers import Kind, PrivateServer, find_kinds

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = (
    "setting             ",
    "durability",
    "  offers/s",
    " p50 ms",
    " p99 ms",
    " offered",
    "    lost",
    " unconfirmed",
)
STALLED = 1.0


class Way(NamedTuple):
    """A setting of the server, and the durability that offers ask for."""

    name: str
    durability: str
    appendonly: Any = None
    options: tuple[str, ...] = ()
    failover: bool = False


WAYS = (
    Way("nothing kept", "memory"),
    Way("snapshots (save 1 1)", "memory", options=("--save", "1 1")),
    Way("appendfsync everysec", "memory", "everysec"),
    Way("appendfsync everysec", "fsync", "everysec"),
    Way("appendfsync always", "memory", "always"),
    Way("appendfsync always", "fsync", "always"),
    Way("failover", "memory", failover=True),
    Way("failover", "replicas:1", failover=True),
)


class Load:
    """Offers from many tasks, and their outcomes."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.unconfirmed = 0
        self.times: list[float] = []

    async def run(self, queue: delayq.ReliableQueue[str], tasks: int) -> None:
        """Offer until cancelled, or until the server does not answer."""

        async def offer_one(place: int) -> None:
            number = 0
            while True:
                name, started = f"{place}-{number}", time.perf_counter()
                try:
                    await queue.offer("x" * 98, delay=3600, id=name)
                except delayq.NotDurable:
                    self.unconfirmed += 1
                else:
                    self.acknowledged.append(name)
                    self.times.append(time.perf_counter() - started)
                number += 1

        with suppress(delayq.DelayqError):
            await asyncio.gather(*(offer_one(place) for place in range(tasks)))


async def measured(way: Way, kind: Kind, seconds: float, tasks: int) -> dict[str, float]:
    options = ("--repl-diskless-sync-delay", "0", "--repl-timeout", "60", *way.options)
    load, took = Load(), 0.0
    with PrivateServer(kind, tcp=True, appendonly=way.appendonly, options=options) as server:
        replica = PrivateServer(kind, tcp=True, options=options) if way.failover else None
        if replica is not None:
            replica.start()
            with admin(replica) as redis:
                redis.execute_command("REPLICAOF", "127.0.0.1", server.port)
                wait_for(
                    lambda: redis.info("replication")["master_link_status"] == "up",
                    "the replica's link",
                )
        try:
            async with delayq.connect(server.url) as client:
                queue: delayq.ReliableQueue[str] = client.reliable_queue(
                    "jobs", durability=way.durability
                )
                loading, started = asyncio.create_task(load.run(queue, tasks)), time.perf_counter()
                await asyncio.sleep(seconds)
                if replica is not None:
                    replica.pause()
                    await asyncio.sleep(STALLED)
                took = time.perf_counter() - started
                server.kill()
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            survivor = replica or server
            if replica is not None:
                replica.resume()
                with admin(replica) as redis:
                    redis.execute_command("REPLICAOF", "NO", "ONE")
            else:
                server.start()
            with admin(survivor) as redis:
                stored: set[Any] = set(redis.hkeys("delayq:{jobs}:bodies"))
        finally:
            if replica is not None:
                replica.close()
    names: Sequence[str] = load.acknowledged
    return {
        "rate": len(names) / took,
        "p50": median(load.times) * 1000,
        "p99": quantiles(load.times, n=100)[-1] * 1000,
        "offered": len(names),
        "lost": sum(name not in stored for name in names),
        "unconfirmed": load.unconfirmed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--runs", type=int, default=3, help="number of interleaved runs; medians are reported"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="seconds of offers before the server dies"
    )
    parser.add_argument(
        "--tasks", type=int, default=100, help="number of tasks that offer concurrently"
    )
    options = parser.parse_args()
    # The server's death is expected.
    logging.disable(logging.WARNING)
    kind = find_kinds()[0]["valkey-9"]
    samples_of: dict[Way, list[dict[str, float]]] = {way: [] for way in WAYS}
    with PrivateServer(kind) as server, admin(server) as redis:
        about = {
            "machine": machine(redis),
            "what": (
                f"{options.tasks} tasks offer for {options.seconds:g} s; medians of {options.runs}"
                " interleaved runs"
            ),
        }
    for _ in range(options.runs):
        for way in WAYS:
            samples_of[way].append(asyncio.run(measured(way, kind, options.seconds, options.tasks)))
    table = Table(about, COLUMNS, as_json=options.json)
    for way, samples in samples_of.items():
        row = {name: median(sample[name] for sample in samples) for name in samples[0]}
        cells = [f"{row['rate']:,.0f}", f"{row['p50']:.1f}", f"{row['p99']:.1f}"]
        cells += [f"{row[name]:,.0f}" for name in ("offered", "lost", "unconfirmed")]
        table.add(
            {"setting": way.name, "durability": way.durability} | row,
            way.name,
            way.durability,
            *cells,
        )
    table.end()


if __name__ == "__main__":
    main()
