"""Draws charts as SVG: round ticks, and the paths of bars and lines. Pure.

A path is drawn on a field with one unit of width for each column, which a page stretches to its
width, and one unit of height for each pixel. A column without a value leaves a gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from delayq.stats import Activity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The part of a column that its bar leaves free on each side.
_MARGIN = 0.1
# A single message among millions is visible, too, in pixels.
_LEAST_HEIGHT = 2.0
# About how many ticks an axis of counts has.
_TICKS = 4
# Durations at which an axis may have ticks, in seconds.
_DURATIONS = (
    (0.0001, "0.1 ms"),
    (0.001, "1 ms"),
    (0.01, "10 ms"),
    (0.1, "0.1 s"),
    (1.0, "1 s"),
    (10.0, "10 s"),
    (60.0, "1 min"),
    (600.0, "10 min"),
    (3600.0, "1 h"),
    (36_000.0, "10 h"),
    (86_400.0, "1 d"),
)
# The least distance between two labels, in pixels.
_LINE = 14.0

MONDAY = 345_600
"""The beginning of a week, in seconds since 1970: ticks lie whole steps from it."""

Shows = Literal["clock", "weekday", "date"]


@dataclass(frozen=True)
class Tick:
    """A tick of an axis: where it is, in pixels or in percent of the width, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class TimeAxis:
    """An axis of times, with ticks at round times in UTC. The script of the page moves them to
    round times in the time zone of its reader.

    Attributes:
        start: The moment at its left end, in seconds since 1970.
        end: The moment at its right end.
        step: The time between two ticks, in seconds.
        shows: Whether the labels are times of the day, days of the week, or dates.
    """

    start: int
    end: int
    step: int
    shows: Shows

    @property
    def ticks(self) -> list[Tick]:
        """The ticks, in percent of the width."""
        first = self.start + (MONDAY - self.start) % self.step
        return [
            Tick(round(100 * (at - self.start) / (self.end - self.start), 2), self._label(at))
            for at in range(first, self.end, self.step)
        ]

    def _label(self, at: int) -> str:
        moment = datetime.fromtimestamp(at, UTC)
        if self.shows == "clock":
            return f"{moment:%H:%M}"
        return (
            f"{moment:%a} {moment.day}" if self.shows == "weekday" else f"{moment:%b} {moment.day}"
        )


@dataclass(frozen=True)
class CountScale:
    """A scale of counts, with a line at zero and round ticks above and below it.

    Attributes:
        height: The height of the chart, in pixels.
        zero: How far down the line at zero is, in pixels.
        ticks: The ticks, from the top. Those below zero have the same labels as those above it.
    """

    height: float
    zero: float
    unit: float
    ticks: Sequence[Tick]

    @classmethod
    def of(cls, above: int, below: int, height: float) -> CountScale:
        """Return the scale for the largest counts above and below the line at zero."""
        step = _round_step((above + below) / _TICKS)
        up = max(1, math.ceil(above / step))
        down = math.ceil(below / step)
        unit = height / ((up + down) * step)
        zero = up * step * unit
        size, name = _unit(max(up, down) * step)

        def label(count: int) -> str:
            return f"{count / size:,g}{name}" if count else "0"

        ticks = [
            Tick(round(zero - number * step * unit, 2), label(abs(number) * step))
            for number in range(up, -down - 1, -1)
        ]
        return cls(height, zero, unit, ticks)

    def length(self, count: int) -> float:
        """Return the height of a bar."""
        return max(_LEAST_HEIGHT, count * self.unit) if count else 0.0


@dataclass(frozen=True)
class DurationScale:
    """A logarithmic scale of durations.

    Attributes:
        height: The height of the chart, in pixels.
        ticks: The ticks, from the top.
    """

    height: float
    least: float
    most: float
    ticks: Sequence[Tick]

    @classmethod
    def of(cls, durations: Iterable[float], height: float) -> DurationScale:
        """Return the scale from the shortest to the longest of some durations, in seconds."""
        shortest, longest = (
            min(durations := [*durations], default=0.01),
            max(durations, default=1.0),
        )
        last = len(_DURATIONS) - 1
        low = max(at for at in range(last) if at == 0 or _DURATIONS[at][0] <= shortest)
        high = min(
            at for at in range(low + 1, last + 1) if at == last or _DURATIONS[at][0] >= longest
        )
        high = max(high, min(low + 2, last))
        scale = cls(height, _DURATIONS[low][0], _DURATIONS[high][0], ())
        ticks: list[Tick] = []
        for seconds, label in reversed(_DURATIONS[low : high + 1]):
            at = round(scale.at(seconds), 2)
            if not ticks or at >= ticks[-1].at + _LINE:
                ticks.append(Tick(at, label))
        return cls(height, scale.least, scale.most, ticks)

    def at(self, seconds: float) -> float:
        """Return how far down a duration is, in pixels."""
        share = math.log(seconds / self.least) / math.log(self.most / self.least)
        return self.height * (1 - min(1.0, max(0.0, share)))


def _unit(most: int) -> tuple[int, str]:
    """Return the unit in which counts up to the largest one are written, and its name."""
    units = ((1_000_000_000, "G"), (1_000_000, "M"), (1000, "k"))
    return next((unit for unit in units if most >= 10 * unit[0]), (1, ""))


def _round_step(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20 and so on that is not less."""
    if least <= 1:
        return 1
    power: int = 10 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def bars(extents: Sequence[tuple[float, float]]) -> str:
    """Return the path of a bar in each column, from its top and its height."""
    width = f"{1 - 2 * _MARGIN:g}"
    return "".join(
        f"M{column + _MARGIN:g} {top:.4g}h{width}v{height:.4g}h-{width}z"
        for column, (top, height) in enumerate(extents)
        if height
    )


def steps(heights: Sequence[float | None]) -> str:
    """Return the path of a line with a level in each column."""
    parts: list[str] = []
    before: float | None = None
    for column, height in enumerate(heights):
        if height is not None:
            parts.append(f"M{column} {height:.4g}" if before is None else f"V{height:.4g}")
            parts.append("h1")
        before = height
    return "".join(parts)


def band(edges: Sequence[tuple[float, float] | None]) -> str:
    """Return the path of an area between an upper and a lower edge in each column."""
    return "".join(
        f"M{column} {edge[0]:.4g}h1v{edge[1] - edge[0]:.4g}h-1z"
        for column, edge in enumerate(edges)
        if edge is not None
    )


def runs(values: Sequence[object], height: float, *, are_there: bool) -> str:
    """Return the path of a line at one height, along the columns with a value, or without one."""
    parts, column = [], 0
    for is_there, group in groupby(values, key=bool):
        count = len([*group])
        if is_there == are_there:
            parts.append(f"M{column} {height:.4g}h{count}")
        column += count
    return "".join(parts)


def by_seconds(activities: Sequence[Activity], seconds: int, most: int) -> list[Activity]:
    """Add up the activities of equal periods that begin at round times, in UTC.

    Return the last ``most`` periods; the current one has not ended yet.
    """

    def period(activity: Activity) -> int:
        return int(activity.start.timestamp()) // seconds

    parts = [Activity.total([*group]) for _, group in groupby(activities, key=period)]
    return parts[-most:]


def duration(seconds: float) -> str:
    """Format a duration in one unit, with two digits or a few more."""
    if seconds < 0.995:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
    for unit, name in ((1, "s"), (60, "min"), (3600, "h")):
        if seconds < 99.5 * unit or name == "h":
            break
    number = seconds / unit
    return (
        f"{number:.1f}".removesuffix(".0") + f" {name}"
        if number < 9.95
        else f"{number:,.0f} {name}"
    )
