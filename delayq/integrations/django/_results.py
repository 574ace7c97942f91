"""The results of enqueued tasks, in the form that Django defines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.tasks.base import Task, TaskError, TaskResult, TaskResultStatus
from django.tasks.exceptions import TaskResultDoesNotExist
from django.utils import timezone
from django.utils.module_loading import import_string

from delayq._reliable.failures import Reject
from delayq.codecs import JsonCodec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from delayq._reliable.outcomes import Attempt, MessageHistory

UNKNOWN_WORKER = ""
"""The id of a worker of which nothing is stored."""

_STATUS = {
    "delayed": TaskResultStatus.READY,
    "ready": TaskResultStatus.READY,
    "leased": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
    "dead": TaskResultStatus.FAILED,
}
_CLASS = re.compile(r"[\w.<>]+")
# Why a message died without an error of its task, where it was not rejected.
_REASONS = ("attempts", "expired")


def to_keep(value: Mapping[str, Any], returned: object) -> dict[str, Any]:
    """Return what is kept of a message whose task has succeeded.

    Args:
        value: The value of the message, which is gone once the task has run.
        returned: The return value of the task, as JSON represents it.
    """
    return {**value, "returned": returned}


def read_call(alias: str, queue_name: str, value: Any) -> tuple[Task, list[Any], dict[str, Any]]:
    """Return the task that a message names, and its arguments.

    Raises:
        Reject: The message names none.
    """
    try:
        path, args, kwargs = value["task"], value["args"], value["kwargs"]
        priority = value.get("priority", 0)
    except (TypeError, KeyError, AttributeError):
        raise Reject("it is not a call of a Django task") from None
    task = find(path).using(priority=priority, queue_name=queue_name, backend=alias)
    return task, args, kwargs


def result_of(alias: str, id: str, entry: tuple[str, MessageHistory] | None) -> TaskResult:  # noqa: A002
    """Return the result of a task.

    Args:
        alias: The key of the backend in ``TASKS``.
        id: The result's id.
        entry: The ``queue_name`` of the task, and the history of its message; None if there is no
            such message.

    Raises:
        TaskResultDoesNotExist: There is none.
    """
    if entry is None or (status := _STATUS.get(entry[1].state)) is None:
        raise TaskResultDoesNotExist(id)
    queue_name, history = entry
    try:
        record = history.result if history.payload is None else JsonCodec().decode(history.payload)
        task, args, kwargs = read_call(alias, queue_name, record)
    except (Reject, ValueError) as error:
        raise TaskResultDoesNotExist(id) from error
    attempts = history.attempts
    starts = [attempt.started_at for attempt in attempts if attempt.started_at is not None]
    has_first = attempts and attempts[0].number == 1
    # The last ten are recorded, and a worker leaves its name at the end of an attempt.
    forgotten = attempts[0].number - 1 if attempts else 0
    running = [UNKNOWN_WORKER] if status is TaskResultStatus.RUNNING else []
    result = TaskResult(
        task=task,
        id=id,
        status=status,
        enqueued_at=_local(history.offered_at),
        started_at=_local(attempts[0].started_at) if has_first else None,
        last_attempted_at=_local(starts[-1]) if starts else None,
        finished_at=_local(history.finished_at),
        args=args,
        kwargs=kwargs,
        backend=alias,
        errors=_errors(history),
        worker_ids=[UNKNOWN_WORKER] * forgotten
        + [attempt.worker for attempt in attempts]
        + running,
    )
    if status is TaskResultStatus.SUCCESSFUL:
        # Results are frozen for their users.
        object.__setattr__(result, "_return_value", record["returned"])
    return result


def _errors(history: MessageHistory) -> list[TaskError]:
    errors = [_error(attempt) for attempt in history.attempts if attempt.error]
    if history.state == "dead" and not (history.attempts and history.attempts[-1].error):
        kind = "MessageFailed" if history.error in _REASONS else "Reject"
        errors.append(TaskError(exception_class_path=f"delayq.{kind}", traceback=history.error))
    return errors


def _error(attempt: Attempt) -> TaskError:
    # It begins with the path of the class, without the module if that is "builtins".
    match = _CLASS.match(attempt.error)
    path = "Exception" if match is None else match[0]
    return TaskError(
        exception_class_path=path if "." in path else f"builtins.{path}",
        traceback=attempt.traceback or attempt.error,
    )


def _local(moment: datetime | None) -> datetime | None:
    return None if moment is None else local_moment(moment)


def local_moment(moment: datetime) -> datetime:
    """Return a moment as Django does: naive, in the local time zone, without ``USE_TZ``."""
    return moment if settings.USE_TZ else timezone.make_naive(moment)


def find(path: object) -> Task:
    """Import the task at a path.

    Raises:
        Reject: There is none.
    """
    if not isinstance(path, str):
        raise Reject("it is not a call of a Django task")
    try:
        task = import_string(path)
    except ImportError as error:
        if not _is_absent(path, error):
            # A module that it imports is missing: a later attempt may find it installed.
            raise
        raise Reject(f"unknown task: {error}") from error
    if not isinstance(task, Task):
        raise Reject(f"unknown task: {path} is not a Task")
    return task


def _is_absent(path: str, error: ImportError) -> bool:
    """Return whether the error of ``import_string`` says that there is nothing at a path."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and path.startswith(f"{error.name}.")
    return isinstance(error.__cause__, AttributeError | ValueError)
