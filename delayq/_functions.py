"""Parameters of functions: defaults with a meaning of their own, and what annotations say."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

EMPTY: Any = inspect.Parameter.empty
"""The default or annotation of a parameter that has none."""


class Unset(Enum):
    """The type of :data:`UNSET`."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return self.name


UNSET: Final = Unset.UNSET
"""The default of settings for which None means "no limit"."""


class _Injected:
    def __repr__(self) -> str:
        return "INJECTED"


INJECTED: Any = _Injected()
"""The default of a parameter that the worker fills by its type: with the message, the client, the
worker or a dependency.
"""


def name_of(function: Any) -> str:
    """Return the name by which errors refer to a function."""
    function = _plain(function)
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def spell_out(options: type[Any]) -> Callable[[F], F]:
    """Have ``help()`` and the documentation show the options of a function one by one.

    The function takes them as ``**options``, so that they are written once: in a TypedDict.
    """
    option_parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=UNSET, annotation=kind.__forward_arg__
        )
        for name, kind in options.__annotations__.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *option_parameters])
        return function

    return decorate


def is_async(function: Any) -> bool:
    """Return whether a function, or the one that it wraps, is a coroutine function."""
    return callable(function) and any(
        is_kind(inspect.iscoroutinefunction, layer) for layer in (function, _plain(function))
    )


def is_generator(function: Any) -> bool:
    """Return whether a function is a generator function, async or not."""
    return is_kind(inspect.isgeneratorfunction, function) or is_kind(
        inspect.isasyncgenfunction, function
    )


def annotation_of(function: Callable[..., Any], name: str) -> Any:
    """Return the annotation of one parameter, or of ``return``, even if it is a string and others
    cannot be read.

    Raises:
        ConfigurationError: It names something that does not exist where the function is defined.
    """
    plain = _plain(function)
    annotations = getattr(plain, "__annotations__", {})
    if name not in annotations:
        return EMPTY
    module = sys.modules.get(getattr(plain, "__module__", ""), None)
    names = getattr(plain, "__globals__", None) or vars(module or typing)
    namespace = {**names, **_closure(plain)}
    try:
        hints = typing.get_type_hints(
            SimpleNamespace(__annotations__={name: annotations[name]}),
            namespace,
            include_extras=True,
        )
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise ConfigurationError(
            f"{name_of(function)}: the annotation of {name!r} cannot be read: {error}; the names in"
            " it must exist in the module"
        ) from error
    return None if hints[name] is type(None) else hints[name]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function. Raises ConfigurationError if they cannot be read."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name_of(function)}: its parameters cannot be read: {error}"
        ) from error


def show(kind: Any) -> str:
    """Return a type as you would write it."""
    plain = isinstance(kind, type) and typing.get_origin(kind) is None
    return kind.__qualname__ if plain else str(kind)


def is_kind(test: Callable[[Any], bool], function: Any) -> bool:
    """Return whether a function, or the ``__call__`` of an object, passes a test of
    :mod:`inspect`.
    """
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - this examines the bound method itself


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
