"""The codecs of delayq that match Redisson's, and the values with which the tests prove it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq import codecs
from delayq.codecs import JavaBigInteger, JavaFloat, JavaLong, JavaMap
from tests.interop.values import Order, to_java

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Pair:
    """Our codec, the simple name of Redisson's, and ten thousand different values."""

    codec: codecs.Codec[Any]
    java: str
    value: Callable[[int], Any]
    to_java: Callable[[Any], Any] = to_java

    def __str__(self) -> str:
        return f"{type(self.codec).__name__}-{self.java}"


_SPECIAL_DOUBLES = (math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308)


def _text(n: int) -> str:
    # One, two, three and four bytes of UTF-8, a quote and control characters, at different lengths.
    return f'{n} é€😀 "\\/\n\x1f\x7f\u2028{"x" * (n % 70)}'


def _plain_text(n: int) -> str:
    # Kryo has special forms for ASCII, depending on its length.
    return f"{n}".ljust(n % 140, "x")


def _integer(n: int) -> int:
    # Cover nearly all of the range of 32 bits.
    return (n - 5000) * 429_496


def _long(n: int) -> int:
    # Cover nearly all of the range of 64 bits, which is more than a double can represent.
    return (n - 5000) * 1_844_674_407_370_955


def _double(n: int) -> float:
    # From 1e-13 to 1e12.
    return (n - 5000.25) * 10.0 ** (n % 25 - 16)


def _double_in_json(n: int) -> float:
    # JSON has no special values. Before JDK 19, Java writes some doubles with more digits than they
    # need, but not those with few digits.
    return (n - 5000.25) * 2.0 ** (n % 30 - 5)


def _whole_tree(n: int) -> Any:
    """Return a tree of all types that JSON has."""
    line = {"price": _double_in_json(n), "paid": n % 2 == 0}
    return {
        "id": n,
        "text": _text(n),
        "long": _long(n) * 2 + 1 if n % 2 else -n,
        "lines": [line, [], {}, [[n, None], [True, "é😀"]]],
        "😀 key": {"deep": {"deeper": [{"deepest": -n}]}},
    }


def _plain(n: int) -> Any:
    values = (_text(n), _integer(n) * 7 + 1, _double_in_json(n), [n, [-n, f"{n}"]])
    return (*values, _whole_tree(n), _whole_tree(n))[n % 6]


def _plain_object(n: int) -> Any:
    # Stay within Unicode's first plane: beyond it, Jackson writes escapes, which JsonCodec reads
    # but does not write.
    return {
        "id": n,
        "name": f'é€ "\\\n{n}',
        "long": _long(n),
        "lines": [{"price": n + 0.5, "paid": n % 2 == 0}, [-n, None]],
    }


def _moment(n: int) -> datetime:
    # Include moments before 1970.
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=(n - 5000) * 123_456_789)


def _decimal(n: int) -> Decimal:
    return Decimal((n - 5000) * 10**20 + n).scaleb(-(n % 25))


def _java_values(n: int) -> list[Any]:
    """Return one value of each class that Java has and JSON lacks."""
    return [
        JavaLong(n - 5000),
        _long(n),
        JavaBigInteger(n),
        2**64 + n,
        JavaFloat(n / 8 - 600),
        _decimal(n),
        _moment(n),
        n.to_bytes(2) + bytes(range(n % 256)),
        JavaMap("java.util.HashMap", {f"é {n}": JavaLong(n)}),
        [n, *_SPECIAL_DOUBLES],
        [UUID(int=n << 64 | n * 7)],
    ]


def _order(n: int) -> Order:
    tags, rank = [_text(n), _plain_text(n)], n if n % 2 else None
    return Order(
        _long(n), _text(n), _double_in_json(n), n % 2 == 0, _decimal(n), _moment(n), tags, rank
    )


def _with_classes(n: int) -> Any:
    """Return a value for JsonJacksonCodec: before 4.2.0, a UUID alone had another form."""
    values = _java_values(n)
    shapes = [_text(n), _integer(n), _double_in_json(n), _whole_tree(n), _order(n), [n, *values]]
    shapes.append({"id": n, **{f"field {at}": value for at, value in enumerate(values)}})
    return (shapes + values)[n % (len(shapes) + len(values))]


def _kryo(n: int) -> Any:
    """Return a single value, as Kryo5Codec writes them. Each special double comes once."""
    if n < len(_SPECIAL_DOUBLES):
        return _SPECIAL_DOUBLES[n]
    values = [value for value in _java_values(n) if not isinstance(value, list | dict)]
    shapes = [_text(n), _plain_text(n), _integer(n), _double(n), UUID(int=n << 64 | n * 7), *values]
    return shapes[n % len(shapes)]


def _as_long(value: int) -> Any:
    return to_java(JavaLong(value))


PAIRS = [
    Pair(codecs.StringCodec(), "StringCodec", _text),
    Pair(codecs.LongCodec(), "LongCodec", _long, to_java=_as_long),
    Pair(codecs.IntegerCodec(), "IntegerCodec", _integer),
    Pair(codecs.BytesCodec(), "ByteArrayCodec", lambda n: n.to_bytes(2) + bytes(range(n % 256))),
    Pair(codecs.JsonCodec(), "TypedJsonJacksonCodec", _plain_object),
    Pair(codecs.TypedJsonJacksonCodec(), "TypedJsonJacksonCodec", _plain),
    Pair(
        codecs.JsonJacksonCodec({"delayq.interop.Order": Order}), "JsonJacksonCodec", _with_classes
    ),
    Pair(codecs.Kryo5Codec(), "Kryo5Codec", _kryo),
]
TEXT = PAIRS[0]
KRYO = PAIRS[-1]
"""Redisson's default codec."""
