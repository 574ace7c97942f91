"""Logging in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._dashboard.forms import see
from delayq._dashboard.page import Note, Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    return {"wrong": ""}


async def log_in(board: Board, request: Request) -> Response:
    form = await board.form(request)
    address = request.client.host if request.client is not None else ""
    if board.guard.is_locked(address):
        locked = "Too many failed attempts. Try again in a minute."
        return await board.page(request, PAGE.template, 429, wrong=locked)
    login = board.guard.login_with(form.get("token"), address)
    if login is None:
        return await board.page(request, PAGE.template, 403, wrong="Wrong token.")
    response = see("./", done="loggedin" if login.may_act else "reading")
    board.guard.log_in(request, response, login)
    return response


async def log_out(board: Board, request: Request) -> Response:
    await board.form_of(board.guard.login(request), request)
    response = see("login" if board.guard.private else "./", done="loggedout")
    board.guard.log_out(response)
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
