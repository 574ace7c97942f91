"""Reads which parameters a handler or a dependency asks for, and their types. Pure."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections import abc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from delayq._reliable.message import Message
from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

NOTHING: Any = inspect.Parameter.empty
"""The annotation of a parameter that has none."""

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


def name_of(function: Any) -> str:
    """Return the name by which errors refer to a function."""
    function = _plain(function)
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def is_async(function: Any) -> bool:
    """Return whether a function, or the one that it wraps, is a coroutine function."""
    return callable(function) and any(
        _is(inspect.iscoroutinefunction, one) for one in (function, _plain(function))
    )


def plan_handler(handler: Callable[..., Any], known: Collection[Any]) -> HandlerPlan:
    """Decide how a handler is called, for whose parameters there are ``known`` types.

    Raises:
        ConfigurationError: The handler takes no value, a parameter cannot be filled, or an
            annotation cannot be read.
    """
    if not callable(handler) or _is_generator(handler):
        raise ConfigurationError(
            f"{name_of(handler)} is not a handler: it must be a function, sync or async, that does"
            " not yield"
        )
    parameters = _parameters(handler)
    if not parameters or parameters[0].kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ):
        raise ConfigurationError(
            f"{name_of(handler)} has no parameter for the value, which is passed as the first one"
        )
    first, *others = parameters
    kind = annotation_of(handler, first.name)
    takes_message = _is_message(kind)
    if not takes_message and _is_known(kind, known):
        raise ConfigurationError(
            f"{name_of(handler)}: the first parameter must be the value or the message, not"
            f" {show(kind)}"
        )
    value = _of_message(kind) if takes_message else kind
    injected = _injected(handler, others, known)
    for parameter in injected:
        if parameter.content not in (NOTHING, Any, value):
            raise ConfigurationError(
                f"{name_of(handler)} takes a {show(value)}, but a message of"
                f" {show(parameter.content)}"
            )
    return HandlerPlan(value, takes_message, injected, _is(inspect.iscoroutinefunction, handler))


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
    yields = _is_generator(function)
    kind = annotation_of(function, "return")
    if yields and typing.get_origin(kind) in _STREAMS:
        kind = typing.get_args(kind)[0]
    elif yields:
        kind = NOTHING
    if kind in (NOTHING, None, type(None), Any):
        raise ConfigurationError(
            f"{name_of(function)}: its return annotation must name the type of the dependency"
        )
    takes = _injected(function, _parameters(function), known)
    if once and any(one.kind is Message for one in takes):
        raise ConfigurationError(
            f"{name_of(function)} is called only once, so it cannot take a message"
        )
    is_async = _is(inspect.iscoroutinefunction, function) or _is(
        inspect.isasyncgenfunction, function
    )
    return Dependency(kind, function, is_async, yields, takes, once)


def annotation_of(function: Callable[..., Any], name: str) -> Any:
    """Return the annotation of one parameter, or of ``return``, even if it is a string and others
    cannot be read.

    Raises:
        ConfigurationError: It names something that does not exist where the function is defined.
    """
    plain = _plain(function)
    annotations = getattr(plain, "__annotations__", {})
    if name not in annotations:
        return NOTHING
    module = sys.modules.get(getattr(plain, "__module__", ""), None)
    names = getattr(plain, "__globals__", None) or vars(module or typing)
    found = {**names, **_closure(plain)}
    try:
        hints = typing.get_type_hints(
            SimpleNamespace(__annotations__={name: annotations[name]}), found, include_extras=True
        )
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise ConfigurationError(
            f"{name_of(function)}: the annotation of {name!r} cannot be read: {error}; the names in"
            " it must exist in the module"
        ) from error
    return None if hints[name] is type(None) else hints[name]


def show(kind: Any) -> str:
    """Return a type as you would write it."""
    plain = isinstance(kind, type) and typing.get_origin(kind) is None
    return kind.__qualname__ if plain else str(kind)


def _injected(
    function: Callable[..., Any], parameters: list[inspect.Parameter], known: Collection[Any]
) -> tuple[Injected, ...]:
    result = []
    for parameter in parameters:
        if parameter.kind in _VARIABLE:
            continue
        kind = annotation_of(function, parameter.name)
        has_default = parameter.default is not inspect.Parameter.empty
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


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name_of(function)}: its parameters cannot be read: {error}"
        ) from error


def _plain(function: Any) -> Any:
    """Return the function inside a partial, a method, a wrapper, or an object with ``__call__``."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.ismethod(function):
            function = function.__func__
        elif callable(function) and not (inspect.isroutine(function) or inspect.isclass(function)):
            return getattr(type(function), "__call__")  # noqa: B004, B009 - from the class, where it is the plain function
        else:
            return function


def _closure(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    result = {}
    for name, cell in zip(names, cells, strict=True):
        try:
            result[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return result


def _is(test: Callable[[Any], bool], function: Any) -> bool:
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - this examines the bound method itself


def _is_generator(function: Any) -> bool:
    return _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function)


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
