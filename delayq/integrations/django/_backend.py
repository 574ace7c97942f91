"""The backend: tasks become messages of reliable queues."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.tasks.base import Task, TaskResult, TaskResultStatus
from django.tasks.exceptions import InvalidTask
from django.tasks.signals import task_enqueued
from django.utils import timezone
from django.utils.json import normalize_json

from delayq import sync
from delayq._checks import check_flag
from delayq._durations import seconds
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.settings import HandleOptions, HandleSettings
from delayq.client import URL_VARIABLE, connect
from delayq.errors import BadInput, BadName, ConfigurationError
from delayq.integrations.django import _outbox as outbox
from delayq.integrations.django._results import result_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayq._durations import Duration
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.queue import ReliableQueue
    from delayq.client import Client

    # As in apps.py.
    from delayq.integrations.django._untyped import Untyped as BaseTaskBackend
else:
    from django.tasks.backends.base import BaseTaskBackend

# Clients by address, for all threads: Django makes a backend for each of them.
_clients: dict[str, _Shared] = {}

_NO_ADDRESS = f"there is no address of a server, in OPTIONS['url'] or ${URL_VARIABLE}"
_PRIVATE = (
    "each process would have its own embedded server, so no worker would find a task: add a"
    " directory, or start a server for all"
)
_HINT = "An address is, for example, redis://127.0.0.1:6379/0"

# The priority of a message whose task has none.
_USUAL = 4

_SETTINGS = frozenset(HandleOptions.__annotations__)
_OPTIONS = _SETTINGS | {"url", "prefix", "timeout", "OUTBOX"}


@dataclass(frozen=True)
class Options:
    """The ``OPTIONS`` of a backend, which have been checked.

    Attributes:
        url: The server's address; None for ``$DELAYQ_URL``.
        prefix: Put in front of the names of queues.
        timeout: How long a task may run; None for no limit.
        settings: The settings of the queues.
        outbox: Whether tasks are written to the default database, in the transaction of the caller.
    """

    url: str | None = None
    prefix: str = ""
    timeout: Duration | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    outbox: bool = False

    @classmethod
    def of(cls, options: object) -> Options:
        """Return the options.

        Raises:
            BadInput: One is unknown or invalid.
        """
        if not isinstance(options, dict):
            raise BadInput(f"OPTIONS must be a dict, not {options!r}")
        if unknown := sorted(str(name) for name in options if name not in _OPTIONS):
            names = ", ".join(sorted(_OPTIONS, key=str.lower))
            raise BadInput(f"there is no option {unknown[0]!r}, only {names}")
        url, prefix, timeout = options.get("url"), options.get("prefix", ""), options.get("timeout")
        for name, value in (("url", url or ""), ("prefix", prefix)):
            if not isinstance(value, str):
                raise BadInput(f"{name} must be a str, not {value!r}")
        if timeout is not None and not seconds(timeout, "timeout"):
            raise BadInput("timeout must be more than 0")
        settings = {name: value for name, value in options.items() if name in _SETTINGS}
        HandleSettings(**settings).check()
        outbox = options.get("OUTBOX", False)
        check_flag(outbox, "OUTBOX")
        return cls(url or None, prefix, timeout, settings, outbox)

    def of_listener(self) -> dict[str, Any]:
        """Return the settings that a worker has a use for."""
        return {name: value for name, value in self.settings.items() if name != "durability"}


class _Shared:
    """A client, and the queues that are open.

    Attributes:
        client: The client.
        queues: By the alias of the backend and the name, in the client's loop: the asynchronous
            client, of which each process has its own, the settings, and the queue.
    """

    def __init__(self, client: sync.Client) -> None:
        self.client = client
        self.queues: dict[
            tuple[str, str], tuple[Client, Mapping[str, Any], ReliableQueue[Any]]
        ] = {}


class DelayqBackend(BaseTaskBackend):
    """A backend of Django's Tasks framework that stores tasks in reliable queues.

    ``OPTIONS`` are ``url``, ``prefix``, ``timeout`` and the settings of
    :meth:`delayq.Client.reliable_queue`.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        """Create a backend, which connects with its first call.

        Args:
            alias: Its key in ``TASKS``.
            params: The value there. :meth:`check` checks it.
        """
        super().__init__(alias, params)
        self._queues_given = params.get("QUEUES")

    @cached_property
    def delayq_options(self) -> Options:
        """The options, which have been checked.

        Raises:
            ImproperlyConfigured: One is unknown or invalid.
        """
        try:
            return Options.of(self.options)
        except BadInput as error:
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: {error}") from error

    @property
    def address(self) -> str:
        """The address of the server.

        Raises:
            ImproperlyConfigured: There is none, it is that of a private server, or an option is
                unknown or invalid.
        """
        address = self.delayq_options.url or os.environ.get(URL_VARIABLE)
        if not address:
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: {_NO_ADDRESS}. {_HINT}")
        if _is_private(address):
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: {_PRIVATE}. {_HINT}")
        return address

    @property
    def supports_get_result(self) -> bool:
        """Whether results are kept, and the queues in which one may be are known."""
        return bool(self.options.get("keep")) and bool(self.queues)

    @property
    def client(self) -> sync.Client:
        """The client, which all backends with the same address share in this process.

        Raises:
            ImproperlyConfigured: An option is unknown or invalid, or there is no address.
        """
        return self._shared.client

    @property
    def _shared(self) -> _Shared:
        address = self.address
        if (shared := _clients.get(address)) is None:
            try:
                # Two threads may get here at once, but only one of the clients is ever opened.
                shared = _clients.setdefault(address, _Shared(sync.connect(address)))
            except ConfigurationError as error:
                raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: {error}") from error
        return shared

    def close(self) -> None:
        """Close the client. A later call opens another one."""
        # Without an address that can be used, there is none: nothing is wrong with closing it.
        with suppress(ImproperlyConfigured):
            if (shared := _clients.pop(self.address, None)) is not None:
                shared.client.close()

    def message_queue(self, queue_name: str) -> str:
        """Return the name of the queue, in delayq, of tasks with this ``queue_name``."""
        return self.delayq_options.prefix + queue_name

    def validate_task(self, task: Task) -> None:
        """Check a task as Django does, and a ``run_after`` that is a ``timedelta``.

        Raises:
            InvalidTask: It is not valid.
        """
        run_after = task.run_after
        if isinstance(run_after, timedelta):
            if run_after < timedelta(0):
                raise InvalidTask("run_after must not be negative.")
            # Django documents it, but takes it for a datetime in its own check.
            replace(task, run_after=None)
            return
        if run_after is not None and not isinstance(run_after, datetime):
            raise InvalidTask(f"run_after must be a datetime or a timedelta, not {run_after!r}.")
        super().validate_task(task)  # type: ignore[misc]

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Store a task in its queue; with the option ``OUTBOX``, write it to the default database.

        Returns:
            The result, whose id is that of the message.

        Raises:
            InvalidTask: The backend cannot run the task.
            TypeError, ValueError, EncodeError: An argument cannot be written as JSON.
            ImproperlyConfigured: An option is unknown or invalid, or there is no address.
            DelayqError: As for :meth:`delayq.ReliableQueue.offer`.
        """
        value, options = self._message(task, args, kwargs)
        if self.delayq_options.outbox:
            id = self._write(task.queue_name, value, options)  # noqa: A001
        else:
            shared = self._shared
            id = shared.client.run(self._offer, shared, task.queue_name, value, options)  # noqa: A001
        result = self._result(task, id, value)
        # The task is stored: an error of a receiver must not make the caller enqueue it again.
        task_enqueued.send_robust(type(self), task_result=result)
        return result

    async def aenqueue(
        self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TaskResult:
        """Store a task in its queue, as :meth:`enqueue` does."""
        value, options = self._message(task, args, kwargs)
        if self.delayq_options.outbox:
            id = await sync_to_async(self._write)(task.queue_name, value, options)  # noqa: A001
        else:
            shared = self._shared
            offer = shared.client.arun(self._offer, shared, task.queue_name, value, options)
            id = await offer  # noqa: A001
        result = self._result(task, id, value)
        await task_enqueued.asend_robust(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return what is known about a task that was enqueued. Needs the option ``keep``.

        Raises:
            TaskResultDoesNotExist: There is none with this id, it was cancelled, or its result is
                not kept any more.
            NotImplementedError: The option is not set, or ``QUEUES`` allows any name.
            DelayqError: As for :meth:`delayq.ReliableQueue.history`.
        """
        self._check_results()
        shared = self._shared
        return result_of(self.alias, result_id, shared.client.run(self._find, shared, result_id))

    async def aget_result(self, result_id: str) -> TaskResult:
        """Return what is known about a task, as :meth:`get_result` does."""
        self._check_results()
        shared = self._shared
        history = await shared.client.arun(self._find, shared, result_id)
        # It may import the module of the task.
        return await sync_to_async(result_of)(self.alias, result_id, history)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check ``QUEUES`` and ``OPTIONS``, for ``manage.py check``."""
        subject = f"TASKS[{self.alias!r}]"
        messages = list(super().check(**kwargs))  # type: ignore[misc]
        try:
            options = Options.of(self.options)
        except BadInput as error:
            return [*messages, checks.Error(f"{subject}['OPTIONS']: {error}", id="delayq.E001")]
        address = options.url or os.environ.get(URL_VARIABLE)
        if not address:
            # Not an error: an image may be built where no address is known.
            messages.append(
                checks.Warning(f"{subject}: {_NO_ADDRESS}", hint=_HINT, id="delayq.W001")
            )
        elif _is_private(address):
            messages.append(checks.Error(f"{subject}: {_PRIVATE}", hint=_HINT, id="delayq.E002"))
        else:
            try:
                connect(address)
            except ConfigurationError as error:
                messages.append(checks.Error(f"{subject}: {error}", hint=_HINT, id="delayq.E002"))
        if options.outbox:
            messages += self._check_outbox(subject)
        if isinstance(self._queues_given, str):
            text = f"{subject}['QUEUES'] must be a list of names, not a str"
            return [*messages, checks.Error(text, id="delayq.E003")]
        for name in self.queues:
            try:
                ReliableKeys.of(options.prefix + name)
            except (BadName, TypeError) as error:
                text = f"{subject}['QUEUES']: {name!r} cannot be a queue: {error}"
                messages.append(checks.Error(text, id="delayq.E003"))
        return messages

    def _check_outbox(self, subject: str) -> list[checks.CheckMessage]:
        vendor = connections[DEFAULT_DB_ALIAS].vendor
        if vendor not in outbox.VENDORS:
            text = (
                f"{subject}: an outbox can be in PostgreSQL or SQLite, but the database is {vendor}"
            )
            return [checks.Error(text, id="delayq.E004")]
        if not apps.is_installed("delayq.integrations.django"):
            text = f"{subject}: OUTBOX needs 'delayq.integrations.django' in INSTALLED_APPS"
            return [checks.Error(text, id="delayq.E005")]
        return []

    def _message(
        self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the value of a task's message, and its options."""
        self.validate_task(task)
        func = task.func
        if func.__module__ == "__main__":
            raise InvalidTask(
                f"{func.__qualname__!r} is in the program itself, where no worker can import it:"
                " move it to a module."
            )
        attribute = getattr(sys.modules.get(func.__module__), func.__qualname__, None)
        if not isinstance(attribute, Task):
            raise InvalidTask(
                f"{task.module_path!r} must be the Task itself, for a worker to find it: decorate"
                " the function with @task."
            )
        value = {
            "task": task.module_path,
            "args": normalize_json(args),
            "kwargs": normalize_json(kwargs),
        }
        if task.priority:
            value["priority"] = task.priority
        options: dict[str, Any] = {"priority": message_priority(task.priority)}
        if isinstance(task.run_after, timedelta):
            options["delay"] = task.run_after
        elif task.run_after is not None:
            aware = timezone.is_aware(task.run_after)
            options["at"] = task.run_after if aware else timezone.make_aware(task.run_after)
        return value, options

    def _queue(self, client: Client, shared: _Shared, queue_name: str) -> ReliableQueue[Any]:
        """Return a queue, which is opened for the first call only. Called in the client's loop."""
        key, settings = (self.alias, queue_name), self.delayq_options.settings
        entry = shared.queues.get(key)
        if entry is None or entry[0] is not client or entry[1] != settings:
            queue = client.reliable_queue(self.message_queue(queue_name), **settings)
            entry = shared.queues[key] = (client, settings, queue)
        return entry[2]

    async def _offer(
        self,
        client: Client,
        shared: _Shared,
        queue_name: str,
        value: object,
        options: Mapping[str, Any],
    ) -> str:
        return await self._queue(client, shared, queue_name).offer(value, **options)

    def _write(self, queue_name: str, value: object, options: Mapping[str, Any]) -> str:
        """Write a task into the outbox, and return the message's id."""
        queue = self.message_queue(queue_name)
        return outbox.write(self.alias, queue, value, options, self.delayq_options.settings)

    def _check_results(self) -> None:
        if not self.supports_get_result:
            missing = "names in QUEUES" if self.options.get("keep") else "keep in OPTIONS"
            raise NotImplementedError(
                f"TASKS[{self.alias!r}] keeps no results that can be found by id: it needs"
                f" {missing}"
            )

    async def _find(
        self,
        client: Client,
        shared: _Shared,
        id: str,  # noqa: A002
    ) -> tuple[str, MessageHistory] | None:
        """Return the history of a message, and the ``queue_name`` of the task."""
        names = sorted(self.queues)
        queues = [self._queue(client, shared, name) for name in names]
        try:
            histories = await asyncio.gather(*(queue.history(id) for queue in queues))
        except BadInput:
            return None
        for name, history in zip(names, histories, strict=True):
            if history is not None:
                return name, history
        return None

    def _result(self, task: Task, id: str, value: Mapping[str, Any]) -> TaskResult:  # noqa: A002
        return TaskResult(
            task=task,
            id=id,
            status=TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=value["args"],
            kwargs=value["kwargs"],
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )


def _is_private(address: str) -> bool:
    # With a directory, all processes share the server.
    return address in ("embedded:", "embedded://")


def message_priority(priority: int) -> int:
    """Return a message's priority, 0 to 9, for that of a task, -100 to 100.

    A task with a positive priority runs before those with 0, and one with a negative priority after
    them; among each, there are steps of 20 or 25.
    """
    return _USUAL - -priority // 20 if priority > 0 else _USUAL + priority // 25
