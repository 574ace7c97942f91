"""Measure what groups and their limits cost the server: ``python -m benchmarks.groups [--json]
[--server URL]``.

Due messages of 100 bytes wait in queues of 0, 1, 10 and 100 groups, without and with limits that
let each claim have all that it asks for; ordered ones only in a queue of 100 groups, because each
of those has one message at a time.
Messages are claimed, and then acknowledged from as many tasks, interleaved on all queues. The
figures are the server's own time, medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median
from typing import Any

import delayq
from benchmarks._moves import BATCH, add_server_option, address, measured_server
from benchmarks._report import Table, machine
from benchmarks.reliable import AT_A_TIME, Bytes, Queue, server_us
from delayq import Limit, Offer

ROUNDS = 40
HIGH_LIMIT = 1_000_000
LIMITS: dict[str, Limit | None] = {
    "none": None,
    "concurrency": Limit(concurrency=HIGH_LIMIT),
    "rate": Limit(rate=HIGH_LIMIT),
    "concurrency, rate": Limit(concurrency=HIGH_LIMIT, rate=HIGH_LIMIT),
    "ordered": Limit(ordered=True),
}


def loads() -> list[tuple[int, str]]:
    """Return the numbers of groups and the limits that are measured; first the queue without."""
    grouped = [(groups, limit) for groups in (1, 10, 100) for limit in LIMITS]
    # A batch of fewer messages has other costs, which are not those of groups.
    return [(0, "none"), *(load for load in grouped if load[1] != "ordered" or load[0] == BATCH)]


async def fill(queue: Queue, groups: int) -> None:
    count = ROUNDS * BATCH
    for first in range(0, count, AT_A_TIME):
        await queue.offer_many(
            [
                Offer(value=b"x" * 100, group=f"group {number % groups}" if groups else None)
                for number in range(first, min(first + AT_A_TIME, count))
            ]
        )


async def claim_and_ack(server: Any, queue: Queue) -> tuple[float, float]:
    """Return the server's time for claims and for acknowledgements, us a message."""
    before = server_us(server)
    messages = await queue.claim(BATCH)
    claimed = server_us(server)
    await asyncio.gather(*(message.ack() for message in messages))
    if len(messages) != BATCH:
        raise AssertionError("not all messages were there")
    return (claimed - before) / BATCH, (server_us(server) - claimed) / BATCH


async def measure(server: Any, url: str, table: Table) -> None:
    async with delayq.connect(url) as client:
        queues: dict[tuple[int, str], Queue] = {}
        for groups, limit in loads():
            queue: Queue = client.reliable_queue(
                f"{groups} {limit}", codec=Bytes(), lease=3600, group_limit=LIMITS[limit]
            )
            queues[groups, limit] = queue
            await fill(queue, groups)
        times: dict[tuple[int, str], list[tuple[float, float]]] = {load: [] for load in queues}
        for _ in range(ROUNDS):
            for load, queue in queues.items():
                times[load].append(await claim_and_ack(server, queue))
    first = None
    for (groups, limit), samples in times.items():
        claim, ack = (median(durations) for durations in zip(*samples, strict=True))
        first = first or claim + ack
        ratio = (claim + ack) / first
        table.add(
            {"groups": groups, "limit": limit, "claim_us": claim, "ack_us": ack, "ratio": ratio},
            str(groups),
            limit,
            f"{claim:.1f}",
            f"{ack:.1f}",
            f"{ratio:.1f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_server_option(parser)
    options = parser.parse_args()
    with measured_server(options.server) as server:
        about = {
            "machine": machine(server),
            "measured": f"medians of {ROUNDS} batches of {BATCH}, interleaved",
        }
        columns = ("groups", "limit            ", " claim us", " ack us", " times the first")
        table = Table(about, columns, as_json=options.json)
        asyncio.run(measure(server, address(server, options.server), table))
    table.end()


if __name__ == "__main__":
    main()
