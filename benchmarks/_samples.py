"""What benchmarks of whole processes share: samples that run in processes of their own, by turns, and their summary."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

LOOPS = ["asyncio"] + ["uvloop"] * (find_spec("uvloop") is not None)


def run_in(loop: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine in a loop of that kind."""
    factory = None
    if loop == "uvloop":
        import uvloop  # type: ignore[import-not-found,unused-ignore]

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work())


def start(module: str, **sample: Any) -> subprocess.Popen[str]:
    """Start ``python -m benchmarks.MODULE --sample JSON``. It prints one line of JSON, and ends when its input does."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--sample", json.dumps(sample)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str], within: float = 120.0) -> Any:
    """What a sample printed."""
    try:
        printed, _ = process.communicate(timeout=within)
    finally:
        process.kill()
    if process.returncode:
        raise SystemExit(f"a sample failed: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
    return json.loads(printed)


def medians(runs: Iterable[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    rows = list(runs)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def quantile(ordered: Sequence[float], part: float) -> float:
    """The value below which so much of an ordered sequence lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
