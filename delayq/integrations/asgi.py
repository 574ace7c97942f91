"""A client, and a worker, that live as long as an ASGI application.

Needs no library, because the server calls it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from delayq.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping

    from delayq.worker import Worker

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY = "delayq"
"""The key of the client in the scope."""


@asynccontextmanager
async def opened(
    address: str | Client | None = None, *, worker: Worker | None = None
) -> AsyncIterator[Client]:
    """Open a client, and run a worker, until the block ends.

    Args:
        address: As for :func:`delayq.connect`; or a client, which you close if it is already open.
        worker: A worker to run in the background, without signal handlers, which belong to the web
            server. It stops gracefully before the client closes, within its ``shutdown_timeout``.

    Raises:
        ServerUnavailable, ServerRefused, ConfigurationError: As for the client and the worker.
    """
    async with AsyncExitStack() as stack:
        client = address if isinstance(address, Client) else connect(address)
        if not isinstance(address, Client) or client.is_new:
            await stack.enter_async_context(client)
        if worker is not None:
            await stack.enter_async_context(worker)
        yield client


class WithClient:
    """An ASGI application that wraps one without a lifespan, such as Django's, and passes the
    client as ``scope["delayq"]``.

    ::

        application = WithClient(get_asgi_application(), "redis://127.0.0.1:6379/0")
    """

    def __init__(
        self, app: App, address: str | None = None, *, worker: Worker | None = None
    ) -> None:
        """Args:
        app: The application, which receives every scope except ``lifespan``.
        address: As for :func:`delayq.connect`.
        worker: As for :func:`opened`.
        """
        self._app = app
        self._address = address
        self._worker = worker
        self._client: Client | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app({**scope, KEY: self._client}, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        step = "startup"
        await receive()
        try:
            async with opened(self._address, worker=self._worker) as self._client:
                await send({"type": "lifespan.startup.complete"})
                step = "shutdown"
                await receive()
        except Exception as error:  # noqa: BLE001 - report every error to the server
            await send({"type": f"lifespan.{step}.failed", "message": f"delayq: {error}"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
        finally:
            self._client = None
