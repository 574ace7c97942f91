"""Calls of tasks, and their arguments: checked against the function, written as JSON by name, and
read back with the types of the annotations. Pure.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from types import FunctionType, GenericAlias
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_origin

from delayq._functions import EMPTY, INJECTED, annotation_of, name_of, parameters_of
from delayq.codecs.json import JsonCodec
from delayq.errors import BadArguments, ConfigurationError, DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delayq._reliable.settings import HandleOptions
    from delayq.codecs._type_codecs import TypeCodec
    from delayq.codecs.protocol import Codec

_JSON = JsonCodec()


def _options_hint(kwargs: Mapping[str, Any], signature: inspect.Signature) -> str:
    """Return where options belong that a call was given as arguments; nothing if there are none."""
    from delayq._reliable.offer import OfferOptions  # noqa: PLC0415 - most calls are right

    options = [name for name in kwargs if name in OfferOptions.__annotations__]
    misplaced = [name for name in options if name not in signature.parameters]
    return f"; give options of the call to task.options({misplaced[0]}=...)" if misplaced else ""


class CallHome(Protocol):
    """The tasks of a queue, as far as a call has to know them."""

    name: str
    settings: HandleOptions

    @property
    def codec(self) -> Codec[Any]: ...


@dataclass(frozen=True)
class Call:
    """A call of a task: the value of a message.

    ``repr`` leaves out the arguments: they may be private, and tracebacks are logged.

    Attributes:
        task: The task's name.
        arguments: The arguments by name, without those that were left out.
        home: The tasks among which it is, if it is from :meth:`Task.to_offer`, whose outbox has to
            know their queue.
    """

    task: str
    arguments: Mapping[str, Any] = field(repr=False)
    home: CallHome | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # Tasks have functions, which another process may not find.
        return {**vars(self), "home": None}


class _Reader(NamedTuple):
    """How an argument is read.

    Attributes:
        kind: The annotated type. Values of this very class that JSON has itself stay as they are.
        codec: Decodes other values; None if there is nothing to check.
        plain: The types whose values are written as they are.
    """

    kind: Any
    codec: TypeCodec | None
    plain: tuple[type[Any], ...]


class Arguments:
    """The parameters of a task's function.

    Attributes:
        injected: The parameters that the worker fills. All others are passed by a message.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = parameters_of(function)
        messages = [parameter for parameter in parameters if _takes_message(function, parameter)]
        self._whole_signature = inspect.Signature(parameters)
        # The parameters that a call may name.
        self._signature = inspect.Signature(
            [parameter for parameter in parameters if parameter not in messages]
        )
        self.injected: tuple[Parameter, ...] = tuple(
            parameter
            for parameter in parameters
            if parameter.default is INJECTED or parameter in messages
        )
        for parameter in self.injected:
            if parameter.kind is Parameter.POSITIONAL_ONLY:
                raise ConfigurationError(
                    f"{name_of(function)}: the worker cannot fill {parameter.name!r}, because it is"
                    " positional-only"
                )
        self._in_message = {
            parameter.name: parameter for parameter in parameters if parameter not in self.injected
        }
        self._required = [
            name
            for name, parameter in self._in_message.items()
            if parameter.default is EMPTY and parameter.kind not in _VARIABLE
        ]
        self._methods: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._by_name = all(
            parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
            for parameter in parameters
        )

    def method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a copy of a task's method that shows the parameters of the task's function, except
        those that the worker fills.
        """
        if method not in self._methods:
            copy = FunctionType(method.__code__, method.__globals__, method.__name__)
            functools.update_wrapper(copy, method)
            del copy.__wrapped__  # type: ignore[attr-defined]
            signature = inspect.signature(method)
            first = next(iter(signature.parameters.values()))
            parameters = [first, *self._in_message.values()]
            with contextlib.suppress(ValueError):  # a parameter has the name of the first one
                copy.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
            self._methods[method] = copy
        return self._methods[method]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names, without those that are left out.

        Those of ``*args`` and ``**kwargs`` are a tuple and a dict, under the parameter's name.

        Raises:
            BadArguments: The function cannot be called like this.
        """
        try:
            named = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            reason = f"{error}{_options_hint(kwargs, self._signature)}"
        else:
            if not self.injected or not (
                filled := [parameter.name for parameter in self.injected if parameter.name in named]
            ):
                return named
            reason = f"the worker fills {filled[0]!r}"
        raise BadArguments(f"{name_of(self._function)}(): {reason}")

    def missing_injected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the names of the parameters that only a worker fills, and that a call leaves
        out.
        """
        try:
            named = self._whole_signature.bind(*args, **kwargs).arguments
        except TypeError:
            # The function itself says what is wrong.
            return []
        return [parameter.name for parameter in self.injected if parameter.name not in named]

    def encode(self, named: Mapping[str, Any]) -> bytes:
        """Return the arguments as a JSON object.

        Raises:
            BadArguments: One is not of the annotated type, or a worker could not read it as it is.
            EncodeError: JSON has no form for one.
        """
        self._check_names(named)
        parts = []
        for name, value in named.items():
            try:
                part = _JSON.encode(value)
            except EncodeError as error:
                raise EncodeError(f"{self._site(name)}: {error}") from None
            reader = self._readers[name]
            if reader.codec is not None and type(value) is not reader.kind:
                reread = self._read(name, reader.codec, part)
                # A plain value may stand for the one that it is read as.
                if type(value) not in reader.plain and (
                    change := reader.codec.change(value, reread)
                ):
                    raise BadArguments(f"{self._site(name)}: {change}")
            parts.append(b'"%b":%b' % (name.encode(), part))
        return b"{%b}" % b",".join(parts)

    def decode(self, value: Any) -> dict[str, Any]:
        """Return the arguments that a JSON object holds.

        Raises:
            BadArguments: The function does not take them.
        """
        if type(value) is not dict:
            raise BadArguments(f"{name_of(self._function)}(): the arguments are not an object")
        self._check_names(value)
        named = {}
        for name, argument in value.items():
            reader = self._readers[name]
            named[name] = (
                argument
                if reader.codec is None or type(argument) is reader.kind
                else self._read(name, reader.codec, _JSON.encode(argument))
            )
        return named

    def call(self, named: Mapping[str, Any], injected: Mapping[str, Any]) -> Any:
        """Call the function with these arguments."""
        if self._by_name:
            return self._function(**named, **injected)
        bound = inspect.BoundArguments(self._whole_signature, {**named, **injected})
        bound.apply_defaults()
        return self._function(*bound.args, **bound.kwargs)

    def check(self) -> None:
        """Check that each argument can be written and read.

        Raises:
            ConfigurationError: An annotation cannot be read, or no codec knows the type.
        """
        assert self._readers is not None

    def _check_names(self, named: Mapping[str, Any]) -> None:
        for name in named:
            if name not in self._in_message:
                raise BadArguments(f"{name_of(self._function)}() has no argument {name!r}")
        for name in self._required:
            if name not in named:
                raise BadArguments(
                    f"{name_of(self._function)}(): missing a required argument: {name!r}"
                )

    def _read(self, name: str, codec: Codec[Any], payload: bytes) -> Any:
        try:
            return codec.decode(payload)
        except DecodeError as error:
            fault, cause = error.fault, error.__cause__
        raise BadArguments(f"{self._site(name)}: {fault}") from cause

    def _site(self, name: str) -> str:
        return f"{name_of(self._function)}(), {name!r}"

    @cached_property
    def _readers(self) -> Mapping[str, _Reader]:
        return {name: self._reader(parameter) for name, parameter in self._in_message.items()}

    def _reader(self, parameter: Parameter) -> _Reader:
        # Reading types needs more modules than registering a task.
        from delayq.codecs._readers import PLAIN  # noqa: PLC0415
        from delayq.codecs._type_codecs import TypeCodec  # noqa: PLC0415
        from delayq.codecs.typed import codec_for  # noqa: PLC0415

        kind = self._kind(parameter)
        if kind is bytes:
            raise ConfigurationError(
                f"{self._site(parameter.name)}: JSON has no bytes: take a str, such as base64"
            )
        try:
            codec = codec_for(kind)
        except ConfigurationError as error:
            # A task has no codec of its own.
            reason = str(error).partition(", or pass a codec")[0]
            raise ConfigurationError(
                f"{self._site(parameter.name)}: {reason}; or if the worker is to fill it, give it"
                " the default delayq.tasks.INJECTED"
            ) from error
        return _Reader(
            kind if kind in PLAIN else EMPTY,
            codec if isinstance(codec, TypeCodec) else None,
            (*PLAIN, tuple) if parameter.kind in _VARIABLE else PLAIN,
        )

    def _kind(self, parameter: Parameter) -> Any:
        kind = annotation_of(self._function, parameter.name)
        kind = Any if kind is EMPTY else kind
        return _VARIABLE[parameter.kind](kind) if parameter.kind in _VARIABLE else kind


def _takes_message(function: Callable[..., Any], parameter: Parameter) -> bool:
    """Return whether a parameter without a default is for the message, by its annotation."""
    text = parameter.annotation
    if parameter.default is not EMPTY or (isinstance(text, str) and "Message" not in text):
        return False
    try:
        kind = annotation_of(function, parameter.name)
    except ConfigurationError:
        return False
    kind = get_origin(kind) or kind
    # Without the class, whose module a process that only offers need not load.
    module = str(getattr(kind, "__module__", ""))
    return getattr(kind, "__qualname__", "") == "Message" and module.partition(".")[0] == "delayq"


_VARIABLE: dict[Any, Callable[[Any], Any]] = {
    Parameter.VAR_POSITIONAL: lambda kind: GenericAlias(tuple, (kind, ...)),
    Parameter.VAR_KEYWORD: lambda kind: GenericAlias(dict, (str, kind)),
}
