"""Methods of synchronous classes that are made from those of the asynchronous ones.

They exist at run time only. Type checkers and editors read ``delayq/sync/__init__.pyi`` instead,
which ``make stubs`` writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

C = TypeVar("C", bound="type[Forwarder]")
F = TypeVar("F", bound="Callable[..., Any]")

# What synchronous classes do not have. Messages are taken by a worker, or by asynchronous code,
# which gives them back if it is cancelled.
_TAKING = {"claim", "deliveries", "drain", "poll", "poll_many", "take"}
# Methods for the library itself, and those that have another name.
_INTERNAL = {"aclose", "keep_codec", "key_sets", "result_payload", "through", "worker_port"}


class Forwarder(Protocol):
    """A synchronous object whose methods are carried out by an asynchronous one."""

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Call the asynchronous object in its loop, and return the result."""


def forwards(asynchronous: type) -> Callable[[C], C]:
    """Give a class the public methods of an asynchronous one, besides those that it has itself."""

    def add_methods(synchronous: C) -> C:
        for name, function in _public_methods(asynchronous):
            if name not in vars(synchronous):
                method = signed_as(function)(_forwarding(name, function))
                method.__module__ = synchronous.__module__
                setattr(synchronous, name, method)
        return synchronous

    return add_methods


def signed_as(original: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function the name and signature of another, and its docstring if it has none."""

    def sign(function: F) -> F:
        # Without __wrapped__, for which inspect would call it a coroutine function.
        vars(function).update(__signature__=inspect.signature(original), signed_as=original)
        function.__name__, function.__qualname__ = original.__name__, original.__qualname__
        function.__annotations__ = original.__annotations__
        function.__doc__ = function.__doc__ or original.__doc__
        return function

    return sign


def _public_methods(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the methods of a class that a synchronous one has, too, in their order."""
    for base in owner.__mro__:
        for name, member in vars(base).items():
            is_here = not name.startswith("_") and name not in _TAKING | _INTERNAL
            if is_here and inspect.isfunction(member):
                yield name, member


def _forwarding(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    is_async = inspect.iscoroutinefunction(function)
    # The positions and names of parameters that may be generators.
    iterables: set[int | str] = set()
    for position, parameter in enumerate(inspect.signature(function).parameters.values(), -1):
        if str(parameter.annotation).startswith(("Iterable[", "Collection[")):
            iterables |= {position, parameter.name}

    def forward(self: Forwarder, *args: Any, **kwargs: Any) -> Any:
        if iterables:
            args = tuple(_iterated(value, key in iterables) for key, value in enumerate(args))
            kwargs = {key: _iterated(value, key in iterables) for key, value in kwargs.items()}

        async def act(target: Any) -> Any:
            result = getattr(target, name)(*args, **kwargs)
            return await result if is_async else result

        return self._run(act)

    return forward


def _iterated(value: Any, is_iterable: bool) -> Any:
    """Return a value that another thread may iterate over.

    A generator would run there, without the database connection or the request of this thread.
    Anything that is to be refused is returned as it is.
    """
    if is_iterable and isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [*value]
    return value
