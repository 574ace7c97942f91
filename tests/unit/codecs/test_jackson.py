"""Redisson's JSON codecs: the values they accept and reject, and what they decode."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from itertools import product
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delayq import DecodeError, EncodeError
from delayq.codecs import (
    JavaBigInteger,
    JavaByte,
    JavaChar,
    JavaDouble,
    JavaFloat,
    JavaList,
    JavaLong,
    JavaMap,
    JavaObject,
    JavaShort,
    JavaValue,
    JsonJacksonCodec,
    TypedJsonJacksonCodec,
)
from tests.support.cases import naming
from tests.support.depth import examples

TYPED = JsonJacksonCodec()
PLAIN = TypedJsonJacksonCodec()
BOTH: tuple[JsonJacksonCodec | TypedJsonJacksonCodec, ...] = (TYPED, PLAIN)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Any str, including lone surrogates.
TEXT = st.text(st.characters())
MOMENTS = st.integers(-62_135_596_800_000, 253_402_300_799_999).map(
    lambda ms: EPOCH + timedelta(milliseconds=ms)
)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
FLOATS = st.floats(width=32).map(JavaFloat)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**999), 10**999)
    | st.floats()
    | TEXT
    | MOMENTS
    | st.uuids()
    | st.decimals("-1e40", "1e40", places=5)
    | st.integers(-(2**63), 2**63 - 1).map(JavaLong)
    | st.integers(-(2**200), 2**200).map(JavaBigInteger)
)
# Outside collections, Jackson writes these without their class.
IN_COLLECTIONS = (
    SCALARS
    | st.binary()
    | FLOATS
    | st.integers(-(2**15), 2**15 - 1).map(JavaShort)
    | st.integers(-(2**7), 2**7 - 1).map(JavaByte)
    | st.characters(max_codepoint=0xFFFF).map(JavaChar)
)
KEYS = st.text(st.characters(codec="utf-8")).filter(lambda key: key != "@class")


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # Jackson drops nulls from maps.
    entries = st.dictionaries(KEYS, inner.filter(lambda item: item is not None))
    return (
        st.lists(inner)
        | entries
        | st.lists(inner).map(lambda items: JavaList("java.util.LinkedList", items))
        | st.lists(inner).map(lambda items: JavaList("[Ljava.lang.Object;", items))
        | entries.map(lambda items: JavaMap("java.util.TreeMap", items))
        | entries.map(lambda items: JavaObject("a.B", items))
    )


VALUES = SCALARS | containers(st.recursive(IN_COLLECTIONS, containers, max_leaves=8))


# --- round trips


@given(VALUES)
@settings(max_examples=examples(500))
def test_an_encoded_value_has_the_same_bytes_after_a_round_trip(value: Any) -> None:
    payload = TYPED.encode(value)
    assert TYPED.encode(TYPED.decode(payload)) == payload
    payload = PLAIN.encode(value)
    assert PLAIN.encode(PLAIN.decode(payload)) == payload


@given(DECIMALS)
def test_a_decimal_is_the_same_number(value: Decimal) -> None:
    try:
        payload = TYPED.encode(value)
    except EncodeError:
        assert abs(value.adjusted()) > 900 or len(value.as_tuple().digits) > 900
    else:
        assert TYPED.decode(payload) == value
        assert b"E" not in payload


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(5e-324)
@example(2e-323)
@example(1e23)
@example(9007199254740993.0)
def test_a_double_has_javas_form(value: float) -> None:
    text = PLAIN.encode(value).decode()
    assert float(text) == value
    mantissa, _, exponent = text.lstrip("-").partition("E")
    whole, _, fraction = mantissa.partition(".")
    assert whole.isdigit()
    assert fraction.isdigit()
    if exponent:
        assert len(whole) == 1
        assert whole != "0"
        assert not -3 <= int(exponent) < 7
    else:
        assert value == 0 or 1e-3 <= abs(value) < 1e7
    # Use as few digits as possible, but never fewer than two.
    digits = (whole + fraction).strip("0")
    assert len(digits) <= max(
        2, len(repr(value).lower().partition("e")[0].replace(".", "").strip("-0"))
    )


def test_doubles_at_the_edges() -> None:
    for ours, java in zip(EDGES.split()[::2], EDGES.split()[1::2], strict=True):
        assert PLAIN.encode(float(ours)).decode() == java


EDGES = """
5e-324 4.9E-324     1.5e-323 1.5E-323     2e-323 2.0E-323     1e23 1.0E23     2e23 2.0E23
-0.0 -0.0           1e7 1.0E7             0.001 0.001         123456789.0 1.23456789E8
nan "NaN"           9999999.999999998 9999999.999999998
0.0009999999999999998 9.999999999999998E-4
"""


OTHERWISE = "9.999999999999999E22 1.9999999999999998E23 1.50 12345678901234567890.123 1e5 1E400"


def test_a_number_that_we_would_write_otherwise_keeps_its_text() -> None:
    """Java before JDK 19 wrote more digits, and a BigDecimal looks like a double."""
    for text in OTHERWISE.split():
        with naming(text):
            for codec in BOTH:
                value = codec.decode(text.encode())
                assert type(value) is JavaDouble
                assert value == float(text)
                assert codec.encode(value) == text.encode()
                assert (
                    codec.encode(pickle.loads(pickle.dumps(value)))
                    == codec.encode(copy.copy(value))
                    == text.encode()
                )
            both = f'["java.lang.Float",{text}],["java.lang.Double",{text}]'
            payload = f'["java.util.ArrayList",[{both}]]'.encode()
            assert TYPED.encode(TYPED.decode(payload)) in (
                payload,
                payload.replace(b'["java.lang.Double",%s]' % text.encode(), text.encode()),
            )


# --- the types of decoded values


def test_a_java_object_is_written_as_it_stands() -> None:
    payload = b'{"@class":"shop.Order","z":null,"a":5000000000,"d":"NaN"}'
    assert (
        TYPED.encode(JavaObject("shop.Order", {"z": None, "a": 5_000_000_000, "d": math.nan}))
        == payload
    )
    assert TYPED.encode(TYPED.decode(payload)) == payload


def test_other_classes_can_stand_for_lists_and_dicts() -> None:
    codec = JsonJacksonCodec(list_class="java.util.LinkedList", map_class="java.util.HashMap")
    assert codec.encode({"a": [1], "b": (2,)}) == (
        b'{"@class":"java.util.HashMap","a":["java.util.LinkedList",[1]],"b":["java.util.LinkedList",[2]]}'
    )
    decoded = codec.decode(codec.encode({"a": [1]}))
    assert (type(decoded), type(decoded["a"])) == (dict, list)


class Plain(Enum):
    A = 1


class Text(StrEnum):
    A = "a"


class Mixed(str, Enum):  # noqa: UP042  # the form that StrEnum replaces, and that formats differently
    A = "a"


class Number(IntEnum):
    A = 5


def test_enums_are_written_by_name_and_what_is_text_or_a_number_as_that() -> None:
    codec = JsonJacksonCodec({"shop.Text": Text, "shop.Number": Number})
    payload = b'["java.util.ArrayList",[["shop.Text","A"],["shop.Number","A"]]]'
    assert codec.decode(payload) == [Text.A, Number.A]
    assert codec.encode([Text.A, Number.A]) == payload
    parcel = JavaObject("shop.Parcel", {"text": Text.A})
    assert codec.encode(parcel) == b'{"@class":"shop.Parcel","text":"A"}'

    codec = JsonJacksonCodec({"shop.Plain": Plain})
    assert PLAIN.encode([Plain.A, Text.A, Mixed.A, Number.A]) == b'["A","a","a",5]'
    assert (
        codec.encode([Plain.A, Text.A, Mixed.A, Number.A])
        == b'["java.util.ArrayList",[["shop.Plain","A"],"a","a",5]]'
    )
    assert codec.encode(Plain.A) == b'"A"'
    assert codec.decode(b'["java.util.ArrayList",[["shop.Plain","A"]]]') == [Plain.A]
    with pytest.raises(DecodeError):
        codec.decode(b'["java.util.ArrayList",[["shop.Plain","B"]]]')


class Status(Enum):
    NEW = 1
    SENT = 2


@dataclass(frozen=True, slots=True)
class Parcel:
    id: int
    status: Status | str
    other: Any = None


PARCEL: dict[str, type[Any]] = {"shop.Parcel": Parcel, "shop.Status": Status}
WITH_CLASS = b'{"@class":"shop.Parcel","id":7,"status":["shop.Status","SENT"]}'


def test_an_enum_with_its_class_in_a_field_is_read_and_written_in_that_form() -> None:
    codec = JsonJacksonCodec(PARCEL)
    parcel = codec.decode(WITH_CLASS)
    assert parcel == Parcel(7, Status.SENT)
    assert codec.encode(parcel) == WITH_CLASS
    # Java reads only the form that it writes, so a form that was read once holds for every parcel.
    assert codec.encode(replace(parcel, status=Status.NEW)) == WITH_CLASS.replace(b"SENT", b"NEW")
    # This applies to that field only.
    assert (
        codec.encode(Parcel(7, "SENT", other=Status.NEW))
        == b'{"@class":"shop.Parcel","id":7,"other":"NEW","status":"SENT"}'
    )
    # A producer that has read none says so.
    with_class = JsonJacksonCodec(PARCEL, enums_with_class=[Status])
    for made in (
        Parcel(7, Status.SENT),
        JavaObject("shop.Parcel", {"id": 7, "status": Status.SENT}),
    ):
        assert with_class.encode(made) == WITH_CLASS
    by_hand: Any = Parcel(7, JavaValue("shop.Status", "SENT"))  # type: ignore[arg-type]
    assert JsonJacksonCodec(PARCEL).encode(by_hand) == WITH_CLASS


def test_an_object_without_a_dataclass_keeps_the_form_of_each_enum() -> None:
    codec = JsonJacksonCodec({"shop.Status": Status})
    payload = (
        b'{"@class":"shop.Parcel","a":["shop.Status","SENT"],"b":"NEW","c":["shop.Status","NEW"]}'
    )
    parcel = codec.decode(payload)
    assert parcel == {"a": Status.SENT, "b": "NEW", "c": Status.NEW}
    for same in (parcel, copy.deepcopy(parcel), pickle.loads(pickle.dumps(parcel))):
        assert codec.encode(same) == payload
    parcel["a"], parcel["b"] = Status.NEW, Status.SENT
    assert codec.encode(parcel) == (
        b'{"@class":"shop.Parcel","a":["shop.Status","NEW"],"b":"SENT","c":["shop.Status","NEW"]}'
    )
    assert codec.encode(JavaObject("shop.Parcel", {"a": Status.SENT}, with_class=["a"])) == (
        b'{"@class":"shop.Parcel","a":["shop.Status","SENT"]}'
    )


@dataclass
class Letter:
    status: Status
    before: Status | None = None
    colour: Text = Text.A
    all: list[Status] | None = None


def test_a_field_declared_as_an_enum_is_read_in_either_form() -> None:
    cases: list[Any] = [{"shop.Letter": Letter}, {"shop.Letter": Letter, "shop.Status": Status}]
    for types in cases:
        with naming(types):
            codec = JsonJacksonCodec(types)
            fields = b'"before":["shop.Status","NEW"],"colour":"a","status":"SENT"'
            payload = b'{"@class":"shop.Letter",%s}' % fields
            letter = codec.decode(payload)
            assert letter == Letter(Status.SENT, Status.NEW)
            assert (type(letter.status), type(letter.before)) == (Status, Status)
            assert codec.encode(letter) == payload
            # Each field keeps its form.
            assert codec.encode(Letter(Status.NEW, Status.SENT)) == (
                b'{"@class":"shop.Letter","before":["shop.Status","SENT"],"colour":"a","status":"NEW"}'
            )
    # What the enum lacks stays as it is.
    codec = JsonJacksonCodec(cases[0])
    lists = b'"all":["java.util.ArrayList",["SENT"]],"colour":"a"'
    lost = {b'"LOST"': "LOST", b'["shop.Status","LOST"]': ["shop.Status", "LOST"], b"5": 5}
    for status, value in lost.items():
        payload = b'{"@class":"shop.Letter",%s,"status":%s}' % (lists, status)
        letter = codec.decode(payload)
        assert (letter.status, letter.all) == (value, ["SENT"])
        assert codec.encode(letter) == payload


def test_a_value_of_an_unknown_enum_is_written_back_unchanged() -> None:
    cases: list[Any] = [
        # A class that types does not name, a constant that the enum lacks, and an enum outside an
        # object: Java writes none there.
        b'{"@class":"shop.Parcel","id":7,"status":["shop.Other","SENT"]}',
        b'{"@class":"shop.Parcel","id":7,"status":["shop.Status","LOST"]}',
        b'{"@class":"shop.Unknown","id":7,"status":["shop.Status","LOST"]}',
        b'["shop.Status","SENT"]',
        # Java omits a class that the field's declaration implies, such as a record's.
        b'{"@class":"shop.Order","record":{"large":5000000000,"small":["java.lang.Long",5]}}',
    ]
    for payload in cases:
        with naming(payload):
            for codec in (JsonJacksonCodec(PARCEL), TYPED):
                assert codec.encode(codec.decode(payload)) == payload


ONE_TWO = "00000000-0000-0001-0000-000000000002"


def test_a_uuid_has_its_class_everywhere_or_as_before_redisson_4_2() -> None:
    types: dict[str, type[Any]] = {"shop.Order": Order}
    new, old = JsonJacksonCodec(types), JsonJacksonCodec(types, uuid_with_class=False)
    uuid, wrapped = UUID(ONE_TWO), f'["java.util.UUID","{ONE_TWO}"]'
    order = '{"@class":"shop.Order","id":1,"made":7,"note":%s,'
    order += '"parts":["java.util.ArrayList",[%s]],"zip":""}'
    for codec, form in ((new, wrapped), (old, f'"{ONE_TWO}"')):
        assert codec.encode(uuid).decode() == form
        assert codec.encode(JavaList(None, [uuid])).decode() == f"[{form}]"
        # Java does not know the class of a list's elements: they are declared as arbitrary objects.
        assert codec.encode(Order("", 1, uuid, [uuid])).decode() == order % (form, wrapped)  # type: ignore[arg-type]
        # Both forms occur before 4.2.0, and stay as they are: the class is written where the field
        # is declared as Object.
        for written in (f'"{ONE_TWO}"', wrapped):
            payload = (order % (written, wrapped)).encode()
            assert codec.encode(codec.decode(payload)) == payload


@dataclass
class Order:
    zip: str
    id: int
    note: str | None = None
    parts: list[Any] = field(default_factory=list)
    made: int = field(init=False, default=7)


def test_fields_are_ordered_as_java_compares_text() -> None:
    """By UTF-16 units, a surrogate comes before U+E000; by code points, after it."""

    @dataclass
    class Odd:
        﨎: int = 1  # noqa: PLC2401
        𐐀: int = 2  # noqa: PLC2401
        a: int = 3
        Zz: int = 4

    assert list(PLAIN.decode(PLAIN.encode(Odd()))) == ["Zz", "a", "𐐀", "﨎"]


def test_a_dataclass_that_does_not_take_the_fields_is_a_decode_error() -> None:
    @dataclass
    class Strict:
        id: int

        def __post_init__(self) -> None:
            if self.id < 0:
                raise KeyError(self.id)

    codec = JsonJacksonCodec({"shop.Strict": Strict})
    for payload in (
        b'{"@class":"shop.Strict"}',
        b'{"@class":"shop.Strict","id":-1}',
        b'{"@class":"shop.Strict","id":"x"}',
    ):
        with pytest.raises(DecodeError):
            codec.decode(payload)


def test_settings_of_a_wrong_type_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        *(({"types": {"shop.Order": kind}}, "types must be") for kind in (int, Order("x", 1), "x")),
        *(
            ({"types": PARCEL, "enums_with_class": [kind]}, "enums_with_class must be enums that")
            for kind in (Plain, int, "shop.Status")
        ),
        ({"uuid_with_class": "no"}, "uuid_with_class must be True or False"),
    ]
    for options, reason in wrong:
        with naming(options), pytest.raises(TypeError, match=reason):
            JsonJacksonCodec(**options)


def test_no_class_is_built_because_a_payload_names_it() -> None:
    payload = b'{"@class":"subprocess.Popen","args":["java.util.ArrayList",["true"]]}'
    before = set(sys.modules)
    assert type(TYPED.decode(payload)) is JavaObject
    assert type(TYPED.decode(b'["java.util.ArrayList",[["antigravity.X","y"]]]')[0]) is JavaValue
    assert set(sys.modules) == before


# --- refusals

LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
SECRET = "53cr37"
REFUSED: dict[str, list[Any]] = {
    "no Java type is known for (object|complex|type|date|memoryview)": [
        *(object(), 1j, Order, date(2024, 1, 2), memoryview(b"x")),
    ],
    "its order is undefined": [{1}, frozenset({1})],
    "a key is (int|NoneType|bytes)": [{1: 2}, {None: "a"}, JavaObject("a.B", {b"53cr37": 1})],
    "a key has a lone surrogate": [{"\ud800": "a"}],
    "no timezone": [datetime(2024, 1, 2)],  # noqa: DTZ001
    "not finite": [Decimal("NaN"), Decimal("Infinity")],
    "more than 1000": [
        *map(Decimal, ("1e1001", "1e-1001", "1e9999", "1e999999999", "1" * 1001)),
        *(10**1000, 1 << 10**7),
    ],
    "out of range": [JavaBigInteger(-(10**1000))],
    "Java(Long|Short|Byte) is out of range": [JavaLong(2**63), JavaShort(2**15), JavaByte(-129)],
    "too large for 32 bits": [JavaFloat(1e39)],
    "not one UTF-16 unit": [JavaChar(""), JavaChar(SECRET), JavaChar("😀")],
    "contains itself": [LOOP],
    "nested too deeply": [DEEP],
}


def test_a_value_without_a_jackson_form_is_refused_and_not_quoted() -> None:
    for reason, values in REFUSED.items():
        for codec, value in product(BOTH, values):
            for nested in (value, [SECRET, value], {SECRET: value}):
                with naming(reason, codec), pytest.raises(EncodeError) as caught:
                    codec.encode(nested)
                refused = f"{type(codec).__name__} cannot encode this {type(nested).__name__}: "
                assert re.match(f"{refused}.*{reason}", str(caught.value)), (reason, codec)
                assert not re.search("53cr37|9999", str(caught.value)), (reason, codec)
                assert caught.value.__cause__ is caught.value.__context__ is None
    for value, name in ((Order("x", 1), "Order"), ([Plain.A], "Plain")):
        with pytest.raises(EncodeError, match=f"types do not name a Java class for {name}"):
            TYPED.encode(value)


MALFORMED = [
    *b"- abc { [1,] NaN -Infinity \xff 'a' 01".split(),
    *(b"", b" ", b"1 2", b'"\xed\xa0\x80"', b'"\x01"', b"[" * 200_000),
]


def test_no_json_is_refused_and_the_reason_is_told() -> None:
    for codec in BOTH:
        for payload in MALFORMED:
            refused = f"{type(codec).__name__} cannot decode the payload: "
            with naming(codec), pytest.raises(DecodeError, match=refused) as caught:
                codec.decode(payload)
            assert caught.value.payload == payload
            assert len(str(caught.value)) < 150
    # A class that is no name.
    for payload in [b'{"@class":5}', b'{"@class":null,"a":1}', b'{"@class":["a.B"]}']:
        with naming(payload), pytest.raises(DecodeError):
            TYPED.decode(payload)


WRONG = """
["java.lang.Integer",true] ["java.lang.Integer",2147483648] ["java.lang.Long","5"]
["java.lang.Short",32768] ["java.lang.Byte",1.0] ["java.lang.Boolean",1] ["java.lang.String",1]
["java.lang.Character","ab"] ["java.lang.Double","1.5"] ["java.lang.Double",true]
["java.lang.Float","x"] ["java.math.BigDecimal","1"] ["java.math.BigDecimal",true]
["java.util.Date","x"] ["java.util.UUID","x"] ["[B","*"] ["[B",5]
["java.util.UUID","{00000000-0000-0001-0000-000000000002}"]
"""


def test_a_class_and_a_value_of_another_class_stay_apart() -> None:
    """At the top level, the payload can be a String[] of two."""
    for text in WRONG.split():
        with naming(text):
            assert isinstance(TYPED.decode(text.encode()), JavaValue)
            assert TYPED.encode(TYPED.decode(text.encode())) == text.encode()
    # Two texts are an array even if one looks like a class.
    assert type(TYPED.decode(b'["a.b","c"]')) is JavaList
    assert TYPED.decode(b'["java.util.ArrayList",[["a.b","c"]]]') == [JavaValue("a.b", "c")]


def test_a_decimal_has_no_negative_zero_and_a_uuid_no_upper_case() -> None:
    upper = b'["java.util.UUID","ABCDEFAB-0000-0000-0000-000000000000"]'
    lower = b'["java.util.UUID","abcdefab-0000-0000-0000-000000000000"]'
    assert TYPED.encode(TYPED.decode(upper)) == lower
    assert TYPED.encode(Decimal("-0.00")) == b'["java.math.BigDecimal",0.00]'
    assert PLAIN.encode(Decimal("-0E+5")) == PLAIN.encode(Decimal("0E+5")) == b"0"


def test_a_datetime_is_cut_to_milliseconds_towards_the_past_in_any_zone() -> None:
    moment = datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert PLAIN.encode(moment + timedelta(microseconds=1999)) == b"1"
    assert PLAIN.encode(moment - timedelta(microseconds=1)) == b"-1"
