"""Integrations with other libraries. Each module says which one it needs; the core needs none.

- :mod:`delayq.integrations.prometheus`: metrics.
- :mod:`delayq.integrations.opentelemetry`: traces and metrics.
- :mod:`delayq.integrations.starlette`, :mod:`delayq.integrations.fastapi`: a client, and a worker,
  that live as long as the app.
- :mod:`delayq.integrations.django`: a backend for Django's tasks, and its worker.
- :mod:`delayq.integrations.asgi`: the same for any other ASGI application.
"""
