"""Redisson's default codec: the values it accepts and rejects, and what it decodes."""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delayq import DecodeError, EncodeError
from delayq.codecs import (
    JavaBigInteger,
    JavaByte,
    JavaChar,
    JavaFloat,
    JavaList,
    JavaLong,
    JavaMap,
    JavaObject,
    JavaShort,
    JavaValue,
    Kryo5Codec,
    KryoOpaque,
)
from tests.support.cases import naming
from tests.support.vectors import kryo

KRYO = Kryo5Codec()
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
VALUES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**31), 2**31 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary(max_size=300)
    | st.integers(-62_135_596_800_000, 253_402_300_799_999).map(
        lambda ms: EPOCH + timedelta(milliseconds=ms)
    )
    | st.uuids()
    | st.decimals(allow_nan=False, allow_infinity=False).filter(
        lambda value: value or not value.is_signed()
    )
    | st.integers(-(2**63), 2**63 - 1).map(JavaLong)
    | st.integers(-(2**15), 2**15 - 1).map(JavaShort)
    | st.integers(-(2**7), 2**7 - 1).map(JavaByte)
    | st.integers().map(JavaBigInteger)
    | st.floats(width=32, allow_nan=False).map(JavaFloat)
    | st.characters(max_codepoint=0xFFFF).map(JavaChar)
)


@given(VALUES)
@example("x" * 32)
@example("é" * 62)
@example("é" * 63)
@example(2**31 - 1)
def test_a_value_comes_back_as_it_went(value: Any) -> None:
    decoded = KRYO.decode(KRYO.encode(value))
    assert decoded == value
    assert type(decoded) is type(value)
    if isinstance(value, Decimal):
        assert decoded.as_tuple() == value.as_tuple()


SIZES = {1: "82", 33: "a2", 62: "bf", 63: "c001", 64: "c101", 200: "c903", 8190: "ff7f"}
SIZES |= {8191: "c08001", 20_000: "e1b802"}


def test_a_text_of_any_length_is_counted_as_in_java() -> None:
    for length, size in SIZES.items():
        with naming(length):
            for letter in ("é", "a"):
                text = letter * length
                assert KRYO.encode(text) == b"\3" + bytes.fromhex(size) + text.encode()
                assert KRYO.decode(KRYO.encode(text)) == text


def test_there_is_one_nan() -> None:
    for nan in (
        math.nan,
        -math.nan,
        math.inf - math.inf,
        struct.unpack("<d", b"\1" + b"\0" * 5 + b"\xf8\xff")[0],
    ):
        assert KRYO.encode(nan) == bytes.fromhex("0a000000000000f87f")
        assert KRYO.encode(JavaFloat(nan)) == bytes.fromhex("040000c07f")
    assert math.isnan(KRYO.decode(bytes.fromhex("0a000000000000f87f")))


def test_values_of_other_types_are_written_as_what_java_has() -> None:
    class Number(IntEnum):
        A = 5

    class Text(StrEnum):
        A = "hi"

    assert KRYO.encode(Number.A) == KRYO.encode(5)
    assert KRYO.encode(Text.A) == KRYO.encode("hi")
    assert KRYO.encode(bytearray(b"hi")) == KRYO.encode(b"hi")
    # Java has no negative zero of this type.
    assert KRYO.encode(Decimal("-0.00")) == KRYO.encode(Decimal("0.00"))


# --- opaque


OTHERS = ("java.util.ArrayList", "shop.Order", "Order", "java.lang.Integer", "java.lang.String")


def test_a_value_of_an_unknown_java_class_passes_through_whole() -> None:
    before = set(sys.modules)
    payloads = [kryo(name, "01ff") for name in (*OTHERS, "x" * 1000, "antigravity.X")]
    for payload in (*payloads, b"\1\0\x84" + "ü.Ü".encode() + b"\1\2"):
        with naming(payload):
            value = KRYO.decode(payload)
            assert type(value) is KryoOpaque
            assert isinstance(value, bytes)
            assert value == payload
            assert KRYO.encode(value) == payload
            assert repr(value) == f"KryoOpaque({payload!r})"
    # No class is looked up.
    assert set(sys.modules) == before


def test_plain_bytes_are_a_byte_array_and_the_opaque_are_not() -> None:
    assert KRYO.encode(b"\0") == kryo("[B", "0200")
    assert KRYO.encode(KryoOpaque(b"\0")) == b"\0"
    assert type(KRYO.encode(KryoOpaque(b"\0"))) is bytes


def test_a_value_that_no_python_type_can_hold_is_opaque() -> None:
    for payload in (
        kryo("java.util.Date", "ffffffffffffffff7f"),
        kryo("java.util.Date", "808080808080808080"),
        kryo("java.math.BigDecimal", "a19c01") + b"\x7f" * 20_000 + b"\0",
    ):
        assert KRYO.decode(payload) == KryoOpaque(payload)
        assert type(KRYO.decode(payload)) is KryoOpaque


# --- refusals


@dataclass
class Order:
    id: int = 5


REFUSED: dict[str, list[Any]] = {
    "it can write only single values": [
        *(["53cr37"], (1,), {"53cr37": 1}, {1}, Order(), Order, object(), 1j, memoryview(b"x")),
        *(JavaList("java.util.Vector"), JavaMap("java.util.TreeMap"), JavaObject("a.B")),
        JavaValue("a.B", "C"),
    ],
    "out of range": [JavaLong(2**63), JavaShort(-(2**15) - 1), JavaByte(128), JavaFloat(1e39)],
    "UTF-16 unit": [JavaChar("53cr37"), JavaChar("😀")],
    "timezone": [datetime(2024, 1, 2)],  # noqa: DTZ001
    "not finite": [Decimal("NaN"), Decimal("-Infinity")],
    "too large an exponent": [Decimal("1e3000000000")],
    "too many digits": [Decimal("1" * 10_001)],
}


def test_a_value_without_a_kryo_form_is_refused_and_not_quoted() -> None:
    for reason, values in REFUSED.items():
        for value in values:
            refused = f"Kryo5Codec cannot encode this {type(value).__name__}: .*{reason}"
            with naming(reason), pytest.raises(EncodeError, match=refused) as caught:
                KRYO.encode(value)
            assert "53cr37" not in str(caught.value)
            assert str(2**63) not in str(caught.value)
            assert caught.value.__context__ is None


_SCALARS = """
00 02d804 0368656c6cef 0381 038668c3a96c6c6f 040000c03f 0501 06fb 07e900 082c01 09feffffffffffffffff
0a000000000000f83f
"""
WHOLE = [
    *map(bytes.fromhex, _SCALARS.split()),
    kryo("[B", "03" + "0102"),
    kryo("java.util.Date", "80d095ffbc31"),
    kryo("java.math.BigDecimal", "03009604"),
    kryo("java.util.UUID", "00" * 16),
    kryo("java.math.BigInteger", "020a"),
]


def test_a_value_that_is_cut_off_or_goes_on_is_refused() -> None:
    for whole in WHOLE:
        assert KRYO.encode(KRYO.decode(whole)) == whole, whole
        for payload in (*(whole[:n] for n in range(len(whole))), whole + b"\0", whole + b"\xff"):
            refused = "Kryo5Codec cannot decode the payload: "
            with naming(payload), pytest.raises(DecodeError, match=refused) as caught:
                KRYO.decode(payload)
            assert caught.value.payload == payload


MALFORMED = {
    "void": "0b",
    "unknown class": "0c00",
    "JSON": b'{"a":1}'.hex(),
    "JSON text": b'"hello"'.hex(),
    "a second class first": "0101" + kryo("[B").hex()[4:] + "01",
    "no name": "010081",
    "null name": "010080",
    "null text": "0380",
    "a text of one byte without a length": "0361",
    "boolean 2": "0502",
    "int of 33 bits": "02ffffffff1f",
    "int of 40 bits": "02ffffffffff01",
    "null bytes": kryo("[B", "00").hex(),
    "null number": kryo("java.math.BigInteger", "00").hex(),
    "number without bytes": kryo("java.math.BigInteger", "01").hex(),
    "four bytes of UTF-8": "0382f09f9880",
    "four bytes of UTF-8, and one": "0383f09f988041",
    "no UTF-8": "0382c0c0",
}


def test_bytes_that_are_no_kryo_are_refused_with_the_reason() -> None:
    for why, text in MALFORMED.items():
        payload = bytes.fromhex(text)
        with naming(why), pytest.raises(DecodeError) as caught:
            KRYO.decode(payload)
        assert caught.value.reason.startswith("Kryo5Codec cannot decode the payload: it "), why


NAMES = ["[B", "java.util.ArrayList"]
NAMES += [f"java.util.{name}" for name in ("Date", "UUID")]
NAMES += [f"java.math.{name}" for name in ("BigInteger", "BigDecimal")]


@given(
    st.integers(0, 12).flatmap(lambda tag: st.binary().map(lambda rest: bytes([tag]) + rest))
    | st.builds(lambda n, r: kryo(n) + r, st.sampled_from(NAMES), st.binary())
)
def test_any_bytes_are_a_value_opaque_or_refused(payload: bytes) -> None:
    try:
        value = KRYO.decode(payload)
    except DecodeError:
        return
    # Java's format allows more than one form of a number; we write another form of the same one.
    again = KRYO.decode(KRYO.encode(value))
    assert again == value or value != value  # noqa: PLR0124
