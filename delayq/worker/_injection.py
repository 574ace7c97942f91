"""The parameters of handlers and dependencies: which ones they ask for, and what fills them."""

from __future__ import annotations

import inspect
import typing
from collections import abc
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._functions import (
    EMPTY,
    INJECTED,
    annotation_of,
    is_generator,
    is_kind,
    name_of,
    parameters_of,
    show,
)
from delayq._reliable.message import Message
from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from contextlib import AsyncExitStack

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_STREAMS = (
    abc.AsyncGenerator,
    abc.AsyncIterable,
    abc.AsyncIterator,
    abc.Generator,
    abc.Iterable,
    abc.Iterator,
)


@dataclass(frozen=True)
class Injected:
    """A parameter that is filled with the message, or with the dependency of its type.

    Attributes:
        name: The parameter's name.
        kind: :class:`Message`, or the type of the dependency.
        content: For a message: the type of its value, if its annotation names one.
    """

    name: str
    kind: Any
    content: Any = EMPTY


@dataclass(frozen=True)
class HandlerPlan:
    """How a handler is called.

    Attributes:
        value: The type of the value.
        takes_message: Whether the first parameter takes the message, which carries the value.
        injected: The other parameters.
        is_async: Whether the handler runs in the event loop. Otherwise it runs in a thread.
    """

    value: Any
    takes_message: bool
    injected: tuple[Injected, ...]
    is_async: bool


def plan_handler(
    handler: Callable[..., Any], injectable: Collection[Any], *, in_batches: bool = False
) -> HandlerPlan:
    """Decide how a handler is called, whose parameters may have ``injectable`` types.

    One that takes messages ``in_batches`` gets a list of values, or of messages.

    Raises:
        ConfigurationError: The handler takes no value, a parameter cannot be filled, or an
            annotation cannot be read.
    """
    if not callable(handler) or is_generator(handler):
        raise ConfigurationError(
            f"{name_of(handler)} is not a handler: it must be a function, sync or async, that does"
            " not yield"
        )
    parameters = parameters_of(handler)
    if not parameters or parameters[0].kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ):
        raise ConfigurationError(
            f"{name_of(handler)} has no parameter for the value, which is passed as the first one"
        )
    first, *extra_parameters = parameters
    kind = annotation_of(handler, first.name)
    if in_batches:
        kind = _item_of(handler, kind)
    takes_message = _is_message(kind)
    if not takes_message and _is_injectable(kind, injectable):
        raise ConfigurationError(
            f"{name_of(handler)}: the first parameter must be the value or the message, not"
            f" {show(kind)}"
        )
    value = _of_message(kind) if takes_message else kind
    injected = plan_injected(handler, extra_parameters, injectable)
    for parameter in injected:
        if in_batches and parameter.kind is Message:
            raise ConfigurationError(
                f"{name_of(handler)} takes batches, so {parameter.name!r} cannot be the message:"
                " annotate the first parameter as list[Message[...]]"
            )
        if parameter.content not in (EMPTY, Any, value):
            raise ConfigurationError(
                f"{name_of(handler)} takes a {show(value)}, but a message of"
                f" {show(parameter.content)}"
            )
    return HandlerPlan(
        value, takes_message, injected, is_kind(inspect.iscoroutinefunction, handler)
    )


@dataclass(frozen=True)
class Dependency:
    """A function that makes the object for a type.

    Attributes:
        kind: The type.
        function: The function that makes the object.
        is_async: Whether the function is a coroutine function or an async generator.
        yields: Whether the function is a generator, which tears the object down at its end.
        injected: The function's parameters.
        once: Whether the object is made once in a run, rather than for each message that asks.
    """

    kind: Any
    function: Callable[..., Any]
    is_async: bool
    yields: bool
    injected: tuple[Injected, ...]
    once: bool


def plan_dependency(
    function: Callable[..., Any], injectable: Collection[Any], *, once: bool
) -> Dependency:
    """Decide how a function makes a dependency. Its parameters may have ``injectable`` types.

    Raises:
        ConfigurationError: The function has no return annotation, a parameter cannot be filled, or
            an annotation cannot be read.
    """
    if not callable(function) or inspect.isclass(function):
        raise ConfigurationError(
            f"{name_of(function)} is not a dependency: it must be a function, sync or async, that"
            " returns or yields the object"
        )
    yields = is_generator(function)
    kind = annotation_of(function, "return")
    if yields and typing.get_origin(kind) in _STREAMS:
        kind = typing.get_args(kind)[0]
    elif yields:
        kind = EMPTY
    if kind in (EMPTY, None, type(None), Any):
        raise ConfigurationError(
            f"{name_of(function)}: its return annotation must name the type of the dependency"
        )
    injected = plan_injected(function, parameters_of(function), injectable)
    if once and any(parameter.kind is Message for parameter in injected):
        raise ConfigurationError(
            f"{name_of(function)} is called only once, so it cannot take a message"
        )
    is_async = is_kind(inspect.iscoroutinefunction, function) or is_kind(
        inspect.isasyncgenfunction, function
    )
    return Dependency(kind, function, is_async, yields, injected, once)


def plan_injected(
    function: Callable[..., Any],
    parameters: Iterable[inspect.Parameter],
    injectable: Collection[Any],
) -> tuple[Injected, ...]:
    """Decide how these parameters are filled, which may have ``injectable`` types.

    Raises:
        ConfigurationError: One cannot be filled and has no default, or its annotation cannot be
            read.
    """
    injected = []
    for parameter in parameters:
        if parameter.kind in _VARIABLE:
            continue
        kind = annotation_of(function, parameter.name)
        has_default = parameter.default is not EMPTY and parameter.default is not INJECTED
        by_name = parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        if by_name and _is_message(kind):
            injected.append(Injected(parameter.name, Message, _of_message(kind)))
        elif by_name and _is_injectable(kind, injectable):
            injected.append(Injected(parameter.name, kind))
        elif not has_default:
            obstacle = "has no annotation" if kind is EMPTY else f"is a {show(kind)}"
            if not by_name:
                obstacle = "is positional-only"
            raise ConfigurationError(
                f"{name_of(function)}: nothing fills the parameter {parameter.name!r}, which"
                f" {obstacle}: annotate it with Message, Client, Worker or the type of a dependency"
                " registered before, or give a default"
            )
    return tuple(injected)


def _item_of(handler: Callable[..., Any], kind: Any) -> Any:
    """Return the type of the items of a handler's first parameter, which takes a batch."""
    if kind in (EMPTY, Any, list):
        return EMPTY
    if typing.get_origin(kind) in (list, abc.Sequence, abc.Collection, abc.Iterable):
        return typing.get_args(kind)[0]
    raise ConfigurationError(
        f"{name_of(handler)} takes batches: annotate its first parameter as list[...], not as"
        f" {show(kind)}"
    )


def _is_message(kind: Any) -> bool:
    return kind is Message or typing.get_origin(kind) is Message


def _of_message(kind: Any) -> Any:
    (value,) = typing.get_args(kind) or (EMPTY,)
    return value


def _is_injectable(kind: Any, injectable: Collection[Any]) -> bool:
    try:
        return kind in injectable
    except TypeError:  # not hashable
        return False


class Scope:
    """The dependencies of one message, or of one run of the worker.

    Each one is made when it is first asked for.
    """

    def __init__(
        self,
        dependencies: Mapping[Any, Dependency],
        instances: dict[Any, Any],
        stack: AsyncExitStack,
    ) -> None:
        """Args:
        dependencies: How dependencies are made, by type.
        instances: Those that exist, by type. Others are added.
        stack: Tears down those that are added.
        """
        self._dependencies = dependencies
        self._instances = instances
        self._stack = stack

    async def fill(self, parameters: Iterable[Injected]) -> dict[str, Any]:
        """Return the arguments for these parameters, by name."""
        return {parameter.name: await self.get(parameter.kind) for parameter in parameters}

    async def get(self, kind: Any) -> Any:
        """Return the dependency of this type."""
        if kind not in self._instances:
            self._instances[kind] = await self._make(self._dependencies[kind])
        return self._instances[kind]

    async def _make(self, dependency: Dependency) -> Any:
        arguments = await self.fill(dependency.injected)
        function = dependency.function
        if dependency.yields and dependency.is_async:
            return await self._stack.enter_async_context(asynccontextmanager(function)(**arguments))
        if dependency.yields:
            return self._stack.enter_context(contextmanager(function)(**arguments))
        instance = function(**arguments)
        return await instance if inspect.isawaitable(instance) else instance
