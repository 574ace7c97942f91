"""Dropping all messages in a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from delayq._dashboard.forms import see
from delayq._dashboard.page import Action, Note, Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.queues import AnySource
    from delayq.admin.delayed import PurgeState

STATES = ("delayed", "ready", "all")


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    return await _values(await board.source(request), "", "", {})


async def _values(
    source: AnySource, state: str, typed: str, wrong: Mapping[str, str]
) -> dict[str, Any]:
    depth = await source.depth()
    # Payloads that workers of a delayed queue have are no longer in it.
    leased = depth.leased if source.kind == "reliable" else 0
    counts = {
        "delayed": depth.delayed,
        "ready": depth.ready,
        "all": depth.delayed + depth.ready + leased,
    }
    return {"source": source, "counts": counts, "state": state, "typed": typed, "wrong": wrong}


async def purge_queue(board: Board, source: AnySource, form: Form) -> Response:
    state, typed = form.get("state"), form.get("typed")
    wrong = {}
    if state not in STATES:
        wrong["state"] = "Choose which messages to drop."
    if typed.replace("\r\n", "\n").strip() != source.name.strip():
        wrong["typed"] = "This is not the name of the queue."
    if wrong:
        values = await _values(source, state, typed, wrong)
        return await board.refused(form, PAGE, **values)
    count = await source.purge(cast("PurgeState", state))
    return see("queue", source, done="dropped", count=str(count), undo="no")


PAGE = Page(
    "/purge",
    "purge.html",
    load,
    label="Purge",
    scope="queue",
    operators=True,
    actions={"purge_queue": Action(purge_queue)},
    notes={"dropped": Note("message dropped.", "messages dropped.")},
)
