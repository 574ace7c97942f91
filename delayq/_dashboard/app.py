"""Puts the dashboard together: routes, access to them, actions, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from delayq._dashboard.board import Board
from delayq._dashboard.forms import redirect
from delayq._dashboard.pages import PAGES
from delayq._dashboard.pages.login import log_in, log_out
from delayq._dashboard.scale import scale
from delayq._dashboard.security import Guard, SecurityHeaders
from delayq.errors import Closed, DelayqError, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from delayq._dashboard.board import Page
    from delayq._dashboard.security import Authenticate
    from delayq.client import Client
    from delayq.codecs.encrypted import Keys

    Handler = Callable[[Board, Request], Awaitable[Response]]

_PATHS = {page.path for page in PAGES}


def make(
    client: Client,
    *,
    token: str | None,
    read_token: str | None,
    authenticate: Authenticate | None,
    queues: Iterable[str] | None,
    title: str,
    keys: Keys | None,
) -> ASGIApp:
    """Make the application. See :func:`delayq.dashboard`."""
    guard = Guard(token, read_token, authenticate)
    board = Board(client, guard, PAGES, queues=queues, title=title, keys=keys)

    def route(
        path: str, handler: Handler, method: str | None = None, *, public: bool = False
    ) -> Route:
        async def handle(request: Request) -> Response:
            if not await board.admit(request) and not public:
                if guard.hosted:
                    raise HTTPException(403, "You have no access to this dashboard.")
                # Only reading leads back here.
                back = f"{path.removeprefix('/') or './'}?{request.url.query}".removesuffix("?")
                return redirect("login", next=back if path in _PATHS else "")
            return await handler(board, request)

        return Route(path, handle, methods=None if method is None else [method])

    async def handle_error(request: Request, error: Exception) -> Response:
        return await _error_page(board, request, error)

    app = Starlette(
        routes=[
            *(route(page.path, _handler_of(page), public=page.public) for page in PAGES),
            route("/events", Board.live_view),
            # These check logins, tokens and forms themselves.
            route("/scale/{queue:path}", scale, public=True),
            route("/act", act, "POST", public=True),
            route("/login", log_in, "POST", public=True),
            route("/logout", log_out, "POST", public=True),
            Mount("/static", _Static(packages=[("delayq._dashboard", "static")])),
        ],
        exception_handlers={HTTPException: handle_error, DelayqError: handle_error},
    )
    # Slash redirects are absolute, with the host of the request, which need not be ours.
    app.router.redirect_slashes = False
    return SecurityHeaders(app)


def _handler_of(page: Page) -> Handler:
    async def show(board: Board, request: Request) -> Response:
        values = await page.load(board, request)
        return await board.page(request, page.template, page=page, **values)

    return show


async def _error_page(board: Board, request: Request, error: Exception) -> Response:
    hint = ""
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, ServerRefused):
        status, message = 502, f"The server refused the request: {error}"
        hint = (
            "The dashboard's user lacks a permission. If it may not run SCAN, pass the queue"
            " names to the dashboard: see SECURITY.md."
        )
    elif isinstance(error, OutcomeUnknown) and request.method == "POST":
        status, message = 502, f"The action may have been carried out: {error}"
    elif isinstance(error, ServerUnavailable | OutcomeUnknown | Closed):
        status, message = 503, f"The server does not answer: {error}"
    else:
        status, message = 400, str(error)
    return await board.page(request, "failed.html", status, what=message, hint=hint)


class _Static(StaticFiles):
    """Serves the files of the package. Browsers cache them, and check whether they have changed."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "no-cache"
        return response


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
    try:
        response = await action.run(board, source, form)
    except DelayqError as error:
        board.log_action(form, source, error)
        raise
    finally:
        board.forget(source)
    board.log_action(form, source, response)
    return response
