"""The dead letters of a reliable queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._dashboard.forms import farthest, offset_of, see
from delayq._dashboard.page import Action, Note, Page
from delayq._dashboard.pages.queue import PER_PAGE
from delayq._durations import moment_us
from delayq.admin import letters
from delayq.admin.letters import LetterQuery

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.reliable_source import ReliableSource


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    offset = offset_of(request, source)
    # Those that die from now on are not among those that the visitor acts on.
    now = await board.now()
    depth, listing = await asyncio.gather(source.depth(), source.page("dead", offset, PER_PAGE))
    return {
        "source": source,
        "depth": depth,
        "rows": listing.rows,
        "offset": offset,
        "limit": PER_PAGE,
        "farthest": farthest(source),
        "total": depth.dead,
        "now": now,
        "until": moment_us(now).isoformat(),
    }


async def redrive(board: Board, source: ReliableSource, form: Form) -> Response:
    if (chosen := form.places()) is None:
        count = await letters.redrive(await source.all_stores(), _until(form))
    elif not chosen:
        return see("dead", source, done="unchosen")
    else:
        count = await source.redrive([place for place in chosen if source.may_hold(place)])
    return see("dead", source, done="redriven", count=str(count))


async def purge(board: Board, source: ReliableSource, form: Form) -> Response:
    if (chosen := form.places()) is None:
        count = await letters.purge(await source.all_stores(), _until(form))
    elif not chosen:
        return see("dead", source, done="unchosen")
    else:
        count = await source.purge_dead([place for place in chosen if source.may_hold(place)])
    return see("dead", source, done="purged", count=str(count))


def _until(form: Form) -> LetterQuery:
    """Return the choice of all letters that were there when the page was shown."""
    return LetterQuery(died_before=form.until())


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
