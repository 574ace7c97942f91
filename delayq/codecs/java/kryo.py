"""Kryo 5 as Redisson's default codec uses it: no references, no registrations of its own
(``Kryo5Codec.createKryo``).

A value is a class tag, followed by the output of the class's serializer. The tag is a varint: 0 for
null, 1 for a class by name, otherwise the number of a registered class plus 2. A class by name goes
on with a varint, which is its number in this payload and always 0 here, and then its name. Observed
in Redisson 4.7.0 (Kryo 5.6.2) and 3.20.1 (Kryo 5.4.0).
"""

from __future__ import annotations

import math
import re
import struct
from datetime import datetime
from decimal import Decimal
from enum import IntEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq.codecs.java.types import (
    JavaBigInteger,
    JavaByte,
    JavaChar,
    JavaFloat,
    JavaLong,
    JavaShort,
    fits,
    from_ms,
    is_char,
    to_ms,
)
from delayq.codecs.protocol import Malformed, Refused, reason_of
from delayq.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable

# A string of ASCII with this many characters needs no length (`Output.writeString`).
_UNCOUNTED = range(2, 33)
# The most digits of a BigDecimal: turning binary into decimal digits takes quadratic time.
_MAX_DIGITS = 10_000


class _Tag(IntEnum):
    """The tag before a value: from INTEGER on, the number of a registered class plus 2."""

    NULL = 0
    BY_NAME = 1
    INTEGER = 2
    STRING = 3
    FLOAT = 4
    BOOLEAN = 5
    BYTE = 6
    CHAR = 7
    SHORT = 8
    LONG = 9
    DOUBLE = 10


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
            return _Reader(payload).read()
        except _NoCounterpart:
            return KryoOpaque(payload)
        except (Malformed, ValueError) as error:
            reason = reason_of(error)
        raise DecodeError("Kryo5Codec", payload, str(reason)) from reason


def _name(class_name: str) -> bytes:
    """Return the tag of a class by name. Its last byte has 0x80 set."""
    name = class_name.encode()
    return bytes([_Tag.BY_NAME, 0, *name[:-1], name[-1] | 0x80])


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
        return bytes([_Tag.INTEGER]) + _zigzag(value)
    return _write_long(value) if fits(value, 64) else _BIG_INTEGER + _signed(value)


def _write_long(value: int) -> bytes:
    if not fits(value, 64):
        raise Refused("it is out of range")
    return bytes([_Tag.LONG]) + _zigzag(value)


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
            return bytes([_Tag.STRING, *data[:-1], data[-1] | 0x80])
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
    return bytes([_Tag.STRING]) + length + data


def _write_char(value: JavaChar) -> bytes:
    if not is_char(value):
        raise Refused("it is not one UTF-16 unit")
    return bytes([_Tag.CHAR]) + ord(value).to_bytes(2, "little")


def _write_date(value: datetime) -> bytes:
    if value.utcoffset() is None:
        raise Refused("it has no timezone")
    # Not zigzag, so a date before 1970 takes nine bytes.
    return _DATE + _varint(to_ms(value) % 2**64)


def _write_decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise Refused("it is not finite")
    if not fits(-exponent, 32) or len(digits) > _MAX_DIGITS:
        raise Refused("it has too many digits, or too large an exponent")
    return _BIG_DECIMAL + _signed(int(Decimal((sign, digits, 0)))) + _zigzag(-exponent)


# A class that is not listed uses the first entry that fits, so a class precedes those that it is
# derived from.
_WRITERS: dict[type[Any], Callable[[Any], bytes]] = {
    KryoOpaque: bytes,
    type(None): lambda _: bytes([_Tag.NULL]),
    bool: lambda value: bytes([_Tag.BOOLEAN, value]),
    JavaLong: _write_long,
    JavaShort: _write_fixed(_Tag.SHORT, "h"),
    JavaByte: _write_fixed(_Tag.BYTE, "b"),
    JavaBigInteger: lambda value: _BIG_INTEGER + _signed(value),
    int: _write_int,
    JavaFloat: _write_fixed(_Tag.FLOAT, "f"),
    float: _write_fixed(_Tag.DOUBLE, "d"),
    JavaChar: _write_char,
    str: _write_string,
    bytes: lambda value: _BYTES + _counted(value),
    bytearray: lambda value: _BYTES + _counted(value),
    datetime: _write_date,
    Decimal: _write_decimal,
    UUID: lambda value: _UUID + value.bytes[7::-1] + value.bytes[:7:-1],
}


def _writer_of(value: Any) -> Callable[[Any], bytes]:
    for base, write in _WRITERS.items():
        if isinstance(value, base):
            return write
    raise Refused(
        "it can write only single values, because only Java knows how it lays out containers and"
        " objects"
    )


# --- reading


class _NoCounterpart(Exception):
    """The payload is Kryo, but something in it has no counterpart here."""


_MARKED_ASCII = re.compile(rb"[\x00-\x7f]+[\x80-\xff]")


class _Reader:
    """Reads a payload from front to back."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.position = 0

    def read(self) -> Any:
        """Return the value, which must fill the payload.

        Raises:
            _NoCounterpart, Malformed, ValueError: There is none that can be read.
        """
        value = self.value()
        if self.position != len(self.payload):
            raise Malformed
        return value

    def value(self) -> Any:
        tag = self.byte()
        if tag == _Tag.BY_NAME:
            number, name = self.byte(), self.string()
            if number != 0 or not name:
                raise Malformed
            read = _BY_NAME.get(name)
            if read is None:
                raise _NoCounterpart
            return read(self)
        if tag not in _BY_TAG:
            raise Malformed
        return _BY_TAG[tag](self)

    def byte(self) -> int:
        if self.position >= len(self.payload):
            raise Malformed
        self.position += 1
        return self.payload[self.position - 1]

    def take(self, size: int) -> bytes:
        if size < 0 or size > len(self.payload) - self.position:
            raise Malformed
        self.position += size
        return self.payload[self.position - size : self.position]

    def varint(self, bits: int = 32) -> int:
        value = 0
        for shift in range(0, 56, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            value |= self.byte() << 56
        if value >> bits:
            raise Malformed
        return value

    def zigzag(self, bits: int = 32) -> int:
        value = self.varint(bits)
        return ~(value >> 1) if value & 1 else value >> 1

    def fixed(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(form)))
        return value

    def counted(self) -> bytes:
        # The length is written one larger: 0 stands for null, which only a field of a Java object
        # can be.
        return self.take(self.varint() - 1)

    def signed(self) -> int:
        if not (data := self.counted()):
            raise Malformed
        return int.from_bytes(data, "big", signed=True)

    def string(self) -> str:
        if text := _MARKED_ASCII.match(self.payload, self.position):
            self.position = text.end()
            return (text[0][:-1] + bytes([text[0][-1] & 0x7F])).decode("ascii")
        first = self.byte()
        if first < 0x80:
            raise Malformed
        size = first & 0x3F
        if first & 0x40:
            size |= self.varint() << 6
        if size == 0:
            raise Malformed
        return self.units(size - 1)

    def units(self, count: int) -> str:
        """Read ``count`` UTF-16 units, each as UTF-8, even surrogates: three bytes and three."""
        plain = self.payload[self.position : self.position + count]
        if len(plain) == count and plain.isascii():
            self.position += count
            return plain.decode("ascii")
        start = self.position
        for _ in range(count):
            first = self.byte()
            self.position += 0 if first < 0x80 else 1 if first < 0xE0 else 2
        text = self.payload[start : self.position].decode("utf-8", "surrogatepass")
        # Java never writes four bytes for one unit.
        if text and max(text) > "\uffff":
            raise Malformed
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")

    def boolean(self) -> bool:
        if (byte := self.byte()) > 1:
            raise Malformed
        return byte == 1

    def date(self) -> datetime:
        milliseconds = self.varint(64)
        try:
            return from_ms(milliseconds if milliseconds < 2**63 else milliseconds - 2**64)
        except OverflowError:
            # Java's dates reach further than Python's.
            raise _NoCounterpart from None

    def decimal(self) -> Decimal:
        unscaled, scale = self.signed(), self.zigzag()
        # Converting a number this large to decimal digits takes a long time.
        if unscaled.bit_length() > 3 * _MAX_DIGITS:
            raise _NoCounterpart
        sign, digits, _ = Decimal(unscaled).as_tuple()
        return Decimal((sign, digits, -scale))

    def uuid(self) -> UUID:
        data = self.take(16)
        return UUID(bytes=data[7::-1] + data[:7:-1])


_BY_TAG: dict[int, Callable[[_Reader], Any]] = {
    _Tag.NULL: lambda _: None,
    _Tag.INTEGER: _Reader.zigzag,
    _Tag.STRING: _Reader.string,
    _Tag.FLOAT: lambda reader: JavaFloat(reader.fixed("f")),
    _Tag.BOOLEAN: _Reader.boolean,
    _Tag.BYTE: lambda reader: JavaByte(reader.fixed("b")),
    _Tag.CHAR: lambda reader: JavaChar(chr(reader.fixed("H"))),
    _Tag.SHORT: lambda reader: JavaShort(reader.fixed("h")),
    _Tag.LONG: lambda reader: JavaLong(reader.zigzag(64)),
    _Tag.DOUBLE: lambda reader: reader.fixed("d"),
}
_BY_NAME: dict[str, Callable[[_Reader], Any]] = {
    "java.math.BigInteger": lambda reader: JavaBigInteger(reader.signed()),
    "java.math.BigDecimal": _Reader.decimal,
    "java.util.Date": _Reader.date,
    "java.util.UUID": _Reader.uuid,
    "[B": _Reader.counted,
}
