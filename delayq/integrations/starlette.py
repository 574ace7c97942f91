"""A client, and a worker, that live as long as a Starlette application.

::

    app = Starlette(lifespan=lifespan("redis://127.0.0.1:6379/0"), routes=[...])

    async def order(request: Request) -> Response:
        await delayq_client(request).reliable_queue("orders").offer(...)
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from delayq.client import Client  # noqa: TC001 - FastAPI reads annotations
from delayq.errors import Closed
from delayq.integrations.asgi import KEY, opened

try:
    from starlette.requests import HTTPConnection  # noqa: TC002 - FastAPI reads annotations
except ImportError as _error:
    raise ImportError(
        "delayq.integrations.starlette needs Starlette: pip install starlette"
    ) from _error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

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
