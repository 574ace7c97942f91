"""Runs the actions of all pages: every form that changes a queue is sent to ``act``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from delayq._dashboard.pages import PAGES

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board

ACTIONS = {name: action for page in PAGES for name, action in page.actions.items()}


async def act(board: Board, request: Request) -> Response:
    """Run the action that a form names on its queue."""
    form = await board.form_to_act(request)
    source = await board.source_of(*form.queue())
    action = ACTIONS.get(form.get("do"))
    if action is None:
        raise HTTPException(400, "Unknown action.")
    if source.kind not in action.kinds:
        raise HTTPException(400, f"{source.kind.capitalize()} queues do not support this action.")
    return await action.run(board, source, form)
