"""The batches of a reliable queue: how far each is, and a form that cancels one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import redirect
from delayq.admin.wording import describe_batch_state
from delayq.errors import NoBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.sources import ReliableSource

_MOST_LISTED = 50
_TONES = {"all handled": "good", "ended": "warn", "not offered whole": "warn"}


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    batch, wrong = request.query_params.get("q", "").strip(), {}
    statuses, has_more = [], False
    if batch:
        try:
            statuses = [await source.open().batch(batch).status()]
        except NoBatch as error:
            wrong = {"q": f"{error}."}
    else:
        # One more tells whether there are more.
        statuses = await source.batches(_MOST_LISTED + 1)
        has_more = len(statuses) > _MOST_LISTED
    states = [describe_batch_state(status) for status in statuses]
    return {
        "source": source,
        "rows": list(zip(statuses, states, strict=True))[:_MOST_LISTED],
        "tones": _TONES,
        "wanted": batch,
        "wrong": wrong,
        "most": _MOST_LISTED if has_more else None,
        "now": await board.now(),
    }


async def cancel_batch(board: Board, source: ReliableSource, form: Form) -> Response:
    """Cancel the messages of a batch that have not ended."""
    batch = form.get("batch")
    try:
        count = await source.open().batch(batch).cancel(running=form.get("running") == "1")
    except NoBatch:
        return redirect("batches", source, done="no_batch")
    return redirect("batches", source, q=batch, done="batch_cancelled", count=str(count))


PAGE = Page(
    "/batches",
    "batches.html",
    load,
    label="Batches",
    scope="queue",
    kinds=("reliable",),
    refresh=5,
    actions={"cancel_batch": Action(cancel_batch, ("reliable",))},
    notes={
        "batch_cancelled": Note(
            "message of the batch cancelled. This cannot be undone.",
            "messages of the batch cancelled. This cannot be undone.",
        ),
        "no_batch": Note("Nothing changed: there is no such batch.", bad=True),
    },
)
