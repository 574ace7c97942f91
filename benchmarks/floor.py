"""Measure delayq beside the same work done by hand: ``python -m benchmarks.floor [options]``.

Each row has a figure of delayq, the same figure of a counterpart, their ratio, and a goal. The
counterpart handles the same messages of 100 bytes with as little code as possible; ``_by_hand.py``
tells what it leaves out. Every sample is a process of its own. Samples are interleaved, and the
medians of the runs are shown: the ratio is the median of the ratios of the runs, with the lowest
and the highest in brackets. A row without a counterpart has a goal for the figure itself, and its
lowest and highest in brackets.

The second table divides the processor time of the client and of the server by cause, in µs per
message. Each of its columns is two more samples, under Python's profiler. The time that the
profiler itself takes is spread over the calls and subtracted, so that a column adds up to the
client's time without a profiler. The server's time is that of the profiled samples: commands that
scripts call, the rest of the scripts, and all that the server does outside scripts. The server
measures scripts in elapsed time. D is a DelayedQueue, and R a ReliableQueue.

Everything runs on private servers, and takes about 7 minutes, or a minute with ``--quick``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import deliver, importing, lateness, many_clients, offer, partitions, timers
from benchmarks._moves import address, measured_server
from benchmarks._profile import client_us, server_us, undisturbed
from benchmarks._report import Table, machine
from benchmarks._samples import medians, result, start

if TYPE_CHECKING:
    from tests.support.clusters import TestCluster

DELAYED, RELIABLE = offer.KINDS
PARTITIONS, MASTERS = 16, partitions.MASTERS
# Many clients: how far due times are apart, seconds, and the number of processes.
APART_S, PROCESSES = 0.1, 2
IMPORTS, PROFILE_RUNS = 3, 2
# A cause that has a smaller share than this in each column is not shown by itself.
SMALL = 0.05
TIMER = "floor, timerfd" if sys.platform == "linux" else "floor, loop's timer"


@dataclass(frozen=True)
class Sizes:
    """How much each sample does: numbers of messages, seconds, clients, due times, and timers."""

    offers: int = 40_000
    slice: int = 500
    delivered: int = 100_000
    spread_s: float = 4.0
    steady_s: float = 3.0
    partitioned: int = 100_000
    clients: int = 2000
    moments: int = 30
    timers: int = 100_000


QUICK = Sizes(5000, 100, 5000, 1.0, 1.0, 5000, 200, 10, 20_000)


class Stage:
    """The servers of the samples, and the messages that are stored once for all runs."""

    def __init__(self, stack: ExitStack, sizes: Sizes) -> None:
        self.sizes = sizes
        self.server = stack.enter_context(measured_server(None))
        self.url = address(self.server, None)
        self._stack = stack

    @cached_property
    def stored(self) -> dict[str, dict[bytes, bytes]]:
        return deliver.store_all(self.server, self.url, self.sizes.delivered)

    @cached_property
    def one_master(self) -> TestCluster:
        return self._stack.enter_context(partitions.masters(1))

    @cached_property
    def masters(self) -> TestCluster:
        return self._stack.enter_context(partitions.masters(MASTERS))


# Samples: each returns its figures, and if it is asked for one, a profile

Figures = dict[str, float]
Sample = Callable[..., Any]


def offering(stage: Stage, role: str, *, profile: bool = False, **options: Any) -> Any:
    stage.server.execute_command("FLUSHALL", "SYNC")
    options = {"offers": stage.sizes.offers, "profile": profile} | options
    return result(start("offer", role=role, url=stage.url, **options))


def one_by_one(stage: Stage) -> Figures:
    stage.server.execute_command("FLUSHALL", "SYNC")
    options = {"size": stage.sizes.slice, "own_scripts": False}
    outcome = result(start("offer", role="one_by_one", url=stage.url, **options))
    return {f"{way}, {name}": outcome[way][name] for way in outcome for name in outcome[way]}


def alone(stage: Stage, kind: str, *, profile: bool) -> Any:
    count = offer.SLICES * stage.sizes.slice
    return offering(stage, "at_once", kind=kind, tasks=1, offers=count, profile=profile)


def delivering(stage: Stage, way: str, *, profile: bool = False) -> Any:
    count = stage.sizes.delivered
    return deliver.run_sample(
        stage.server, stage.url, stage.stored, way, "asyncio", count, profile=profile
    )


def late(stage: Stage, load: str, way: str) -> Figures:
    seconds = stage.sizes.spread_s if load == "spread" else stage.sizes.steady_s
    return lateness.run_sample(stage.server, stage.url, load, way, "asyncio", seconds)


def partitioned(stage: Stage, count: int | None, clients: int = 1) -> Figures:
    """Offer to a queue in partitions on three masters, or to a plain one on one master, and take
    everything.
    """
    cluster = stage.masters if count else stage.one_master
    return partitions.sampled(cluster, count, stage.sizes.partitioned, clients)


def crowd(stage: Stage) -> Figures:
    return many_clients.measure(
        stage.server,
        stage.url,
        RELIABLE,
        stage.sizes.clients,
        processes=PROCESSES,
        moments=stage.sizes.moments,
        apart=APART_S,
    )


def timing(stage: Stage, design: str) -> Figures:
    return timers.sample_of(design, "speed", stage.sizes.timers)


def importing_of(_stage: Stage, name: str) -> Figures:
    program = importing.PROGRAMS[name]
    return {"ms": statistics.median(importing.measured(program) for _ in range(IMPORTS))}


SHARED, ONE_BY_ONE, ONE_QUEUE, PARTITIONED = "shared", "one by one", "one queue", "partitioned"
TWO_CLIENTS = "partitioned, two clients"
CROWD, WHEEL, CALL_LATER = "many clients", "wheel", "call_later"
LEASED, AT_MOST_ONCE = deliver.BY_HAND
LOOP, DELIVERIES = f"{RELIABLE}, async for", f"{DELAYED}, deliveries()"
WORKERS = tuple(way for way in deliver.WAYS if way.startswith("Worker"))
SAMPLES: dict[str, Sample] = {
    SHARED: partial(offering, role="by_hand"),
    **{
        f"{kind}, {way}": partial(offering, role="at_once", kind=kind, tasks=tasks)
        for kind in offer.KINDS
        for way, tasks in (("at once", 1000), ("many", 0))
    },
    ONE_BY_ONE: one_by_one,
    **{
        way: partial(delivering, way=way)
        for way in (LEASED, AT_MOST_ONCE, LOOP, *WORKERS, DELIVERIES)
    },
    **{f"{kind}, steady": partial(late, load="steady", way=kind) for kind in offer.KINDS},
    **{f"{way}, spread": partial(late, load="spread", way=way) for way in (TIMER, *offer.KINDS)},
    ONE_QUEUE: partial(partitioned, count=None),
    PARTITIONED: partial(partitioned, count=PARTITIONS),
    TWO_CLIENTS: partial(partitioned, count=PARTITIONS, clients=2),
    CROWD: crowd,
    WHEEL: partial(timing, design="wheel"),
    CALL_LATER: partial(timing, design="asyncio"),
    "import delayq": partial(importing_of, name="delayq"),
    "import asyncio": partial(importing_of, name="asyncio"),
}
# The columns of the second table: a sample to profile, the one that tells its time without a
# profiler, and how the names of those figures begin.
PROFILES: dict[str, tuple[Sample, str, str]] = {
    " offer, hand": (SAMPLES[SHARED], SHARED, ""),
    **{
        f" {head} {kind[0]}": (SAMPLES[f"{kind}, {way}"], f"{kind}, {way}", "")
        for head, way in (("1,000", "at once"), ("many", "many"))
        for kind in offer.KINDS
    },
    **{
        f" lone {kind[0]}": (partial(alone, kind=kind), ONE_BY_ONE, f"{kind}, one by one, ")
        for kind in offer.KINDS
    },
    " lease, hand": (SAMPLES[LEASED], LEASED, ""),
    " async for R": (SAMPLES[LOOP], LOOP, ""),
    " Worker 100": (SAMPLES[WORKERS[0]], WORKERS[0], ""),
    " deliveries D": (SAMPLES[DELIVERIES], DELIVERIES, ""),
}


# Rows


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        figure: The name of the figure, and its unit.
        sample: The name of the sample, and of its figure.
        by_hand: The same of the counterpart; None if there is none.
        at_least: The goal of a ratio that should be high, if there is one.
        at_most: The goal of a ratio, or of a figure without a counterpart, that should be low.
        inverse: Whether the ratio is the counterpart's figure over delayq's.
    """

    figure: str
    sample: tuple[str, str]
    by_hand: tuple[str, str] | None = None
    at_least: float | None = None
    at_most: float | None = None
    inverse: bool = False

    def samples(self) -> set[str]:
        return {self.sample[0], self.by_hand[0]} if self.by_hand else {self.sample[0]}

    def judge(self, runs: list[dict[str, Figures]]) -> dict[str, Any]:
        """Return the row's figures over the runs, and whether it meets its goal."""
        ours = [run[self.sample[0]][self.sample[1]] for run in runs]
        row: dict[str, Any] = {"what": self.figure, "delayq": statistics.median(ours)}
        judged = ours
        if self.by_hand is not None:
            theirs = [run[self.by_hand[0]][self.by_hand[1]] for run in runs]
            over, under = (theirs, ours) if self.inverse else (ours, theirs)
            judged = [
                numerator / denominator for numerator, denominator in zip(over, under, strict=True)
            ]
            row |= {"by_hand": statistics.median(theirs), "ratio": statistics.median(judged)}
        value = statistics.median(judged)
        row |= {"runs": judged, "least": min(judged), "most": max(judged)}
        if self.at_least is not None:
            row |= {"goal": f">= {self.at_least:g}", "met": value >= self.at_least}
        elif self.at_most is not None:
            row |= {"goal": f"<= {self.at_most:g}", "met": value <= self.at_most}
        return row


def all_rows(clients: int) -> list[Row]:
    return [*rows_of_offers(), *rows_of_deliveries(), *rows_of_moments(clients), *other_rows()]


def rows_of_offers() -> list[Row]:
    rows = []
    for name, way, goals in (
        ("offers, 1,000 at once", "at once", (0.70, 0.60)),
        ("offer_many(1,000)", "many", (0.85, 0.75)),
    ):
        for kind, goal in zip(offer.KINDS, goals, strict=True):
            ours = f"{kind}, {way}", "rate"
            rows.append(Row(f"{name}, {kind}, /s", ours, (SHARED, "rate"), goal))
    for figure, unit, at_least in (
        ("rate", "/s", 0.85),
        ("client_us", "client us", None),
        ("script_us", "script us", None),
    ):
        for kind in offer.KINDS:
            ours = ONE_BY_ONE, f"{kind}, one by one, {figure}"
            bare = ONE_BY_ONE, f"{offer.BARE}, {figure}"
            rows.append(Row(f"one lone offer, {kind}, {unit}", ours, bare, at_least))
    return rows


def rows_of_deliveries() -> list[Row]:
    goals = {LOOP: 1.3, **dict.fromkeys(WORKERS, 1.0), DELIVERIES: 1.0}
    rates = [
        Row(f"{way}, /s", (way, "rate"), (LEASED, "rate"), goal) for way, goal in goals.items()
    ]
    script = LOOP, "script_us"
    return [
        *rates,
        Row(f"{LOOP}, to at most once, /s", (LOOP, "rate"), (AT_MOST_ONCE, "rate")),
        Row("claim + ack, script us", script, (LEASED, "script_us"), at_most=1.5),
        Row("claim + ack, to at most once, script us", script, (AT_MOST_ONCE, "script_us")),
    ]


def rows_of_moments(clients: int) -> list[Row]:
    steady = [
        Row(f"{lateness.STEADY:,}/s, {kind}, p99 ms", (f"{kind}, steady", "p99"), at_most=4.0)
        for kind in reversed(offer.KINDS)
    ]
    spread = [
        Row(
            f"lateness, {kind}, {part} ms",
            (f"{kind}, spread", part),
            (f"{TIMER}, spread", part),
            at_most=1.1,
        )
        for kind in reversed(offer.KINDS)
        for part in ("p50", "p99")
    ]
    return [
        *steady,
        *spread,
        Row(f"{clients:,} clients, claims a message", (CROWD, "claims"), at_most=3.0),
        Row(f"{clients:,} clients, p99 ms", (CROWD, "p99"), at_most=50.0),
    ]


def other_rows() -> list[Row]:
    name = f"{PARTITIONS} partitions on {MASTERS} masters"
    parts = [
        Row(f"{name}, {unit}", (PARTITIONED, figure), (ONE_QUEUE, figure), at_least, at_most)
        for figure, unit, at_least, at_most in (
            ("offer rate", "offers/s", None, None),
            ("take rate", "taken/s", 1.8, None),
            ("offer client", "client us an offer", None, 1.2),
            ("take client", "client us a message taken", None, 1.2),
        )
    ]
    # These need a processor for each process.
    parts += [
        Row(
            f"{name}, possible {unit}, 2 clients to 1",
            (TWO_CLIENTS, f"{call} possible"),
            (PARTITIONED, f"{call} possible"),
            1.7,
        )
        for call, unit in (("offer", "offers/s"), ("take", "taken/s"))
    ]
    wheel, call_later = (WHEEL, "pair"), (CALL_LATER, "pair")
    delayq, asyncio = ("import delayq", "ms"), ("import asyncio", "ms")
    return [
        *parts,
        Row("timers, add + cancel, to call_later, ns", wheel, call_later, 6.0, inverse=True),
        Row("import delayq, to asyncio, ms", delayq, asyncio, at_most=1.6),
    ]


# Tables


def figure_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def cells_of(row: dict[str, Any]) -> list[str]:
    verdict = {True: "yes", False: "NO", None: ""}[row.get("met")]
    span = f"[{figure_text(row['least'])} - {figure_text(row['most'])}]"
    figures = [figure_text(row.get(name)) for name in ("delayq", "by_hand", "ratio")]
    return [row["what"], *figures, span, row.get("goal", ""), verdict]


def causes(
    stage: Stage, runs: list[dict[str, Figures]], profiles: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Profile the samples of the runs, and divide the time of client and server by cause."""
    heads = [head for head, (_, plain, _) in PROFILES.items() if plain in runs[0]]
    samples: dict[str, list[Any]] = {head: [] for head in heads}
    for _ in range(profiles):
        for head, sample_list in samples.items():
            sample_list.append(PROFILES[head][0](stage, profile=True))
    divided = {}
    for head, sample_list in samples.items():
        _, plain, of = PROFILES[head]
        cost = medians(sample["figures"] for sample in sample_list)
        divided[head] = {
            "client": client_us(
                undisturbed([sample["client"] for sample in sample_list]),
                cost,
                statistics.median(run[plain][f"{of}client_us"] for run in runs),
                # So little that it is often less than the system can tell in one run.
                statistics.fmean(run[plain][f"{of}kernel_us"] for run in runs),
            ),
            "server": server_us(
                medians(sample["commands"] for sample in sample_list),
                cost["script_us"],
                cost["server_us"],
            ),
        }
    return divided


def print_causes(causes_by_head: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print a column for each sample, with the causes of the client and then of the server."""
    heads = ["us per message by cause".ljust(36), *causes_by_head]
    table = Table({"head": ""}, heads, as_json=False)
    for part in ("client", "server"):
        columns = [column[part] for column in causes_by_head.values()]
        totals = [sum(column.values()) for column in columns]
        largest: dict[str, float] = {}
        for column, total in zip(columns, totals, strict=True):
            for cause, us in column.items():
                largest[cause] = max(largest.get(cause, 0.0), us / total)
        small = {cause for cause, share in largest.items() if share < SMALL}
        table.add({}, part, *(f"{total:.2f}" for total in totals))
        for cause in sorted(largest.keys() - small, key=lambda cause: -largest[cause]):
            table.add({}, f"  {cause}", *(f"{column.get(cause, 0.0):.2f}" for column in columns))
        rests = (sum(column.get(cause, 0.0) for cause in small) for column in columns)
        table.add({}, "  others", *(f"{small_share:.2f}" for small_share in rests))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--rows", nargs="+", metavar="WORD", help="measure only the rows that contain one of these"
    )
    parser.add_argument("--runs", type=int, help="number of interleaved runs; default: 5")
    parser.add_argument(
        "--quick", action="store_true", help="one run of short samples, to see that all is well"
    )
    parser.add_argument(
        "--clients",
        type=int,
        help="number of clients that wait for one queue; default: 2,000, or 200 with --quick",
    )
    options = parser.parse_args()
    runs = options.runs or (1 if options.quick else 5)
    sizes = QUICK if options.quick else Sizes()
    if options.clients is not None:
        sizes = replace(sizes, clients=options.clients)
    if sizes.clients < PROCESSES or sizes.clients % PROCESSES:
        parser.error(f"--clients must be a multiple of {PROCESSES}")
    rows = [
        row
        for row in all_rows(sizes.clients)
        if not options.rows or any(word.lower() in row.figure.lower() for word in options.rows)
    ]
    if not rows:
        parser.error(f"no row contains {' or '.join(map(repr, options.rows))}")
    sample_names = set[str]().union(*(row.samples() for row in rows))
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        stage = Stage(stack, sizes)
        about = {
            "machine": machine(stage.server),
            "measured": (
                f"messages of 100 bytes, asyncio; medians of {runs} interleaved runs; load by"
                f" others before it began: {load:.2f}"
            ),
        }
        figures = [
            {name: sample(stage) for name, sample in SAMPLES.items() if name in sample_names}
            for _ in range(runs)
        ]
        divided = causes(stage, figures, 1 if options.quick else PROFILE_RUNS)
    columns = (
        "what".ljust(52),
        "    delayq",
        "   by hand",
        "  ratio",
        " [least - most]".rjust(18),
        " goal   ".rjust(8),
        " met",
    )
    table = Table(about, columns, as_json=options.json)
    for row in rows:
        judged = row.judge(figures)
        table.add(judged, *cells_of(judged))
    if divided and not options.json:
        print_causes(divided)
    table.end(causes={head.strip(): parts for head, parts in divided.items()}, samples=figures)


if __name__ == "__main__":
    main()
