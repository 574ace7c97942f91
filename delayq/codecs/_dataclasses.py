"""Reads dataclasses from JSON without msgspec or pydantic: fields of the types that JSON has, and
of further dataclasses.
"""

from __future__ import annotations

import dataclasses
import typing
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any

from delayq.codecs._reasons import said
from delayq.codecs.json import JsonCodec
from delayq.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    Reader = Callable[[Any], Any]

_PLAIN = (dict, list, str, int, float, bool, NoneType)


class DataclassCodec:
    """Reads JSON objects as instances of a dataclass.

    Unknown fields are ignored, and missing ones get their defaults.

    Raises:
        TypeError: The type, or one within it, does not exist in JSON.
    """

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._read = _dataclass_reader(kind, {})
        self._json = JsonCodec()

    def encode(self, value: Any, /) -> bytes:
        if not isinstance(value, self._kind):
            raise EncodeError(f"{self!r} cannot encode {type(value).__name__}")
        return self._json.encode(dataclasses.asdict(value))

    def decode(self, payload: bytes, /) -> Any:
        value = self._json.decode(payload)
        try:
            return self._read(value)
        except (TypeError, ValueError, RecursionError) as error:
            reason = said(error)
        raise DecodeError(repr(self), payload) from reason

    def __repr__(self) -> str:
        return f"codec_for({self._kind.__qualname__})"


def _reader(kind: Any, made: dict[Any, Reader]) -> Reader:
    """Return a function that turns a JSON value into this type, or raises ``TypeError``.

    ``made`` holds the classes' readers.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return lambda value: value
    if kind is None or kind in _PLAIN:
        return _plain_reader(NoneType if kind is None else kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind, made)
    if origin in (typing.Union, UnionType):
        return _union_reader([_reader(part, made) for part in parts], kind)
    if origin is list:
        (item,) = (_reader(part, made) for part in parts)
        read_list = _plain_reader(list)
        return lambda value: [item(one) for one in read_list(value)]
    if origin is dict and parts[0] is str:
        item, read_dict = _reader(parts[1], made), _plain_reader(dict)
        return lambda value: {name: item(one) for name, one in read_dict(value).items()}
    raise TypeError(f"{kind} has no JSON representation")


def _plain_reader(kind: type[Any]) -> Reader:
    def read(value: Any) -> Any:
        # In Python a bool is an int; in JSON it is not. A number without a fraction is a float as
        # well.
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise TypeError(f"it is {type(value).__name__}, not {kind.__name__}")

    return read


def _union_reader(readers: list[Reader], kind: Any) -> Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except TypeError:
                continue
        raise TypeError(f"it is {type(value).__name__}, not {kind}")

    return read


def _dataclass_reader(kind: type[Any], made: dict[Any, Reader]) -> Reader:
    if kind in made:
        return made[kind]
    fields: dict[str, Reader] = {}
    required: list[str] = []

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise TypeError(f"it is {type(value).__name__}, not an object of {kind.__qualname__}")
        for name in required:
            if name not in value:
                raise TypeError(f"{name} is missing")
        return kind(
            **{
                name: _named(name, reader, value[name])
                for name, reader in fields.items()
                if name in value
            }
        )

    # Registered before its fields are looked at, because one of them may be of this very class.
    made[kind] = read
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.init:
            fields[field.name] = _reader(hints[field.name], made)
            if (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                required.append(field.name)
    return read


def _named(name: str, reader: Reader, value: Any) -> Any:
    try:
        return reader(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
