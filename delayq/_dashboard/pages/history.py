"""The history of a reliable queue, as charts that share an axis of times, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._dashboard import charts
from delayq._dashboard.board import Page
from delayq._dashboard.charts import CountScale, DurationScale, TimeAxis
from delayq._dashboard.rendering import us
from delayq.stats import Activity, Spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq._dashboard.charts import Shows, Tick
    from delayq._reliable.report_format import Unit

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


@dataclass(frozen=True)
class Period:
    """A time for which the history is shown, and how.

    Attributes:
        text: Its name.
        unit: The unit of what is read.
        span: How many units are read; one column more than is shown, which may begin earlier.
        columns: How many columns are shown.
        share: The time that each column stands for, in seconds.
        share_text: The same in words.
        step: The time between two ticks of the axis, in seconds.
        shows: The form of their labels.
    """

    text: str
    unit: Unit
    span: int
    columns: int
    share: int
    share_text: str
    step: int
    shows: Shows


# By its name in addresses.
_PERIODS = {
    "hour": Period("Last hour", "m", 60, 60, _MINUTE, "minute", 10 * _MINUTE, "clock"),
    "day": Period("Last day", "m", 1440, 96, 15 * _MINUTE, "15 minutes", 4 * _HOUR, "clock"),
    "week": Period("Last 7 days", "h", 170, 84, 2 * _HOUR, "2 hours", _DAY, "weekday"),
    "month": Period("Last 30 days", "h", 720, 90, 8 * _HOUR, "8 hours", 7 * _DAY, "date"),
}
_COUNTS = {
    "offered": "Offered",
    "handled": "Handled",
    "failed": "Failed attempts",
    "dead": "Dead",
    "expired": "Expired",
}
# Those that are drawn below zero, one below the other.
_UNSUCCESSFUL = ("failed", "dead", "expired")
_QUANTILES = {"p50": (0.5, "median"), "p99": (0.99, "99 %")}
_COUNTS_HEIGHT, _DURATIONS_HEIGHT = 200.0, 110.0


@dataclass(frozen=True)
class Mark:
    """A figure in a chart: the class that styles it, and its path."""

    name: str
    path: str


@dataclass(frozen=True)
class Entry:
    """An entry of a legend: the class of its marks, its label, and the figure of all columns."""

    name: str
    label: str
    total: str


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: Its id.
        title: Its heading.
        description: The same in words, for those who do not see it.
        height: Its height, in pixels.
        zero: How far down the line of zero is; its lower end if there is no zero.
        ticks: The ticks of its axis.
        marks: The figures that it draws, from the back to the front.
        legend: Its legend, in the order in which marks lie above each other.
    """

    name: str
    title: str
    description: str
    height: float
    zero: float
    ticks: Sequence[Tick]
    marks: Sequence[Mark]
    legend: Sequence[Entry]


@dataclass(frozen=True)
class Column:
    """The figures of a part of the period, in words: those that are not zero, and all of them.

    Attributes:
        start_us: When it begins, in microseconds.
        is_recorded: Whether anything is recorded of it.
        figures: By the labels of the table.
    """

    start_us: int
    is_recorded: bool
    figures: Mapping[str, str]

    @property
    def nonzero(self) -> Mapping[str, str]:
        """The figures that are not zero."""
        return {label: figure for label, figure in self.figures.items() if figure not in ("", "0")}


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    name = request.query_params.get("span", "")
    name = name if name in _PERIODS else "hour"
    period = _PERIODS[name]
    activities = await source.activity(period.unit, period.span)
    parts = charts.by_seconds(activities, period.share, period.columns)
    total = Activity.total(parts)
    start = int(parts[0].start.timestamp())
    return {
        "source": source,
        "span": name,
        "spans": [(each, period.text) for each, period in _PERIODS.items()],
        "period": period,
        "failed_share": _failed_share(total),
        "happened": any(getattr(total, count) for count in _COUNTS),
        "axis": TimeAxis(start, start + len(parts) * period.share, period.step, period.shows),
        "charts": [
            _chart_of_counts(parts, total, period),
            _chart_of_durations("lateness", "Late when handed out", parts, total),
            _chart_of_durations("handling", "Handlers took", parts, total),
        ],
        "columns": [_column(part) for part in parts],
        "recorded": charts.runs([_is_recorded(part) for part in parts], 0.5, are_there=True),
    }


def _chart_of_counts(parts: Sequence[Activity], total: Activity, period: Period) -> Chart:
    below = [sum(getattr(part, name) for name in _UNSUCCESSFUL) for part in parts]
    above = max(max(part.offered, part.handled) for part in parts)
    scale = CountScale.of(above, max(below), _COUNTS_HEIGHT)
    zero = scale.zero
    lengths = [scale.length(part.handled) for part in parts]
    marks = [Mark("handled", charts.bars([(zero - length, length) for length in lengths]))]
    ends = [zero] * len(parts)
    for name in _UNSUCCESSFUL:
        lengths = [scale.length(getattr(part, name)) for part in parts]
        marks.append(Mark(name, charts.bars([*zip(ends, lengths, strict=True)])))
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    offered = [zero - part.offered * scale.unit if _is_recorded(part) else None for part in parts]
    marks.append(Mark("offered", charts.steps(offered)))
    counts = ", ".join(
        f"{getattr(total, name):,} {label.lower()}" for name, label in _COUNTS.items()
    )
    return Chart(
        "counts",
        f"Messages per {period.share_text}",
        f"{period.text}: {counts}. At most {above:,} were offered or handled per"
        f" {period.share_text}, and {max(below):,} failed, died or expired.",
        scale.height,
        zero,
        scale.ticks,
        marks,
        [Entry(name, label, f"{getattr(total, name):,}") for name, label in _COUNTS.items()],
    )


def _chart_of_durations(name: str, title: str, parts: Sequence[Activity], total: Activity) -> Chart:
    spreads: list[Spread] = [getattr(part, name) for part in parts]
    levels = {
        quantile: [spread.quantile(share) for spread in spreads]
        for quantile, (share, _) in _QUANTILES.items()
    }
    known = [level for of_all in levels.values() for level in of_all if level is not None]
    scale = DurationScale.of(known, _DURATIONS_HEIGHT)
    heights = {
        quantile: [None if level is None else scale.at(level) for level in of_all]
        for quantile, of_all in levels.items()
    }
    edges = [
        None if low is None or high is None else (high, low)
        for low, high in zip(heights["p50"], heights["p99"], strict=True)
    ]
    of_total: Spread = getattr(total, name)
    legend = [
        Entry(quantile, text, _duration(of_total, share))
        for quantile, (share, text) in reversed(_QUANTILES.items())
    ]
    figures = ", ".join(f"{entry.label} {entry.total or 'unknown'}" for entry in legend)
    longest = charts.duration(max(known)) if known else "unknown"
    return Chart(
        name,
        title,
        f"{title}, in the whole period: {figures}. At most, 99 % of a column: {longest}.",
        scale.height,
        scale.height,
        scale.ticks,
        [
            Mark("range", charts.band(edges)),
            *(Mark(quantile, charts.steps(heights[quantile])) for quantile in ("p99", "p50")),
        ],
        legend,
    )


def _column(part: Activity) -> Column:
    figures = {label: f"{getattr(part, name):,}" for name, label in _COUNTS.items()}
    for label, spread in (("Late", part.lateness), ("Took", part.handling)):
        for share, text in _QUANTILES.values():
            figures[f"{label}, {text}"] = _duration(spread, share)
    return Column(us(part.start), _is_recorded(part), figures)


def _failed_share(total: Activity) -> str:
    """Return which share of the attempts failed; empty if there were none."""
    failed = total.failed + total.dead
    attempts = total.handled + failed
    share = 100 * failed / attempts if attempts else 0
    figure = f"{share:.0f}" if share >= 9.95 else f"{share:.2g}"
    return f"{figure} %" if attempts else ""


def _is_recorded(part: Activity) -> bool:
    return any(getattr(part, name) for name in _COUNTS) or part.lateness.count > 0


def _duration(spread: Spread, share: float) -> str:
    seconds = spread.quantile(share)
    return "" if seconds is None else charts.duration(seconds)


PAGE = Page(
    "/history",
    "history.html",
    load,
    label="History",
    scope="queue",
    kinds=("reliable",),
    refresh=60,
    every=2.5,
)
