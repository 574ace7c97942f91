"""Finds what would not come back from JSON as it was, and names the cure. Quotes no values."""

from __future__ import annotations

import math
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from delayq.codecs._plain import HIDDEN_CURE, a_kind, encode_json, is_secret, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    # The key or name of a part, its place after that of the whole, and the part.
    Part = tuple[Any, str, Any]

_CURE = "check its aliases, excluded fields, serializers and validators, or offer another type"
_OFFSET_CURE = "JSON holds no zone and no seconds of an offset, so offer it in UTC"
_SUBCLASS_CURE = "its type names a class that it is derived from, so name its own there"
_KEYS_CURE = "it has keys that its type does not name, or reads as others"
_LISTS, _SETS = (list, tuple), (set, frozenset)
_COLLECTIONS = (dict, _LISTS, _SETS)


def not_finite(value: Any) -> str | None:
    """Return why JSON cannot hold a value with a NaN or infinity in it; None if it has none."""
    place = _place(value, _is_not_finite)
    return place and f"{place} is NaN or infinite, which JSON cannot hold: use None"


def unwritten(value: Any, reason: object) -> str:
    """Return why a value is refused that a library does not write, for this reason."""
    return _secret(value) or str(reason)


def unread(value: Any, reason: object) -> str:
    """Return why a value is refused that cannot be read back, for this reason."""
    if (why := not_finite(value)) or (why := _secret(value)):
        return why
    return f"value could not be read back ({reason}): {_CURE}"


def changed(value: Any, back: Any, *, is_open: bool) -> str | None:
    """Return why a value is refused that is read back as ``back``; None if that is the same.

    Args:
        value: The value that was written.
        back: The value that was read.
        is_open: Whether parts may be of any type, which come back as plain values.
    """
    different = _difference(value, back, "value", is_open=is_open)
    if different is None:
        return None
    place, part, other = different
    if (why := not_finite(value)) or (why := _secret(part, place)):
        return why
    is_alike = type(other) is type(part)
    what = "another value" if is_alike else a_kind(type(other))
    cure = _CURE
    if isinstance(part, datetime | time) and is_alike:
        cure = _OFFSET_CURE
    elif isinstance(part, dict) and is_alike:
        has_times = any(isinstance(key, datetime | time) for key in part)
        cure = _OFFSET_CURE if has_times else _KEYS_CURE
    elif _names(type(part)) and isinstance(part, type(other)):
        cure = _SUBCLASS_CURE
    return f"{place} is {a_kind(type(part))}, and would come back as {what}: {cure}"


def _secret(value: Any, path: str = "value") -> str | None:
    place = _place(value, is_secret, path)
    return place and f"{place} is a secret of pydantic's: {HIDDEN_CURE}"


def _is_not_finite(value: Any) -> bool:
    if isinstance(value, Decimal):
        return not value.is_finite()
    return isinstance(value, float) and not math.isfinite(value)


def _place(value: Any, wanted: Callable[[Any], bool], path: str = "value") -> str | None:
    """Return the place of the first part of a value that is ``wanted``, if any. The value must not
    contain itself.
    """
    if wanted(value):
        return path
    if isinstance(value, dict) and any(map(wanted, value)):
        return f"a key of {path}"
    places = (_place(part, wanted, path + place) for _, place, part in _parts(value))
    return next(filter(None, places), None)


def _parts(value: Any) -> Iterable[Part]:
    """Return the parts of a collection or record."""
    if isinstance(value, dict):
        # The place does not quote a key, which is data like a value.
        return [(key, "[...]", part) for key, part in value.items()]
    if isinstance(value, _LISTS):
        return [(i, f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, _SETS):
        return [(part, "[...]", part) for part in value]
    names = _names(type(value))
    extra = getattr(value, "__pydantic_extra__", None) or {}
    return [
        *((name, f".{name}", getattr(value, name)) for name in names if hasattr(value, name)),
        *((name, ".[...]", part) for name, part in extra.items()),
    ]


def _names(kind: Any) -> Iterable[str]:
    """Return the names of the fields of a class."""
    if hasattr(kind, "__attrs_attrs__"):
        return [field.name for field in kind.__attrs_attrs__]
    for names in ("__pydantic_fields__", "__dataclass_fields__", "__struct_fields__"):
        if hasattr(kind, names):
            return list(getattr(kind, names))
    return list(getattr(kind, "model_fields", ()))


def _difference(value: Any, back: Any, path: str, *, is_open: bool) -> tuple[str, Any, Any] | None:
    """Return the first place at which two values differ, and what is there in both."""
    if _is_equal(value, back):
        return None
    parts = {key: (place, part) for key, place, part in _parts(value)}
    others = {key: part for key, _, part in _parts(back)}
    if _is_alike(value, back) and parts.keys() == others.keys():
        differences = (
            _difference(part, others[key], path + place, is_open=is_open)
            for key, (place, part) in parts.items()
        )
        return next(filter(None, differences), None)
    if is_open and _place(value, is_secret) is None and _is_plain_form(value, back):
        return None
    return path, value, back


def _is_equal(value: Any, back: Any) -> bool:
    if isinstance(value, datetime) and isinstance(back, datetime) and value.utcoffset() is not None:
        # An hour that occurs twice in a zone is never equal to one in another zone.
        return back.utcoffset() is not None and value.astimezone(UTC) == back.astimezone(UTC)
    if isinstance(value, time) and value.tzinfo is not None and getattr(back, "tzinfo", 0) is None:
        # A zone whose offset depends on the date is none for a time.
        return False
    try:
        if value is back or value == back:
            return True
    except Exception:  # noqa: BLE001 - a class may raise anything
        return False
    # Objects that cannot be compared, and have no fields: nothing shows that they differ.
    kind: Any = type(value)
    compares = kind.__eq__ != object.__eq__
    return kind is type(back) and not compares and not _names(kind)


def _is_alike(value: Any, back: Any) -> bool:
    """Return whether values of two types are the same if their parts are."""
    if _names(type(value)):
        return isinstance(value, type(back))
    return any(isinstance(value, kinds) and isinstance(back, kinds) for kinds in _COLLECTIONS)


def _is_plain_form(value: Any, back: Any) -> bool:
    if isinstance(value, timedelta):
        # There are several ways to write one.
        return isinstance(back, str)
    try:
        return encode_json(to_plain(value)) == encode_json(to_plain(back))
    except (TypeError, ValueError, RecursionError):
        return False
