"""Read every byte that Redisson's own codecs wrote, and write it again. Kryo, its default codec:
the values that it accepts and rejects.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

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
    JsonJacksonCodec,
    Kryo5Codec,
    KryoOpaque,
)
from tests.support.cases import naming
from tests.support.vectors import CODECS, DATA, check, is_beyond_python, kryo, read, to_encode

MORE = read("redisson_codec_vectors_more.txt")


class Colour(Enum):
    RED = 0
    GREEN = 1


VECTORS = "delayq.interop.Vectors$"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIVE, SEVEN, ONE_TWO = JavaLong(5), JavaLong(7), UUID(int=1 << 64 | 2)
# The values of fields declared as Object.
RED, THREE = JavaValue(f"{VECTORS}Colour", "RED"), JavaValue("[B", "Aw==")


@dataclass
class Pojo:
    """``Vectors.Pojo``: a value declared as Object in Java needs an explicit class."""

    name: str = "né😀"
    small: int = -1
    large: int = 5_000_000_000
    boxed: int = FIVE
    real: float = 1e-5
    yes: bool = True
    missing: int | None = None
    blob: bytes | str = b"\1\2"
    when: datetime = EPOCH - timedelta(milliseconds=1)
    price: Decimal = Decimal("1.50")
    uuid: UUID = ONE_TWO
    colour: Colour | str = Colour.GREEN
    anything: int = SEVEN
    anyColour: Any = RED  # noqa: N815
    anyBlob: Any = THREE  # noqa: N815
    items: Any = ("a", 1, JavaLong(2))
    map: Any = None
    Capital: str = "first"

    def __post_init__(self) -> None:
        self.items = list(self.items)
        self.map = self.map or JavaMap("java.util.HashMap", {"k": JavaLong(1)})


TYPES: dict[str, type[Any]] = {f"{VECTORS}Pojo": Pojo, f"{VECTORS}Colour": Colour}
WITH_TYPES = JsonJacksonCodec(TYPES)

# A container as Python has it with Java's classes, for both JSON codecs.
NATURAL: dict[str, Any] = {
    "empty ArrayList": [],
    "ArrayList": ["a", 1, JavaLong(2), 1.5, True],
    "ArrayList of nulls": [None, "a", None],
    "nested lists": [[[], [1]]],
    "LinkedList": JavaList("java.util.LinkedList", ["a", 1]),
    "ArrayDeque": JavaList("java.util.ArrayDeque", ["a", 1]),
    "LinkedHashSet": JavaList("java.util.LinkedHashSet", ["b", "a", JavaLong(3)]),
    "TreeSet": JavaList("java.util.TreeSet", ["a", "b"]),
    "List.of": JavaList(None, ["a"]),
    "List.of two": JavaList(None, ["a", "b"]),
    "List.of three": JavaList(None, [1, JavaLong(2), "c"]),
    "Arrays.asList": JavaList("java.util.Arrays$ArrayList", ["a", JavaLong(2)]),
    "emptyList": JavaList("java.util.Collections$EmptyList"),
    "singletonList": JavaList("java.util.Collections$SingletonList", ["a"]),
    "String[]": JavaList(None, ["a", None, "b"]),
    "Object[]": JavaList("[Ljava.lang.Object;", ["a", 1, JavaLong(2), JavaLong(5_000_000_000)]),
    "int[]": JavaList(None, [1, -2]),
    "long[]": JavaList(None, [1, 5_000_000_000]),
    "double[]": JavaList(None, [1.5, 1e10, "NaN"]),
    "Long[]": JavaList("[Ljava.lang.Long;", [JavaLong(1), None]),
    "list of arrays": [
        JavaList("[I", [1]),
        JavaList("[Ljava.lang.String;", ["a", "b"]),
        JavaList("[J", [5_000_000_000]),
    ],
    "empty HashMap": JavaMap("java.util.HashMap"),
    "HashMap": JavaMap("java.util.HashMap", {"k": JavaLong(1)}),
    "TreeMap": JavaMap("java.util.TreeMap", {"a": 5_000_000_000, "b": 1}),
    "ConcurrentHashMap": JavaMap("java.util.concurrent.ConcurrentHashMap", {"k": JavaLong(1)}),
    "Map.of": JavaMap(
        None, {"k": JavaList("java.util.ImmutableCollections$List12", [JavaLong(1)])}
    ),
    "emptyMap": JavaMap("java.util.Collections$EmptyMap"),
    "singletonMap": JavaMap("java.util.Collections$SingletonMap", {"k": JavaLong(1)}),
    "LinkedHashMap": {
        "id": 1,
        "name": "é😀",
        "price": 19.99,
        "paid": True,
        "large": 5_000_000_000,
        "at": EPOCH,
    },
    "map with a class key": {"b": 1, "@class": "x"},
    "map with int keys": JavaMap("java.util.TreeMap", {"1": "a", "2": "b"}),
    "enum": "RED",
}
# These change on the way: the first value is encoded, the second decoded.
CHANGED: dict[str, tuple[Any, Any]] = {
    "map with nulls": ({"a": None, "b": 1, "c": None, "": "empty"}, {"b": 1, "": "empty"}),
    # At the top level, Redisson itself takes it for a class and a value.
    "String[] of two": (JavaList(None, ["java.util.Date", "b"]), JavaValue("java.util.Date", "b")),
}
EVERYTHING = [
    *(1, 5_000_000_000, JavaLong(7), JavaBigInteger(10), 1.5, math.nan, -math.inf, JavaFloat(2.5)),
    *(JavaShort(3), JavaByte(4), JavaChar("c"), "s", True, None, b"\1\2"),
    *(EPOCH + timedelta(milliseconds=5), Decimal("1.50"), ONE_TWO, Colour.RED),
]
DEEP = {
    "lines": [{"n": 1}, {"n": JavaLong(2)}],
    "empty": {},
    "list": [],
    "blob": b"\1",
    "colour": Colour.GREEN,
    "strings": ["a", "b"],
}
BY_TYPES: dict[str, Any] = {
    "ArrayList of everything": EVERYTHING,
    "deep map": DEEP,
    "Pojo": Pojo(),
    "list of Pojo": [Pojo()],
    "enum": Colour.RED,
}


CONTAINERS = [vector for vector in MORE if vector.kind == "="]


def test_a_scalar_is_written_and_read_as_redisson_does() -> None:
    for vector in MORE:
        if vector.kind != "=":
            with naming(vector):
                check(vector)
                value = to_encode(vector)
                if vector.codec == "Kryo5" and not is_beyond_python(vector):
                    assert type(Kryo5Codec().decode(vector.payload)) is type(value)
                # A plain int takes the smallest class that holds it.
                classes = {"Long": 32, "BigInteger": 64} if vector.codec != "TypedJson" else {}
                bits = classes.get(vector.kind, 999 if classes else 0)
                number = isinstance(value, int) and vector.kind != "Boolean"
                if number and max(value, ~value) >= 1 << bits >> 1:
                    assert CODECS[vector.codec].encode(int(value)) == vector.payload


def test_a_container_is_written_and_read_as_redisson_does() -> None:
    assert {vector.told for vector in CONTAINERS} == {*NATURAL, *CHANGED, *BY_TYPES}
    for codec, told, payload in ((each.codec, each.told, each.payload) for each in CONTAINERS):
        with naming(codec, told):
            if codec == "Kryo5":
                value = Kryo5Codec().decode(payload)
                assert type(value) is KryoOpaque
                assert value == payload
                assert Kryo5Codec().encode(value) == payload
                continue
            for reader in (CODECS[codec], *([WITH_TYPES] if codec == "JsonJackson" else [])):
                assert reader.encode(reader.decode(payload)) == payload
            before, after = CHANGED.get(told, (NATURAL.get(told), NATURAL.get(told)))
            if told in BY_TYPES:
                writer = WITH_TYPES if codec == "JsonJackson" else CODECS[codec]
                assert writer.encode(BY_TYPES[told]) == payload
            else:
                assert CODECS[codec].encode(before) == payload
                if codec == "JsonJackson":
                    value = CODECS[codec].decode(payload)
                    assert (value, type(value)) == (after, type(after))


def payload_of(told: str) -> bytes:
    (payload,) = (
        vector.payload
        for vector in CONTAINERS
        if (vector.codec, vector.told) == ("JsonJackson", told)
    )
    return payload


def test_types_bring_back_dataclasses_and_enums() -> None:
    # A field declared as byte[] or as the enum is mere text: the payload does not name its type. A
    # field declared as Object does.
    pojo = Pojo(blob="AQI=", colour="GREEN", anyColour=Colour.RED)
    assert WITH_TYPES.decode(payload_of("Pojo")) == pojo
    assert WITH_TYPES.decode(payload_of("list of Pojo")) == [pojo]
    decoded = WITH_TYPES.decode(payload_of("ArrayList of everything"))
    assert decoded[-1] is Colour.RED
    assert decoded[6:-1] == EVERYTHING[6:-1]
    types = map(type, [*EVERYTHING[:1], JavaLong(1), *EVERYTHING[2:]])
    assert list(map(type, decoded)) == list(types)


def test_without_types_an_object_is_a_dict_of_its_fields() -> None:
    pojo = JsonJacksonCodec().decode(payload_of("Pojo"))
    assert isinstance(pojo, JavaObject)
    assert pojo.class_name == f"{VECTORS}Pojo"
    fields = [pojo[name] for name in ("name", "boxed", "price", "items")]
    assert fields == ["né😀", 5, Decimal("1.50"), ["a", 1, 2]]
    assert JsonJacksonCodec().decode(payload_of("ArrayList of everything"))[-1] == RED


DECODED: dict[str, Any] = {
    "5": 5,
    "5000000000": 5_000_000_000,
    '{"@class":"java.util.HashMap","k":"v"}': {"k": "v"},
    '["java.util.ArrayList",[1,2]]': [1, 2],
    '{"@class":"Gen$Order","id":"zz","unknown":1}': {"id": "zz", "unknown": 1},
    "null": None,
}


def test_bytes_that_redisson_decodes_are_decoded() -> None:
    codec = JsonJacksonCodec()
    for line in (DATA / "redisson_codec_vectors.txt").read_text().splitlines():
        if line.startswith("DEC "):
            text = line.removeprefix("DEC ").partition(" -> " if " -> " in line else " ERR ")[0]
            with naming(line):
                if " ERR " in line:
                    with pytest.raises(DecodeError, match="JsonJacksonCodec cannot decode"):
                        codec.decode(text.encode())
                else:
                    assert codec.decode(text.encode()) == DECODED[text]


def test_a_known_class_ignores_fields_that_it_lacks_as_redisson_does() -> None:
    @dataclass
    class Order:
        id: str

    codec = JsonJacksonCodec({"Gen$Order": Order})
    assert codec.decode(b'{"@class":"Gen$Order","id":"zz","unknown":1}') == Order("zz")


KRYO = Kryo5Codec()
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
