"""The dead letters of a reliable queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._dashboard.forms import farthest, offset_of, see
from delayq._dashboard.page import Action, Note, Page
from delayq._dashboard.pages.queue import PER_PAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.reliable_source import ReliableSource
    from delayq._dashboard.rows import Place


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    offset = offset_of(request, source)
    depth, listing, now = await asyncio.gather(
        source.depth(), source.page("dead", offset, PER_PAGE), board.now()
    )
    return {
        "source": source,
        "depth": depth,
        "rows": listing.rows,
        "offset": offset,
        "limit": PER_PAGE,
        "farthest": farthest(source),
        "total": depth.dead,
        "now": now,
    }


async def redrive(board: Board, source: ReliableSource, form: Form) -> Response:
    if (chosen := _chosen(source, form)) == []:
        return see("dead", source, done="unchosen")
    return see("dead", source, done="redriven", count=str(await source.redrive(chosen)))


async def purge(board: Board, source: ReliableSource, form: Form) -> Response:
    if (chosen := _chosen(source, form)) == []:
        return see("dead", source, done="unchosen")
    return see("dead", source, done="purged", count=str(await source.purge_dead(chosen)))


def _chosen(source: ReliableSource, form: Form) -> list[Place] | None:
    """Return the places of the selected letters; None for all letters."""
    chosen = form.places()
    return chosen and [place for place in chosen if source.has(place)]


PAGE = Page(
    "/dead",
    "dead.html",
    load,
    label="Dead letters",
    scope="queue",
    kinds=("reliable",),
    actions={"redrive": Action(redrive, ("reliable",)), "purge": Action(purge, ("reliable",))},
    notes={
        "redriven": Note("message re-queued.", "messages re-queued."),
        "purged": Note("dead letter dropped.", "dead letters dropped."),
        "unchosen": Note(
            "Nothing changed: select messages, or confirm that the action applies to all of them.",
            bad=True,
        ),
    },
)
