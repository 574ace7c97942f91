"""A client, and a worker, that live as long as a Starlette application.

::

    app = Starlette(lifespan=lifespan("redis://127.0.0.1:6379/0"), routes=[...])

    async def order(request: Request) -> Response:
        await delayq_client(request).reliable_queue("orders").offer(...)
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from delayq.client import Client  # noqa: TC001 - FastAPI reads annotations
from delayq.errors import Closed, ResultTimeout
from delayq.integrations.asgi import KEY, opened

try:
    from starlette.requests import HTTPConnection  # noqa: TC002 - FastAPI reads annotations
    from starlette.responses import StreamingResponse
except ImportError as _error:
    raise ImportError(
        "delayq.integrations.starlette needs Starlette: pip install starlette"
    ) from _error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from delayq._durations import Duration
    from delayq._reliable.following import MessageEvent
    from delayq._reliable.queue import ReliableQueue
    from delayq.worker import Worker


def lifespan(
    address: str | Client | None = None, *, worker: Worker | None = None
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Create a lifespan for Starlette or FastAPI.

    To use it within a lifespan of your own, write ``async with lifespan(...)(app)``.

    Args:
        address: As for :func:`delayq.connect`; or a client, which serves one run of the app.
        worker: A worker to run in the background, as for :func:`delayq.integrations.asgi.opened`.
    """

    @asynccontextmanager
    async def live(app: Any) -> AsyncIterator[None]:
        async with opened(address, worker=worker) as client:
            setattr(app.state, KEY, client)
            try:
                yield
            finally:
                delattr(app.state, KEY)

    return live


def delayq_client(connection: HTTPConnection) -> Client:
    """Return the client of the application that serves this request or WebSocket.

    Raises:
        Closed: The application does not use :func:`lifespan` of this module, or is not running.
    """
    client: Client | None = getattr(connection.app.state, KEY, None)
    if client is None:
        raise Closed("the application was not created with delayq's lifespan, or is not running")
    return client


def follow_response(
    queue: ReliableQueue[Any],
    id: str,  # noqa: A002
    timeout: Duration | None = None,
) -> StreamingResponse:
    """Answer a request with the events of a message, as server-sent events. Call it in a coroutine
    function.

    In a browser, ``new EventSource("/orders/7/progress")`` gets a ``message`` event for each, whose
    ``data`` is JSON: ``state``, ``attempt``, ``done``, ``total``, ``text``, ``at`` and ``error``.
    The last one has the type ``end``: close the source then, or it connects again.

    Args:
        queue: The queue that has the message.
        id: The message's id. Check that the user may follow it.
        timeout: How long to follow it, as for :meth:`delayq.ReliableQueue.follow`.

    Raises:
        BadInput, Closed: As for :meth:`delayq.ReliableQueue.follow`.
    """
    return StreamingResponse(
        _server_sent(queue.follow(id, timeout)),
        media_type="text/event-stream",
        # nginx would wait for more.
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _server_sent(events: AsyncIterator[MessageEvent]) -> AsyncIterator[str]:
    with suppress(ResultTimeout):
        async for event in events:
            facts = {**asdict(event), "at": event.at.isoformat()}
            kind = "end" if event.is_final else "message"
            yield f"event: {kind}\ndata: {json.dumps(facts, separators=(',', ':'))}\n\n"
