"""A message, or a dead letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from delayq._dashboard import changes
from delayq._dashboard.forms import NO_DELAY, UNITS, see
from delayq._dashboard.page import Action, Note, Page
from delayq._dashboard.pages.queue import see_changed
from delayq._dashboard.reliable_source import ReliableSource
from delayq._dashboard.rendering import packed, unpacked
from delayq._dashboard.timeline import timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.queues import AnySource
    from delayq._dashboard.rows import Place


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    place = unpacked(request.query_params.get("at", ""))
    dead = request.query_params.get("dead") == "1"
    return await _values(board, await board.source(request), place, dead=dead)


async def _values(
    board: Board, source: AnySource, place: Place | None, *, dead: bool
) -> dict[str, Any]:
    row = await source.find(place, dead=dead) if place is not None else None
    if row is None:
        raise HTTPException(
            404, "This message no longer exists: it was delivered, cancelled, moved or dropped."
        )
    now = await board.now()
    history = await source.history(row) if isinstance(source, ReliableSource) else None
    return {
        "source": source,
        "row": row,
        "now": now,
        "units": tuple(UNITS),
        "events": timeline(row, history, now) if source.kind == "reliable" else (),
        **NO_DELAY,
    }


async def cancel(board: Board, source: AnySource, form: Form) -> Response:
    changed = await changes.cancel(board, source, [form.place(source)])
    return see_changed(source, source.states[0], "cancelled", changed)


async def reschedule(board: Board, source: AnySource, form: Form) -> Response:
    place = form.place(source)
    try:
        delay = form.delay_us()
    except HTTPException as error:
        values = await _values(board, source, place, dead=False)
        return await board.refused(form, PAGE, **values | form.refused_delay(error))
    changed = await changes.reschedule(board, source, [place], delay)
    if not changed.places:
        return see("queue", source, done="gone")
    at = packed(changed.places[0])
    return see("message", source, at=at, done="rescheduled", undo=changed.undo)


PAGE = Page(
    "/message",
    "message.html",
    load,
    actions={"cancel": Action(cancel), "reschedule": Action(reschedule)},
    notes={
        "cancelled": Note("Message cancelled. It will not be delivered."),
        "rescheduled": Note("Message rescheduled."),
        "gone": Note(
            "Nothing changed: the message no longer exists, or a worker is handling it.", bad=True
        ),
    },
)
