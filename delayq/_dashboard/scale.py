"""The figures of a queue for autoscalers, which send a token in a header instead of logging in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from delayq._dashboard.security import LATE
from delayq.admin.catalog import KINDS
from delayq.errors import BadInput, DelayqError, ServerRefused
from delayq.worker._scale import scale_of, window_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from delayq._dashboard.board import Board


async def scale(board: Board, request: Request) -> JSONResponse:
    """Answer with the figures of the queue in the address."""
    if not (await board.admit(request) or await _has_token(board, request)):
        headers = {"WWW-Authenticate": "Bearer"}
        return _error(401, "send one of the dashboard's tokens: Authorization: Bearer ...", headers)
    argument: str = request.path_params["queue"]
    kind, colon, name = argument.partition(":")
    if not (colon and kind in KINDS):
        kind, name = "reliable", argument
    try:
        window = window_of(request.url.query)
        source = await board.source_of(kind, name)
        return JSONResponse(await scale_of(source, await board.now(), window))
    except HTTPException:
        return _error(404, f"there is no {kind} queue {name!r}")
    except BadInput as error:
        return _error(400, str(error))
    except ServerRefused as error:
        return _error(502, f"the server refuses to count the messages: {error}")
    except DelayqError as error:
        return _error(503, f"the server does not answer: {error}")


async def _has_token(board: Board, request: Request) -> bool:
    """Return whether a request carries a token. Wrong ones are answered late, as on the login."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    address = request.client.host if request.client is not None else ""
    if board.guard.login_with(token.strip(), address) is not None:
        return True
    if board.guard.is_guessing(address):
        await asyncio.sleep(LATE)
    return False


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": text}, status, headers)
