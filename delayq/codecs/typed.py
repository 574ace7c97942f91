"""A codec for a Python type: JSON on the wire, checked when it is read.

Who checks depends on the type alone where it is msgspec's or pydantic's. For the others (dataclasses, TypedDicts,
``list[int]``) it is msgspec if that is installed and knows the whole type, else pydantic. Both write the same JSON for what
JSON has, and RFC 3339 for dates; let both sides of a queue have the same one if values hold ``bytes``, which they write
differently. Neither is imported before a type needs it.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from importlib import import_module
from inspect import Parameter
from typing import Any, TypeVar, overload

from delayq.codecs._dataclasses import DataclassCodec
from delayq.codecs._reasons import said
from delayq.codecs.json import JsonCodec
from delayq.codecs.string import BytesCodec
from delayq.errors import ConfigurationError, DecodeError, EncodeError

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delayq.codecs.protocol import Codec

T = TypeVar("T")

# What JSON is made of needs no library.
_PLAIN: dict[type[Any], type[Any] | tuple[type[Any], ...]] = {
    dict: dict,
    list: list,
    str: str,
    int: int,
    float: (float, int),
    bool: bool,
    type(None): type(None),
}
# JSON has no other keys, so these say nothing more.
_AS_PLAIN = {dict[str, Any]: dict, list[Any]: list}
# What a reason names of many faults.
_FAULTS = 3


@overload
def codec_for(kind: type[T], /) -> Codec[T]: ...
@overload
def codec_for(kind: Any, /) -> Codec[Any]: ...
def codec_for(kind: Any, /) -> Codec[Any]:
    """Make a codec whose values have the type ``kind``, for a producer's queue or a listener's.

    =====================================================  ==========================================================
    ``Any``, ``object``, no annotation                     :class:`~delayq.JsonCodec`: whatever JSON there is
    ``dict``, ``list``, ``str``, ``int``, ``float``,       JSON of that type and no other
    ``bool``, ``None``, ``dict[str, Any]``, ``list[Any]``
    ``bytes``                                              :class:`~delayq.codecs.BytesCodec`: the payload as it is
    pydantic models and dataclasses                        pydantic, by alias where there is one
    ``msgspec.Struct``                                     msgspec
    dataclasses                                            msgspec or pydantic; without either, those of JSON's own types
    anything else                                          msgspec or pydantic, whichever is installed and knows it
    =====================================================  ==========================================================

    Its ``decode`` raises :class:`~delayq.DecodeError` for a value of another type; the cause says what is wrong, and quotes
    no value. Its ``encode`` raises :class:`~delayq.EncodeError`.

    Raises:
        ConfigurationError: The type needs ``delayq[msgspec]`` or ``delayq[pydantic]``, or neither knows it.
    """
    if kind in (Any, object, Parameter.empty):
        return JsonCodec()
    if kind is bytes:
        return BytesCodec()
    if kind is None:
        kind = type(None)
    plain = _AS_PLAIN.get(kind, kind) if _hashable(kind) else kind
    if isinstance(plain, type) and plain in _PLAIN:
        return _PlainCodec(plain)
    return _library_codec(kind)


def _library_codec(kind: Any) -> Codec[Any]:
    makers: list[tuple[str, Callable[[Any], Codec[Any]]]] = [("msgspec", _MsgspecCodec), ("pydantic", _PydanticCodec)]
    if any(_is_pydantics(part) for part in _parts(kind)):
        # msgspec takes pydantic's dataclasses for plain ones, and would pass over their validators.
        del makers[0]
    reasons = []
    for library, make in makers:
        try:
            import_module(library)
        except ImportError:
            reasons.append(f"pip install 'delayq[{library}]'")
            continue
        try:
            return make(kind)
        except Exception as error:  # noqa: BLE001 - each library has errors of its own for a type that it does not know
            reasons.append(f"{library}: {str(error).splitlines()[0]}")
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and makers[0][0] == "msgspec":
        try:
            return DataclassCodec(kind)
        except (TypeError, NameError) as error:
            reasons.append(f"without either: {error}")
    raise ConfigurationError(f"no codec for {_name(kind)}: {'; or '.join(reasons)}")


class _PlainCodec(JsonCodec):
    """JSON of one type."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def encode(self, value: Any, /) -> bytes:
        if not self._fits(value):
            raise EncodeError(f"{self!r} cannot encode {type(value).__name__}")
        return super().encode(value)

    def decode(self, payload: bytes, /) -> Any:
        value = super().decode(payload)
        if not self._fits(value):
            raise DecodeError(repr(self), payload) from TypeError(f"it is {type(value).__name__}, not {self._kind.__name__}")
        return value

    def _fits(self, value: Any) -> bool:
        # In Python a bool is an int; in JSON it is not.
        return isinstance(value, _PLAIN[self._kind]) and (self._kind is bool or not isinstance(value, bool))

    def __repr__(self) -> str:
        return f"codec_for({self._kind.__name__})"


class _MsgspecCodec:
    """What msgspec knows."""

    def __init__(self, kind: Any) -> None:
        import msgspec  # noqa: PLC0415 - an extra

        # Raises for a type that it does not know; a decoder would do so only when it meets a value.
        msgspec.json.schema(kind)
        self._name = f"codec_for({_name(kind)})"
        self._class = _class(kind)
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(kind).decode

    def encode(self, value: Any, /) -> bytes:
        if self._class is not None and not isinstance(value, self._class):
            raise EncodeError(f"{self._name} cannot encode {type(value).__name__}")
        try:
            return self._encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = said(error)
        raise EncodeError(f"{self._name} cannot encode this {type(value).__name__}: {reason}")

    def decode(self, payload: bytes, /) -> Any:
        try:
            return self._decode(payload)
        except (ValueError, RecursionError) as error:
            reason = said(error)
        raise DecodeError(self._name, payload) from reason

    def __repr__(self) -> str:
        return self._name


class _PydanticCodec:
    """What pydantic knows."""

    def __init__(self, kind: Any) -> None:
        import pydantic  # noqa: PLC0415 - an extra

        self._name = f"codec_for({_name(kind)})"
        self._class = _class(kind)
        self._adapter = pydantic.TypeAdapter(kind)
        self._invalid = pydantic.ValidationError

    def encode(self, value: Any, /) -> bytes:
        if self._class is not None and not isinstance(value, self._class):
            raise EncodeError(f"{self._name} cannot encode {type(value).__name__}")
        try:
            # By alias, because it is read by alias. What is not of the type would be a mere warning.
            return self._adapter.dump_json(value, by_alias=True, warnings="error")
        except (TypeError, ValueError, RecursionError):
            # Its text quotes the value.
            pass
        raise EncodeError(f"{self._name} cannot encode this {type(value).__name__}")

    def decode(self, payload: bytes, /) -> Any:
        try:
            return self._adapter.validate_json(payload)
        except self._invalid as error:
            # Its text quotes the value, which may be private.
            faults = error.errors(include_input=False, include_url=False, include_context=False)
            words = [": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"]))) for fault in faults[:_FAULTS]]
        raise DecodeError(self._name, payload) from ValueError("; ".join(words))

    def __repr__(self) -> str:
        return self._name


def _parts(kind: Any) -> Iterator[Any]:
    """A type, and all that it is put together from."""
    yield kind
    for part in typing.get_args(kind):
        yield from _parts(part)


def _is_pydantics(kind: Any) -> bool:
    # Where nobody has imported pydantic, no type is its.
    return isinstance(kind, type) and "pydantic" in sys.modules and hasattr(kind, "__pydantic_validator__")


def _class(kind: Any) -> type[Any] | None:
    """The class of which a value must be, where the type is one."""
    if hasattr(kind, "__required_keys__"):
        # A TypedDict, also one of typing_extensions: its values are plain dicts.
        return dict
    return kind if isinstance(kind, type) and typing.get_origin(kind) is None else None


def _name(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)


def _hashable(kind: Any) -> bool:
    try:
        hash(kind)
    except TypeError:
        return False
    return True
