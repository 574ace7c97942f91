"""Measure how a backlog drains: ``python -m benchmarks.drain [--json] [--messages 100000]``.

All messages have the same due time, which has passed. They are moved to the ready list until none
is left, 100 per call: by our script, and by Redisson's steps with its random ids, which take over
half a minute. The time is the server's own (``INFO commandstats``).
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks._moves import (
    BATCH,
    add_server_option,
    delayq_transfer,
    fill,
    measured_server,
    redisson_transfer,
)
from benchmarks._report import Table, machine
from delayq._redisson.keys import DelayedKeys

KEYS = DelayedKeys.of("benchmark")


def drain(server: Any, script: str, messages: int) -> dict[str, Any]:
    fill(
        server,
        KEYS,
        messages,
        java_ids=script == "Redisson",
        due=lambda _place: 1,
        payload=lambda _place: b"x" * 100,
    )
    move = redisson_transfer if script == "Redisson" else delayq_transfer
    blocks, is_unfinished = [], True
    while is_unfinished:
        milliseconds, is_unfinished = move(server, KEYS)
        blocks.append(milliseconds)
    if server.llen(KEYS.ready) != messages or server.exists(KEYS.timeout, KEYS.ordered):
        raise AssertionError(f"{script} did not move all messages")
    return {
        "script": script,
        "messages": messages,
        "total_ms": sum(blocks),
        "longest_ms": max(blocks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_server_option(parser)
    parser.add_argument("--messages", type=int, default=100_000, help="number of due messages")
    options = parser.parse_args()
    with measured_server(options.server) as server:
        about = {
            "machine": machine(server),
            "measured": f"{options.messages} messages with one due time, {BATCH} per call; one run",
        }
        table = Table(
            about,
            ("script  ", " total ms", " longest block ms", " us a message"),
            as_json=options.json,
        )
        for script in ("delayq", "Redisson"):
            row = drain(server, script, options.messages)
            message_us = row["total_ms"] * 1000 / options.messages
            table.add(
                row,
                script,
                f"{row['total_ms']:.1f}",
                f"{row['longest_ms']:.2f}",
                f"{message_us:.2f}",
            )
    table.end()


if __name__ == "__main__":
    main()
