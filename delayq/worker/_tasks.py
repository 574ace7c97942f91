"""Calls the tasks of a queue: finds the task of each message, and treats it as that task says."""
# ruff: noqa: SLF001 - the worker and the queue are one library

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from delayq._functions import is_kind, name_of
from delayq._reliable.message import RetryRules
from delayq._reliable.settings import Settings
from delayq._unset import UNSET
from delayq.codecs import JsonCodec
from delayq.errors import ConfigurationError, DecodeError
from delayq.tasks._calls import Call, TaskCodec
from delayq.worker._listener import Listener, ListenerSettings
from delayq.worker._retries import checked
from delayq.worker._signatures import HandlerPlan, plan_injected

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable, Mapping

    from delayq._reliable.consumer import WorkerPort
    from delayq._reliable.message import WorkerMessage
    from delayq._reliable.replies import Claim
    from delayq.tasks import Task, Tasks
    from delayq.tasks._tasks import Treatment
    from delayq.worker._handling import Handling
    from delayq.worker._threads import Threads

SPENT = "it had no attempt left: its last one ended with its worker, or its lease was lost"
"""The error of a dead letter whose last attempt ended without a result."""


@dataclass(frozen=True)
class Included:
    """The tasks of one queue that a worker calls.

    Attributes:
        queue: The queue's name.
        groups: The tasks. Tasks may be registered later.
        concurrency: Maximum number of calls at a time; None for the worker's.
    """

    queue: str
    groups: tuple[Tasks, ...] = ()
    concurrency: int | None = None

    def tasks(self) -> dict[str, Task[Any, Any]]:
        """Return the tasks by their names and aliases.

        Raises:
            ConfigurationError: Two have the same name.
        """
        found: dict[str, Task[Any, Any]] = {}
        for group in self.groups:
            for name, task in group._tasks.items():
                if name in found:
                    raise ConfigurationError(
                        f"queue {self.queue!r} has two tasks {name!r}:"
                        f" {name_of(found[name].function)} and {name_of(task.function)}"
                    )
                found[name] = task
        return found

    def settings(self) -> dict[str, Any]:
        """Return the settings of the queue, without those that each task has for itself.

        Raises:
            ConfigurationError: Two groups have different ones.
        """
        found: dict[str, Any] = {}
        for group in self.groups:
            for name, value in group._shared.items():
                if found.setdefault(name, value) != value:
                    raise ConfigurationError(
                        f"tasks of queue {self.queue!r} have different settings for {name}:"
                        f" {found[name]!r} and {value!r}"
                    )
        return found

    def codec(self) -> TaskCodec:
        """Return the codec of the calls."""
        return TaskCodec(self.tasks())

    def unreadable(self) -> Listener:
        """Return the listener for messages that cannot be read, whose handler is never called."""
        settings = ListenerSettings(self.queue, None, Settings(), 1, None, {})
        return Listener(settings, _start, HandlerPlan(Call, False, (), True), JsonCodec())

    def listeners(self, known: Collection[Any]) -> dict[str, Listener]:
        """Return how the tasks are called, by name, whose parameters may have ``known`` types.

        Raises:
            BadInput, ConfigurationError: A parameter cannot be filled, no codec knows the type of
                an argument, or ``on_error`` is invalid.
        """
        return {task.name: self._listener(task, known) for task in self.tasks().values()}

    def _listener(self, task: Task[Any, Any], known: Collection[Any]) -> Listener:
        arguments, treatment = task.arguments, task.treatment
        arguments.check()
        settings = ListenerSettings(
            self.queue, None, Settings(), 1, treatment.timeout, checked(treatment.on_error)
        )
        injected = plan_injected(task.function, arguments.injected, known)
        plan = HandlerPlan(Call, False, injected, is_kind(iscoroutinefunction, task.function))
        return Listener(settings, partial(_start, task), plan, JsonCodec(), task.name)


class TaskHandling:
    """Handles the messages of one queue, each as its task says."""

    def __init__(
        self,
        port: WorkerPort,
        handlings: Mapping[str, Handling],
        unreadable: Handling,
        treatments: Mapping[str, Treatment],
        threads: Threads,
    ) -> None:
        """Args:
        port: Claims the messages. The server then gives up a message only after the most
            attempts that any of the tasks has.
        handlings: How calls are handled, by the name of the task.
        unreadable: How the other messages are handled.
        treatments: The retries of the tasks, by name.
        threads: Runs the functions that are not coroutine functions.
        """
        self._handlings = handlings
        self._unreadable = unreadable
        self.threads: Threads = threads
        # The rules of the tasks, by name.
        self._retry_rules = {
            name: RetryRules(
                port.policy.max_attempts
                if treatment.max_attempts is UNSET
                else treatment.max_attempts or 0,
                treatment.backoff or port.backoff,
            )
            for name, treatment in treatments.items()
        }
        limits = [rules.max_attempts for rules in self._retry_rules.values()]
        port.set_max_attempts(max(limits) if all(limits) else 0)

    def hurry(self) -> None:
        """As :meth:`Handling.hurry`."""

    def expect(self, claims: Iterable[Claim]) -> None:
        """As :meth:`Handling.expect`."""

    def expect_no_more(self, claims: Iterable[Claim]) -> None:
        """As :meth:`Handling.expect_no_more`."""

    @property
    def keeps_none(self) -> bool:
        """As :attr:`Handling.keeps_none`."""
        return False

    def places_of(self, most: int) -> int:
        """As :meth:`Handling.places_of`."""
        return self._unreadable.places_of(most)

    def handle(self, message: WorkerMessage[Call]) -> Coroutine[Any, Any, None]:
        """Handle a message and settle it, as :meth:`Handling.handle` does."""
        try:
            name = message.value.task
        except DecodeError:
            return self._unreadable.handle(message)
        message.retry_by(self._retry_rules[name])
        handling = self._handlings[name]
        # Its body need not be parsed for the limit in the first attempt.
        most = message.max_attempts if message.attempt > 1 else None
        if most and message.counted_attempts > most:
            return handling.bury(message, "attempts", SPENT)
        return handling.handle(message)


def _start(task: Task[Any, Any], call: Call, /, **injected: Any) -> Any:
    return task.arguments.call(call.arguments, injected)
