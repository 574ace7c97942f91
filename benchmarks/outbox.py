"""Measure how many rows of an outbox a relay stores per second: ``python -m benchmarks.outbox
[--json] [--rows 20000] [--driver psycopg] [--profile]``.

A private PostgreSQL, which must be installed, and a private server of queues run on this machine,
and so does the relay, which is one process. The rows are there before it begins. The option
``--profile`` adds the functions that take most of the time of its process.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import platform
import pstats
import statistics
import sys
import time
from typing import Any

from sqlalchemy import create_engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import delayq
from delayq._embedded.server import EmbeddedServer
from delayq.outbox import Outbox
from tests.support.postgres import NOT_FOUND, PrivatePostgres, find_programs

DRIVERS = ("psycopg", "psycopg_async", "asyncpg")
VALUE = {"order": 4711, "to": "ada@example.org"}


def fill(outbox: Outbox, url: str, rows: int) -> float:
    """Write rows, as one transaction each would, and return the seconds."""
    engine = create_engine(url)
    started = time.perf_counter()
    outbox.table.create(engine)
    value = json.dumps(VALUE).encode()
    row = {"queue": "mails", "body": b"\n" + value, "priority": 0, "delay_us": 0}
    row |= {"ttl_us": 0, "unique_us": 0, "on_duplicate": "raise"}
    created = time.time_ns() // 1000
    with engine.begin() as connection:
        for first in range(0, rows, 1000):
            batch = [
                {**row, "id": f"id-{number:08}", "created_us": created}
                for number in range(first, min(first + 1000, rows))
            ]
            connection.execute(insert(outbox.table), batch)
    engine.dispose()
    return time.perf_counter() - started


async def relay(
    outbox: Outbox, engine: Any, url: str, rows: int, profile: cProfile.Profile | None
) -> dict[str, float]:
    async with delayq.connect(url) as client:
        started, cpu_started = time.perf_counter(), time.process_time()
        if profile is not None:
            profile.enable()
        counts = await outbox.relay(engine).drain(client)
        if profile is not None:
            profile.disable()
        seconds, processor = time.perf_counter() - started, time.process_time() - cpu_started
        assert (counts.stored, counts.set_aside) == (rows, 0), counts
        stats = await client.reliable_queue("mails").stats()
        assert stats.ready == rows, stats
    if isinstance(engine, AsyncEngine):
        await engine.dispose()
    return {"per_second": rows / seconds, "relay_us": processor / rows * 1e6}


def measure(postgres: PrivatePostgres, driver: str, rows: int, profile: Any) -> dict[str, float]:
    postgres.sql("DROP TABLE IF EXISTS delayq_outbox")
    outbox = Outbox()
    fill(outbox, postgres.url("psycopg"), rows)
    postgres.sql("VACUUM ANALYZE delayq_outbox")
    url = postgres.url(driver)
    engine = create_engine(url) if driver == "psycopg" else create_async_engine(url)
    with EmbeddedServer(None) as server:
        return asyncio.run(relay(outbox, engine, server.url, rows, profile))


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments.add_argument("--rows", type=int, default=20_000)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--driver", choices=DRIVERS, help="one only; all by default")
    arguments.add_argument("--profile", action="store_true")
    options = arguments.parse_args()
    programs = find_programs()
    if programs is None:
        sys.exit(NOT_FOUND)
    drivers = [options.driver] if options.driver else list(DRIVERS)
    profile = cProfile.Profile() if options.profile else None
    samples: dict[str, list[dict[str, float]]] = {driver: [] for driver in drivers}
    with PrivatePostgres(programs) as postgres:
        version = postgres.sql("SHOW server_version")
        # In turn, so that other load affects all of them.
        for _ in range(options.runs):
            for driver in drivers:
                samples[driver].append(measure(postgres, driver, options.rows, profile))
    rows = [
        {
            "driver": driver,
            "rows_per_second": round(statistics.median(run["per_second"] for run in runs)),
            "relay_us_per_row": round(statistics.median(run["relay_us"] for run in runs), 1),
        }
        for driver, runs in samples.items()
    ]
    if options.json:
        print(json.dumps(rows))
        return
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    print(f"{platform.platform()}, CPython {platform.python_version()}, PostgreSQL {version}")
    print(f"{options.rows:,} rows, median of {options.runs} runs; load average {load}")
    for row in rows:
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
