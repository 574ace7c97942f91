"""A queue: counts, due times, and the messages in each state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from delayq._dashboard.forms import offset_of, see
from delayq._dashboard.page import Action, Note, Page
from delayq._dashboard.source import undeliverable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.source import ReliableSource

PER_PAGE = 25
"""How many messages a page of a list shows."""
_BARS = ("next minute", "next hour", "next day", "later")


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.source(request)
    state = request.query_params.get("state", source.states[0])
    if state not in source.states:
        raise HTTPException(404, "Unknown message state.")
    offset = offset_of(request, source)
    now = await board.now()
    depth, bars, rows, settings = await asyncio.gather(
        source.depth(),
        source.histogram(now),
        source.page(state, offset, PER_PAGE),
        source.settings(),
    )
    return {
        "source": source,
        "depth": depth,
        "settings": settings,
        "bars": list(zip(_BARS, bars, (_share(bar, bars) for bar in bars), strict=True)),
        "state": state,
        "total": undeliverable(depth) if state == "unreadable" else getattr(depth, state),
        "rows": rows,
        "offset": offset,
        "limit": PER_PAGE,
        "now": now,
    }


async def pause(board: Board, source: ReliableSource, form: Form) -> Response:
    await source.pause()
    return see("queue", source, done="paused")


async def resume(board: Board, source: ReliableSource, form: Form) -> Response:
    await source.resume()
    return see("queue", source, done="resumed")


def _share(bar: int, bars: Iterable[int]) -> int:
    """Return the length of a bar, out of 100. A bar that is not empty is visible."""
    most = max(bars, default=0)
    return 0 if not bar else max(1, round(100 * bar / most))


PAGE = Page(
    "/queue",
    "queue.html",
    load,
    label="Messages",
    scope="queue",
    refresh=10,
    actions={"pause": Action(pause, ("reliable",)), "resume": Action(resume, ("reliable",))},
    notes={
        "paused": Note("Queue paused. No messages are delivered until you resume it."),
        "resumed": Note("Queue resumed."),
    },
)
