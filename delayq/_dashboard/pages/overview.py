"""All queues, those in trouble first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from delayq._dashboard.board import Page
from delayq._dashboard.forms import whole_number
from delayq._dashboard.health import STATES, is_late, late_us, states, undeliverable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq._dashboard.health import State
    from delayq._dashboard.live import Trail
    from delayq._dashboard.sources import AnySource
    from delayq.stats import QueueDepth

_PER_PAGE = 100
# A page explains why at most this many queues are late.
_MOST_EXPLAINED = 20
# With more queues than that, only those of the page are counted, so they are sorted by name.
_MAX_RANKED = 1000


@dataclass(frozen=True)
class Line:
    """A queue in the table. A queue that cannot be counted has no depth, but an error."""

    source: AnySource
    depth: QueueDepth | None
    error: str
    states: list[State]
    trail: Trail
    cause: str = ""

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
    return {
        "lines": await _explained(board, listed[offset : offset + _PER_PAGE] if ranked else listed),
        "sums": {name: _sum(listed, name) for name in ("delayed", "ready", "leased", "dead")},
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
    lines = []
    for source, depth in zip(sources, await board.live.depths(sources), strict=True):
        trail = board.live.trail(source)
        if isinstance(depth, str):
            lines.append(Line(source, None, depth, states(depth, source.kind), trail))
        else:
            trail.add(depth, late_us(depth, source.kind))
            lines.append(Line(source, depth, "", states(depth, source.kind), trail))
    return lines


async def _explained(board: Board, lines: Sequence[Line]) -> list[Line]:
    """Return the lines, the first ones of queues that are late with the cause."""
    late = [line for line in lines if line.depth is not None and is_late(line.states)]
    late = late[:_MOST_EXPLAINED]
    causes = await board.live.causes([line.source for line in late])
    cause_of = dict(zip(map(id, late), causes, strict=True))
    return [replace(line, cause=cause_of.get(id(line), "")) for line in lines]


def _labels(line: Line) -> list[str]:
    return [state.label for state in line.states]


def _troubles(lines: Sequence[Line]) -> list[tuple[State, int]]:
    """Return the troubles, the worst first, and how many queues have each."""
    counted = ((state, sum(state in line.states for line in lines)) for state in STATES)
    return [entry for entry in counted if entry[1] and entry[0].tone in ("bad", "warn")]


def _sum(lines: Sequence[Line], name: str) -> int:
    return sum(line.dead if name == "dead" else max(0, line.figure(name)) for line in lines)


PAGE = Page("/", "overview.html", load, label="Queues", scope="server", refresh=5)
