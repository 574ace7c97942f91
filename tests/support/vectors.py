"""Values in the bytes of Redisson's codecs, printed by Java in ``tests/data``, and in Python."""

from __future__ import annotations

import base64
import json
import math
import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq import codecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DATA = Path(__file__).parents[1] / "data"
CODECS: dict[str, codecs.Codec[Any]] = {
    "JsonJackson": codecs.JsonJacksonCodec(),
    "TypedJson": codecs.TypedJsonJacksonCodec(),
    "Kryo5": codecs.Kryo5Codec(),
    "String": codecs.StringCodec(),
    "Long": codecs.LongCodec(),
    "Integer": codecs.IntegerCodec(),
    "Bytes": codecs.BytesCodec(),
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Vector:
    """A value that Java encoded."""

    codec: str  # without "Codec"
    kind: str  # the simple name of its class, or "=" for a container
    told: str  # the value in text, or the container's name
    payload: bytes

    def __repr__(self) -> str:
        return f"{self.codec} {self.kind} {self.told[:40]}: {self.payload[:60]!r}"


def parse(lines: Iterable[str]) -> list[Vector]:
    """Return the vectors of a file, skipping its comments and the values that Java decoded."""
    vectors = []
    for line in lines:
        if not line.startswith(("#", "DEC ")):
            codec, value, _, payload = line.split(" | ")
            kind, _, told = value.partition(" ")
            vectors.append(Vector(codec, kind, told, bytes.fromhex(payload)))
    return vectors


def read(name: str) -> list[Vector]:
    return parse((DATA / name).read_text("utf-8").splitlines())


def _moment(milliseconds: str) -> datetime | None:
    try:
        return _EPOCH + timedelta(milliseconds=int(milliseconds))
    except OverflowError:
        return None


def _text(quoted: str) -> str:
    # Java's escapes are UTF-16 units; here a pair of them becomes one character.
    return (
        str(json.loads(quoted))
        .encode("utf-16-le", "surrogatepass")
        .decode("utf-16-le", "surrogatepass")
    )


_MAKERS: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "Boolean": "true".__eq__,
    "Integer": int,
    "Long": codecs.JavaLong,
    "BigInteger": codecs.JavaBigInteger,
    "Short": codecs.JavaShort,
    "Byte": codecs.JavaByte,
    "Double": float,
    "Float": lambda told: codecs.JavaFloat(float(told)),
    "Character": lambda told: codecs.JavaChar(_text(told)),
    "String": _text,
    "byte[]": bytes.fromhex,
    "Date": _moment,
    "BigDecimal": Decimal,
    "UUID": UUID,
}


def to_encode(vector: Vector) -> Any:
    """Return the scalar to encode, or None for a Date outside Python's range."""
    return _MAKERS[vector.kind](vector.told)


def is_beyond_python(vector: Vector) -> bool:
    return vector.kind == "Date" and to_encode(vector) is None


def decoded(vector: Vector) -> Any:
    """Return the value to which Python decodes that scalar."""
    if is_beyond_python(vector):
        return {
            "Kryo5": codecs.KryoOpaque(vector.payload),
            "JsonJackson": codecs.JavaValue("java.util.Date", int(vector.told)),
            "TypedJson": int(vector.told),
        }[vector.codec]
    value = to_encode(vector)
    if vector.codec in ("JsonJackson", "TypedJson"):
        return _read_from_json(vector, value)
    if vector.codec == "Kryo5" and isinstance(value, codecs.JavaFloat):
        # Java's value has the precision of 32 bits, where 0.1 is a different number.
        return struct.unpack("<f", struct.pack("<f", value))[0]
    return value


def _read_from_json(vector: Vector, value: Any) -> Any:
    # Jackson writes these as text or as a number without a class.
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[str(float(value))]
    if isinstance(value, codecs.JavaFloat):
        return float(json.loads(vector.payload))
    if vector.codec == "TypedJson" and isinstance(value, datetime | Decimal | UUID):
        return json.loads(vector.payload)
    return value


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal. NaN equals NaN; zeros of different signs differ."""
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def check(vector: Vector) -> None:
    """Assert that Python encodes and decodes a scalar as Java does."""
    codec = CODECS[vector.codec]
    if not is_beyond_python(vector):
        assert codec.encode(to_encode(vector)) == vector.payload, vector
    value = codec.decode(vector.payload)
    assert same(value, decoded(vector)), (vector, value)
    assert codec.encode(value) == vector.payload, (vector, value)


def kryo(class_name: str, rest: str = "") -> bytes:
    """Return Kryo's payload of a class: the last byte of its name is marked."""
    name = class_name.encode()
    return b"\1\0" + name[:-1] + bytes([name[-1] | 0x80]) + bytes.fromhex(rest)
