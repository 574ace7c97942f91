"""Turns the bytes of Kryo 5 into single values. ``kryo`` describes the format."""

from __future__ import annotations

import re
import struct
from decimal import Decimal
from enum import IntEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq.codecs._reasons import Malformed
from delayq.codecs.java._limits import from_ms
from delayq.codecs.java.types import (
    JavaBigInteger,
    JavaByte,
    JavaChar,
    JavaFloat,
    JavaLong,
    JavaShort,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

# The most digits of a BigDecimal: turning binary into decimal digits takes quadratic time.
MOST_DIGITS = 10_000


class Tag(IntEnum):
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


class Unknown(Exception):
    """The payload is Kryo, but something in it has no counterpart here."""


_UP_TO_THE_MARKED_BYTE = re.compile(rb"[\x00-\x7f]+[\x80-\xff]")


class Reader:
    """Reads a payload from front to back."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0

    def read(self) -> Any:
        """Return the value, which must fill the payload.

        Raises:
            Unknown, Malformed, ValueError: There is none that can be read.
        """
        value = self.value()
        if self.at != len(self.payload):
            raise Malformed
        return value

    def value(self) -> Any:
        tag = self.byte()
        if tag == Tag.BY_NAME:
            number, name = self.byte(), self.string()
            if number != 0 or not name:
                raise Malformed
            read = _BY_THEIR_NAMES.get(name)
            if read is None:
                raise Unknown
            return read(self)
        if tag not in _REGISTERED:
            raise Malformed
        return _REGISTERED[tag](self)

    def byte(self) -> int:
        if self.at >= len(self.payload):
            raise Malformed
        self.at += 1
        return self.payload[self.at - 1]

    def take(self, size: int) -> bytes:
        if size < 0 or size > len(self.payload) - self.at:
            raise Malformed
        self.at += size
        return self.payload[self.at - size : self.at]

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
        if ascii_only := _UP_TO_THE_MARKED_BYTE.match(self.payload, self.at):
            self.at = ascii_only.end()
            return (ascii_only[0][:-1] + bytes([ascii_only[0][-1] & 0x7F])).decode("ascii")
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
        plain = self.payload[self.at : self.at + count]
        if len(plain) == count and plain.isascii():
            self.at += count
            return plain.decode("ascii")
        start = self.at
        for _ in range(count):
            first = self.byte()
            self.at += 0 if first < 0x80 else 1 if first < 0xE0 else 2
        text = self.payload[start : self.at].decode("utf-8", "surrogatepass")
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
            raise Unknown from None

    def decimal(self) -> Decimal:
        unscaled, scale = self.signed(), self.zigzag()
        # Converting a number this large to decimal digits takes a long time.
        if unscaled.bit_length() > 3 * MOST_DIGITS:
            raise Unknown
        sign, digits, _ = Decimal(unscaled).as_tuple()
        return Decimal((sign, digits, -scale))

    def uuid(self) -> UUID:
        data = self.take(16)
        return UUID(bytes=data[7::-1] + data[:7:-1])


_REGISTERED: dict[int, Callable[[Reader], Any]] = {
    Tag.NULL: lambda _: None,
    Tag.INTEGER: Reader.zigzag,
    Tag.STRING: Reader.string,
    Tag.FLOAT: lambda reader: JavaFloat(reader.fixed("f")),
    Tag.BOOLEAN: Reader.boolean,
    Tag.BYTE: lambda reader: JavaByte(reader.fixed("b")),
    Tag.CHAR: lambda reader: JavaChar(chr(reader.fixed("H"))),
    Tag.SHORT: lambda reader: JavaShort(reader.fixed("h")),
    Tag.LONG: lambda reader: JavaLong(reader.zigzag(64)),
    Tag.DOUBLE: lambda reader: reader.fixed("d"),
}
_BY_THEIR_NAMES: dict[str, Callable[[Reader], Any]] = {
    "java.math.BigInteger": lambda reader: JavaBigInteger(reader.signed()),
    "java.math.BigDecimal": Reader.decimal,
    "java.util.Date": Reader.date,
    "java.util.UUID": Reader.uuid,
    "[B": Reader.counted,
}
