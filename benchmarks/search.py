"""Measure the search by content: ``python -m benchmarks.search [--json] [--pending 1000000]
[--redisson 100000]``.

Ours runs through the real API, which reads the ordered list in pages. Redisson's steps are one
script that fetches one entry after another by index, which takes time quadratic in the length: over
half a minute for a million. The longest block is the server's own measurement (SLOWLOG of every
command, INFO commandstats).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from benchmarks._moves import add_server_option, fill, measured_server, timed
from benchmarks._report import Table, machine
from delayq import connect
from delayq._redisson.keys import DelayedKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NAME = "benchmark"
KEYS = DelayedKeys.of(NAME)
NEVER = 2**53 - 1

# For each index: fetch the record, and compare its payload.
REDISSON_CONTAINS = """
for index = 0, redis.call('LLEN', KEYS[1]) - 1 do
  local _, payload = struct.unpack('Bc0Lc0', redis.call('LINDEX', KEYS[1], index))
  if payload == ARGV[1] then return 1 end
end
return 0
"""


def value(place: int) -> str:
    """Return the value of the message at this place: 100 bytes as JSON."""
    return f"{place:098d}"


def watch(server: Any) -> None:
    """Make the server log how long each command takes."""
    server.config_set("slowlog-max-len", 1_000_000)
    server.config_set("slowlog-log-slower-than", 0)
    server.slowlog_reset()


def longest_ms(server: Any) -> float:
    """Return how long the longest command since then has blocked the server."""
    watching = (b"SLOWLOG", b"CONFIG")
    entries = server.slowlog_get(-1)
    return max(
        float(entry["duration"]) / 1000
        for entry in entries
        if not entry["command"].upper().startswith(watching)
    )


async def search_ours(server: Any, url: str, pending: int) -> list[dict[str, Any]]:
    rows = []
    async with connect(url) as client:
        queue = client.delayed_queue(NAME)
        searches: dict[str, tuple[Callable[[str], Awaitable[bool]], str]] = {
            "contains(missing)": (queue.pending.contains, "missing"),
            "remove(first)": (queue.pending.remove, value(0)),
            "remove(middle)": (queue.pending.remove, value(pending // 2)),
            "remove(last)": (queue.pending.remove, value(pending - 1)),
        }
        for search, (method, argument) in searches.items():
            watch(server)
            start = time.perf_counter()
            answer = await method(argument)
            waited_ms = (time.perf_counter() - start) * 1000
            rows.append(
                {
                    "search": search,
                    "found": answer,
                    "waited_ms": waited_ms,
                    "longest_ms": longest_ms(server),
                }
            )
    server.config_set("slowlog-log-slower-than", -1)
    return rows


def search_redisson(server: Any) -> dict[str, Any]:
    milliseconds, answer = timed(server, REDISSON_CONTAINS, [KEYS.ordered], '"missing"')
    return {
        "search": "contains(missing)",
        "found": answer == 1,
        "waited_ms": milliseconds,
        "longest_ms": milliseconds,
    }


def fill_queue(server: Any, pending: int) -> None:
    fill(
        server,
        KEYS,
        pending,
        java_ids=False,
        due=lambda _place: NEVER,
        payload=lambda place: f'"{value(place)}"'.encode(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_server_option(parser)
    parser.add_argument("--pending", type=int, default=1_000_000, help="number of pending messages")
    parser.add_argument(
        "--redisson",
        type=int,
        default=100_000,
        help="number of pending messages for Redisson's steps",
    )
    options = parser.parse_args()
    with measured_server(options.server) as server:
        about = {"machine": machine(server), "measured": "messages of 100 bytes; one run"}
        columns = (
            "script  ",
            "search           ",
            "  pending",
            "found",
            " caller waits ms",
            " longest block ms",
        )
        table = Table(about, columns, as_json=options.json)

        def add(script: str, pending: int, row: dict[str, Any]) -> None:
            figures = (f"{row['waited_ms']:.1f}", f"{row['longest_ms']:.2f}")
            verdict = "yes" if row["found"] else "no"
            table.add(
                {"script": script, "pending": pending} | row,
                script,
                row["search"],
                str(pending),
                verdict,
                *figures,
            )

        fill_queue(server, options.pending)
        url = f"unix://{quote(server.connection_pool.connection_kwargs['path'])}"
        for row in asyncio.run(search_ours(server, url, options.pending)):
            add("delayq", options.pending, row)
        fill_queue(server, options.redisson)
        add("Redisson", options.redisson, search_redisson(server))
    table.end()


if __name__ == "__main__":
    main()
