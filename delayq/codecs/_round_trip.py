"""Tells whether values come back from JSON as they were, by their type or by what is read back.

Most types are certain to: their values are written without a further check. Of the others (unions,
types with validators, aliases, constraints, parts of any type ...) only each value decides, so each
is read back before it is offered. Errors name the part that would change and its cure, and quote no
values.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq.codecs._plain import HIDDEN_CURE, a_kind, encode_json, is_secret, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    # The key or name of a part, its path after that of the whole, and the part.
    Part = tuple[Any, str, Any]

_CERTAIN = (str, int, bool, NoneType, UUID, date, timedelta, bytes)
_MOMENTS = (datetime, time)
_NUMBERS = (float, Decimal)
_KEYS = (str, int, UUID, date, datetime)
_ARRAYS = (list, tuple, set, frozenset)
_MARKS = tuple(
    getattr(typing, name)
    for name in ("Required", "NotRequired", "ReadOnly")
    if hasattr(typing, name)
)
# The settings of a model that do not change how it is written and read.
_HARMLESS = {
    *("title", "frozen", "from_attributes", "populate_by_name", "validate_assignment", "extra"),
    *("arbitrary_types_allowed", "json_schema_extra", "protected_namespaces", "validate_by_name"),
    *("use_attribute_docstrings", "hide_input_in_errors", "alias_generator", "slots", "kw_only"),
}
# Not computed fields, which are not written.
_DECORATORS = (
    *("validators", "field_validators", "root_validators", "model_validators"),
    *("field_serializers", "model_serializers"),
)

_CURE = "check its aliases, excluded fields, serializers and validators, or offer another type"
_OFFSET_CURE = "JSON holds no zone and no seconds of an offset, so offer it in UTC"
_SUBCLASS_CURE = "its type names a class that it is derived from, so name its own there"
_KEYS_CURE = "it has keys that its type does not name, or reads as others"
_LISTS, _SETS = (list, tuple), (set, frozenset)
_COLLECTIONS = (dict, _LISTS, _SETS)


@dataclasses.dataclass
class Shape:
    """The facts that hold for all values of a type.

    Attributes:
        is_certain: Whether they come back as they were, but for NaN and the infinities, for
            moments in zones whose offset has seconds, and for instances of subclasses.
        is_open: Whether a part may be of any type: it comes back as the plain value that JSON has.
        has_numbers: Whether a part may be a float, which is written as null if it is not finite.
        has_decimals: Whether a part may be a Decimal, which is written as text.
        has_moments: Whether a part may be a datetime or time.
        classes: The classes of parts, instances of whose subclasses would come back as theirs.
    """

    is_certain: bool = True
    is_open: bool = False
    has_numbers: bool = False
    has_decimals: bool = False
    has_moments: bool = False
    classes: list[type[Any]] = dataclasses.field(default_factory=list)

    def decides(self) -> bool:
        """Return whether the values come back, so that none has to be read back for that."""
        if self.is_certain:
            for kind in self.classes:
                if kind.__subclasses__():
                    return False
        return self.is_certain


def shape_of(kind: Any) -> Shape:
    """Return the shape of a type."""
    shape = Shape()
    _examine(kind, shape)
    # Others cannot have subclasses, or are uncertain; and an instance of a subclass of the type
    # itself is offered as what it is.
    shape.classes = [part for part in shape.classes if part is not kind and _has_fields(part)]
    return shape


def has_odd_enums(kind: Any) -> bool:
    """Return whether a part may be of an enum whose values are not text or numbers."""
    shape = Shape()
    _examine(kind, shape)
    return any(
        not isinstance(member.value, str | int | float)
        for part in shape.classes
        if issubclass(part, Enum)
        for member in part
    )


def _examine(kind: Any, shape: Shape) -> None:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object) or isinstance(kind, typing.TypeVar):
        shape.is_certain, shape.is_open, shape.has_numbers = False, True, True
    elif kind is None or kind in _CERTAIN:
        pass
    elif kind in _NUMBERS:
        shape.has_numbers = True
        shape.has_decimals |= kind is Decimal
    elif kind in _MOMENTS:
        shape.has_moments = True
        # A time may have a zone whose offset depends on the date.
        shape.is_certain &= kind is datetime
    elif hasattr(kind, "__supertype__"):
        _examine(kind.__supertype__, shape)
    elif origin is typing.Literal:
        shape.is_certain &= all(type(part) in (str, int, bool, NoneType) for part in parts)
    elif origin is typing.Annotated:
        shape.is_certain &= all(isinstance(text, str) for text in kind.__metadata__)
        _examine(parts[0], shape)
    elif origin is not None:
        _examine_parts(origin, parts, shape)
    elif isinstance(kind, type):
        _examine_class(kind, shape)
    else:
        shape.is_certain, shape.has_numbers = False, True


def _examine_parts(origin: Any, parts: tuple[Any, ...], shape: Shape) -> None:
    if origin in (typing.Union, UnionType):
        # Which of several types a value is of may be read otherwise.
        shape.is_certain &= len([part for part in parts if part is not NoneType]) == 1
    elif origin is dict:
        shape.is_certain &= _is_key(parts[0])
    elif origin not in (*_ARRAYS, *_MARKS):
        shape.is_certain = False
        if isinstance(origin, type):
            _examine_class(origin, shape)
    for part in parts:
        if part is not ...:
            _examine(part, shape)


def _is_key(kind: Any) -> bool:
    return kind in _KEYS or (isinstance(kind, type) and issubclass(kind, Enum))


def _examine_class(kind: type[Any], shape: Shape) -> None:
    if kind in shape.classes:
        return
    # Before its fields are examined, because one of them may be of this very class.
    shape.classes.append(kind)
    if issubclass(kind, Enum):
        # By what JSON makes of their values, other members are not found again.
        kinds = {type(member.value) for member in kind}
        shape.is_certain &= kinds in ({str}, {int}) and not issubclass(kind, Flag)
        return
    if kind is dict or kind in _ARRAYS:
        shape.is_certain, shape.is_open, shape.has_numbers = False, True, True
        return
    certain, hints = _fields(kind)
    shape.is_certain &= certain
    if _is_extensible(kind):
        shape.is_open = shape.has_numbers = True
    if not certain:
        shape.has_numbers = True
    for hint in hints:
        _examine(hint, shape)


def _fields(kind: type[Any]) -> tuple[bool, Iterable[Any]]:
    """Return whether a class does nothing of its own to its fields, and their types."""
    if "__pydantic_validator__" in vars(kind):
        fields = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", {})
        certain = (
            _is_harmless(kind) and all(map(_is_usual, fields.values())) and not _is_extensible(kind)
        )
        return certain, [field.annotation for field in fields.values()]
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return False, [Any]
    if hasattr(kind, "__dataclass_fields__"):
        certain = kind.__dataclass_params__.init and all(
            field.init and not field.name.startswith("_") for field in dataclasses.fields(kind)
        )
        names = {field.name for field in dataclasses.fields(kind)}
        certain &= not any(isinstance(hint, dataclasses.InitVar) for hint in hints.values())
    elif hasattr(kind, "__struct_fields__"):
        certain, names = True, {*kind.__struct_fields__}
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        certain, names = True, {*kind._fields}
        hints = {name: hints.get(name, Any) for name in names}
    elif hasattr(kind, "__required_keys__"):
        # A TypedDict's value may have further keys, which nobody reads.
        return False, [*hints.values()]
    else:
        return False, ()
    certain &= not any(
        hasattr(kind, name) for name in ("__post_init__", "__pydantic_config__", "__attrs_attrs__")
    )
    return certain, [hint for name, hint in hints.items() if name in names]


def _is_harmless(kind: Any) -> bool:
    """Return whether a class of pydantic's neither changes nor refuses what its fields hold."""
    return (
        bool(getattr(kind, "__pydantic_complete__", True))
        and {*_config(kind)} <= _HARMLESS
        and not any(getattr(kind.__pydantic_decorators__, name) for name in _DECORATORS)
        and not getattr(kind, "__pydantic_custom_init__", False)
        and not getattr(kind, "__pydantic_post_init__", None)
        and not hasattr(kind, "__post_init__")
        and "__get_pydantic_core_schema__" not in vars(kind)
    )


def _has_fields(kind: type[Any]) -> bool:
    return any(
        hasattr(kind, name)
        for name in ("__dataclass_fields__", "__struct_fields__", "__pydantic_validator__")
    )


def _is_extensible(kind: Any) -> bool:
    return "__pydantic_validator__" in vars(kind) and _config(kind).get("extra") == "allow"


def _config(kind: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = (
        getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}
    )
    return config


def _is_usual(field: Any) -> bool:
    """Return whether a field of pydantic's is written under the name under which it is read, and
    has no constraints.
    """
    return (
        not field.metadata
        and not field.exclude
        and not getattr(field, "exclude_if", None)
        and field.discriminator is None
        and field.init is not False
        and field.validation_alias == field.serialization_alias
    )


# --- what is read back


def not_finite_reason(value: Any) -> str | None:
    """Return why JSON cannot hold a value with a NaN or infinity in it; None if it has none."""
    path = _path(value, _is_not_finite)
    return path and f"{path} is NaN or infinite, which JSON cannot hold: use None"


def write_reason(value: Any, reason: object) -> str:
    """Return why a value is refused that a library does not write, for this reason."""
    return _secret(value) or str(reason)


def read_reason(value: Any, reason: object) -> str:
    """Return why a value is refused that cannot be read back, for this reason."""
    if obstacle := not_finite_reason(value) or _secret(value):
        return obstacle
    return f"value could not be read back ({reason}): {_CURE}"


def change_reason(value: Any, back: Any, *, is_open: bool) -> str | None:
    """Return why a value is refused that is read back as ``back``; None if that is the same.

    Args:
        value: The value that was written.
        back: The value that was read.
        is_open: Whether parts may be of any type, which come back as plain values.
    """
    difference = _difference(value, back, "value", is_open=is_open)
    if difference is None:
        return None
    path, part, back_part = difference
    if obstacle := not_finite_reason(value) or _secret(part, path):
        return obstacle
    is_alike = type(back_part) is type(part)
    result = "another value" if is_alike else a_kind(type(back_part))
    cure = _CURE
    if isinstance(part, datetime | time) and is_alike:
        cure = _OFFSET_CURE
    elif isinstance(part, dict) and is_alike:
        has_times = any(isinstance(key, datetime | time) for key in part)
        cure = _OFFSET_CURE if has_times else _KEYS_CURE
    elif _names(type(part)) and isinstance(part, type(back_part)):
        cure = _SUBCLASS_CURE
    return f"{path} is {a_kind(type(part))}, and would come back as {result}: {cure}"


def _secret(value: Any, path: str = "value") -> str | None:
    secret_path = _path(value, is_secret, path)
    return secret_path and f"{secret_path} is a secret of pydantic's: {HIDDEN_CURE}"


def _is_not_finite(value: Any) -> bool:
    if isinstance(value, Decimal):
        return not value.is_finite()
    return isinstance(value, float) and not math.isfinite(value)


def _path(value: Any, test: Callable[[Any], bool], path: str = "value") -> str | None:
    """Return the path to the first part of a value that passes a test, if any. The value must not
    contain itself.
    """
    if test(value):
        return path
    if isinstance(value, dict) and any(map(test, value)):
        return f"a key of {path}"
    paths = (_path(part, test, path + step) for _, step, part in _parts(value))
    return next(filter(None, paths), None)


def _parts(value: Any) -> Iterable[Part]:
    """Return the parts of a collection or record."""
    if isinstance(value, dict):
        # The path does not quote a key, which is data like a value.
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
    """Return the path to the first part in which two values differ, and both of its forms."""
    if _is_equal(value, back):
        return None
    parts = {key: (step, part) for key, step, part in _parts(value)}
    back_parts = {key: part for key, _, part in _parts(back)}
    if _is_alike(value, back) and parts.keys() == back_parts.keys():
        differences = (
            _difference(part, back_parts[key], path + step, is_open=is_open)
            for key, (step, part) in parts.items()
        )
        return next(filter(None, differences), None)
    if is_open and _path(value, is_secret) is None and _is_plain_form(value, back):
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
