"""The history of a reliable queue, as charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._dashboard.board import Page
from delayq.stats import Activity, Spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq._reliable.report_format import Unit

# By its name in addresses: unit, number, text, and how many of them share a bar.
_SPANS: Mapping[str, tuple[Unit, int, str, int]] = {
    "hour": ("m", 60, "Last hour", 1),
    "day": ("m", 1440, "Last day", 15),
    "week": ("h", 168, "Last 7 days", 2),
    "month": ("h", 720, "Last 30 days", 8),
}
_COUNTS = {
    "offered": "Offered",
    "handled": "Handled",
    "failed": "Failed attempts",
    "dead": "Dead",
    "expired": "Expired",
}
_HEIGHT = 40.0


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: its position and height, and the text that explains it."""

    x: int
    y: float
    height: float
    title: str


@dataclass(frozen=True)
class Chart:
    """A chart: its bars, one unit wide each, and the figure for the whole period."""

    label: str
    total: str
    peak: str
    bars: Sequence[Bar]
    width: int


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    span_name = request.query_params.get("span", "")
    span_name = span_name if span_name in _SPANS else "hour"
    unit, span, _, share = _SPANS[span_name]
    activities = await source.activity(unit, span)
    parts = [Activity.total(activities[at : at + share]) for at in range(0, len(activities), share)]
    total = Activity.total(activities)
    charts = [
        _chart(label, parts, [getattr(part, name) for part in parts], getattr(total, name), _count)
        for name, label in _COUNTS.items()
    ]
    for label, name in (("Late when handed out", "lateness"), ("Handlers took", "handling")):
        for quantile, text in ((0.5, "median"), (0.99, "99 %")):
            figures = [_quantile(getattr(part, name), quantile) for part in parts]
            of_all = _quantile(getattr(total, name), quantile)
            charts.append(_chart(f"{label}, {text}", parts, figures, of_all, _duration))
    return {
        "source": source,
        "charts": charts,
        "span": span_name,
        "spans": [(name, text) for name, (_, _, text, _) in _SPANS.items()],
        "happened": any(getattr(total, name) for name in _COUNTS),
        "height": _HEIGHT,
    }


def _chart(
    label: str, parts: Sequence[Activity], figures: Sequence[float], total: float, text: Any
) -> Chart:
    peak = max(figures)
    bars = []
    for x, (part, figure) in enumerate(zip(parts, figures, strict=True)):
        if figure:
            # A single message among millions is visible, too.
            height = max(1.0, figure / peak * _HEIGHT)
            title = f"{part.start:%Y-%m-%d %H:%M} UTC: {text(figure)}"
            bars.append(Bar(x, round(_HEIGHT - height, 2), round(height, 2), title))
    return Chart(label, text(total), text(peak), bars, len(parts))


def _quantile(spread: Spread, share: float) -> float:
    return spread.quantile(share) or 0.0


def _count(figure: float) -> str:
    return f"{figure:,}"


def _duration(seconds: float) -> str:
    if not seconds:
        return "-"
    if seconds < 0.995:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds / 60:,.0f} min"


PAGE = Page(
    "/history",
    "history.html",
    load,
    label="History",
    scope="queue",
    kinds=("reliable",),
    refresh=60,
)
