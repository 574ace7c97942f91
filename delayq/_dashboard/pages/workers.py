"""The processes that work on reliable queues: on all of them, or on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._dashboard.page import Page
from delayq._dashboard.reliable_source import ReliableSource
from delayq._dashboard.rows import Place, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq.stats import RunningMessage, WorkerInfo

# Maximum number of workers that are shown, and of queues that could not be read.
_MOST_SHOWN = 200


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    chosen = await board.reliable(request) if request.query_params.get("name") else None
    sources = [chosen] if chosen is not None else await _every(board)
    now = await board.now()
    rows: list[tuple[ReliableSource, WorkerInfo]] = []
    troubles: list[tuple[ReliableSource, str]] = []
    for source, found in zip(sources, await board.live.workers(sources), strict=True):
        if isinstance(found, str):
            troubles.append((source, found))
        else:
            rows += [(source, each) for each in found]
    # A process may have more than one client.
    rows.sort(key=lambda row: (row[1].host, row[1].pid, row[1].queue, row[1].started_at))
    return {
        "rows": rows[:_MOST_SHOWN],
        "total": len(rows),
        "troubles": troubles[:_MOST_SHOWN],
        "chosen": chosen,
        "now": now,
        "row_of": _row_of,
    }


async def _every(board: Board) -> list[ReliableSource]:
    sources = [board.queues.of(*each) for each in await board.queues.find_all()]
    return [source for source in sources if isinstance(source, ReliableSource)]


def _row_of(message: RunningMessage) -> Row:
    """Return what a link to a message needs."""
    return Row(Place(message.id.encode(), message.partition), "leased", None)


PAGE = Page("/workers", "workers.html", load, label="Workers", scope="server", refresh=5)
