"""All queues, those in trouble first, each with its last hour and the causes of its trouble."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from delayq._background import gather_mixed
from delayq._dashboard.board import Page
from delayq._dashboard.charts import TimeAxis
from delayq._dashboard.forms import whole_number
from delayq._dashboard.health import late_us
from delayq._dashboard.recent import MINUTES, strip
from delayq.admin.states import DEAD, STATES, UNATTENDED, is_late, states, undeliverable
from delayq.stats import COUNTED_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq._dashboard.recent import Minutes, Strip
    from delayq._dashboard.sources import AnySource
    from delayq.admin.states import QueueState
    from delayq.stats import QueueDepth

_PER_PAGE = 100
# A page looks for the cause at most of this many queues that are late, and of as many that fail.
_MOST_EXPLAINED = 20
# The reasons for lateness that are the clearer for when work was last reported.
_IDLE = ("paused", "no_consumers")
_TICK = 15 * 60
# With more queues than that, only those of the page are counted, so they are sorted by name.
_MAX_RANKED = 1000


@dataclass(frozen=True)
class Line:
    """A queue in the table. A queue that cannot be counted has no depth, but an error.

    Its last minutes are None if they are unknown, and so are the last hour and its strip, which
    only queues on the page have, as they have the causes of their troubles.
    """

    source: AnySource
    depth: QueueDepth | None
    error: str
    states: list[QueueState]
    minutes: Minutes | None = None
    hour: Minutes | None = None
    strip: Strip | None = None
    causes: tuple[str, ...] = ()

    @property
    def dead(self) -> int:
        return undeliverable(self.depth) if self.depth else 0

    @property
    def late_us(self) -> int | None:
        return late_us(self.depth, self.source.kind) if self.depth else None

    def figure(self, name: str) -> int:
        return getattr(self.depth, name) if self.depth else -1


# By the name in the address: heading, how to sort, and whether the largest comes first.
_COLUMNS: dict[str, tuple[str, Callable[[Line], Any], bool]] = {
    "name": ("Queue", lambda line: line.source.name.casefold(), False),
    "state": ("State", lambda line: [STATES.index(state) for state in line.states], False),
    "delayed": ("Delayed", lambda line: line.figure("delayed"), True),
    "ready": ("Ready", lambda line: line.figure("ready"), True),
    "leased": ("Leased", lambda line: line.figure("leased"), True),
    "dead": ("Dead", lambda line: line.dead, True),
    "late": ("Oldest due", lambda line: line.late_us or 0, True),
}


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    params = request.query_params
    pattern, state = params.get("q", ""), params.get("state", "")
    offset = whole_number(params.get("offset"))
    # By name.
    queues = await board.queues.find_all()
    matching = [queue for queue in queues if pattern.casefold() in queue[1].casefold()]
    ranked = len(matching) <= _MAX_RANKED
    counted = matching if ranked else matching[offset : offset + _PER_PAGE]
    lines = await _lines(board, counted)
    sort = params.get("sort") if ranked else "name"
    sort = sort if sort in _COLUMNS else "state"
    _, key, largest_first = _COLUMNS[sort]
    backwards = params.get("order") == "reversed" and ranked
    lines.sort(key=key, reverse=largest_first != backwards)
    listed = [line for line in lines if not state or state in _labels(line)]
    total = len(listed) if ranked else len(matching)
    shown, axis = await _with_hours(
        board, listed[offset : offset + _PER_PAGE] if ranked else listed
    )
    return {
        "lines": await _explained(board, shown),
        "axis": axis,
        "sums": {name: _sum(listed, name) for name in COUNTED_STATES},
        "troubles": _troubles(lines),
        "columns": {name: (column[0], column[2]) for name, column in _COLUMNS.items()},
        "sort": sort,
        "backwards": backwards,
        "ranked": ranked,
        "most_ranked": _MAX_RANKED,
        "wanted": pattern,
        "state": state,
        "total": total,
        "offset": offset,
        "limit": _PER_PAGE,
    }


async def _lines(board: Board, queues: Sequence[Any]) -> list[Line]:
    sources = [board.queues.of(*queue) for queue in queues]
    depths, last_minutes = await gather_mixed(
        board.live.depths(sources), board.live.minutes(sources)
    )
    lines = []
    for source, depth, minutes in zip(sources, depths, last_minutes, strict=True):
        is_failing = minutes is not None and minutes.is_wave
        of_queue = states(depth, source.kind, is_failing=is_failing)
        if isinstance(depth, str):
            lines.append(Line(source, None, depth, of_queue))
        else:
            lines.append(Line(source, depth, "", of_queue, minutes))
    return await _with_consumers(board, lines)


async def _with_consumers(board: Board, lines: Sequence[Line]) -> list[Line]:
    """Return the lines. The first queues without a leased message are late, and not without
    consumers, if something else than a lack of them keeps their messages back.
    """
    idle = [line for line in lines if UNATTENDED in line.states][:_MOST_EXPLAINED]
    delays = await board.live.delays([line.source for line in idle])
    delay_of = dict(zip(map(id, idle), delays, strict=True))

    def states_of(line: Line) -> list[QueueState]:
        delay = delay_of.get(id(line))
        if delay is None or line.depth is None:
            return line.states
        is_failing = line.minutes is not None and line.minutes.is_wave
        return states(line.depth, line.source.kind, is_failing=is_failing, delay=delay)

    return [replace(line, states=states_of(line)) for line in lines]


async def _with_hours(board: Board, lines: Sequence[Line]) -> tuple[list[Line], TimeAxis]:
    """Return the lines with the last hours of their queues, and the axis of these."""
    hours = await board.live.hours(
        [line.source for line in lines], [line.minutes for line in lines]
    )
    # They may have been read in different minutes.
    starts = [hour.start for hour in hours if hour is not None]
    start = max(starts, default=int(time.time()) // 60 - MINUTES + 1)
    axis = TimeAxis(60 * start, 60 * (start + MINUTES), _TICK, "clock")
    with_hours = [
        replace(line, hour=hour, strip=None if hour is None else strip(hour, axis))
        for line, hour in zip(lines, hours, strict=True)
    ]
    return with_hours, axis


async def _explained(board: Board, lines: Sequence[Line]) -> list[Line]:
    """Return the lines, the first ones of queues in trouble with the causes."""
    late = [line for line in lines if line.depth is not None and is_late(line.states)]
    late = late[:_MOST_EXPLAINED]
    failing = [line for line in lines if line.minutes is not None and line.minutes.is_wave]
    failing = failing[:_MOST_EXPLAINED]
    delays, errors = await gather_mixed(
        board.live.delays([line.source for line in late]),
        board.live.errors([line.source for line in failing]),
    )
    delay_of = dict(zip(map(id, late), delays, strict=True))
    errors_of = dict(zip(map(id, failing), errors, strict=True))

    def causes(line: Line) -> Iterator[str]:
        if (delay := delay_of.get(id(line))) is not None:
            # The state beside it may say the same.
            cause = "" if delay.cause in _labels(line) else delay.cause
            idle = _idle_for(line) if delay.reason in _IDLE else ""
            if parts := [part for part in (cause, idle) if part]:
                yield "; ".join(parts)
        if line.minutes is not None and id(line) in errors_of:
            errors = errors_of[id(line)] or ()
            yield line.minutes.describe_failures(time.time(), errors)
        elif DEAD in line.states and line.hour is not None and (dead := sum(line.hour.dead)):
            yield f"{dead:,} died in the last hour"

    return [replace(line, causes=tuple(causes(line))) for line in lines]


def _idle_for(line: Line) -> str:
    """Return since when no process has worked on a queue from which nothing is taken."""
    if line.hour is None:
        return ""
    minutes = line.hour.since_work()
    if minutes is None:
        return "no work was reported in the last hour"
    return f"no work was reported for {minutes} min" if minutes > 1 else ""


def _labels(line: Line) -> list[str]:
    return [state.label for state in line.states]


def _troubles(lines: Sequence[Line]) -> list[tuple[QueueState, int]]:
    """Return the troubles, the worst first, and how many queues have each."""
    counted = ((state, sum(state in line.states for line in lines)) for state in STATES)
    return [entry for entry in counted if entry[1] and entry[0].tone in ("bad", "warn")]


def _sum(lines: Sequence[Line], name: str) -> int:
    return sum(line.dead if name == "dead" else max(0, line.figure(name)) for line in lines)


PAGE = Page("/", "overview.html", load, label="Queues", scope="server", refresh=5)
