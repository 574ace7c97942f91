"""All queues."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._dashboard.forms import whole
from delayq._dashboard.page import Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from delayq._dashboard.board import Board

_PER_PAGE = 100


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    wanted = request.query_params.get("q", "")
    known = await board.queues.known()
    found = [each for each in known if wanted.casefold() in each[1].casefold()]
    offset = whole(request.query_params.get("offset"))
    sources = [board.queues.of(*each) for each in found[offset : offset + _PER_PAGE]]
    counted = await asyncio.gather(*map(board.live.depth, sources))
    return {
        "rows": list(zip(sources, counted, strict=True)),
        "wanted": wanted,
        "total": len(found),
        "offset": offset,
        "limit": _PER_PAGE,
    }


PAGE = Page("/", "overview.html", load, label="Queues", scope="server", refresh=5)
