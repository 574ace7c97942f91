"""The processes that work on reliable queues: on all of them, or on one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._dashboard.page import Page
from delayq._dashboard.reliable_source import ReliableSource
from delayq._dashboard.rows import Place, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq.stats import RunningMessage, WorkerInfo

# How many queues are asked at a time.
_AT_A_TIME = 50


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    chosen = await board.reliable(request) if request.query_params.get("name") else None
    sources = [chosen] if chosen is not None else await _every(board)
    now = await board.now()
    rows: list[tuple[ReliableSource, WorkerInfo]] = []
    for at in range(0, len(sources), _AT_A_TIME):
        some = sources[at : at + _AT_A_TIME]
        found = await asyncio.gather(*(source.workers() for source in some))
        rows += [(source, each) for source, of in zip(some, found, strict=True) for each in of]
    rows.sort(key=lambda row: (row[1].host, row[1].pid, row[1].queue))
    return {"rows": rows, "chosen": chosen, "now": now, "row_of": _row_of}


async def _every(board: Board) -> list[ReliableSource]:
    sources = [board.queues.of(*each) for each in await board.queues.known()]
    return [source for source in sources if isinstance(source, ReliableSource)]


def _row_of(message: RunningMessage) -> Row:
    """Return what a link to a message needs."""
    return Row(Place(message.id.encode(), message.partition), "leased", None)


PAGE = Page("/workers", "workers.html", load, label="Workers", scope="server", refresh=5)
