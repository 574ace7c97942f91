"""A soak test: a steady load, a fault every few seconds, and a look for leaks.

::
    make soak ARGS="--minutes 5"  # an hour without it
Each round offers its messages, breaks everything, drains and is judged; then memory is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.faults.checker import Violation, check, summary
from tests.faults.consumers import Habits, Kind, shorten_deadlines
from tests.faults.storm import Plan, Storm
from tests.support.servers import PrivateServer, first_kind, memory_disk

GROWTH = 1.05
"""How much memory a consumer may have at the end, as a multiple of its memory after the warm-up."""
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
WARM_UP = 0.3
"""The share of the time that is warm-up, in which caches and pools fill."""


class Sample(NamedTuple):
    """The resources in use at a moment when nothing is in progress."""

    at: float
    rss_kb: int  # of the consumer, which is a process of its own
    files: int
    server_kb: int
    keys: int


@dataclass
class Result:
    """The findings of a soak."""

    violations: list[Violation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    messages: int = 0
    faults: int = 0

    @property
    def leaks(self) -> list[str]:
        """What has grown by more than it may since the warm-up, in words."""
        warm = self.samples[-1].at * WARM_UP
        settled = [sample for sample in self.samples if sample.at >= warm]
        first, last, third = settled[0], settled[-1], max(1, len(settled) // 3)
        # Of the memory, medians.
        before, after = (
            sorted(sample.rss_kb for sample in part)[third // 2]
            for part in (settled[:third], settled[-third:])
        )
        grown = {
            f"memory, {after / before:.3f} times": after / before > GROWTH,
            # A connection may be in the middle of being replaced.
            f"files, {first.files} to {last.files}": last.files > first.files + 4,
            f"keys, {first.keys} to {last.keys}": last.keys > first.keys + 4,
            f"the server's memory, {first.server_kb:,} to {last.server_kb:,} KiB": (
                last.server_kb > first.server_kb * 1.1 + 1024
            ),
        }
        return [words for words, is_leak in grown.items() if is_leak]


async def soak(
    server: PrivateServer, folder: Path, seconds: float, *, kind: Kind, rate: int, seed: int
) -> Result:
    """Load a server for a number of seconds, at a rate per second. It is killed and restarted."""
    # A single consumer, which lives for the whole soak: it is the one that is measured.
    habits = Habits(leaves=0.0005)
    plan = Plan(kind, rate * 15, 5, seed, clients=1, pause=(1.5, 3.0), habits=habits, only=_FAULTS)
    result, started = Result(), time.monotonic()
    async with Storm(server, plan, folder) as storm:
        while not result.samples or time.monotonic() - started < seconds:
            history = await storm.blow()
            history.delivered += await storm.crowd.settled_notes()
            history.doubts, history.nameless_doubts = storm.take_doubts()
            result.violations += check(history, plan.rules)
            result.messages += len(history.offered)
            (pid,) = storm.crowd.pids
            raw = await storm.raw(server)
            server_kb = (await raw.info("memory"))["used_memory"] // 1024
            rss_kb = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KB
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            sample = Sample(
                time.monotonic() - started, rss_kb, files, server_kb, await raw.dbsize()
            )
            result.samples.append(sample)
            print(f"{result.messages:,} messages  {sample}  {summary(result.violations, 1)}")
        result.faults = storm.injected.total()
        result.violations += [Violation("left", 0, words) for words in (await storm.end()).left]
    return result


# Every fault except the death of the consumer, which is measured.
_FAULTS = (
    "cut", "half open", "requests stalled", "replies stalled", "slow", "cut in a request",
    "cut in a reply", "refused", "server stopped", "server killed", "CLIENT KILL normal",
    "CLIENT KILL pubsub", "CLIENT PAUSE", "SCRIPT FLUSH",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=int, default=1000, help="messages a second")
    parser.add_argument("--kind", choices=("reliable", "deliveries"), default="reliable")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    shorten_deadlines()
    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateServer(first_kind(), appendonly="always", within=memory_disk()) as server,
    ):
        chosen = {"kind": options.kind, "rate": options.rate, "seed": options.seed}
        seconds = options.minutes * 60
        result = asyncio.run(soak(server, Path(folder), seconds, **chosen))
    leaks = ", ".join(result.leaks) or "none"
    print(f"{result.faults} faults over {result.messages:,} messages; leaks: {leaks}")
    if result.violations or result.leaks:
        sys.exit(f"FAILED: {summary(result.violations)}")


if __name__ == "__main__":
    main()
