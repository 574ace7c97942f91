"""Workers for the queues of a backend: they find the function that a message names, and call it."""

from __future__ import annotations

import os
import socket
from asyncio import CancelledError
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.cache import close_caches
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections, reset_queries
from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from django.tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
from django.tasks.signals import task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json

from delayq._reliable.failures import Interrupted, Reject, Snooze, instruction_of
from delayq._reliable.message import Message  # noqa: TC001 - the worker reads the annotation
from delayq.integrations.django._backend import DelayqBackend
from delayq.integrations.django._outbox import DjangoOutbox
from delayq.integrations.django._results import UNKNOWN_WORKER, local_moment, read_call, to_keep
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
    if options.outbox:
        durability = options.settings.get("durability")
        worker.relay(DjangoOutbox(alias), None, durability=durability)
    return worker


def runner(backend: DelayqBackend, queue_name: str) -> Callable[[Message[Any]], Any]:
    """Return the handler of a queue's messages."""
    worker_id = f"{socket.gethostname()}:{os.getpid()}"

    def run(message: Message[Any]) -> Any:
        # In a thread of the worker, because it may import modules.
        task_run = TaskRun(backend, queue_name, message, worker_id)
        # The worker awaits a coroutine in its event loop.
        return task_run.await_call() if task_run.is_async else task_run.call()

    return run


class _NoJson(Reject):
    """Raised when a task returns what JSON has no form for: no other attempt would help."""


class TaskRun:
    """An attempt to run the task that a message names.

    Attributes:
        is_async: Whether its function is a coroutine function.
    """

    def __init__(
        self, backend: DelayqBackend, queue_name: str, message: Message[Any], worker_id: str
    ) -> None:
        """Find the task.

        Raises:
            Reject: The message names none.
        """
        self._sender = type(backend)
        self._message = message
        self._result = _read(backend, queue_name, message, worker_id)
        self._task = self._result.task
        self.is_async: bool = iscoroutinefunction(self._task.func)

    def call(self) -> Any:
        """Call the function here, and return what is kept of what it returns."""
        self._begin()
        try:
            returned = self._start()
            return self._on_success(returned)
        except BaseException as error:
            self._on_failure(error)
            raise
        finally:
            close_old_connections()
            close_caches()

    async def await_call(self) -> Any:
        """Await the function, and return what is kept, as :meth:`call` does.

        Its queries run in a thread of its own, as those of a request do under ASGI.
        """
        async with ThreadSensitiveContext():
            await sync_to_async(self._begin)()
            try:
                returned = await self._start()
                return await sync_to_async(self._on_success)(returned)
            except CancelledError:
                raise
            except BaseException as error:
                await sync_to_async(self._on_failure)(error)
                raise
            finally:
                # The thread ends, so nothing could use its connections again.
                await sync_to_async(_close_all)()

    def _start(self) -> Any:
        result = self._result
        first = (TaskContext(task_result=result),) if self._task.takes_context else ()
        return self._task.func(*first, *result.args, **result.kwargs)

    def _begin(self) -> None:
        close_old_connections()
        reset_queries()
        # An error of a receiver must not keep a task from running, nor make it run twice.
        task_started.send_robust(self._sender, task_result=self._result)

    def _on_success(self, returned: Any) -> Any:
        try:
            value = normalize_json(returned)
        except (TypeError, ValueError) as error:
            raise _NoJson(f"its return value is not JSON: {error}") from error
        _set(self._result, _return_value=value)
        self._finish(TaskResultStatus.SUCCESSFUL)
        return to_keep(self._message.value, value) if self._message.keeps_result else None

    def _on_failure(self, error: BaseException) -> None:
        # Receivers see the same error as with Django's own backends.
        reported = (error.__cause__ or error) if isinstance(error, _NoJson) else error
        kind = type(reported)
        self._result.errors.append(
            TaskError(
                exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
                traceback="".join(format_exception(reported)),
            )
        )
        instruction = instruction_of(error)
        if isinstance(instruction, Reject) or (
            self._message.is_last_attempt and not isinstance(instruction, Snooze | Interrupted)
        ):
            self._finish(TaskResultStatus.FAILED)
        else:
            _set(self._result, status=TaskResultStatus.READY)

    def _finish(self, status: TaskResultStatus) -> None:
        _set(self._result, status=status, finished_at=timezone.now())
        task_finished.send_robust(self._sender, task_result=self._result)


def _read(
    backend: DelayqBackend, queue_name: str, message: Message[Any], worker_id: str
) -> TaskResult:
    task, args, kwargs = read_call(backend.alias, queue_name, message.value)
    now = timezone.now()
    return TaskResult(
        task=task,
        id=message.id,
        status=TaskResultStatus.RUNNING,
        enqueued_at=local_moment(message.enqueued_at),
        started_at=now if message.attempt == 1 else None,
        last_attempted_at=now,
        finished_at=None,
        args=args,
        kwargs=kwargs,
        backend=backend.alias,
        errors=[],
        worker_ids=[UNKNOWN_WORKER] * (message.attempt - 1) + [worker_id],
    )


def _close_all() -> None:
    connections.close_all()
    close_caches()


def _set(result: TaskResult, **values: Any) -> None:
    # Results are frozen for their users.
    for name, value in values.items():
        object.__setattr__(result, name, value)
