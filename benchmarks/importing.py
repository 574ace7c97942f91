"""Measure the time that ``import delayq`` takes, beside its dependencies: ``python -m
benchmarks.importing [--runs N] [--json]``.

Each import runs in an interpreter of its own, interleaved with the others, with its byte code on
disk. Times are milliseconds of processor time of that process, so other load has little effect.
delayq loads what is asked for: "delayq.connect" is what every program needs that sends or receives.
"connect()" also creates a client, which loads redis-py. The last column is the multiple of asyncio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from benchmarks._report import Table, machine

PROGRAMS = {
    "asyncio": "import asyncio",
    "redis.asyncio": "import redis.asyncio",
    "delayq": "import delayq",
    "delayq.connect": "from delayq import connect",
    "connect()": "import delayq; delayq.connect('redis://localhost')",
}
TIMED = "import time; begun = time.process_time(); {}; print((time.process_time() - begun) * 1000)"


def measured(program: str) -> float:
    command = [sys.executable, "-c", TIMED.format(program)]
    # As for users: compiled once.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    return float(
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument(
        "--runs", type=int, default=15, help="number of runs of each import; default: 15"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    for program in PROGRAMS.values():
        measured(program)
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(options.runs):
        for name, program in PROGRAMS.items():
            times[name].append(measured(program))
    table = Table(
        {"machine": machine()},
        ["import".ljust(14), "median ms".rjust(10), "least ms".rjust(10), "ratio".rjust(6)],
        as_json=options.json,
    )
    for name, samples in times.items():
        median, minimum = statistics.median(samples), min(samples)
        ratio = median / statistics.median(times["asyncio"])
        table.add(
            {"import": name, "median": median, "least": minimum, "ratio": ratio},
            name,
            f"{median:.0f}",
            f"{minimum:.0f}",
            f"{ratio:.1f}",
        )
    table.end()


if __name__ == "__main__":
    main()
