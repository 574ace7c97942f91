"""Logging in and out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._dashboard.board import Note, Page
from delayq._dashboard.forms import redirect
from delayq._dashboard.security import LATE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    return {"wrong": "", "next": request.query_params.get("next", "")}


async def log_in(board: Board, request: Request) -> Response:
    form = await board.form(request)
    destination = form.get("next")
    address = request.client.host if request.client is not None else ""
    login = board.guard.login_with(form.get("token"), address)
    if login is None:
        status, wrong = 403, "Wrong token."
        if board.guard.is_guessing(address):
            await asyncio.sleep(LATE)
            status, wrong = 429, "Wrong token, after many others from your address."
        return await board.page(request, PAGE.template, status, wrong=wrong, next=destination)
    page, query = board.own_address(destination)
    response = redirect(page, **query | {"done": "loggedin" if login.may_act else "reading"})
    board.guard.log_in(request, response, login)
    return response


async def log_out(board: Board, request: Request) -> Response:
    login = board.login(request)
    await board.form_of(login, request)
    response = redirect("login" if board.guard.private else "./", done="loggedout")
    if login is not None:
        board.guard.log_out(response, login)
    return response


PAGE = Page(
    "/login",
    "login.html",
    load,
    public=True,
    notes={
        "loggedin": Note("You are logged in as an operator."),
        "reading": Note("You are logged in with read-only access."),
        "loggedout": Note("You are logged out."),
    },
)
