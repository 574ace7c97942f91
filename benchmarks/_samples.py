"""Helpers for benchmarks of whole processes: samples that run interleaved, each in its own process,
and their summary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks._moves import Meter, add_server_option
from benchmarks._profile import Profile
from benchmarks._report import add_options

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

# A sample that takes longer than this has gone wrong, seconds.
PATIENCE = 900.0
LOOPS = ["asyncio"] + ["uvloop"] * (find_spec("uvloop") is not None)


def run_in(loop: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine in an event loop of this kind."""
    factory = None
    if loop == "uvloop":
        import uvloop  # type: ignore[import-not-found,unused-ignore]

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work())


def new_parser(doc: str | None, runs: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that all these benchmarks share."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add_server_option(parser)
    parser.add_argument(
        "--runs", type=int, default=runs, help="number of interleaved runs; the median is reported"
    )
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    return parser


def be_sample(sample: str, roles: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]) -> None:
    """Act as the process that :func:`start` started: carry out the role, and print its result.

    With ``profile``, print its figures and the profile.
    """
    arguments = json.loads(sample)
    role, loop = roles[arguments.pop("role")], arguments.pop("loop", "asyncio")
    profile = Meter.profile = Profile() if arguments.pop("profile", False) else None
    outcome = run_in(loop, lambda: asyncio.wait_for(role(**arguments), PATIENCE))
    if profile is not None:
        outcome = {"figures": outcome, "client": profile.client, "commands": profile.commands}
    json.dump(outcome, sys.stdout)


def say_ready() -> None:
    """Signal :func:`await_ready`, before the result."""
    print("ready", flush=True)


def await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None, "started with a pipe"
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"a sample failed: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]


def start(module: str, **sample: Any) -> subprocess.Popen[str]:
    """Start ``python -m benchmarks.MODULE --sample JSON``.

    It prints one line of JSON, and ends when its input ends.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", "--sample", json.dumps(sample)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end_input(process: subprocess.Popen[str]) -> None:
    """End the input of a sample that waits for that. :func:`result` does so as well."""
    assert process.stdin is not None, "started with a pipe"
    process.stdin.close()
    process.stdin = None


def result(process: subprocess.Popen[str], within: float = 120.0) -> Any:
    """Return the result that a sample printed."""
    try:
        printed, _ = process.communicate(timeout=within)
    finally:
        process.kill()
    if process.returncode:
        raise SystemExit(f"a sample failed: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
    return json.loads(printed)


def medians(runs: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    rows = list(runs)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the value below which this part of an ordered sequence lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
