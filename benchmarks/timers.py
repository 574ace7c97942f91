"""Measure the timer wheel against ``loop.call_later``: ``python -m benchmarks.timers [--json]
[--plot FILE]``.

Every sample runs in a process of its own, with the designs interleaved and garbage collection on;
the medians over the runs are shown. Delays are 60 s to 3600 s, except for "expire" (N within half a
second) and "hold" (N at the same moment). "hold" is the longest time for which the loop did nothing
else. "kept" is the memory left per timer after cancelling all of them and one turn of the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks._report import BLUE, ORANGE, SKY, add_options, machine, plotter, save
from delayq._timer.timer import HashedWheelTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PAIRS = 100_000
UNITS = {
    "pair": "ns",
    "add": "ns",
    "cancel": "ns",
    "expire": "ns",
    "hold": "ms",
    "memory": "B",
    "kept": "B",
}


def do_nothing(_timeout: object = None) -> None:
    pass


def adder(design: str) -> Callable[..., Any]:
    """Return a function that adds a timer; see :func:`arguments`."""
    return (
        HashedWheelTimer().new_timeout
        if design == "wheel"
        else asyncio.get_running_loop().call_later
    )


def arguments(
    design: str, callback: Callable[..., None], delays: list[float]
) -> list[tuple[Any, Any]]:
    """Return ready-made arguments in the order of the design, so that neither design pays for an
    adapter.
    """
    return [(callback, delay) if design == "wheel" else (delay, callback) for delay in delays]


def far(count: int) -> list[float]:
    chance = random.Random(1)
    return [chance.uniform(60, 3600) for _ in range(count)]


async def speed(design: str, count: int) -> dict[str, float]:
    add = adder(design)
    calls, pairs = (
        arguments(design, do_nothing, far(count)),
        arguments(design, do_nothing, far(PAIRS)),
    )
    seconds = {}
    start = time.perf_counter()
    timers = [add(a, b) for a, b in calls]
    seconds["add"] = (time.perf_counter() - start) / count
    start = time.perf_counter()
    for a, b in pairs:
        add(a, b).cancel()
    seconds["pair"] = (time.perf_counter() - start) / PAIRS
    start = time.perf_counter()
    for timer in timers:
        timer.cancel()
    seconds["cancel"] = (time.perf_counter() - start) / count
    return {name: value * 1e9 for name, value in seconds.items()}


async def run_dry(design: str, delays: list[float]) -> tuple[float, float]:
    """Block the loop until everything is due.

    Return the seconds until all have run, and the longest turn of the loop.
    """
    remaining = len(delays)

    def fired(_timeout: object = None) -> None:
        nonlocal remaining
        remaining -= 1

    add = adder(design)
    for a, b in arguments(design, fired, delays):
        add(a, b)
    gc.collect()
    time.sleep(max(delays) + 0.1)  # noqa: ASYNC251 - the point is that the loop is late
    start = last = time.perf_counter()
    longest = 0.0
    while remaining:
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return last - start, longest


async def expire(design: str, count: int) -> dict[str, float]:
    seconds, _ = await run_dry(design, [0.5 * delay / 3600 for delay in far(count)])
    return {"expire": seconds / count * 1e9}


async def hold(design: str, count: int) -> dict[str, float]:
    _, longest = await run_dry(design, [0.5] * count)
    return {"hold": longest * 1e3}


async def memory(design: str, count: int) -> dict[str, float]:
    if design == "uvloop":
        return {}  # It allocates memory that tracemalloc does not see.
    add, calls = adder(design), arguments(design, do_nothing, far(count))
    timers: list[Any] = [None] * count
    gc.collect()
    tracemalloc.start()
    for index, (a, b) in enumerate(calls):
        timers[index] = add(a, b)
    gc.collect()
    bytes_held = tracemalloc.get_traced_memory()[0]
    for index, timer in enumerate(timers):
        timer.cancel()
        timers[index] = None
    del timer
    await asyncio.sleep(0)
    gc.collect()
    return {"memory": bytes_held / count, "kept": tracemalloc.get_traced_memory()[0] / count}


SAMPLES: dict[str, Callable[[str, int], Coroutine[Any, Any, dict[str, float]]]] = {
    "speed": speed,
    "expire": expire,
    "hold": hold,
    "memory": memory,
}


def run_sample(design: str, sample: str, count: int) -> dict[str, float]:
    factory = None
    if design == "uvloop":
        import uvloop  # type: ignore[import-not-found,unused-ignore]

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(SAMPLES[sample](design, count))


def sample_of(design: str, sample: str, count: int) -> dict[str, float]:
    """Run a sample in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.timers", "--sample", design, sample]
    done = subprocess.run([*command, "--pending", str(count)], check=True, capture_output=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def measure(count: int, runs: int) -> dict[str, dict[str, float]]:
    """Return the medians, by design and figure."""
    designs = ["asyncio", "wheel"] + ["uvloop"] * (find_spec("uvloop") is not None)
    values: dict[str, dict[str, list[float]]] = {design: {} for design in designs}
    for _ in range(runs):
        for sample in SAMPLES:
            for design in designs:
                for name, value in sample_of(design, sample, count).items():
                    values[design].setdefault(name, []).append(value)
    return {
        d: {name: statistics.median(v) for name, v in figures.items()}
        for d, figures in values.items()
    }


def print_table(medians: dict[str, dict[str, float]]) -> None:
    other_designs = [design for design in medians if design != "wheel"]
    print(
        f"{'':12}{'wheel':>10}" + "".join(f"{design:>12}{'ratio':>9}" for design in other_designs)
    )
    for name, unit in UNITS.items():
        mine = medians["wheel"][name]
        row = f"{name + ' ' + unit:12}{mine:10.2f}"
        for design in other_designs:
            theirs = medians[design].get(name)
            row += (
                f"{'-':>12}{'-':>9}" if theirs is None else f"{theirs:12.2f}{theirs / mine:8.1f}x"
            )
        print(row)


def draw(plt: Any, file: str, medians: dict[str, dict[str, float]], footer: str) -> None:
    labels = {
        "pair": "add and cancel",
        "add": "add",
        "cancel": "cancel",
        "expire": "expire",
        "memory": "memory",
    }
    figure, axes = plt.subplots(figsize=(6.6, 3.4))
    other_designs = [design for design in medians if design != "wheel"]
    for at, (design, colour) in enumerate(zip(other_designs, (ORANGE, SKY), strict=False)):
        ratios = [medians[design].get(name, 0.0) / medians["wheel"][name] for name in labels]
        places = [place + 0.2 - at * 0.4 for place in range(len(labels))]
        bars = axes.barh(
            places,
            ratios,
            height=0.36,
            color=colour,
            label="asyncio" if design == "asyncio" else design,
        )
        axes.bar_label(
            bars,
            labels=[f"{ratio:.1f}" if ratio else "not measured" for ratio in ratios],
            padding=3,
            fontsize=8,
        )
    axes.axvline(1, color=BLUE, linewidth=1.4, label="the wheel")
    axes.set_yticks(range(len(labels)), list(labels.values()))
    axes.invert_yaxis()
    axes.set_title(
        "loop.call_later: multiples of the wheel's time or memory", loc="left", fontsize=9.5
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(
        "Timers of the wheel and of the event loop", x=0.012, ha="left", fontweight="bold"
    )
    figure.subplots_adjust(left=0.17, right=0.96, top=0.83, bottom=0.12)
    save(figure, file, footer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the timer wheel against loop.call_later.")
    add_options(parser)
    parser.add_argument("--pending", type=int, default=100_000, help="number of outstanding timers")
    parser.add_argument(
        "--runs", type=int, default=5, help="number of interleaved runs; the median is reported"
    )
    parser.add_argument("--sample", nargs=2, metavar=("DESIGN", "SAMPLE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        design, sample = options.sample
        print(json.dumps(run_sample(design, sample, options.pending)))
        return
    plt = plotter() if options.plot else None
    medians = measure(options.pending, options.runs)
    about = machine()
    if options.json:
        print(
            json.dumps(
                {
                    "machine": about,
                    "pending": options.pending,
                    "runs": options.runs,
                    "medians": medians,
                }
            )
        )
    else:
        print(
            f"{about}\n{options.pending:,} timers, medians of {options.runs} runs; ratio: multiple"
            " of the wheel's figure\n"
        )
        print_table(medians)
    if plt:
        draw(
            plt,
            options.plot,
            medians,
            f"{about}. {options.pending:,} timers, medians of {options.runs} interleaved runs.",
        )


if __name__ == "__main__":
    main()
