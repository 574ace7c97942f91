"""The registry of a worker: its listeners, tasks, dependencies and middleware."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from delayq._functions import is_async, is_kind, name_of, show
from delayq._reliable.message import Message
from delayq._reliable.settings import HandleSettings
from delayq.codecs import JsonCodec
from delayq.errors import ConfigurationError
from delayq.tasks._calls import Call
from delayq.tasks._tasks import TaskCodec
from delayq.worker._injection import HandlerPlan, plan_dependency, plan_injected
from delayq.worker._listeners import Listener, ListenerSettings, check_on_error, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractAsyncContextManager

    from delayq.client import Client
    from delayq.codecs import Codec
    from delayq.tasks import Task, Tasks
    from delayq.worker._handling import Middleware
    from delayq.worker._injection import Dependency

E_contra = TypeVar("E_contra", contravariant=True)


class AnyRelay(Protocol):
    """A relay: see :class:`delayq.outbox.Relay`, which this module does not import."""

    @property
    def name(self) -> str: ...
    def running(self, client: Client, /) -> AbstractAsyncContextManager[object]: ...

    async def drain(self, client: Client, /) -> object: ...


class AnyOutbox(Protocol[E_contra]):
    """An outbox, with an engine of its kind."""

    def relay(self, engine: E_contra, /, *, durability: str | None = None) -> AnyRelay: ...


@dataclass(frozen=True)
class IncludedTasks:
    """The tasks of one queue that a worker calls.

    Attributes:
        queue: The queue's name.
        groups: The tasks. Tasks may be registered later.
        concurrency: Maximum number of calls at a time; None for the worker's.
    """

    queue: str
    groups: tuple[Tasks, ...] = ()
    concurrency: int | None = None

    def by_name(self) -> dict[str, Task[Any, Any]]:
        """Return the tasks by their names and aliases.

        Raises:
            ConfigurationError: Two have the same name.
        """
        tasks: dict[str, Task[Any, Any]] = {}
        for group in self.groups:
            for name, task in group.by_name.items():
                if name in tasks:
                    raise ConfigurationError(
                        f"queue {self.queue!r} has two tasks {name!r}:"
                        f" {name_of(tasks[name].function)} and {name_of(task.function)}"
                    )
                tasks[name] = task
        return tasks

    def settings(self) -> dict[str, Any]:
        """Return the settings of the queue, without those that each task has for itself.

        Raises:
            ConfigurationError: Two groups have different ones.
        """
        settings: dict[str, Any] = {}
        for group in self.groups:
            for name, value in group.queue_settings.items():
                if settings.setdefault(name, value) != value:
                    raise ConfigurationError(
                        f"tasks of queue {self.queue!r} have different settings for {name}:"
                        f" {settings[name]!r} and {value!r}"
                    )
        if any(group.encryption is not self.groups[0].encryption for group in self.groups):
            raise ConfigurationError(
                f"tasks of queue {self.queue!r} have different codecs: give all of them the same"
                " object"
            )
        return settings

    def codec(self) -> Codec[Any]:
        """Return the codec of the calls."""
        return self.groups[0].encrypted(TaskCodec(self.by_name()))

    def unreadable(self) -> Listener:
        """Return the listener for messages that cannot be read, whose handler is never called."""
        settings = ListenerSettings(self.queue, None, HandleSettings(), 1, None, {})
        return Listener(settings, _call_task, HandlerPlan(Call, False, (), True), JsonCodec())

    def listeners(self, injectable: Collection[Any]) -> dict[str, Listener]:
        """Return how the tasks are called, by name. Their parameters may have ``injectable`` types.

        Raises:
            BadInput, ConfigurationError: A parameter cannot be filled, no codec knows the type of
                an argument, or ``on_error`` is invalid.
        """
        return {task.name: self._listener(task, injectable) for task in self.by_name().values()}

    def _listener(self, task: Task[Any, Any], injectable: Collection[Any]) -> Listener:
        arguments, options = task.arguments, task.task_options
        arguments.check()
        settings = ListenerSettings(
            self.queue, None, HandleSettings(), 1, options.timeout, check_on_error(options.on_error)
        )
        injected = plan_injected(task.function, arguments.injected, injectable)
        plan = HandlerPlan(Call, False, injected, is_kind(iscoroutinefunction, task.function))
        return Listener(settings, partial(_call_task, task), plan, JsonCodec(), task.name)


def _call_task(task: Task[Any, Any], call: Call, /, **injected: Any) -> Any:
    return task.arguments.call(call.arguments, injected)


@dataclass
class Registry:
    """The listeners, tasks, dependencies and middleware of a worker.

    Attributes:
        built_in: The types that every handler may ask for, besides :class:`Message`.
        listeners: The listeners, by queue.
        included: The tasks, by queue.
        dependencies: How dependencies are made, by type.
        middleware: The functions around each handler, outermost first.
        relays: The relays of outboxes.
    """

    built_in: frozenset[type[Any]]
    listeners: dict[str, Listener] = field(default_factory=dict)
    included: dict[str, IncludedTasks] = field(default_factory=dict)
    dependencies: dict[Any, Dependency] = field(default_factory=dict)
    middleware: list[Middleware] = field(default_factory=list)
    relays: list[AnyRelay] = field(default_factory=list)

    @property
    def queues(self) -> list[str]:
        """The names of the queues."""
        return [*self.listeners, *self.included]

    @property
    def injectable(self) -> set[Any]:
        """The types that parameters may have."""
        return {*self.built_in, *self.dependencies}

    def settings(self) -> dict[str, HandleSettings]:
        """Return the settings that are given for each queue."""
        settings = {name: listener.settings.settings for name, listener in self.listeners.items()}
        for name, included in self.included.items():
            settings[name] = HandleSettings(**included.settings())
        return settings

    def declared_settings(self) -> dict[str, dict[str, str]]:
        """Return what is declared for each queue, as :meth:`Worker.declared_settings`."""
        return {name: settings.declared() for name, settings in self.settings().items()}

    def add_listener(self, settings: ListenerSettings, handler: Callable[..., Any]) -> None:
        """Register a handler, as :meth:`Worker.listener`."""
        queue = settings.queue
        if queue in self.included:
            raise ConfigurationError(
                f"queue {queue!r} has tasks, so it can have no listener: {name_of(handler)}"
                " needs a queue of its own"
            )
        if queue in self.listeners:
            present = name_of(self.listeners[queue].handler)
            raise ConfigurationError(
                f"queue {queue!r} already has a listener: {present}; {name_of(handler)} would be"
                " a second one"
            )
        injectable = self.injectable
        if settings.batch is not None:
            injectable -= self._dependent_on_message()
        self.listeners[queue] = listen(settings, handler, injectable)

    def include(self, tasks: Tasks, concurrency: int | None) -> None:
        """Register tasks, as :meth:`Worker.include`."""
        name = tasks.name
        if name in self.listeners:
            present = name_of(self.listeners[name].handler)
            raise ConfigurationError(
                f"queue {name!r} has a listener, {present}, so it can have no tasks"
            )
        before = self.included.get(name, IncludedTasks(name))
        included = IncludedTasks(name, (*before.groups, tasks), concurrency or before.concurrency)
        # Check them.
        included.settings()
        included.listeners(self.injectable)
        self.included[name] = included

    def add_dependency(self, function: Callable[..., Any], *, once: bool) -> None:
        """Register a dependency, as :meth:`Worker.dependency`."""
        injectable = {
            kind
            for kind in self.injectable
            if not once or kind not in self.dependencies or self.dependencies[kind].once
        }
        dependency = plan_dependency(function, injectable, once=once)
        kind = dependency.kind
        if kind in self.injectable or kind is Message:
            raise ConfigurationError(
                f"{name_of(function)}: there already is a dependency of type {show(kind)}"
            )
        self.dependencies[kind] = dependency

    def add_middleware(self, function: Any) -> None:
        """Register a middleware, as :meth:`Worker.middleware`."""
        if not is_async(function):
            raise ConfigurationError(
                f"{name_of(function)} is not a middleware: write async def"
                f" {name_of(function)}(message, call_next)"
            )
        self.middleware.append(function)

    def _dependent_on_message(self) -> set[Any]:
        """Return the types that cannot be made without a message."""
        dependent: set[Any] = {Message}
        # A dependency is registered after those that it asks for.
        for kind, dependency in self.dependencies.items():
            if any(parameter.kind in dependent for parameter in dependency.injected):
                dependent.add(kind)
        return dependent
