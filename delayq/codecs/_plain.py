"""Turns dataclasses, dates, enums and the like into the values that JSON has."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Form = Callable[[Any], Any]
    Check = Callable[[Any, str], None]

_SCALARS = (str, int, float, type(None))
_ZERO, _MINUTE = timedelta(0), timedelta(minutes=1)
_CURE = "convert it first, or open the queue with a codec for it (codec=...)"
HIDDEN_CURE = (
    "it is written as asterisks, so offer a reference to it, or give its field a serializer that"
    " returns get_secret_value()"
)
_HAVE_FIELDS = ("__dataclass_fields__", "__struct_fields__", "model_fields")
# Raised by the objects themselves: an unset attribute, or a field of another type than declared.
_FAILURES = (TypeError, ValueError, AttributeError, ArithmeticError)


class Unencodable(TypeError):
    """JSON cannot hold a value. The text says which one and why, without quoting it."""


class _UnknownType(TypeError):
    def __init__(self, kind: type[Any]) -> None:
        super().__init__(f"JSON cannot hold {a_kind(kind)}")
        self.kind = kind


def plain(value: Any, /) -> Any:
    """Return ``value``, but not its parts, in a form closer to JSON, or raise TypeError."""
    kind: Any = type(value)
    return _form(kind)(value)


def to_plain(value: Any, /, check: Check = lambda *_: None) -> Any:
    """Turn ``value``, everything in it, and the keys of its dicts into the values that JSON has.

    This is slower than an encoder that calls :func:`plain`, which does not convert keys, and cannot
    tell where it failed.

    Args:
        value: The value.
        check: Called with each part that JSON does not have itself, and the path to the part,
            after everything in the part has been converted. It may raise Unencodable.

    Raises:
        Unencodable: JSON cannot hold it, or something in it.
        RecursionError: It is nested too deeply.
    """
    return _to_plain(value, "value", set(), check)


def is_record(kind: type[Any]) -> bool:
    """Return whether a class is an enum, or one with fields that are written as an object."""
    return (
        issubclass(kind, Enum)
        or "__pydantic_serializer__" in vars(kind)
        or any(hasattr(kind, name) for name in _HAVE_FIELDS)
    )


def is_secret(value: Any) -> bool:
    """Return whether a value, or its class, is one of pydantic's that hide what they hold."""
    return hasattr(value, "get_secret_value")


def a_kind(kind: type[Any]) -> str:
    """Return the name of a class with its article."""
    return f"{'an' if kind.__name__[0] in 'AEIOaeio' else 'a'} {kind.__name__}"


@lru_cache(maxsize=1024)
def _form(kind: type[Any]) -> Form:
    """Return a function that brings values of a class closer to JSON."""
    if is_secret(kind):
        raise _UnknownType(kind)
    if issubclass(kind, Enum):
        return attrgetter("value")
    # Its own: a subclass that is a plain dataclass inherits one that leaves out its fields.
    if "__pydantic_serializer__" in vars(kind):
        return _pydantic
    # The metaclass of Struct has them as well, for the classes themselves.
    if hasattr(kind, "__struct_fields__") and not issubclass(kind, type):
        return _struct
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda value: {name: getattr(value, name) for name in names}
    for base, form in _FORMS.items():
        if issubclass(kind, base):
            return form
    raise _UnknownType(kind)


def _pydantic(value: Any) -> Any:
    # By alias, because it is read by alias, and without what is computed. A value of another type
    # than its field would only cause a warning by default.
    return value.__pydantic_serializer__.to_python(
        value, mode="json", by_alias=True, round_trip=True, warnings="error", fallback=plain
    )


def _struct(value: Any) -> Any:
    # A Struct cannot exist before msgspec has been imported.
    return sys.modules["msgspec"].to_builtins(value, str_keys=True, enc_hook=plain)


def _datetime(value: datetime) -> str:
    offset = value.utcoffset()
    if offset and offset % _MINUTE:
        # RFC 3339 has no offsets with seconds, such as cities had before there were time zones.
        value, offset = value.astimezone(UTC), _ZERO
    return _with_z(value.isoformat(), offset)


def _time(value: time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise Unencodable(" whose offset depends on the date, and JSON holds no zone: use UTC")
    return _with_z(value.isoformat(), value.utcoffset())


def _with_z(text: str, offset: timedelta | None) -> str:
    return f"{text.removesuffix('+00:00')}Z" if offset == _ZERO else text


def _timedelta(value: timedelta) -> str:
    # In the form of ISO 8601, but without years and months, which differ in length.
    sign, value = ("-", -value) if value < _ZERO else ("", value)
    fraction = f".{value.microseconds:06d}".rstrip("0") if value.microseconds else ""
    seconds = f"T{value.seconds}{fraction}S" if value.seconds or fraction else ""
    days = f"{value.days}D" if value.days or not seconds else ""
    return f"{sign}P{days}{seconds}"


_FORMS: dict[type[Any], Form] = {
    UUID: str,
    # A NaN is refused in the form of a float, too.
    Decimal: lambda value: str(value) if value.is_finite() else math.nan,
    # Before date, of which it is a subclass.
    datetime: _datetime,
    date: date.isoformat,
    time: _time,
    timedelta: _timedelta,
    set: to_plain,
    frozenset: to_plain,
}

# Made once, because json.dumps makes an encoder for each call that has options.
encode_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain
).encode
"""Writes compact JSON. It calls :func:`plain` for each value that JSON has no form for."""


def _to_plain(value: Any, path: str, above: set[int], check: Check) -> Any:
    """Convert the value at ``path``, which is inside the containers that have the ids ``above``."""
    if isinstance(value, _SCALARS):
        return _checked(value, path)
    if id(value) in above:
        raise Unencodable(f"{path} contains itself, and JSON has no references")
    above.add(id(value))
    result: Any
    if isinstance(value, dict):
        # The path does not quote a key, which is data like a value.
        result = {
            _key(key, path): _to_plain(item, f"{path}[...]", above, check)
            for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        result = [_to_plain(item, f"{path}[{i}]", above, check) for i, item in enumerate(value)]
    elif isinstance(value, set | frozenset):
        # Sorted, so that equal sets are equal bytes, by which queues compare them.
        items = [_to_plain(item, f"{path}[...]", above, check) for item in value]
        result = sorted(items, key=encode_json)
    else:
        result = _record(value, path, above, check)
        check(value, path)
    above.remove(id(value))
    return result


def _record(value: Any, path: str, above: set[int], check: Check) -> Any:
    form, names = _form_of(value, path), _field_names(type(value))
    if not isinstance(form, dict):
        return _to_plain(form, path, above, check)
    return {
        name: _to_plain(item, f"{path}.{name}" if name in names else path, above, check)
        for name, item in form.items()
    }


def _key(key: Any, path: str) -> Any:
    path = f"a key of {path}"
    if not isinstance(key, _SCALARS):
        form = _form_of(key, path)
        if not isinstance(form, _SCALARS):
            raise Unencodable(
                f"{path} is {a_kind(type(key))}, but keys are text in JSON: use a str"
            )
        key = form
    return _checked(key, path)


def _checked(value: Any, path: str) -> Any:
    """Return a scalar if JSON can hold it."""
    try:
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, int):
            int.__repr__(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise Unencodable(f"{path} is NaN or infinite, which JSON cannot hold: use None")
    except UnicodeEncodeError:
        reason = "has a lone surrogate, which UTF-8 cannot hold: remove it"
    except ValueError:
        reason = "has more digits than Python writes: see sys.set_int_max_str_digits()"
    else:
        return value
    # Outside the handlers, because a UnicodeEncodeError holds the text.
    raise Unencodable(f"{path} {reason}")


def _form_of(value: Any, path: str) -> Any:
    kind = type(value)
    try:
        return plain(value)
    except _UnknownType as error:
        inner = "" if error.kind is kind else f" that holds {a_kind(error.kind)}"
        cure = HIDDEN_CURE if is_secret(error.kind) else _CURE
        reason = f"{inner}, which JSON cannot hold: {cure}"
    except Unencodable as error:
        reason = str(error)
    except _FAILURES as error:
        reason = f" that cannot be read ({type(error).__name__}): check the types of its fields"
    raise Unencodable(f"{path} is {a_kind(kind)}{reason}")


def _field_names(kind: type[Any]) -> Iterable[str]:
    for attribute in _HAVE_FIELDS:
        if hasattr(kind, attribute):
            names: Iterable[str] = getattr(kind, attribute)
            return names
    return ()
