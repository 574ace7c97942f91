"""Starlette: a client and a worker that live as long as the application.

export DELAYQ_URL=redis://127.0.0.1:6379/0
uvicorn starlette_app:app --app-dir examples/web
curl -X POST 'localhost:8000/mails?to=ada@example.org'
"""

import asyncio
import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import delayq
from delayq.integrations.starlette import delayq_client, lifespan

worker = delayq.Worker(shutdown_timeout=20)


@worker.listener("mails")
async def send_mail(to: str) -> None:
    print("sending to", to, flush=True)
    # A slow mail server: if the application stops in the meantime, this finishes first.
    await asyncio.sleep(float(os.environ.get("MAIL_SECONDS", "0")))
    print("sent to", to, flush=True)


async def post_mail(request: Request) -> PlainTextResponse:
    queue: delayq.ReliableQueue[str] = delayq_client(request).reliable_queue("mails")
    return PlainTextResponse(await queue.offer(request.query_params["to"], delay=0.1), 202)


app = Starlette(
    lifespan=lifespan(worker=worker), routes=[Route("/mails", post_mail, methods=["POST"])]
)
