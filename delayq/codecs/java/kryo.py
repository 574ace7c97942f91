"""Kryo 5 as Redisson's default codec uses it: no references, no registrations of its own
(``Kryo5Codec.createKryo``).

A value is a class tag, followed by the output of the class's serializer. The tag is a varint: 0 for
null, 1 for a class by name, otherwise the number of a registered class plus 2. A class by name goes
on with a varint, which is its number in this payload and always 0 here, and then its name. Observed
in Redisson 4.7.0 (Kryo 5.6.2) and 3.20.1 (Kryo 5.4.0).
"""

from __future__ import annotations

import math
import struct
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq.codecs._reasons import Malformed, Refused, reason_of
from delayq.codecs.java._kryo_reader import MOST_DIGITS, Reader, Tag, Unknown
from delayq.codecs.java._limits import fits, is_char, to_ms
from delayq.codecs.java.types import (
    JavaBigInteger,
    JavaByte,
    JavaChar,
    JavaFloat,
    JavaLong,
    JavaShort,
)
from delayq.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable

# A string of ASCII with this many characters needs no length (`Output.writeString`).
_UNCOUNTED = range(2, 33)


class KryoOpaque(bytes):
    """A whole payload of a list, map, enum or object, whose layout only Java knows.

    You can offer one again, remove it and compare it; to look inside, use another codec.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"KryoOpaque({super().__repr__()})"


class Kryo5Codec:
    """Kryo as Redisson's default codec ``Kryo5Codec`` writes it, for single values.

    Writes None, bool, int (``Integer``, past 32 bits ``Long``, past 64 ``BigInteger``), float
    (``Double``), str, bytes (``byte[]``), aware datetimes (``Date``, in whole milliseconds),
    Decimal, UUID, and from :mod:`delayq.codecs.java.types` the numbers and
    :class:`~delayq.codecs.JavaChar`.

    Reads the same types. A payload of any other class comes back as :class:`KryoOpaque`. No class
    is ever looked up by a name in a payload.
    """

    def encode(self, value: Any, /) -> bytes:
        """Encode a single value, or raise EncodeError: another type, or it does not fit."""
        try:
            write = _WRITERS.get(type(value)) or _writer_of(value)
            return write(value)
        except Refused as refused:
            reason = str(refused)
        raise EncodeError(f"Kryo5Codec cannot encode this {type(value).__name__}: {reason}")

    def decode(self, payload: bytes, /) -> Any:
        """Decode a value, or raise DecodeError."""
        try:
            return Reader(payload).read()
        except Unknown:
            return KryoOpaque(payload)
        except (Malformed, ValueError) as error:
            reason = reason_of(error)
        raise DecodeError("Kryo5Codec", payload, str(reason)) from reason


def _name(class_name: str) -> bytes:
    """Return the tag of a class by name. Its last byte has 0x80 set."""
    name = class_name.encode()
    return bytes([Tag.BY_NAME, 0, *name[:-1], name[-1] | 0x80])


_BIG_INTEGER, _BIG_DECIMAL = _name("java.math.BigInteger"), _name("java.math.BigDecimal")
_DATE, _UUID, _BYTES = _name("java.util.Date"), _name("java.util.UUID"), _name("[B")


def _varint(value: int) -> bytes:
    """Write seven bits per byte, the lowest first, 0x80 for more to follow; a ninth has eight."""
    out = bytearray()
    while value > 0x7F and len(out) < 8:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zigzag(value: int) -> bytes:
    # 0, -1, 1, -2 become 0, 1, 2, 3.
    return _varint(value * 2 if value >= 0 else ~value * 2 + 1)


def _counted(data: bytes) -> bytes:
    return _varint(len(data) + 1) + data


def _signed(value: int) -> bytes:
    return _counted(value.to_bytes(max(value, ~value).bit_length() // 8 + 1, "big", signed=True))


def _write_int(value: int) -> bytes:
    if fits(value, 32):
        return bytes([Tag.INTEGER]) + _zigzag(value)
    return _write_long(value) if fits(value, 64) else _BIG_INTEGER + _signed(value)


def _write_long(value: int) -> bytes:
    if not fits(value, 64):
        raise Refused("it is out of range")
    return bytes([Tag.LONG]) + _zigzag(value)


def _write_fixed(tag: int, form: str) -> Callable[[Any], bytes]:
    pack = struct.Struct(f"<B{form}").pack

    def write(value: Any) -> bytes:
        try:
            # Java writes only one NaN, and not the negative one that inf - inf makes.
            return pack(tag, value if value == value else math.nan)  # noqa: PLR0124
        except (struct.error, OverflowError):
            raise Refused("it is out of range") from None

    return write


def _write_string(value: str) -> bytes:
    if value.isascii():
        data = value.encode()
        if len(data) in _UNCOUNTED:
            return bytes([Tag.STRING, *data[:-1], data[-1] | 0x80])
        count = len(data)
    else:
        # Java counts UTF-16 units, and writes each as UTF-8: a character beyond U+FFFF as two
        # surrogates.
        units = value.encode("utf-16-le", "surrogatepass")
        count = len(units) // 2
        if count != len(value):
            value = "".join(map(chr, struct.unpack(f"<{count}H", units)))
        data = value.encode("utf-8", "surrogatepass")
    # In the first byte, 0x80 says that there is a length, and 0x40 that more of it follows.
    size = count + 1
    length = (
        bytes([0x80 | size]) if size < 0x40 else bytes([0xC0 | size & 0x3F]) + _varint(size >> 6)
    )
    return bytes([Tag.STRING]) + length + data


def _write_char(value: JavaChar) -> bytes:
    if not is_char(value):
        raise Refused("it is not one UTF-16 unit")
    return bytes([Tag.CHAR]) + ord(value).to_bytes(2, "little")


def _write_date(value: datetime) -> bytes:
    if value.utcoffset() is None:
        raise Refused("it has no timezone")
    # Not zigzag, so a date before 1970 takes nine bytes.
    return _DATE + _varint(to_ms(value) % 2**64)


def _write_decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise Refused("it is not finite")
    if not fits(-exponent, 32) or len(digits) > MOST_DIGITS:
        raise Refused("it has too many digits, or too large an exponent")
    return _BIG_DECIMAL + _signed(int(Decimal((sign, digits, 0)))) + _zigzag(-exponent)


# A class that is not listed uses the first entry that fits, so a class precedes those that it is
# derived from.
_WRITERS: dict[type[Any], Callable[[Any], bytes]] = {
    KryoOpaque: bytes,
    type(None): lambda _: bytes([Tag.NULL]),
    bool: lambda value: bytes([Tag.BOOLEAN, value]),
    JavaLong: _write_long,
    JavaShort: _write_fixed(Tag.SHORT, "h"),
    JavaByte: _write_fixed(Tag.BYTE, "b"),
    JavaBigInteger: lambda value: _BIG_INTEGER + _signed(value),
    int: _write_int,
    JavaFloat: _write_fixed(Tag.FLOAT, "f"),
    float: _write_fixed(Tag.DOUBLE, "d"),
    JavaChar: _write_char,
    str: _write_string,
    bytes: lambda value: _BYTES + _counted(value),
    bytearray: lambda value: _BYTES + _counted(value),
    datetime: _write_date,
    Decimal: _write_decimal,
    UUID: lambda value: _UUID + value.bytes[7::-1] + value.bytes[:7:-1],
}


def _writer_of(value: Any) -> Callable[[Any], bytes]:
    for known, write in _WRITERS.items():
        if isinstance(value, known):
            return write
    raise Refused(
        "it can write only single values, because only Java knows how it lays out containers and"
        " objects"
    )
