"""Tells from a type whether its values come back from JSON as they were.

Most types are certain to: their values are written without a further look. Of the others (unions,
types with validators, aliases, constraints, parts of any type ...) only each value decides, so each
is read back before it is offered.
"""

from __future__ import annotations

import dataclasses
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_CERTAIN = (str, int, bool, NoneType, UUID, date, timedelta, bytes)
_MOMENTS = (datetime, time)
_NUMBERS = (float, Decimal)
_KEYS = (str, int, UUID, date, datetime)
_COLLECTIONS = (list, tuple, set, frozenset)
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


@dataclasses.dataclass
class Shape:
    """The facts that a type tells about its values.

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
    _look(kind, shape)
    # Others cannot have subclasses, or are uncertain; and an instance of a subclass of the type
    # itself is offered as what it is.
    shape.classes = [part for part in shape.classes if part is not kind and _has_fields(part)]
    return shape


def has_odd_enums(kind: Any) -> bool:
    """Return whether a part may be of an enum whose values are not text or numbers."""
    shape = Shape()
    _look(kind, shape)
    return any(
        not isinstance(member.value, str | int | float)
        for part in shape.classes
        if issubclass(part, Enum)
        for member in part
    )


def _look(kind: Any, shape: Shape) -> None:
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
        _look(kind.__supertype__, shape)
    elif origin is typing.Literal:
        shape.is_certain &= all(type(part) in (str, int, bool, NoneType) for part in parts)
    elif origin is typing.Annotated:
        shape.is_certain &= all(isinstance(each, str) for each in kind.__metadata__)
        _look(parts[0], shape)
    elif origin is not None:
        _look_at_parts(origin, parts, shape)
    elif isinstance(kind, type):
        _look_at_class(kind, shape)
    else:
        shape.is_certain, shape.has_numbers = False, True


def _look_at_parts(origin: Any, parts: tuple[Any, ...], shape: Shape) -> None:
    if origin in (typing.Union, UnionType):
        # Which of several types a value is of may be read otherwise.
        shape.is_certain &= len([part for part in parts if part is not NoneType]) == 1
    elif origin is dict:
        shape.is_certain &= _is_key(parts[0])
    elif origin not in (*_COLLECTIONS, *_MARKS):
        shape.is_certain = False
        if isinstance(origin, type):
            _look_at_class(origin, shape)
    for part in parts:
        if part is not ...:
            _look(part, shape)


def _is_key(kind: Any) -> bool:
    return kind in _KEYS or (isinstance(kind, type) and issubclass(kind, Enum))


def _look_at_class(kind: type[Any], shape: Shape) -> None:
    if kind in shape.classes:
        return
    # Before its fields are looked at, because one of them may be of this very class.
    shape.classes.append(kind)
    if issubclass(kind, Enum):
        # Others are not found again by what JSON makes of their values.
        kinds = {type(member.value) for member in kind}
        shape.is_certain &= kinds in ({str}, {int}) and not issubclass(kind, Flag)
        return
    if kind is dict or kind in _COLLECTIONS:
        shape.is_certain, shape.is_open, shape.has_numbers = False, True, True
        return
    certain, hints = _fields(kind)
    shape.is_certain &= certain
    if _is_extensible(kind):
        shape.is_open = shape.has_numbers = True
    if not certain:
        shape.has_numbers = True
    for hint in hints:
        _look(hint, shape)


def _fields(kind: type[Any]) -> tuple[bool, Iterable[Any]]:
    """Return whether a class does nothing of its own to its fields, and their types."""
    own = vars(kind)
    if "__pydantic_validator__" in own:
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
        wanted = {field.name for field in dataclasses.fields(kind)}
        certain &= not any(isinstance(hint, dataclasses.InitVar) for hint in hints.values())
    elif hasattr(kind, "__struct_fields__"):
        certain, wanted = True, {*kind.__struct_fields__}
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        certain, wanted = True, {*kind._fields}
        hints = {name: hints.get(name, Any) for name in wanted}
    elif hasattr(kind, "__required_keys__"):
        # A TypedDict's value may have further keys, which nobody reads.
        return False, [*hints.values()]
    else:
        return False, ()
    certain &= not any(
        hasattr(kind, name) for name in ("__post_init__", "__pydantic_config__", "__attrs_attrs__")
    )
    return certain, [hint for name, hint in hints.items() if name in wanted]


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
