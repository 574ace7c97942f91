"""Codecs of single types, made by msgspec, by pydantic, or with the standard library.

``JsonCodec`` uses them too: :func:`plain` refuses what a worker would not read as it was.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import typing
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from delayq._functions import show
from delayq.codecs import _plain
from delayq.codecs._plain import Unencodable, encode_json
from delayq.codecs._readers import UnknownType, reader_of
from delayq.codecs._round_trip import (
    Shape,
    change_reason,
    has_odd_enums,
    not_finite_reason,
    read_reason,
    shape_of,
    write_reason,
)
from delayq.codecs.protocol import reason_of
from delayq.errors import ConfigurationError, DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.codecs.protocol import Codec

# Attributes of dataclasses, TypedDicts and named tuples.
_HAVE_FIELDS = ("__dataclass_fields__", "__required_keys__", "_fields")
# The maximum number of faults that a reason names.
_FAULTS = 3
_FAILURES = (TypeError, ValueError, ArithmeticError, RecursionError)
# An offset whose minutes are unusual may have seconds, which the libraries cut off. Since 1973, no
# zone has any.
_ODD_OFFSET = re.compile(rb':(?!00|15|30|45)\d\d"')
# msgspec quotes a value that is not in an enum, an unknown tag, or an unknown field.
_QUOTED = re.compile(
    r"(Invalid (?:enum )?value|Object contains unknown field) .*?( - at `[^`]*`)?", re.DOTALL
)
# Pydantic's errors whose texts quote what was read, or are a validator's.
_QUOTING = {
    "assertion_error",
    "get_attribute_error",
    "import_error",
    "union_tag_invalid",
    "uuid_parsing",
    "value_error",
}
# Where msgspec met the fault: the same fault in another payload is elsewhere.
_AT_BYTE = re.compile(r" \(byte \d+\)")
_CERTAIN = Shape()


class TypeCodec:
    """A codec for one type, from functions that write and read it.

    The texts of their errors quote nothing but what :func:`_reason` leaves out.

    Attributes:
        write: Encodes a value without a check, or raises what the library raises.
        results: The codec of the results of handlers, which are of other types. Set by
            :func:`delayq.codecs.codec_for`.
    """

    results: Codec[Any]

    def __init__(
        self,
        kind: Any,
        write: Callable[[Any], bytes],
        read: Callable[[bytes], Any],
        shape: Shape | None = None,
    ) -> None:
        """Args:
        kind: The type.
        write: Encodes a value.
        read: Decodes a payload.
        shape: Tells which values have to be read back; None if all of them are certain to be the
            same.
        """
        self._name = f"codec_for({show(kind)})"
        self._class = _class_of(kind)
        self.write = write
        self._read = read
        self._shape = shape

    def encode(self, value: Any, /) -> bytes:
        if self._class is not None and not isinstance(value, self._class):
            raise EncodeError(f"{self._name} cannot encode {type(value).__name__}")
        try:
            payload = self.write(value)
            reason = self.flaw(value, payload)
        except EncodeError:
            raise
        except RecursionError as error:
            reason = str(_reason(error))
        except _FAILURES as error:
            reason = write_reason(value, _reason(error))
        if reason is None:
            return payload
        raise EncodeError(f"{self._name} cannot encode this {type(value).__name__}: {reason}")

    def decode(self, payload: bytes, /) -> Any:
        try:
            return self._read(payload)
        except _FAILURES as error:
            reason = _reason(error)
        raise DecodeError(self._name, payload, str(reason)) from reason

    def __repr__(self) -> str:
        return self._name

    def flaw(self, value: Any, payload: bytes) -> str | None:
        """Return why a value would not be read from a payload as it was; None if it would."""
        shape = self._shape
        if shape is None or not self._is_doubtful(value, payload, shape):
            return None
        try:
            back = self._read(payload)
        except _FAILURES as error:
            return read_reason(value, _reason(error))
        # An infinity comes back with some of pydantic's settings, but what they write is no JSON.
        return (_names_a_number(payload) and not_finite_reason(value)) or change_reason(
            value, back, is_open=shape.is_open
        )

    def change(self, value: Any, back: Any) -> str | None:
        """Return why a value is not what was read for it; None if it is, or is certain to be."""
        shape = self._shape
        if shape is None or (shape.decides() and type(value) is type(back)):
            return None
        return change_reason(value, back, is_open=shape.is_open)

    def _is_doubtful(self, value: Any, payload: bytes, shape: Shape) -> bool:
        return (
            not shape.decides()
            or (self._class is not None and type(value) is not self._class)
            # Neither library refuses NaN and the infinities.
            or (shape.has_numbers and b"null" in payload)
            or (shape.has_decimals and _names_a_number(payload))
            or (shape.has_moments and _names_an_odd_offset(payload))
        )


def _names_a_number(payload: bytes) -> bool:
    return b"NaN" in payload or b"Infinity" in payload


def _names_an_odd_offset(payload: bytes) -> bool:
    before_2000 = b'"1' in payload or b'"0' in payload
    return before_2000 and _ODD_OFFSET.search(payload) is not None


def library_codec(kind: Any) -> TypeCodec:
    """Return the codec of the first library that knows a type.

    Raises:
        ConfigurationError: None does.
    """
    makers: list[tuple[str, Callable[[Any], TypeCodec]]] = [
        ("msgspec", msgspec_codec),
        ("pydantic", pydantic_codec),
        ("json", standard_codec),
    ]
    if "pydantic" in sys.modules and _holds_pydantics(kind, visited=[]):
        # The others take pydantic's dataclasses for plain ones, and would skip their validators.
        makers = makers[1:2]
    elif has_odd_enums(kind):
        # Neither of the others reads them back.
        makers.reverse()
    missing = []
    for library, make in makers:
        try:
            import_module(library)
        except ImportError:
            missing.append(f"'delayq[{library}]'")
            continue
        with contextlib.suppress(Exception):  # each library has its own for an unknown type
            return make(kind)
    raise ConfigurationError(_unknown(kind, missing))


def _unknown(kind: Any, missing: list[str]) -> str:
    """Return why there is no codec for a type, and what to do."""
    try:
        reader_of(kind)
    except UnknownType as error:
        part = show(error.kind)
    except (TypeError, NameError) as error:
        return f"no codec can be made for {show(kind)}: {error}"
    else:
        part = show(kind)
    of = "" if part == show(kind) else f", which is in {show(kind)}"
    if missing:
        cure = f"try pip install {' or '.join(missing)}, or pass a codec of your own (codec=...)"
    else:
        cure = (
            "make it a dataclass, a pydantic model or a msgspec.Struct, or pass a codec of your own"
            " (codec=...)"
        )
    return f"no codec knows the type {part}{of}: {cure}"


def msgspec_codec(kind: Any) -> TypeCodec:
    """Return a codec for a type that msgspec knows."""
    import msgspec  # noqa: PLC0415 - an extra

    # This raises for an unknown type; a decoder would do so only when it meets a value.
    msgspec.json.schema(kind)
    encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder(kind)
    return TypeCodec(kind, encoder.encode, decoder.decode, shape_of(kind))


def pydantic_codec(kind: Any) -> TypeCodec:
    """Return a codec for a type that pydantic knows."""
    import pydantic  # noqa: PLC0415 - an extra
    from pydantic_core.core_schema import ErrorType  # noqa: PLC0415 - comes with it

    adapter = pydantic.TypeAdapter(kind)

    harmless = {*typing.get_args(ErrorType)} - _QUOTING
    names: set[str] = set()

    def text(fault: Any) -> str:
        if not names:
            _add_names(adapter.core_schema, names)
        # The keys of a dict are private, and so are fields that no model has.
        parts = (
            f"[{part}]" if isinstance(part, int) else f".{part}" if part in names else "[...]"
            for part in fault["loc"]
        )
        # Validators have types of their own as well.
        said = fault["msg"] if fault["type"] in harmless else fault["type"]
        return ": ".join(filter(None, ("".join(parts).removeprefix("."), said)))

    # The texts of pydantic's errors quote the value, which may be private.
    def write(value: Any) -> bytes:
        try:
            # By alias, because it is read by alias, and without what is computed. A value of
            # another type would only cause a warning by default.
            return adapter.dump_json(value, by_alias=True, round_trip=True, warnings="error")
        except (TypeError, ValueError, RecursionError):
            raise ValueError(
                "pydantic cannot write it: check the types of its fields, and their serializers"
            ) from None

    def read(payload: bytes) -> Any:
        try:
            return adapter.validate_json(payload)
        except pydantic.ValidationError as error:
            faults = error.errors(include_input=False, include_url=False, include_context=False)
        raise ValueError("; ".join(map(text, faults[:_FAULTS])))

    return TypeCodec(kind, write, read, shape_of(kind))


def _add_names(schema: Any, names: set[str]) -> None:
    """Add the names of all fields in a schema of pydantic's, and their aliases."""
    if isinstance(schema, dict):
        match schema:
            case {"type": "dataclass-args", "fields": fields}:
                names.update(field["name"] for field in fields)
            case {"fields": dict(fields)}:
                names.update(fields)
        if isinstance(alias := schema.get("validation_alias"), str):
            names.add(alias)
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list | tuple):
            _add_names(part, names)


def standard_codec(kind: Any) -> TypeCodec:
    """Return a codec for a type that needs neither msgspec nor pydantic."""
    read = reader_of(kind)

    def write(value: Any) -> bytes:
        return encode_json(_plain.to_plain(value)).encode()

    return TypeCodec(kind, write, lambda payload: read(json.loads(payload)), shape_of(kind))


def _holds_pydantics(kind: Any, visited: list[Any]) -> bool:
    """Return whether a type of pydantic's is among those that a type is composed of."""
    if kind in visited:
        return False
    visited.append(kind)
    parts = typing.get_args(kind)
    if isinstance(kind, type):
        if hasattr(kind, "__pydantic_validator__"):
            return True
        if any(hasattr(kind, name) for name in _HAVE_FIELDS):
            with contextlib.suppress(NameError, TypeError):
                parts += tuple(typing.get_type_hints(kind).values())
    return any(_holds_pydantics(part, visited) for part in parts)


def _class_of(kind: Any) -> type[Any] | tuple[type[Any], ...] | None:
    """Return the class of which a value must be an instance, if the type is a class."""
    if kind is float:
        return float, int
    if hasattr(kind, "__required_keys__"):
        # A TypedDict, including one from typing_extensions: its values are plain dicts.
        return dict
    return kind if isinstance(kind, type) and typing.get_origin(kind) is None else None


def _reason(error: BaseException) -> ValueError:
    """Do what :func:`reason_of` does, but keep a text that quotes nothing but what msgspec does."""
    if isinstance(error, UnicodeError | RecursionError | json.JSONDecodeError):
        return reason_of(error)
    text = _AT_BYTE.sub("", str(error))
    quoting = _QUOTED.fullmatch(text)
    return ValueError(f"{quoting[1]}{quoting[2] or ''}" if quoting else text)


# --- values of types that JSON has not, without a codec for their type


def plain(value: Any, /) -> Any:
    """Return what :func:`delayq.codecs._plain.plain` does, or raise TypeError if the value would
    not come back as it was.
    """
    _check(value, "value")
    return _plain.plain(value)


def to_plain(value: Any, /) -> Any:
    """Do the same for :func:`delayq.codecs._plain.to_plain`."""
    return _plain.to_plain(value, _check)


def _check(value: Any, path: str) -> None:
    kind: Any = type(value)
    if _shape_of_class(kind).decides() or (codec := _codec(kind)) is None:
        return
    try:
        if codec.flaw(value, codec.write(value)) is None:
            return
    except _FAILURES:
        # It has parts that the library does not write.
        pass
    # Of a dataclass, JsonCodec writes some parts otherwise.
    if reason := codec.flaw(value, encode_json(_plain.to_plain(value)).encode()):
        # It begins with "value".
        raise Unencodable(path + reason[5:])


@lru_cache(maxsize=1024)
def _shape_of_class(kind: Any) -> Shape:
    """Return the shape of a class whose instances are turned into plain values as a whole."""
    if not _plain.is_record(kind):
        return _CERTAIN
    shape = shape_of(kind)
    if not hasattr(kind, "__dataclass_fields__"):
        # A library writes the texts of these itself.
        shape.is_certain &= not (shape.has_decimals or shape.has_moments)
    return shape


@lru_cache(maxsize=1024)
def _codec(kind: Any) -> TypeCodec | None:
    """Return the codec by which a worker reads a class."""
    try:
        return library_codec(kind)
    except ConfigurationError:
        # No worker reads the class, only what it is written as.
        return None
