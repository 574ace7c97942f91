"""Runs tasks in a worker: finds the function that a message names, and calls it."""

from __future__ import annotations

import os
import socket
from asyncio import CancelledError
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.cache import close_caches
from django.db import close_old_connections, connections, reset_queries
from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
from django.tasks.signals import task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from delayq._reliable.message import Message, Reject, Snooze, instruction_of
from delayq.integrations.django._backend import local_moment

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.integrations.django._backend import DelayqBackend

# Its length is the number of attempts: nothing is stored about those of other workers.
_UNKNOWN_WORKER = ""


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
        """Call the function here, and return what it returns, as JSON has it."""
        self._begin()
        try:
            returned = self._start()
            return self._succeeded(returned)
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            close_old_connections()
            close_caches()

    async def await_call(self) -> Any:
        """Await the function, and return what it returns, as :meth:`call` does.

        Its queries run in a thread of its own, as those of a request do under ASGI.
        """
        async with ThreadSensitiveContext():
            await sync_to_async(self._begin)()
            try:
                returned = await self._start()
                return await sync_to_async(self._succeeded)(returned)
            except CancelledError:
                raise
            except BaseException as error:
                await sync_to_async(self._failed)(error)
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

    def _succeeded(self, returned: Any) -> Any:
        try:
            value = normalize_json(returned)
        except (TypeError, ValueError) as error:
            raise _NoJson(f"its return value is not JSON: {error}") from error
        _set(self._result, _return_value=value)
        self._finish(TaskResultStatus.SUCCESSFUL)
        return value

    def _failed(self, error: BaseException) -> None:
        # Receivers see the same error as with Django's own backends.
        shown = (error.__cause__ or error) if isinstance(error, _NoJson) else error
        kind = type(shown)
        self._result.errors.append(
            TaskError(
                exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
                traceback="".join(format_exception(shown)),
            )
        )
        said = instruction_of(error)
        if isinstance(said, Reject) or (
            self._message.is_last_attempt and not isinstance(said, Snooze)
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
    value = message.value
    try:
        path, args, kwargs = value["task"], value["args"], value["kwargs"]
        priority = value.get("priority", 0)
    except (TypeError, KeyError, AttributeError):
        raise Reject("it is not a call of a Django task") from None
    task = find(path).using(priority=priority, queue_name=queue_name, backend=backend.alias)
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
        worker_ids=[_UNKNOWN_WORKER] * (message.attempt - 1) + [worker_id],
    )


def find(path: object) -> Task:
    """Import the task at a path.

    Raises:
        Reject: There is none.
    """
    if not isinstance(path, str):
        raise Reject("it is not a call of a Django task")
    try:
        found = import_string(path)
    except ImportError as error:
        if not _is_absent(path, error):
            # A module that it imports is missing: a later attempt may find it installed.
            raise
        raise Reject(f"unknown task: {error}") from error
    if not isinstance(found, Task):
        raise Reject(f"unknown task: {path} is not a Task")
    return found


def _is_absent(path: str, error: ImportError) -> bool:
    """Return whether the error of ``import_string`` says that there is nothing at a path."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and path.startswith(f"{error.name}.")
    return isinstance(error.__cause__, AttributeError | ValueError)


def _close_all() -> None:
    connections.close_all()
    close_caches()


def _set(result: TaskResult, **values: Any) -> None:
    # Results are frozen for their users.
    for name, value in values.items():
        object.__setattr__(result, name, value)
