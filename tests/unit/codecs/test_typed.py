"""codec_for: the JSON of values that a producer offers, and the types that workers read them by."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType, NotRequired, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import dataclasses as pydantic_dataclasses
from typing_extensions import TypedDict

import delayq
from delayq import JsonCodec
from delayq.codecs import BytesCodec, codec_for
from delayq.codecs._type_codecs import msgspec_codec, pydantic_codec, standard_codec
from tests.support.cases import naming
from tests.support.depth import examples
from tests.support.programs import output_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Kind(enum.StrEnum):
    CARD = "card"
    CASH = "cash"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


Number = NewType("Number", int)

TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
# msgspec reads a number of more digits as a float.
INTS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
ZONES: SearchStrategy[Any] = st.sampled_from(
    [
        None,
        UTC,
        ZoneInfo("Europe/Berlin"),
        ZoneInfo("America/New_York"),
        ZoneInfo("Asia/Kathmandu"),
        timezone(timedelta(hours=-3, minutes=-30)),
    ]
)
# In every zone they are between the years 1 and 9999.
DATETIMES = st.datetimes(
    datetime.fromisoformat("0001-01-02"),
    datetime.fromisoformat("9999-12-30"),
    timezones=ZONES,
    allow_imaginary=False,
)
TIMES = st.times(timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=2))]))

LEAVES: list[tuple[Any, SearchStrategy[Any], str]] = [
    (str, TEXT, "string"),
    (int, INTS, "number"),
    (float, FLOATS, "number"),
    (bool, st.booleans(), "boolean"),
    (UUID, st.uuids(), "string"),
    (datetime, DATETIMES, "string"),
    (date, st.dates(), "string"),
    (time, TIMES, "string"),
    (timedelta, st.timedeltas(), "string"),
    (Decimal, DECIMALS, "string"),
    (Colour, st.sampled_from(Colour), "string"),
    (Kind, st.sampled_from(Kind), "string"),
    (Level, st.sampled_from(Level), "number"),
    (Right, st.sampled_from([*Right, Right.READ | Right.WRITE]), "number"),
    (Literal["a", "b"], st.sampled_from("ab"), "string"),
    (Number, INTS, "number"),
    (Annotated[int, "of a kind"], INTS, "number"),
]
KEYS = [leaf for leaf in LEAVES if leaf[0] not in (bool, Right)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A type, a strategy for its values, and what JSON writes them as."""

    kind: Any
    values: SearchStrategy[Any]
    form: str


# As values, because mypy would take a computed type for an annotation.
LIST, DICT, TUPLE, NAMED_TUPLE, TYPED_DICT = cast("Any", (list, dict, tuple, NamedTuple, TypedDict))


@st.composite
def records(draw: Callable[[Any], Any], parts: SearchStrategy[Case]) -> Case:
    """Return a class with two fields."""
    a, b = draw(parts), draw(parts)
    fields = {"a": a.kind, "b": b.kind}
    kind: Any
    match draw(st.sampled_from(["dataclass", "frozen", "tuple", "dict"])):
        case "tuple":
            kind = NAMED_TUPLE("Made", [*fields.items()])
            return Case(kind, st.builds(kind, a=a.values, b=b.values), "array")
        case "dict":
            kind = TYPED_DICT("Made", fields | {"b": NotRequired[b.kind]})
            values = st.fixed_dictionaries({"a": a.values}, optional={"b": b.values})
            return Case(kind, values, "object")
        case form:
            kind = dataclasses.make_dataclass("Made", [*fields.items()], frozen=form == "frozen")
            return Case(kind, st.builds(kind, a=a.values, b=b.values), "object")


@st.composite
def containers(draw: Callable[[Any], Any], parts: SearchStrategy[Case]) -> Case:
    inner = draw(parts)
    kind, values = inner.kind, inner.values
    match draw(st.sampled_from(["list", "dict", "pair", "tuple", "optional"])):
        case "list":
            return Case(LIST[kind], st.lists(values, max_size=3), "array")
        case "dict":
            key, keys, _ = draw(st.sampled_from(KEYS))
            return Case(DICT[key, kind], st.dictionaries(keys, values, max_size=3), "object")
        case "pair":
            return Case(TUPLE[kind, int], st.tuples(values, INTS), "array")
        case "tuple":
            return Case(TUPLE[kind, ...], st.lists(values, max_size=3).map(tuple), "array")
        case _:
            return Case(kind | None, values | st.none(), inner.form)


@st.composite
def unions(draw: Callable[[Any], Any], parts: SearchStrategy[Case]) -> Case:
    one, other = draw(parts), draw(parts)
    # A codec cannot tell a Decimal from a UUID, for example: both are strings.
    assume(one.form != other.form and "union" not in (one.form, other.form))
    return Case(one.kind | other.kind, one.values | other.values, "union")


def cases(*makers: Callable[[SearchStrategy[Case]], SearchStrategy[Case]]) -> SearchStrategy[Case]:
    return st.recursive(
        st.sampled_from([Case(*leaf) for leaf in LEAVES]),
        lambda parts: st.one_of(*(make(parts) for make in makers)),
        max_leaves=6,
    )


ALL_CASES = cases(containers, records, unions)
# pydantic, which codec_for needs for some, converts in a union: it reads 1 as True, or a datetime.
CASES_WITHOUT_UNIONS = cases(containers, records)


def comparable(value: Any) -> Any:
    """Return what is compared: types and values, but of a datetime the moment, in any zone."""
    kind = type(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return kind, value.astimezone(UTC)
    if dataclasses.is_dataclass(value):
        return kind, comparable(vars(value))
    if isinstance(value, dict):
        return {comparable(key): comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return kind, [comparable(item) for item in value]
    return kind, value


PATIENT = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.mark.parametrize(
    ("make", "all_cases"),
    [
        (standard_codec, ALL_CASES),
        (msgspec_codec, ALL_CASES),
        (pydantic_codec, CASES_WITHOUT_UNIONS),
        (codec_for, CASES_WITHOUT_UNIONS),
    ],
)
@settings(PATIENT, max_examples=examples(400))
@given(st.data())
def test_a_workers_type_reads_what_a_producer_offers(
    make: Callable[[Any], Any], all_cases: SearchStrategy[Case], data: Any
) -> None:
    case = data.draw(all_cases)
    value = data.draw(case.values)
    try:
        codec = make(case.kind)
    except Exception:
        # The library does not know the type. There is always one that does.
        assert make in (msgspec_codec, pydantic_codec)
        return
    payloads = []
    for encode in (JsonCodec().encode, codec.encode):
        try:
            payloads.append(encode(value))
        except delayq.EncodeError as error:
            # A producer without the type refuses what pydantic would convert in a union.
            converts = all_cases is ALL_CASES and "would come back as a " in str(error)
            assert converts or "so offer it in UTC" in str(error)  # noqa: PT017 - most are encoded
    for payload in payloads:
        assert comparable(codec.decode(payload)) == comparable(value), payload


@settings(PATIENT)
@given(st.data())
def test_a_value_of_another_type_raises_the_documented_error_only(data: Any) -> None:
    """Or it is of the type by chance, so that it can be written again."""
    kind = data.draw(ALL_CASES).kind
    other = data.draw(ALL_CASES.flatmap(lambda case: case.values) | st.just(10**400))
    payload = JsonCodec().encode(other)
    codec = standard_codec(kind)
    with contextlib.suppress(delayq.DecodeError):
        codec.encode(codec.decode(payload))


@dataclasses.dataclass
class Line:
    price: Any


@dataclasses.dataclass
class Order:
    id: UUID
    lines: list[Line]
    paid: Colour = Colour.RED
    at: datetime | None = None
    by_day: dict[date, Decimal] = dataclasses.field(default_factory=dict)


class Struct(msgspec.Struct, rename="camel", tag="struct", omit_defaults=True):
    made_at: datetime
    tags: frozenset[str] = frozenset()


class Model(pydantic.BaseModel):
    made_by: str = pydantic.Field(alias="madeBy")
    prices: dict[Colour, Decimal] = {}


@pydantic_dataclasses.dataclass
class Checked:
    size: int = pydantic.Field(alias="SIZE")

    @pydantic.field_validator("size")
    @classmethod
    def positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError("must not be negative")
        return value


@dataclasses.dataclass
class Both:
    """Holds types of pydantic's, and is none."""

    model: Model
    checked: list[Checked]


@pydantic_dataclasses.dataclass
class Small:
    size: int


@dataclasses.dataclass
class Large(Small):
    """Inherits from a dataclass of pydantic's, and is none."""

    weight: int


@dataclasses.dataclass
class WithStruct:
    struct: Struct
    parent: WithStruct | None = None


class Row(TypedDict):
    id: int


@dataclasses.dataclass
class Item:
    item: str
    price: float = 0.0


@dataclasses.dataclass
class Basket:
    id: int
    lines: list[Item]
    notes: dict[str, str | None] = dataclasses.field(default_factory=dict)
    parent: Basket | None = None
    total: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.total = sum(line.price for line in self.lines)


class Money:
    """No codec knows it."""


MOMENT = datetime(2030, 1, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
MODEL = Model(madeBy="ada", prices={Colour.RED: Decimal("1.50")})
ORDER = Order(
    UUID(int=5), [Line(1), Line(None)], Colour.GREEN, MOMENT, {date(2030, 1, 1): Decimal(7)}
)


LATER = '"2030-01-01T12:00:00+01:00"'
STRUCT = f'{{"type":"struct","madeAt":{LATER}}}'
ORDER_JSON = (
    '{"id":"00000000-0000-0000-0000-000000000005","lines":[{"price":1},{"price":null}],'
    f'"paid":"green","at":{LATER},"by_day":{{"2030-01-01":"7"}}}}'
)
EXACT: list[tuple[Any, Any, str]] = [
    *((kind, {"a": [1.5, None]}, '{"a":[1.5,null]}') for kind in (dict, dict[str, Any], Any)),
    *((kind, [1, "é", True], '[1,"é",true]') for kind in (list, list[Any], object)),
    (None, None, "null"),
    (Struct, Struct(MOMENT, frozenset("a")), f'{STRUCT[:-1]},"tags":["a"]}}'),
    (Model, MODEL, '{"madeBy":"ada","prices":{"red":"1.50"}}'),
    (Checked, Checked(SIZE=1), '{"SIZE":1}'),
    (Large, Large(1, 2), '{"size":1,"weight":2}'),
    (list[Model], [MODEL], '[{"madeBy":"ada","prices":{"red":"1.50"}}]'),
    (
        Both,
        Both(Model(madeBy="bob"), [Checked(SIZE=1)]),
        '{"model":{"madeBy":"bob","prices":{}},"checked":[{"SIZE":1}]}',
    ),
    (
        WithStruct,
        WithStruct(Struct(MOMENT), WithStruct(Struct(MOMENT))),
        f'{{"struct":{STRUCT},"parent":{{"struct":{STRUCT},"parent":null}}}}',
    ),
    (Order, ORDER, ORDER_JSON),
    (dict[str, Small], {"a": Small(1)}, '{"a":{"size":1}}'),
    (Row, {"id": 1}, '{"id":1}'),
    (set[UUID], {UUID(int=5)}, '["00000000-0000-0000-0000-000000000005"]'),
    (frozenset[int], frozenset({3, 1, 2}), "[1,2,3]"),
    (dict[int, str], {1: "a"}, '{"1":"a"}'),
]


def test_a_value_is_the_same_json_from_both_codecs() -> None:
    for kind, value, wire in EXACT:
        with naming(kind, value, wire):
            assert (
                JsonCodec().encode(value).decode() == codec_for(kind).encode(value).decode() == wire
            )
            back = codec_for(kind).decode(wire.encode())
            assert back == value
            assert type(back) is type(value)
    # An offset with seconds is written in UTC.
    moment = datetime(1880, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    assert JsonCodec().encode(moment) == b'"1879-12-31T23:06:32Z"'
    assert codec_for(datetime).decode(b'"1879-12-31T23:06:32Z"') == moment.astimezone(UTC)


def test_a_refused_value_has_a_cause_that_says_why_without_quoting_it() -> None:
    cases: list[Any] = [
        (dict, b"[]", "list, not dict"),
        (int, b"true", "bool, not int"),
        (int, b"1.5", "float, not int"),
        (str, b"1", "int, not str"),
        (bool, b"1", "int, not bool"),
        (list[int], b'["a"]', "$[0]"),
        (Small, b'{"size":"x"}', "size: Input should be a valid integer"),
        (Model, b"{}", "madeBy: Field required"),
        (Struct, b'{"type":"struct","madeAt":"x"}', "$.madeAt"),
        (Basket, b'{"id":null}', "$.id"),
        (Checked, b'{"SIZE":-1}', "SIZE: value_error"),
        (dict[str, list[Checked]], b'{"secret":[{"SIZE":-1}]}', "[...][0].SIZE: value_error"),
        (Both, b'{"model":{"madeBy":"bob"},"checked":[{"SIZE":-1}]}', "checked[0].SIZE: value"),
        (Row, b"{}", "id"),
        *((kind, b"{", "") for kind in (dict, list[int], Model, Struct, Order)),
        *((kind, b'{                  "id":"secret"}', "") for kind in (Model, Order, Struct, int)),
    ]
    for kind, wire, why in cases:
        refuses(codec_for(kind), wire, why)


def refuses(codec: Any, wire: bytes, why: str) -> None:
    """Assert that the cause of a refusal says why, and quotes nothing."""
    with naming(codec, wire, why):
        with pytest.raises(delayq.DecodeError) as caught:
            codec.decode(wire)
        assert why in str(caught.value.__cause__)
        assert "secret" not in f"{caught.value}{caught.value.__cause__}"
        assert caught.value.__context__ is None


def test_a_producer_cannot_offer_another_type() -> None:
    cases: list[Any] = [
        *((int, "1"), (int, True), (dict, []), (Row, 1), (list[Model], [1])),
        *((Model, {"id": 1}), (Struct, {"id": 1}), (Order, {"id": 1})),
    ]
    for kind, value in cases:
        with naming(kind, value), pytest.raises(delayq.EncodeError):
            codec_for(kind).encode(value)


def test_a_type_has_the_plain_codec_or_a_checking_one_or_is_an_error_that_names_it() -> None:
    assert isinstance(codec_for(Any), JsonCodec)
    assert isinstance(codec_for(bytes), BytesCodec)
    with pytest.raises(
        delayq.ConfigurationError, match="knows the type Money: make it a dataclass"
    ):
        codec_for(Money)


@given(st.sets(TEXT | INTS))
def test_equal_sets_have_equal_bytes(values: set[Any]) -> None:
    assert JsonCodec().encode(values) == JsonCodec().encode({*reversed([*values])})


def loop() -> Order:
    order = Order(UUID(int=1), [])
    order.lines.append(Line(order))
    return order


class Unchecked(pydantic.BaseModel):
    price: Any = None
    size: int = 0


class Loose(msgspec.Struct):
    price: Any


CANNOT = ", which JSON cannot hold"


def test_an_error_about_a_value_json_cannot_hold_says_where_it_is_and_what_to_do() -> None:
    cases: list[Any] = [
        (Money(), f"value is a Money{CANNOT}: convert it first, or open the queue with a codec"),
        (Order(UUID(int=1), [Line(1), Line(Money())]), f"value.lines[1].price is a Money{CANNOT}"),
        ({"secret": [0, Money()]}, f"value[...][1] is a Money{CANNOT}"),
        ([b"secret"], f"value[0] is a bytes{CANNOT}"),
        ([{Money()}], f"value[0][...] is a Money{CANNOT}"),
        ({(1, "secret"): 2}, f"a key of value is a tuple{CANNOT}"),
        ({Line(1).__class__: 2}, f"a key of value is a type{CANNOT}"),
        ({frozenset({"secret"}): 2}, "a key of value is a frozenset, but keys are text in JSON"),
        ({"secret": math.nan}, f"value[...] is NaN or infinite{CANNOT}"),
        (Line(Decimal("-Infinity")), f"value.price is NaN or infinite{CANNOT}"),
        ({"secret": "secret\ud800"}, "value[...] has a lone surrogate"),
        ({"secret\ud800": 1}, "a key of value has a lone surrogate"),
        ([10**5000], "value[0] has more digits than Python writes"),
        (loop(), "value.lines[0].price contains itself"),
        ([Unchecked(price=[Money()])], f"value[0] is a Unchecked that holds a Money{CANNOT}"),
        ([Loose([Money()])], f"value[0] is a Loose that holds a Money{CANNOT}"),
        (
            Line(Unchecked.model_construct(size="secret")),
            "value.price is a Unchecked that cannot be read (PydanticSerializationError)",
        ),
        (Loose, f"value is a StructMeta{CANNOT}"),
    ]
    for value, reason in cases:
        with naming(value, reason):
            with pytest.raises(delayq.EncodeError) as caught:
                JsonCodec().encode(value)
            kind = type(value).__name__
            assert str(caught.value).startswith(f"JsonCodec cannot encode this {kind}: {reason}")
            assert "secret" not in str(caught.value)
            assert caught.value.__context__ is caught.value.__cause__ is None


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


class Hidden(Login):
    @pydantic.field_serializer("password", when_used="json")
    def shown(self, value: pydantic.SecretStr) -> str:
        return value.get_secret_value()


class Computed(pydantic.BaseModel, extra="forbid"):
    net: int
    ids: pydantic.Json[list[int]]

    @pydantic.computed_field  # type: ignore[prop-decorator, unused-ignore]
    @property
    def gross(self) -> int:
        return self.net * 2


class OneSided(pydantic.BaseModel):
    size: int = pydantic.Field(default=1, serialization_alias="SIZE")
    left_out: int = pydantic.Field(default=2, exclude=True)
    words: Sequence[str] = ()


class Pairs(enum.Enum):
    A = (1, 2)


class Reading(pydantic.BaseModel):
    celsius: float | None = None
    price: Decimal = Decimal(1)
    at: datetime = MOMENT
    kind: Pairs | None = None
    data: dict[str, Any] = {}
    count: int = pydantic.Field(default=1, gt=0)


class Sample(msgspec.Struct):
    celsius: float | None = None
    price: Decimal = Decimal(1)
    count: Annotated[int, msgspec.Meta(gt=0)] = 1


@dataclasses.dataclass
class Mixed:
    key: UUID | str | None = None
    pairs: Pairs | None = None
    shape: Named | None = None
    x: float | None = None


@attrs.define
class Private:
    _size: int = 1


LOCAL = datetime(1880, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
NOT_FINITE = "is NaN or infinite, which JSON cannot hold: use None"
SECRET = "it is written as asterisks, so offer a reference to it, or give its field a serializer"


def test_a_value_that_would_not_come_back_is_refused_with_the_cure() -> None:
    login = Login(user="ada", password=pydantic.SecretStr("s3cret"))
    refused: list[Any] = [
        *((Login, login, SECRET), (list[Login], [login], SECRET), (Any, {"a": login}, SECRET)),
        (pydantic.SecretBytes, pydantic.SecretBytes(b"s3cret"), SECRET),
        (Line, Line(pydantic.SecretStr("s3cret")), SECRET),
        (Reading, Reading(data={"a": pydantic.SecretStr("s3cret")}), SECRET),
        *((kind, kind(celsius=math.nan), f"celsius {NOT_FINITE}") for kind in (Reading, Sample)),
        *((kind, kind(celsius=-math.inf), f"celsius {NOT_FINITE}") for kind in (Reading, Sample)),
        (Sample, Sample(price=Decimal("Infinity")), f"price {NOT_FINITE}"),
        (Reading, Reading.model_construct(price=Decimal("NaN")), f"price {NOT_FINITE}"),
        (Reading, Reading(data={"a": [math.inf]}), NOT_FINITE),
        (Mixed, Mixed(x=math.inf), f"x {NOT_FINITE}"),
        (dict[float, int], {math.nan: 1}, f"a key of value {NOT_FINITE}"),
        (OneSided, OneSided(size=7), "value.size is an int, and would come back as another value"),
        (OneSided, OneSided(left_out=7), "value.left_out is an int"),
        (Reading, Reading(kind=Pairs.A), "could not be read back (kind: Input should be (1, 2))"),
        (Reading, Reading(at=LOCAL), "value.at is a datetime, and would come back as another"),
        (Reading, Reading.model_construct(count=-1), "(count: Input should be greater than 0)"),
        (Sample, Sample(count=-1), "(Expected `int` >= 1 - at `$.count`)"),
        (Mixed, Mixed(shape=Derived("a", 1)), "value.shape is a Derived, and would come back as a"),
    ]
    typed: list[Any] = [
        (Row, {"id": 1, "more": 2}, "it has keys that its type does not name"),
        (Private, Private(2), "value._size is an int"),
        (dict[int | str, int], {1: 2}, "keys that its type does not name, or reads as others"),
        (Named, Derived("a", 1), "value is a Derived, and would come back as a Named"),
        (time, time(1, tzinfo=ZoneInfo("Europe/Berlin")), "value is a time"),
    ]
    for kind, value, reason in (*refused, *typed):
        for codec in (codec_for(kind), *[JsonCodec()] * ((kind, value, reason) in refused)):
            with naming(kind, value, codec), pytest.raises(delayq.EncodeError) as caught:
                codec.encode(value)
            assert reason in str(caught.value)
            assert "s3cret" not in str(caught.value)


def test_a_value_that_survives_the_round_trip_is_not_refused() -> None:
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    data = {"at": MOMENT, "long": timedelta(days=1), "pair": (1, UUID(int=5)), "none": None}
    values: list[Any] = [
        Hidden(user="ada", password=pydantic.SecretStr("secret")),
        Computed.model_validate({"net": 1, "ids": "[1,2]"}),
        *(OneSided(), OneSided(words=("a",)), Mixed(UUID(int=5), Pairs.A, Named("a"))),
        *(Reading(data=data, at=twice, celsius=1.5), Sample(), Pairs.A, Line(data)),
    ]
    for value in values:
        with naming(value):
            payload = JsonCodec().encode(value)
            codec = codec_for(type(value))
            assert json.loads(codec.encode(value)) == json.loads(payload) or "P1D" in str(payload)
            back = codec.decode(payload)
            assert isinstance(value, Reading | Line | OneSided) or back == value
    assert codec_for(Private).decode(codec_for(Private).encode(Private())) == Private()


@dataclasses.dataclass
class Named:
    item: str


@dataclasses.dataclass
class Derived(Named):
    size: int


class Pair(NamedTuple):
    first: int
    second: str = "x"


def test_without_a_library_other_forms_are_read_too() -> None:
    cases: list[Any] = [
        (Named | Item, b'{"item":"pen","price":2}', Item("pen", 2.0)),
        (Item | Named, b'{"item":"pen"}', Named("pen")),
        (date | datetime, b'"2030-01-01T00:00:00Z"', datetime(2030, 1, 1, tzinfo=UTC)),
        (datetime | date, b'"2030-01-01"', date(2030, 1, 1)),
        (Decimal, b"1.5", Decimal("1.5")),
        (timedelta, b'"-P1DT1H1M1.5S"', -timedelta(1, 3661.5)),
        (tuple, b"[1,null]", (1, None)),
        (set[Any], b"[1,1]", {1}),
        (Pair, b"[1]", Pair(1)),
        (Right, b"3", Right.READ | Right.WRITE),
        (dict[UUID | int, int], b'{"5":6}', {5: 6}),
    ]
    for kind, payload, value in cases:
        with naming(kind, payload, value):
            assert comparable(standard_codec(kind).decode(payload)) == comparable(value)


def test_without_a_library_the_reason_of_a_refusal_says_where_and_quotes_nothing() -> None:
    cases: list[Any] = [
        (UUID, b'"secret"', "it is not the text of a UUID"),
        (datetime, b"1", "it is int, not datetime"),
        (timedelta, b'"P1Y"', "it is not the text of a timedelta"),
        (timedelta, b'"P9999999999D"', "it is not the text of a timedelta"),
        (Colour, b'"secret"', "it is not one of the values of Colour"),
        (Literal["a"], b'"secret"', "it is not one of the values of typing.Literal['a']"),
        (dict[UUID, int], b'{"secret":1}', "a key: it is not the text of a UUID"),
        (tuple[int, str], b"[1]", "it has 1 items, not 2"),
        (Pair, b'[1,"a",2]', "it has 3 items, not 2"),
        (Pair, b'["secret"]', "first: it is str, not int"),
        (set[Any], b"[[]]", "unhashable type: 'list'"),
        (Basket, b"[]", "it is list, not an object of Basket"),
        (Basket, b'{"lines": []}', "id is missing"),
        (Basket, b'{"id": true, "lines": []}', "id: it is bool, not int"),
        (Basket, b'{"id": 1, "lines": {}}', "lines: it is dict, not list"),
        (Basket, b'{"id": 1, "lines": [{"item": 1}]}', "lines: item: it is int, not str"),
        (Basket, b'{"id": 1, "lines": [], "notes": {"a": 1}}', "notes: it is int, not str | None"),
        (Basket, b'{"id": 1, "lines": [], "parent": 1}', "parent: it is int, not "),
    ]
    for kind, payload, reason in cases:
        refuses(standard_codec(kind), payload, reason)
        if kind is Basket:
            refuses(codec_for(kind), payload, "")


def test_without_a_library_defaults_unknown_fields_and_whole_floats_are_fine() -> None:
    with pytest.raises(delayq.EncodeError):
        standard_codec(Basket).encode(Item("pen"))  # type: ignore[arg-type, unused-ignore]
    text = b'{"id": 1, "new": true, "lines": [{"item": "pen", "price": 2}]}'
    for codec in (standard_codec(Basket), codec_for(Basket)):
        assert codec.decode(text) == Basket(1, [Item("pen", 2.0)])


def test_a_field_that_json_codec_does_not_write_is_an_error_at_once() -> None:
    for kind in [bytes, complex, Sequence[int], list[bytes], dict[str, bytes]]:
        with naming(kind), pytest.raises(TypeError, match="JsonCodec does not write "):
            standard_codec(dataclasses.make_dataclass("Odd", [("field", kind)]))


DATACLASS = """
import dataclasses, datetime, delayq, pathlib, sys, uuid
from delayq.codecs import JsonCodec, codec_for

@dataclasses.dataclass
class Short:
    id: int

@dataclasses.dataclass
class Order:
    id: uuid.UUID
    either: "Short | Order | None"
    rest: tuple[datetime.timedelta, ...] = ()

@dataclasses.dataclass
class File:
    path: pathlib.Path

def loaded():
    return sorted({"msgspec", "pydantic"} & {*sys.modules})
"""
NEITHER = """
order = Order(uuid.uuid4(), Order(uuid.uuid4(), Short(1)), (datetime.timedelta(-2, 0, 5),))
for kind, value in (Order, order), (list[Order], [order]), (datetime.date, datetime.date(1, 2, 3)):
    assert codec_for(kind).decode(JsonCodec().encode(value)) == value, value
    assert codec_for(kind).decode(codec_for(kind).encode(value)) == value, value
try: codec_for(File)
except delayq.ConfigurationError as error: print(error)
"""
BOTH = """
delayq.Worker("redis://x"); codec_for(dict); print(loaded())
print(codec_for(Short).decode(b'{"id":2}'), loaded())
"""


def without(*modules: str, code: str) -> str:
    program = f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n{code}"
    return output_of("-c", program)


def test_neither_library_is_needed_and_only_one_is_loaded() -> None:
    assert without("msgspec", "pydantic", code=DATACLASS + NEITHER) == (
        "no codec knows the type Path, which is in File: try pip install 'delayq[msgspec]' or"
        " 'delayq[pydantic]', or pass a codec of your own (codec=...)"
    )
    assert without(code=DATACLASS + BOTH) == "[]\nShort(id=2) ['msgspec']"


@pytest.mark.gate
def test_a_dataclass_is_read_by_either_library() -> None:
    code = DATACLASS + "print(codec_for(Short).decode(b'{\"id\":2}'))"
    for library in ("msgspec", "pydantic"):
        assert without(library, code=code) == "Short(id=2)"
