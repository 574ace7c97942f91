"""Workers for the queues of a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured
from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, task_backends

from delayq.integrations.django._backend import DelayqBackend
from delayq.integrations.django._running import runner
from delayq.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from delayq._durations import Duration

CONCURRENCY = 10
"""The default of ``concurrency``. Each thread of a worker has its own database connection."""


def new_worker(
    alias: str = DEFAULT_TASK_BACKEND_ALIAS,
    *,
    queues: Iterable[str] = (),
    concurrency: int = CONCURRENCY,
    shutdown_timeout: Duration = 30.0,
    lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None = None,
) -> Worker:
    """Create a worker that runs the tasks of a backend.

    ``manage.py delayq_worker`` runs one. Create your own to add middleware or dependencies, or to
    run it with ``delayq worker``. Call ``django.setup()`` before.

    Args:
        alias: The key of the backend in ``TASKS``.
        queues: The ``queue_name`` of the tasks to run; by default all in ``QUEUES``.
        concurrency: Number of tasks that run at a time.
        shutdown_timeout: As for :class:`delayq.Worker`.
        lifespan: As for :class:`delayq.Worker`.

    Raises:
        ImproperlyConfigured: The backend is not a :class:`DelayqBackend`, one of its options is
            invalid, or there is no such queue.
        BadInput: ``concurrency`` or ``shutdown_timeout`` is invalid.
        ConfigurationError: The address is invalid.
    """
    backend = task_backends[alias]
    if not isinstance(backend, DelayqBackend):
        raise ImproperlyConfigured(
            f"TASKS[{alias!r}] is a {type(backend).__name__}, not a DelayqBackend"
        )
    names = list(dict.fromkeys(queues)) or sorted(backend.queues)
    if not names:
        raise ImproperlyConfigured(
            f"TASKS[{alias!r}]['QUEUES'] allows any name: say which queues the worker is for"
        )
    for name in names:
        if backend.queues and name not in backend.queues:
            raise ImproperlyConfigured(
                f"TASKS[{alias!r}] has no queue {name!r}, only {', '.join(sorted(backend.queues))}"
            )
    options = backend.delayq_options
    worker = Worker(
        backend.address,
        concurrency=concurrency,
        shutdown_timeout=shutdown_timeout,
        lifespan=lifespan,
    )
    for name in names:
        listen = worker.listener(
            backend.message_queue(name), timeout=options.timeout, **options.of_listener()
        )
        listen(runner(backend, name))
    return worker
