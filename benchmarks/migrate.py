"""Measure what a migration costs the server: ``python -m benchmarks.migrate [--json] [--records
1000000] [--url URL]``.

This runs on a private server, or on an empty one of yours, whose key ``benchmark`` and slow log are
used. It measures how long the migration of an old Redisson's records takes, with payloads of 100
bytes, and how long its steps block the server. The times of steps are the server's own (``INFO
commandstats``, ``SLOWLOG``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import struct
import time
from typing import Any

from redis import Redis

import delayq
from delayq._embedded.server import EmbeddedServer
from delayq._redisson.keys import DelayedKeys
from delayq.admin.migrate import Migration, migrate

KEYS = DelayedKeys.of("benchmark")
# Steps that block for longer than this are counted, ms.
LONG = 2.0


def fill(server: Redis, records: int) -> None:
    """Store messages as Redisson did before 3.21.1, in random order of due time."""
    chance = random.Random(1)
    for first in range(0, records, 1000):
        chunk = [
            chance.randbytes(8) + struct.pack("<Q", 100) + b"x" * 100
            for _ in range(first, min(first + 1000, records))
        ]
        server.zadd(
            KEYS.timeout, {record: 1_900_000_000_000 + chance.randrange(10**9) for record in chunk}
        )
        server.rpush(KEYS.ordered, *chunk)


async def run(url: str) -> Migration:
    last: Migration | None = None
    async with delayq.connect(url) as client:
        async for step in migrate(client, KEYS.name):
            last = step
    assert last is not None
    assert last.complete
    return last


def measure(server: Any, url: str, records: int) -> dict[str, Any]:
    fill(server, records)
    server.config_set("slowlog-log-slower-than", int(LONG * 1000))
    server.config_set("slowlog-max-len", 100_000)
    server.slowlog_reset()
    server.config_resetstat()
    started = time.perf_counter()
    result = asyncio.run(run(url))
    seconds = time.perf_counter() - started
    calls = server.info("commandstats")["cmdstat_evalsha"]
    slow = [
        entry["duration"] / 1000
        for entry in server.slowlog_get(100_000)
        if entry["command"].startswith(b"EVALSHA")
    ]
    server.delete(KEYS.timeout, KEYS.ordered)
    return {
        "records": records,
        "rewritten": result.rewritten,
        "seconds": round(seconds, 2),
        "steps": calls["calls"],
        "mean_ms": round(calls["usec"] / calls["calls"] / 1000, 3),
        "over_2_ms": len(slow),
        "longest_ms": round(max(slow, default=LONG), 2),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments.add_argument("--records", type=int, default=1_000_000)
    arguments.add_argument("--url", help="use this server instead of a private one")
    options = arguments.parse_args()
    with EmbeddedServer(None) as embedded:
        url = options.url or embedded.url
        with Redis.from_url(url, socket_timeout=600) as server:
            info = server.info("server")
            version = info.get("valkey_version") or info["redis_version"]
            row = measure(server, url, options.records)
    if options.json:
        print(json.dumps(row))
    else:
        print(f"{platform.platform()}, CPython {platform.python_version()}, server {version}")
        for name, value in row.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
