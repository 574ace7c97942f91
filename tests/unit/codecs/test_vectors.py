"""Read every byte that Redisson's own codecs wrote, and write it again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest

from delayq import DecodeError
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
from tests.support.vectors import (
    CODECS,
    DATA,
    check,
    is_beyond_python,
    read,
    to_encode,
)

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
