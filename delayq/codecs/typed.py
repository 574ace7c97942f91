"""A codec for a Python type: JSON on the wire, checked when it is read.

A type that belongs to msgspec or pydantic is checked by that library. Other types (dataclasses,
TypedDicts, ``list[int]``) are checked by msgspec if it is installed and knows the whole type,
otherwise by pydantic, otherwise by functions that read what :class:`~delayq.JsonCodec` writes. All
of them write and read the same JSON, except for ``bytes``: if values hold any, use the same library
on both sides of a queue. Neither is imported before a type needs it.
"""

from __future__ import annotations

import contextlib
import sys
import typing
from importlib import import_module
from inspect import Parameter
from typing import Any, TypeVar, overload

from delayq.codecs._readers import PLAIN, reader_of
from delayq.codecs._reasons import said, shown
from delayq.codecs.json import JsonCodec
from delayq.codecs.string import BytesCodec
from delayq.errors import ConfigurationError, DecodeError, EncodeError

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.codecs.protocol import Codec

T = TypeVar("T")

# JSON has no other keys, so these types are no more specific than the plain ones.
_AS_PLAIN = {dict[str, Any]: dict, list[Any]: list}
# Attributes of dataclasses, TypedDicts and named tuples.
_HAVE_FIELDS = ("__dataclass_fields__", "__required_keys__", "_fields")
# The maximum number of faults that a reason names.
_FAULTS = 3
_FAILURES = (TypeError, ValueError, ArithmeticError, RecursionError)


@overload
def codec_for(kind: type[T], /) -> Codec[T]: ...
@overload
def codec_for(kind: Any, /) -> Codec[Any]: ...
def codec_for(kind: Any, /) -> Codec[Any]:
    """Return a codec whose values have the type ``kind``, for a producer's queue or a listener's.

    =====================================================  =========================================
    ``Any``, ``object``, no annotation                     :class:`~delayq.JsonCodec`: whatever
                                                           JSON there is
    ``dict``, ``list``, ``str``, ``int``, ``float``,       JSON of that type and no other
    ``bool``, ``None``, ``dict[str, Any]``, ``list[Any]``
    ``bytes``                                              :class:`~delayq.codecs.BytesCodec`: the
                                                           payload as it is
    pydantic models and dataclasses                        pydantic, by alias where there is one
    ``msgspec.Struct``                                     msgspec
    anything else                                          msgspec or pydantic, whichever is
                                                           installed and knows it; without either,
                                                           the standard library
    =====================================================  =========================================

    Its ``decode`` raises :class:`~delayq.DecodeError` for a value of another type. The cause says
    what is wrong without quoting a value. Its ``encode`` raises :class:`~delayq.EncodeError`.

    Raises:
        ConfigurationError: The type needs ``delayq[msgspec]`` or ``delayq[pydantic]``, or neither
            knows it.
    """
    if kind in (Any, object, Parameter.empty):
        return JsonCodec()
    if kind is bytes:
        return BytesCodec()
    if kind is None:
        kind = type(None)
    with contextlib.suppress(TypeError):  # not every type can be hashed
        kind = _AS_PLAIN.get(kind, kind)
    if kind in PLAIN:
        return _plain_codec(kind)
    return _library_codec(kind)


def _library_codec(kind: Any) -> Codec[Any]:
    makers: list[tuple[str, Callable[[Any], Codec[Any]]]] = [
        ("msgspec", msgspec_codec),
        ("pydantic", pydantic_codec),
        ("json", standard_codec),
    ]
    if "pydantic" in sys.modules and _holds_pydantics(kind, []):
        # The others take pydantic's dataclasses for plain ones, and would skip their validators.
        makers = makers[1:2]
    reasons = []
    for library, make in makers:
        try:
            import_module(library)
        except ImportError:
            reasons.append(f"pip install 'delayq[{library}]'")
            continue
        try:
            return make(kind)
        except Exception as error:  # noqa: BLE001 - each library has its own errors for a type that it does not know
            reasons.append(f"{library}: {str(error).splitlines()[0]}")
    raise ConfigurationError(f"no codec for {shown(kind)}: {'; or '.join(reasons)}")


class TypedCodec:
    """A codec for one type, from functions that write and read it.

    The texts of their errors quote nothing but what :func:`said` leaves out.

    Attributes:
        results: The codec of the results of handlers, which are of other types.
    """

    results: JsonCodec = JsonCodec()

    def __init__(
        self, kind: Any, write: Callable[[Any], bytes], read: Callable[[bytes], Any]
    ) -> None:
        self._name = f"codec_for({shown(kind)})"
        self._class = _class(kind)
        self._write = write
        self._read = read

    def encode(self, value: Any, /) -> bytes:
        if self._class is not None and not isinstance(value, self._class):
            raise EncodeError(f"{self._name} cannot encode {type(value).__name__}")
        try:
            return self._write(value)
        except EncodeError:
            raise
        except _FAILURES as error:
            reason = said(error)
        raise EncodeError(f"{self._name} cannot encode this {type(value).__name__}: {reason}")

    def decode(self, payload: bytes, /) -> Any:
        try:
            return self._read(payload)
        except _FAILURES as error:
            reason = said(error)
        raise DecodeError(self._name, payload) from reason

    def __repr__(self) -> str:
        return self._name


def _plain_codec(kind: type[Any]) -> TypedCodec:
    """Return a codec for a type that JSON has itself."""
    json, accepted = JsonCodec(), _class(kind)
    assert accepted is not None

    def checked(value: Any) -> Any:
        # In Python a bool is an int; in JSON it is not.
        if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)):
            return value
        raise TypeError(f"it is {type(value).__name__}, not {kind.__name__}")

    decode = json.decode

    def read(payload: bytes) -> Any:
        value = decode(payload)
        return value if type(value) is kind else checked(value)

    return TypedCodec(kind, lambda value: json.encode(checked(value)), read)


def msgspec_codec(kind: Any) -> TypedCodec:
    """Return a codec for a type that msgspec knows."""
    import msgspec  # noqa: PLC0415 - an extra

    # This raises for an unknown type; a decoder would do so only when it meets a value.
    msgspec.json.schema(kind)
    return TypedCodec(kind, msgspec.json.Encoder().encode, msgspec.json.Decoder(kind).decode)


def pydantic_codec(kind: Any) -> TypedCodec:
    """Return a codec for a type that pydantic knows."""
    import pydantic  # noqa: PLC0415 - an extra

    adapter = pydantic.TypeAdapter(kind)

    # The texts of pydantic's errors quote the value, which may be private.
    def write(value: Any) -> bytes:
        try:
            # By alias, because it is read by alias. A value of another type would only cause a
            # warning by default.
            return adapter.dump_json(value, by_alias=True, warnings="error")
        except (TypeError, ValueError, RecursionError):
            raise ValueError("pydantic cannot write it") from None

    def read(payload: bytes) -> Any:
        try:
            return adapter.validate_json(payload)
        except pydantic.ValidationError as error:
            faults = error.errors(include_input=False, include_url=False, include_context=False)
        raise ValueError(
            "; ".join(
                ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"])))
                for fault in faults[:_FAULTS]
            )
        )

    return TypedCodec(kind, write, read)


def standard_codec(kind: Any) -> TypedCodec:
    """Return a codec for a type that needs neither msgspec nor pydantic."""
    json, read = JsonCodec(), reader_of(kind)
    return TypedCodec(kind, json.encode, lambda payload: read(json.decode(payload)))


def _holds_pydantics(kind: Any, seen: list[Any]) -> bool:
    """Return whether a type of pydantic's is among those that a type is composed of."""
    if kind in seen:
        return False
    seen.append(kind)
    parts = typing.get_args(kind)
    if isinstance(kind, type):
        if hasattr(kind, "__pydantic_validator__"):
            return True
        if any(hasattr(kind, name) for name in _HAVE_FIELDS):
            with contextlib.suppress(NameError, TypeError):
                parts += tuple(typing.get_type_hints(kind).values())
    return any(_holds_pydantics(part, seen) for part in parts)


def _class(kind: Any) -> type[Any] | tuple[type[Any], ...] | None:
    """Return the class of which a value must be an instance, if the type is a class."""
    if kind is float:
        return float, int
    if hasattr(kind, "__required_keys__"):
        # A TypedDict, including one from typing_extensions: its values are plain dicts.
        return dict
    return kind if isinstance(kind, type) and typing.get_origin(kind) is None else None
