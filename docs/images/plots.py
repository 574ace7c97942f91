"""Draws the plots of docs/performance.md from the output of benchmarks with ``--json``:
``python docs/images/plots.py`` writes them beside this file, or into a directory.

The figures are in ``benchmarks/figures``, in files with the names of the benchmarks. ``clients``
and ``crowd`` are of ``many_clients``, with a process for each client and without. The plots have no
background, and their colours are for light or dark pages, as the reader prefers.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from diagrams import BLUE, FAINT, GREEN, GREY, ORANGE, Picture

FIGURES = Path(__file__).parents[2] / "benchmarks" / "figures"
GRID = "#e1e5ec"
# Not libraries: the same work by hand.
BY_HAND = "raw redis-py"
# Delivers at most once.
AT_MOST_ONCE = "delayq DelayedQueue"
# The start of bars and lines, to the right of the names, and the least lateness that has a place.
LEFT = 156
LEAST_MS = 0.3


def read(name: str, table: str = "rows") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FIGURES / f"{name}.json").read_text("utf-8"))[table]
    return found


class Log:
    """A logarithmic scale between two places of a picture."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = math.log10(low), start
        self._step = (end - start) / (math.log10(high) - self._low)

    def __call__(self, value: float) -> float:
        return self._start + (math.log10(value) - self._low) * self._step


def settings(row: dict[str, Any], figure: str) -> dict[str, dict[str, Any]]:
    """Return the settings of a peer that were measured, by their names."""
    return {name: row[name] for name in ("default", "best") if figure in row.get(name, {})}


def named(p: Picture, y: float, name: str) -> bool:
    """Write the name of a row. Return whether it is one of delayq."""
    ours = name.startswith("delayq")
    p.text(LEFT - 8, y, name, size=11, anchor="end", bold=ours)
    return ours


def rates() -> Picture:
    """Draw the rates at which one process offers messages, and one handles them."""
    rows = [row for row in read("peers") if row["peer"] not in (AT_MOST_ONCE, BY_HAND)]
    found = [
        (
            row["peer"],
            max(each["delivered"] for each in settings(row, "delivered").values()),
            max(row["default"]["one"], row["default"]["bulk"]),
        )
        for row in rows
        if settings(row, "delivered")
    ]
    found.sort(key=lambda row: (not row[0].startswith("delayq"), -row[1]))
    height = 100 + 31 * len(found)
    p = Picture("Messages that one process offers and handles per second", height, card=False)
    p.text(16, 28, "Messages per second, one process", size=15, bold=True)
    p.lines(16, 46, "Each library at its best settings, with one process offering,", size=12)
    p.lines(16, 61, "and one handling; both beside the server on two cores.", size=12)
    for x, colour, words in (
        (LEFT, BLUE[0], "handled"),
        (LEFT + 72, ORANGE[0], "offered in bulk"),
    ):
        p.bar(x, 72, 10, 10, colour)
        p.text(x + 15, 81, words, size=12)
    most = max(max(handled, offered) for _, handled, offered in found)
    for number, (name, handled, offered) in enumerate(found):
        y = 92 + 31 * number
        named(p, y + 15, name)
        for at, (value, colour) in enumerate(((handled, BLUE[0]), (offered, ORANGE[0]))):
            width = max(value / most * 200, 1.5)
            p.bar(LEFT, y + 12 * at, width, 11, colour)
            p.text(LEFT + width + 5, y + 9.5 + 12 * at, f"{value:,.0f}", size=11)
    return p


def lateness() -> Picture:
    """Draw the lateness of messages, from the median to the 99th percentile."""
    found = [(row["peer"], settings(row, "p50")) for row in read("peers")]
    found = [(name, of) for name, of in found if of]
    found.sort(key=lambda row: (not row[0].startswith("delayq"), row[1]["default"]["p50"]))
    height = 108 + 27 * len(found)
    title = "How late messages are handled, from the median to the 99th percentile"
    p = Picture(title, height, card=False)
    p.text(16, 28, "From due to handled", size=15, bold=True)
    p.lines(16, 46, "100 messages a second. Dot: the median; end of the line:", size=12)
    p.lines(16, 61, "the 99th percentile.", size=12)
    p.dot(150, 57, GREY[0])
    p.text(159, 61, "by default", size=12)
    p.dot(236, 57, ORANGE[0])
    p.text(245, 61, "at best", size=12)
    p.dot(306, 57, BLUE[0])
    p.text(315, 61, "delayq", size=12)
    x = Log(LEAST_MS, 60_000, LEFT, 392)
    ends = {1: "1 ms", 10: "10 ms", 100: "0.1 s", 1000: "1 s", 10_000: "10 s", 60_000: "60 s"}
    for ms, words in ends.items():
        p.line(x(ms), 76, x(ms), height - 26, colour=GRID, width=1)
        p.text(x(ms), height - 11, words, size=12, anchor="middle", colour=FAINT)
    for number, (name, of) in enumerate(found):
        y = 90 + 27 * number
        ours = named(p, y + 4, "by hand" if name == BY_HAND else name)
        for at, (setting, each) in enumerate(of.items()):
            colour = BLUE[0] if ours else GREY[0] if setting == "default" else ORANGE[0]
            p50, p99 = (max(each[figure], LEAST_MS) for figure in ("p50", "p99"))
            level = y + (at * 9 - 4.5 if len(of) == 2 else 0)
            p.line(x(p50), level, x(p99), level, colour=colour, width=3.5)
            if each["p50"] >= LEAST_MS:
                p.dot(x(p50), level, colour)
            else:
                p.text(x(p99) + 6, level + 4, "many early", size=11)
    return p


def panel(p: Picture, y: float, title: str, x: Log, ticks: list[int], words: str) -> None:
    """Draw the title of a panel, and the axis below it."""
    p.text(16, y, title, bold=True)
    for tick in ticks:
        p.text(x(tick), y + 160, f"{tick:,}", size=11.5, colour=FAINT, anchor="middle")
    p.text(404, y + 176, words, size=11.5, colour=FAINT, anchor="end")


def series(p: Picture, points: list[tuple[float, float]], colour: str) -> None:
    """Draw a line through points, and a dot at each."""
    for start, end in pairwise(points):
        p.line(*start, *end, colour=colour, width=2.2)
    for x, y in points:
        p.dot(x, y, colour, 3.6)


KINDS = {"DelayedQueue": GREEN[0], "ReliableQueue": BLUE[0]}
# The ways of taking messages that stand for both kinds.
TAKING = {"DelayedQueue, async for": "DelayedQueue", "ReliableQueue, 100 tasks": "ReliableQueue"}


def scale() -> Picture:
    """Draw the costs of a message by the number of pending messages and of waiting clients."""
    title = "What a message costs, by how many are pending and how many clients wait"
    p = Picture(title, 470, card=False)
    p.text(16, 28, "What a message costs as you grow", size=15, bold=True)
    for at, (kind, colour) in enumerate(KINDS.items()):
        p.dot(22 + at * 120, 46, colour)
        p.text(32 + at * 120, 50, kind, size=12)
    flat = [row for row in read("deliver", "flat") if row["way"] in TAKING]
    by_kind: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for row in flat:
        by_kind[TAKING[row["way"]]].append((row["pending"], row["script_us"]))
    sizes = sorted({row["pending"] for row in flat})
    x = Log(sizes[0], sizes[-1], 64, 372)
    top = 5 * math.ceil(max(row["script_us"] for row in flat) * 1.1 / 5)
    panel(p, 80, "Server's time for a message, µs", x, sizes, "messages pending")
    for value in range(0, top + 1, 5):
        y = 224 - value / top * 130
        p.line(52, y, 404, y, colour=GRID, width=1)
        p.text(44, y + 4, f"{value}", size=11.5, colour=FAINT, anchor="end")
    for kind, points in by_kind.items():
        series(p, [(x(size), 224 - us / top * 130) for size, us in points], KINDS[kind])

    rows = [*read("clients"), *read("crowd")]
    clients = sorted({row["clients"] for row in rows})
    x, y_of = Log(1, clients[-1], 64, 384), Log(1, clients[-1], 424, 302)
    panel(p, 282, "Calls to the server for one due message", x, clients, "clients waiting for it")
    for tick in [tick for tick in (1, 10, 100, 1000) if tick <= clients[-1]]:
        p.line(52, y_of(tick), 404, y_of(tick), colour=GRID, width=1)
        p.text(44, y_of(tick) + 4, f"{tick:,}", size=11.5, colour=FAINT, anchor="end")
    p.line(x(1), y_of(1), x(clients[-1]), y_of(clients[-1]), colour=GREY[0], dash="4 4")
    middle = clients[-1] ** 0.7
    p.text(x(middle) - 10, y_of(middle), "if each client asked", size=11.5, anchor="end")
    for kind, colour in KINDS.items():
        points = [
            (x(row["clients"]), y_of(max(1, row["claims"]))) for row in rows if row["kind"] == kind
        ]
        series(p, points, colour)
    return p


PICTURES = {"rates": rates, "lateness": lateness, "scale": scale}


def draw(directory: Path) -> None:
    """Write all plots to a directory."""
    for name, picture in PICTURES.items():
        (directory / f"{name}.svg").write_text(str(picture()), "utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
