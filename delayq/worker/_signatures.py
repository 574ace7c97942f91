"""Reads which parameters a handler or a dependency asks for, and their types. Pure."""

from __future__ import annotations

import inspect
import typing
from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._functions import (
    INJECTED,
    NOTHING,
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
    from collections.abc import Callable, Collection, Iterable

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
    content: Any = NOTHING


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
    handler: Callable[..., Any], known: Collection[Any], *, in_batches: bool = False
) -> HandlerPlan:
    """Decide how a handler is called, for whose parameters there are ``known`` types.

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
    first, *others = parameters
    kind = annotation_of(handler, first.name)
    if in_batches:
        kind = _item_of(handler, kind)
    takes_message = _is_message(kind)
    if not takes_message and _is_known(kind, known):
        raise ConfigurationError(
            f"{name_of(handler)}: the first parameter must be the value or the message, not"
            f" {show(kind)}"
        )
    value = _of_message(kind) if takes_message else kind
    injected = plan_injected(handler, others, known)
    for parameter in injected:
        if in_batches and parameter.kind is Message:
            raise ConfigurationError(
                f"{name_of(handler)} takes batches, so {parameter.name!r} cannot be the message:"
                " annotate the first parameter as list[Message[...]]"
            )
        if parameter.content not in (NOTHING, Any, value):
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
        takes: The function's parameters.
        once: Whether the object is made once in a run, rather than for each message that asks.
    """

    kind: Any
    function: Callable[..., Any]
    is_async: bool
    yields: bool
    takes: tuple[Injected, ...]
    once: bool


def plan_dependency(
    function: Callable[..., Any], known: Collection[Any], *, once: bool
) -> Dependency:
    """Decide how a dependency is made by a function, which may ask for ``known`` types.

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
        kind = NOTHING
    if kind in (NOTHING, None, type(None), Any):
        raise ConfigurationError(
            f"{name_of(function)}: its return annotation must name the type of the dependency"
        )
    takes = plan_injected(function, parameters_of(function), known)
    if once and any(one.kind is Message for one in takes):
        raise ConfigurationError(
            f"{name_of(function)} is called only once, so it cannot take a message"
        )
    is_async = is_kind(inspect.iscoroutinefunction, function) or is_kind(
        inspect.isasyncgenfunction, function
    )
    return Dependency(kind, function, is_async, yields, takes, once)


def plan_injected(
    function: Callable[..., Any], parameters: Iterable[inspect.Parameter], known: Collection[Any]
) -> tuple[Injected, ...]:
    """Decide how these parameters are filled, for which there are ``known`` types.

    Raises:
        ConfigurationError: One cannot be filled and has no default, or its annotation cannot be
            read.
    """
    result = []
    for parameter in parameters:
        if parameter.kind in _VARIABLE:
            continue
        kind = annotation_of(function, parameter.name)
        has_default = all(parameter.default is not each for each in (NOTHING, INJECTED))
        by_name = parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        if by_name and _is_message(kind):
            result.append(Injected(parameter.name, Message, _of_message(kind)))
        elif by_name and _is_known(kind, known):
            result.append(Injected(parameter.name, kind))
        elif not has_default:
            what = "has no annotation" if kind is NOTHING else f"is a {show(kind)}"
            if not by_name:
                what = "is positional-only"
            raise ConfigurationError(
                f"{name_of(function)}: nothing fills the parameter {parameter.name!r}, which"
                f" {what}: annotate it with Message, Client, Worker or the type of a dependency"
                " registered before, or give a default"
            )
    return tuple(result)


def _item_of(handler: Callable[..., Any], kind: Any) -> Any:
    """Return the type of the items of a handler's first parameter, which takes a batch."""
    if kind in (NOTHING, Any, list):
        return NOTHING
    if typing.get_origin(kind) in (list, abc.Sequence, abc.Collection, abc.Iterable):
        return typing.get_args(kind)[0]
    raise ConfigurationError(
        f"{name_of(handler)} takes batches: annotate its first parameter as list[...], not as"
        f" {show(kind)}"
    )


def _is_message(kind: Any) -> bool:
    return kind is Message or typing.get_origin(kind) is Message


def _of_message(kind: Any) -> Any:
    (value,) = typing.get_args(kind) or (NOTHING,)
    return value


def _is_known(kind: Any, known: Collection[Any]) -> bool:
    try:
        return kind in known
    except TypeError:  # not hashable
        return False
