"""Reads values by their type without msgspec or pydantic: what ``JsonCodec`` writes for that type.

The readers turn what ``json`` has read into a value of the type, or raise ``TypeError`` with a text
that quotes nothing. Unknown fields are ignored, and missing ones get their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq._functions import show
from delayq.codecs._plain import encode_json, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    Reader = Callable[[Any], Any]
    ClassReaders = dict[Any, Reader]


class UnknownType(TypeError):
    """JsonCodec does not write a type.

    Attributes:
        kind: The type.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__(f"JsonCodec does not write {show(kind)}")
        self.kind: Any = kind


PLAIN = (dict, list, str, int, float, bool, NoneType)
_COLLECTIONS = (list, tuple, set, frozenset)
_DURATION = re.compile(
    r"([+-]?)P(?=[\dT])(?:(\d+)D)?(?:T(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,6}))?S)?)?",
    re.ASCII,
)


def reader_of(kind: Any) -> Reader:
    """Return a function that turns a JSON value into a value of a type.

    Raises:
        TypeError, NameError: JsonCodec does not write the type, or it names one that is unknown.
    """
    return _reader(kind, {})


def _reader(kind: Any, class_readers: ClassReaders) -> Reader:
    """Do what :func:`reader_of` does. ``class_readers`` holds those of classes."""
    if kind in (Any, object):
        return lambda value: value
    if kind is None or kind in PLAIN:
        return _plain_reader(kind or NoneType)
    if hasattr(kind, "__supertype__"):
        return _reader(kind.__supertype__, class_readers)
    if isinstance(kind, type) and typing.get_origin(kind) is None:
        return _class_reader(kind, class_readers)
    return _composed_reader(kind, class_readers)


def _composed_reader(kind: Any, class_readers: ClassReaders) -> Reader:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return _union_reader([_reader(part, class_readers) for part in parts], kind)
    if origin is typing.Literal:
        return _choice_reader(kind, parts)
    if origin is typing.Annotated:
        return _reader(parts[0], class_readers)
    if origin is dict:
        return _dict_reader(*(_reader(part, class_readers) for part in parts))
    if origin in _COLLECTIONS:
        return _collection_reader(origin, parts, class_readers)
    raise UnknownType(kind)


def _class_reader(kind: type[Any], class_readers: ClassReaders) -> Reader:
    if issubclass(kind, Enum):
        return _choice_reader(kind, [member.value for member in kind], kind)
    if kind in _COLLECTIONS:
        return _collection_reader(kind, (Any, ...), class_readers)
    if kind in _TEXTS:
        return _text_reader(kind, _TEXTS[kind])
    if kind in class_readers:
        return class_readers[kind]
    fields: dict[str, Reader] = {}
    if dataclasses.is_dataclass(kind):
        read = _object_reader(kind, fields, _required(kind))
    elif hasattr(kind, "__required_keys__"):
        # A TypedDict, including one from typing_extensions.
        read = _object_reader(kind, fields, kind.__required_keys__)
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        read = _named_tuple_reader(kind, fields)
    else:
        raise UnknownType(kind)
    # Registered before its fields are read, because one of them may be of this very class.
    class_readers[kind] = read
    hints = typing.get_type_hints(kind)
    fields |= {name: _reader(hints.get(name, Any), class_readers) for name in _names(kind, hints)}
    return read


def _names(kind: Any, hints: Iterable[str]) -> Iterable[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    return getattr(kind, "_fields", hints)


def _required(kind: Any) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    ]


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


def _text_reader(kind: type[Any], parse: Callable[[str], Any]) -> Reader:
    def read(value: Any) -> Any:
        if kind is Decimal and type(value) in (int, float):
            value = repr(value)
        if type(value) is not str:
            raise TypeError(f"it is {type(value).__name__}, not {kind.__name__}")
        try:
            return parse(value)
        except (ValueError, ArithmeticError):
            # The error's text quotes the value.
            pass
        raise TypeError(f"it is not the text of a {kind.__name__}")

    return read


def _timedelta(text: str) -> timedelta:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("not a duration")
    sign, days, hours, minutes, seconds, fraction = match.groups("0")
    value = timedelta(
        days=int(days),
        hours=int(hours),
        minutes=int(minutes),
        seconds=int(seconds),
        microseconds=int(fraction.ljust(6, "0")),
    )
    return -value if sign == "-" else value


_TEXTS: dict[type[Any], Callable[[str], Any]] = {
    UUID: UUID,
    Decimal: Decimal,
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    timedelta: _timedelta,
}


def _choice_reader(
    kind: Any, values: Iterable[Any], make: Callable[[Any], Any] | None = None
) -> Reader:
    """Read one of several values, or what ``make`` accepts: a combination of flags."""
    choices = {_text(value): make(value) if make else value for value in values}

    def read(value: Any) -> Any:
        try:
            return choices[_text(value)]
        except KeyError:
            pass
        try:
            if make is not None and type(value) in (int, str):
                return make(value)
        except ValueError:
            # The error's text quotes the value.
            pass
        raise TypeError(f"it is not one of the values of {show(kind)}")

    return read


def _union_reader(readers: list[Reader], kind: Any) -> Reader:
    def read(value: Any) -> Any:
        candidates = []
        for reader in readers:
            try:
                candidates.append(reader(value))
            except (TypeError, ValueError, ArithmeticError):
                continue
        if not candidates:
            raise TypeError(f"it is {type(value).__name__}, not {kind}")
        if len(candidates) == 1:
            return candidates[0]
        # A dataclass accepts the fields of a larger one: prefer the candidate that would be written
        # like the value.
        return next(
            (candidate for candidate in candidates if json.loads(_text(candidate)) == value),
            candidates[0],
        )

    return read


def _collection_reader(
    kind: type[Any], parts: tuple[Any, ...], class_readers: ClassReaders
) -> Reader:
    read_list = _plain_reader(list)
    if kind is not tuple or parts[1:] == (...,):
        read_item = _reader(parts[0], class_readers)
        return lambda value: kind([read_item(item) for item in read_list(value)])
    readers = [_reader(part, class_readers) for part in parts]

    def read(value: Any) -> Any:
        items = read_list(value)
        if len(items) != len(readers):
            raise TypeError(f"it has {len(items)} items, not {len(readers)}")
        return tuple(reader(item) for reader, item in zip(readers, items, strict=True))

    return read


def _dict_reader(key: Reader, read_item: Reader) -> Reader:
    read_key = _key_reader(key)
    read_dict = _plain_reader(dict)
    return lambda value: {
        read_key(name): read_item(item) for name, item in read_dict(value).items()
    }


def _key_reader(reader: Reader) -> Reader:
    def read(name: str) -> Any:
        try:
            return reader(name)
        except TypeError as error:
            reason = error
        try:
            # Keys that are numbers, booleans and None are written as text.
            return reader(json.loads(name))
        except (TypeError, ValueError, RecursionError):
            pass
        raise TypeError(f"a key: {reason}")

    return read


def _object_reader(
    kind: type[Any], fields: Mapping[str, Reader], required: Collection[str]
) -> Reader:
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

    return read


def _named_tuple_reader(kind: Any, fields: Mapping[str, Reader]) -> Reader:
    required, read_list = len(kind._fields) - len(kind._field_defaults), _plain_reader(list)

    def read(value: Any) -> Any:
        items = read_list(value)
        if not required <= len(items) <= len(fields):
            raise TypeError(f"it has {len(items)} items, not {len(fields)}")
        named = zip(fields.items(), items, strict=False)
        return kind(*(_named(name, reader, item) for (name, reader), item in named))

    return read


def _named(name: str, reader: Reader, value: Any) -> Any:
    try:
        return reader(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _text(value: Any) -> str:
    return encode_json(to_plain(value))
