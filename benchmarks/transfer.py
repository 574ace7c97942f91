"""Measure what one transfer costs the server: ``python -m benchmarks.transfer [--json] [--most 1000000]``.

Ours beside Redisson's steps, written out again from their description, on a private server, by turns: how long one script
that moves 100 due messages blocks the server, with so many pending, for four orders in which they come due. Medians over
the runs; the time is the server's own (``INFO commandstats``). Payloads have 100 bytes. Both work on records with our ids;
with Redisson's random ones, "all at once" is as bad for Redisson as "scattered".
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from redis import Redis

from delayq._redis.keys import DelayedKeys
from delayq._redis.records import pack
from delayq._redis.scripts import TRANSFER
from delayq.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEYS = DelayedKeys.of("benchmark")
BATCH = 100
RUNS = 5
ORDERS = ("in offer order", "all at once", "newest first", "scattered")
# Beyond this many pending, Redisson's steps take seconds a call for some orders: one run tells enough.
MANY = 100_000

# For each record due: append its payload to the ready list, and search the ordered list for it from the head.
REDISSON = """
local due = redis.call('ZRANGEBYSCORE', KEYS[2], 0, ARGV[1], 'LIMIT', 0, ARGV[2])
for _, record in ipairs(due) do
  local _, payload = struct.unpack('Bc0Lc0', record)
  redis.call('RPUSH', KEYS[1], payload)
  redis.call('LREM', KEYS[3], 1, record)
end
if #due > 0 then redis.call('ZREM', KEYS[2], unpack(due)) end
return redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
"""


def fill(server: Redis, pending: int, order: str) -> None:
    """Store messages that were offered a millisecond apart and are all due."""
    server.delete(KEYS.timeout, KEYS.ordered, KEYS.ready)
    chance = random.Random(1)
    start = int(time.time() * 1_000_000) - pending * 1000
    ago = int(time.time() * 1000) - 2 * pending
    orders: dict[str, Callable[[int], int]] = {
        "in offer order": lambda place: ago + place,
        "all at once": lambda _place: ago,
        "newest first": lambda place: ago + pending - place,
        "scattered": lambda _place: ago + chance.randrange(pending),
    }
    due = orders[order]
    for first in range(0, pending, 1000):
        places = range(first, min(first + 1000, pending))
        records = {pack(((start + place * 1000) * 4096).to_bytes(8, "big"), b"x" * 100, 8): due(place) for place in places}
        server.zadd(KEYS.timeout, records)
        server.rpush(KEYS.ordered, *records)


def block_ms(server: Any, script: str) -> float:
    """Run one transfer, and return how long it blocked the server."""
    names = [KEYS.ready, KEYS.timeout, KEYS.ordered, KEYS.quarantine, "benchmark:taken", KEYS.leases, KEYS.leased]
    server.config_resetstat()
    if script == "redisson":
        server.eval(REDISSON, 3, *names[:3], int(time.time() * 1000), BATCH)
    else:
        server.eval(TRANSFER.text, 7, *names, BATCH, 0, 1000, 0, "call")
    return float(server.info("commandstats")["cmdstat_eval"]["usec"]) / 1000


def measure(server: Redis, most: int) -> Iterator[dict[str, Any]]:
    pending = 1000
    while pending <= most:
        for order in ORDERS:
            fill(server, pending, order)
            blocks: dict[str, list[float]] = {"redisson": [], "delayq": []}
            for run in range(RUNS):
                for script, times in blocks.items():
                    if script == "delayq" or run == 0 or pending < MANY:
                        times.append(block_ms(server, script))
            row: dict[str, Any] = {"pending": pending, "order": order}
            row |= {f"{script}_ms": statistics.median(times) for script, times in blocks.items()}
            row |= {f"{script}_longest_ms": max(times) for script, times in blocks.items()}
            yield row
        pending *= 10


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments.add_argument("--most", type=int, default=1_000_000, help="pending messages at most")
    chosen = arguments.parse_args()
    with EmbeddedServer(None) as embedded, Redis.from_url(embedded.url, socket_timeout=600) as server:
        version = server.info("server").get("valkey_version") or server.info("server")["redis_version"]
        if not chosen.json:
            print(f"{platform.platform()}, CPython {platform.python_version()}, server {version}; {BATCH} messages a call")
            print(
                f"{'pending':>9}  {'come due':<15}{'Redisson ms':>12}{'longest':>10}{'delayq ms':>12}{'longest':>10}{'ratio':>9}"
            )
        for row in measure(server, chosen.most):
            if chosen.json:
                print(json.dumps(row))
            else:
                print(
                    f"{row['pending']:>9}  {row['order']:<15}{row['redisson_ms']:>12.2f}{row['redisson_longest_ms']:>10.2f}"
                    f"{row['delayq_ms']:>12.2f}{row['delayq_longest_ms']:>10.2f}{row['redisson_ms'] / row['delayq_ms']:>8.1f}x"
                )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
