"""The arguments of a task: checked against its function, written as JSON by name, and read back
with the types of the annotations. Pure.
"""

from __future__ import annotations

import inspect
from dataclasses import field, make_dataclass
from functools import cached_property
from inspect import Parameter
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from delayq._functions import INJECTED, NOTHING, annotation_of, name_of, parameters_of
from delayq.codecs.json import JsonCodec
from delayq.errors import BadArguments, ConfigurationError, DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delayq.codecs.protocol import Codec

_JSON = JsonCodec()


class _LeftOut:
    """Stands for an argument that was not passed, so that the function uses its default."""


class Arguments:
    """The parameters of a task's function.

    Attributes:
        injected: The parameters that the worker fills. All others are passed by a message.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = parameters_of(function)
        self._signature = inspect.Signature(parameters)
        self.injected: tuple[Parameter, ...] = tuple(
            each for each in parameters if each.default is INJECTED
        )
        for each in self.injected:
            if each.kind is Parameter.POSITIONAL_ONLY:
                raise ConfigurationError(
                    f"{name_of(function)}: the worker cannot fill {each.name!r}, because it is"
                    " positional-only"
                )
        injected = {each.name for each in self.injected}
        self._passed = {each.name: each for each in parameters if each.name not in injected}
        self._by_name = all(
            each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
            for each in parameters
        )

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names, without those that are left out.

        Those of ``*args`` and ``**kwargs`` are a tuple and a dict, under the parameter's name.

        Raises:
            BadArguments: The function cannot be called like this.
        """
        try:
            named = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            reason = str(error)
        else:
            if not self.injected or not (
                filled := [each.name for each in self.injected if each.name in named]
            ):
                return named
            reason = f"the worker fills {filled[0]!r}"
        raise BadArguments(f"{name_of(self._function)}(): {reason}")

    def unfilled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the names of the parameters that only a worker fills, and that a call leaves
        out.
        """
        try:
            named = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            # The function itself says what is wrong.
            return []
        return [each.name for each in self.injected if each.name not in named]

    def encode(self, named: Mapping[str, Any]) -> bytes:
        """Return the arguments as a JSON object.

        Raises:
            BadArguments: One is not of the annotated type: a worker could not read it.
            EncodeError: JSON has no form for one.
        """
        try:
            payload = _JSON.encode(named)
        except EncodeError:
            # One of these fails as well, and says which argument it is.
            payload = _JSON.encode({name: self._encodable(name, named[name]) for name in named})
        self._read(payload)
        return payload

    def decode(self, value: Any) -> dict[str, Any]:
        """Return the arguments that a JSON object holds.

        Raises:
            BadArguments: The function does not take them.
        """
        if type(value) is not dict:
            raise BadArguments(f"{name_of(self._function)}(): the arguments are not an object")
        for name in value:
            if name not in self._passed:
                raise BadArguments(f"{name_of(self._function)}() has no argument {name!r}")
        return self._read(_JSON.encode(value))

    def call(self, named: Mapping[str, Any], injected: Mapping[str, Any]) -> Any:
        """Call the function with these arguments."""
        if self._by_name:
            return self._function(**named, **injected)
        bound = inspect.BoundArguments(self._signature, {**named, **injected})
        bound.apply_defaults()
        return self._function(*bound.args, **bound.kwargs)

    def check(self) -> None:
        """Check that each argument can be written and read.

        Raises:
            ConfigurationError: An annotation cannot be read, or no codec knows the type.
        """
        assert self._codec is not None

    def _encodable(self, name: str, value: Any) -> Any:
        """Return an argument if JSON has a form for it. Raises EncodeError."""
        try:
            _JSON.encode(value)
        except EncodeError as error:
            raise EncodeError(f"{name_of(self._function)}(), {name!r}: {error}") from None
        return value

    def _read(self, payload: bytes) -> dict[str, Any]:
        try:
            found = vars(self._codec.decode(payload))
        except DecodeError as error:
            reason = error.__cause__
        else:
            return {name: value for name, value in found.items() if value is not _LeftOut}
        raise BadArguments(f"{name_of(self._function)}(): {reason}") from reason

    @cached_property
    def _codec(self) -> Codec[Any]:
        # Reading types needs more modules than registering a task.
        from delayq.codecs.typed import codec_for  # noqa: PLC0415

        fields: list[Any] = []
        for name, each in self._passed.items():
            is_left_out = each.default is not NOTHING or each.kind in _VARIABLE
            default = field(default_factory=lambda: _LeftOut) if is_left_out else field()
            fields.append((name, self._kind(each), default))
        made = make_dataclass("Arguments", fields, kw_only=True)
        try:
            return codec_for(made)
        except ConfigurationError as error:
            whole = error
        for name, kind, _ in fields:
            try:
                codec_for(kind)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"{name_of(self._function)}(), {name!r}: {error}; if the worker is to fill it,"
                    " give it the default delayq.tasks.INJECTED"
                ) from error
        raise whole

    def _kind(self, parameter: Parameter) -> Any:
        kind = annotation_of(self._function, parameter.name)
        kind = Any if kind is NOTHING else kind
        return _VARIABLE[parameter.kind](kind) if parameter.kind in _VARIABLE else kind


_VARIABLE: dict[Any, Callable[[Any], Any]] = {
    Parameter.VAR_POSITIONAL: lambda kind: GenericAlias(tuple, (kind, ...)),
    Parameter.VAR_KEYWORD: lambda kind: GenericAlias(dict, (str, kind)),
}
