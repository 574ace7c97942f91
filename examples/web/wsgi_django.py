"""Django's synchronous views, under WSGI: the queue is a global variable.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    cd examples/web
    delayq worker wsgi_django:worker
    python wsgi_django.py
    curl -X POST 'localhost:8000/mails?to=ada@example.org'

This is a whole project in one file, on the server of the standard library. In production, gunicorn
or another server runs ``app``, with ``--preload`` or without.
"""

import os
from wsgiref.simple_server import make_server

import django
from django.conf import settings
from django.core.handlers.wsgi import WSGIRequest
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

import delayq
from delayq.codecs import StringCodec

settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__)
django.setup()

# Connects with the first request, in each process of its own.
mails = delayq.sync.connect().reliable_queue("mails", codec=StringCodec())
worker = delayq.Worker()


# Workers call plain functions, too, in threads.
@worker.listener("mails", codec=StringCodec())
def send_mail(to: str) -> None:
    print("sent to", to, flush=True)


def post_mail(request: WSGIRequest) -> HttpResponse:
    return HttpResponse(mails.offer(request.GET["to"], delay=0.1), status=202)


urlpatterns = [path("mails", post_mail)]

app = get_wsgi_application()

if __name__ == "__main__":
    with make_server("127.0.0.1", int(os.environ.get("PORT", "8000")), app) as server:
        print("serving on port", server.server_port, flush=True)
        server.serve_forever()
