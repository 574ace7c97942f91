"""Django under an ASGI server: the client is in the request's scope. Only async views can use it.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    uvicorn django_app:app --app-dir examples/web
    curl -X POST 'localhost:8000/mails?to=ada@example.org'

This is a whole project in one file; in yours, the last line belongs in ``asgi.py``.
"""

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse
from django.urls import path

import delayq
from delayq.integrations.asgi import WithClient

settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__)
django.setup()

worker = delayq.Worker()


@worker.listener("mails")
async def send_mail(to: str) -> None:
    print("sent to", to, flush=True)


async def post_mail(request: ASGIRequest) -> HttpResponse:
    client: delayq.Client = request.scope["delayq"]
    queue: delayq.ReliableQueue[str] = client.reliable_queue("mails")
    return HttpResponse(await queue.offer(request.GET["to"], delay=0.1), status=202)


urlpatterns = [path("mails", post_mail)]

app = WithClient(get_asgi_application(), worker=worker)
