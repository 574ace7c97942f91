"""A codec for a Python type: JSON on the wire, checked when it is read.

A type that belongs to msgspec or pydantic is checked by that library. Other types (dataclasses,
TypedDicts, ``list[int]``) are checked by msgspec if it is installed and knows the whole type,
otherwise by pydantic, otherwise by functions that read what :class:`~delayq.JsonCodec` writes. All
of them write and read the same JSON, except for ``bytes``: if values hold any, use the same library
on both sides of a queue. Neither is imported before a type needs it.
"""

from __future__ import annotations

import contextlib
import typing
from inspect import Parameter
from typing import Any, TypeVar, overload

from delayq.codecs._readers import PLAIN
from delayq.codecs._type_codecs import TypeCodec, library_codec
from delayq.codecs.json import JsonCodec
from delayq.codecs.string import BytesCodec
from delayq.errors import DecodeError, EncodeError

if typing.TYPE_CHECKING:
    from delayq.codecs.protocol import Codec

T = TypeVar("T")

# JSON has no other keys, so these types are no more specific than the plain ones.
_AS_PLAIN = {dict[str, Any]: dict, list[Any]: list}
_JSON = JsonCodec()


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
    what is wrong without quoting a value, unless a validator of the type quotes it. Its ``encode``
    raises :class:`~delayq.EncodeError`, also for a value that ``decode`` would not return as it
    was: see ``docs/codecs.md``.

    Raises:
        ConfigurationError: The type needs ``delayq[msgspec]`` or ``delayq[pydantic]``, or neither
            knows it.
    """
    if kind in (Any, object, Parameter.empty):
        return _JSON
    if kind is bytes:
        return BytesCodec()
    if kind is None:
        kind = type(None)
    with contextlib.suppress(TypeError):  # not every type can be hashed
        kind = _AS_PLAIN.get(kind, kind)
    codec = _JsonTypeCodec(kind) if kind in PLAIN else library_codec(kind)
    codec.results = _JSON
    return codec


class _JsonTypeCodec(TypeCodec):
    """A codec for a type that JSON has itself."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__(kind, _JSON.encode, _JSON.decode)
        self._kind = kind
        self._accepted = (float, int) if kind is float else kind

    def encode(self, value: Any, /) -> bytes:
        if type(value) is not self._kind:
            if not isinstance(value, self._accepted):
                raise EncodeError(f"{self._name} cannot encode {type(value).__name__}")
            if isinstance(value, bool):
                raise EncodeError(f"{self._name} cannot encode this bool: {self._mismatch(value)}")
        return _JSON.encode(value)

    def decode(self, payload: bytes, /) -> Any:
        value = _JSON.decode(payload)
        # In Python a bool is an int; in JSON it is not.
        if type(value) is self._kind or (
            isinstance(value, self._accepted) and not isinstance(value, bool)
        ):
            return value
        reason = self._mismatch(value)
        raise DecodeError(self._name, payload, reason) from ValueError(reason)

    def _mismatch(self, value: Any) -> str:
        return f"it is {type(value).__name__}, not {self._kind.__name__}"
