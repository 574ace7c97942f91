"""A client, and a worker, that live as long as a FastAPI application.

::

    app = FastAPI(lifespan=lifespan("redis://127.0.0.1:6379/0"))

    @app.post("/orders")
    async def order(client: DelayqClient) -> None:
        await client.reliable_queue("orders").offer(...)
"""

from __future__ import annotations

from typing import Annotated

from delayq.client import Client
from delayq.integrations.starlette import delayq_client, follow_response, lifespan

try:
    from fastapi import Depends
except ImportError as _error:
    raise ImportError("delayq.integrations.fastapi needs FastAPI: pip install fastapi") from _error

__all__ = ["DelayqClient", "delayq_client", "follow_response", "lifespan"]

DelayqClient = Annotated[Client, Depends(delayq_client)]
"""The type of a parameter that receives the client."""
