"""Without a framework: the client is in the scope.

export DELAYQ_URL=redis://127.0.0.1:6379/0
uvicorn asgi_app:app --app-dir examples/web
curl -X POST 'localhost:8000/mails?to=ada@example.org'
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import delayq
from delayq.integrations.asgi import WithClient

worker = delayq.Worker()


@worker.listener("mails")
async def send_mail(to: str) -> None:
    print("sent to", to, flush=True)


async def post_mail(
    scope: MutableMapping[str, Any],
    _receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    client: delayq.Client = scope["delayq"]
    queue: delayq.ReliableQueue[str] = client.reliable_queue("mails")
    name = await queue.offer(parse_qs(scope["query_string"].decode())["to"][0], delay=0.1)
    await send(
        {
            "type": "http.response.start",
            "status": 202,
            "headers": [(b"content-type", b"text/plain")],
        }
    )
    await send({"type": "http.response.body", "body": name.encode()})


app = WithClient(post_mail, worker=worker)
