"""The ranges of Java's types, and the way in which Java counts."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def fits(value: int, bits: int | None) -> bool:
    """Tell whether ``value`` fits into ``bits`` bits, sign included; None: any number of bits."""
    # `~value` is -value - 1: the negative side reaches one further.
    return bits is None or max(value, ~value) < 1 << bits - 1


def is_char(text: str) -> bool:
    """Tell whether ``text`` is one UTF-16 unit."""
    return len(text) == 1 and text <= "\uffff"


def utf16_order(text: str) -> bytes:
    """Return the key by which Java sorts strings: its ``compareTo`` compares UTF-16 units."""
    return text.encode("utf-16-be", "surrogatepass")


def to_float(value: float) -> float:
    """Round to Java's ``Float``, or raise OverflowError if it is too large for 32 bits."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def to_ms(moment: datetime) -> int:
    """Return milliseconds since the epoch, cutting off anything finer towards the past."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def from_ms(milliseconds: int) -> datetime:
    """Return the moment in UTC, or raise OverflowError outside of the years 1 to 9999."""
    return _EPOCH + timedelta(milliseconds=milliseconds)
