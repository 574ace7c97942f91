"""Codecs for a single plain value: text, a whole number, bytes. Redisson has each as well."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from delayq.codecs.protocol import reason_of
from delayq.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from typing import TypeAlias

    BytesLike: TypeAlias = "bytes | bytearray | memoryview"

# Java's Long.valueOf also accepts the digits of every other script, which do not occur in practice.
_WHOLE_NUMBER = re.compile(rb"[+-]?[0-9]{1,1000}")


class StringCodec:
    """Text as UTF-8, without quotes."""

    def encode(self, value: str, /) -> bytes:
        """Encode text as UTF-8, or raise EncodeError: no str, or a lone surrogate."""
        if not isinstance(value, str):
            raise EncodeError(f"StringCodec encodes str, not {type(value).__name__}")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            reason = reason_of(error)
        raise EncodeError(f"StringCodec cannot encode this str: {reason}")

    def decode(self, payload: bytes, /) -> str:
        """Decode UTF-8, or raise DecodeError."""
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            reason = reason_of(error)
        raise DecodeError("StringCodec", payload, str(reason)) from reason


class _WholeNumberCodec:
    """A number as ASCII digits, which must fit into the codec's bits, sign included."""

    _bits: ClassVar[int]

    def encode(self, value: int, /) -> bytes:
        """Write the digits, or raise EncodeError: no int, or it does not fit."""
        name = type(self).__name__
        # In Python a bool is an int; in Java it is not a number.
        if not isinstance(value, int) or isinstance(value, bool):
            raise EncodeError(f"{name} encodes int, not {type(value).__name__}")
        if not self._in_range(value):
            raise EncodeError(
                f"{name} encodes ints of {self._bits} bits including the sign; this one is larger"
            )
        return b"%d" % value

    def decode(self, payload: bytes, /) -> int:
        """Read a sign and digits as Java's ``valueOf`` does, or raise DecodeError."""
        if _WHOLE_NUMBER.fullmatch(payload):
            value = int(payload)
            if self._in_range(value):
                return value
        reason = ValueError(f"it is not a whole number of {self._bits} bits")
        raise DecodeError(type(self).__name__, payload, str(reason)) from reason

    def _in_range(self, value: int) -> bool:
        # `~value` is -value - 1: the negative side reaches one further.
        return max(value, ~value) < 1 << self._bits - 1


class LongCodec(_WholeNumberCodec):
    """Java's ``long`` as decimal text: -2**63 to 2**63 - 1, like Redisson's ``LongCodec``."""

    _bits = 64


class IntegerCodec(_WholeNumberCodec):
    """Java's ``int`` as decimal text: -2**31 to 2**31 - 1, like Redisson's ``IntegerCodec``."""

    _bits = 32


class BytesCodec:
    """Bytes as they are, like Redisson's ``ByteArrayCodec``. They come back as ``bytes``."""

    def encode(self, value: BytesLike, /) -> bytes:
        """Copy the bytes, or raise EncodeError: another type, or a released memoryview."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise EncodeError(
                f"BytesCodec encodes bytes, bytearray and memoryview, not {type(value).__name__}"
            )
        try:
            return bytes(value)
        except ValueError as error:
            raise EncodeError(
                "BytesCodec cannot encode this memoryview: it was released"
            ) from error

    def decode(self, payload: bytes, /) -> bytes:
        """Return the payload."""
        return bytes(payload)
