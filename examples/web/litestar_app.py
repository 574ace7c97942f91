"""Litestar: the client is a dependency.

export DELAYQ_URL=redis://127.0.0.1:6379/0
uvicorn litestar_app:app --app-dir examples/web
curl -X POST 'localhost:8000/mails?to=ada@example.org'
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar, post
from litestar.datastructures import State
from litestar.di import Provide

import delayq
from delayq.integrations.asgi import opened

worker = delayq.Worker()


@worker.listener("mails")
async def send_mail(to: str) -> None:
    print("sent to", to, flush=True)


@asynccontextmanager
async def lifespan(app: Litestar) -> AsyncIterator[None]:
    async with opened(worker=worker) as app.state.delayq:
        yield


async def delayq_client(state: State) -> delayq.Client:
    client: delayq.Client = state.delayq
    return client


@post("/mails", status_code=202)
async def post_mail(to: str, client: delayq.Client) -> str:
    queue: delayq.ReliableQueue[str] = client.reliable_queue("mails")
    return await queue.offer(to, delay=0.1)


app = Litestar([post_mail], lifespan=[lifespan], dependencies={"client": Provide(delayq_client)})
