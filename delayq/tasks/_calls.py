"""Calls of tasks, and their form in the messages of a queue.

A call is a JSON object: ``{"task":"send_mail","args":{"to":"ada@example.org","subject":"hi"}}``.
Arguments are named, and those that were left out are missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delayq.codecs.json import JsonCodec
from delayq.errors import BadInput, DecodeError, UnknownTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayq.tasks._tasks import Task

_JSON = JsonCodec()


@dataclass(frozen=True)
class Call:
    """A call of a task: the value of a message.

    ``repr`` leaves out the arguments: they may be private, and tracebacks are logged.

    Attributes:
        task: The task's name.
        arguments: The arguments by name, without those that were left out.
    """

    task: str
    arguments: Mapping[str, Any] = field(repr=False)


class TaskCodec:
    """Encodes and decodes calls of the tasks of one queue.

    Attributes:
        results: The codec of what the tasks return.
    """

    results = _JSON

    def __init__(self, tasks: Mapping[str, Task[Any, Any]]) -> None:
        """Args:
        tasks: The tasks, by their names and aliases. There may be more later.
        """
        self._tasks = tasks

    def encode(self, value: Call, /) -> bytes:
        """Encode a call.

        Raises:
            BadArguments: An argument is not of the type that the task's function takes.
            BadInput: It is not a call of one of the tasks.
            EncodeError: JSON has no form for an argument.
        """
        if not isinstance(value, Call):
            raise BadInput(
                f"this queue takes calls of tasks, not {type(value).__name__}: use offer() or"
                " to_offer() of a task"
            )
        task = self._tasks.get(value.task)
        if task is None:
            raise BadInput(f"no task is registered as {value.task!r}")
        return b"%b%b}" % (task.head, task.arguments.encode(value.arguments))

    def decode(self, payload: bytes, /) -> Call:
        """Decode a call. The arguments have the types of the annotations.

        Raises:
            UnknownTask: The task is not among those of the queue.
            BadArguments: The task's function does not take the arguments.
            DecodeError: It is not a call.
        """
        value = _JSON.decode(payload)
        name = value.get("task") if isinstance(value, dict) else None
        if type(name) is not str:
            raise DecodeError(
                "TaskCodec", payload, 'it is not a call of a task, {"task": name, "args": {...}}'
            )
        task = self._tasks.get(name)
        if task is None:
            raise UnknownTask(name, payload)
        return Call(task.name, task.arguments.decode(value.get("args", {})))
