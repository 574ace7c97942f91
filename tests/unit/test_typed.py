"""codec_for: the JSON for each Python type, and values that do not match their type."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import pydantic
import pytest
from pydantic import dataclasses as pydantic_dataclasses
from typing_extensions import TypedDict

import delayq
from delayq.codecs import BytesCodec, JsonCodec, codec_for
from delayq.codecs.typed import StandardCodec


class Model(pydantic.BaseModel):
    id: int
    amount: float = 0.0
    made_by: str = pydantic.Field("ada", alias="madeBy")


class Struct(msgspec.Struct):
    id: int
    tags: list[str] = []


@dataclasses.dataclass
class Order:
    id: int
    at: datetime | None = None


@pydantic_dataclasses.dataclass
class Checked:
    id: int

    @pydantic.field_validator("id")
    @classmethod
    def positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError("must not be negative")
        return value


class Row(TypedDict):
    id: int


ROUND_TRIPS: list[tuple[Any, Any, bytes]] = [
    (dict, {"a": 1}, b'{"a":1}'),
    (dict[str, Any], {"a": 1}, b'{"a":1}'),
    (list, [1, "a"], b'[1,"a"]'),
    (list[Any], [1], b"[1]"),
    (str, "é", '"é"'.encode()),
    (int, 7, b"7"),
    (float, 1.5, b"1.5"),
    (bool, True, b"true"),
    (None, None, b"null"),
    (Any, {"a": None}, b'{"a":null}'),
    (object, 1, b"1"),
    (bytes, b"\x00\xff", b"\x00\xff"),
    (list[int], [1, 2], b"[1,2]"),
    (int | None, None, b"null"),
    (Literal["a", "b"], "b", b'"b"'),
    (Model, Model(id=1, madeBy="bob"), b'{"id":1,"amount":0.0,"madeBy":"bob"}'),
    (list[Model], [Model(id=1, madeBy="bob")], b'[{"id":1,"amount":0.0,"madeBy":"bob"}]'),
    (Struct, Struct(1, ["a"]), b'{"id":1,"tags":["a"]}'),
    (Order, Order(1, datetime(2030, 1, 1, tzinfo=UTC)), b'{"id":1,"at":"2030-01-01T00:00:00Z"}'),
    (dict[str, Order], {"a": Order(1)}, b'{"a":{"id":1,"at":null}}'),
    (Checked, Checked(1), b'{"id":1}'),
    (Row, {"id": 1}, b'{"id":1}'),
]


@pytest.mark.parametrize(
    ("kind", "value", "wire"), ROUND_TRIPS, ids=[str(kind) for kind, _, _ in ROUND_TRIPS]
)
def test_a_value_is_json_on_the_wire_and_the_same_again_behind_it(
    kind: Any, value: Any, wire: bytes
) -> None:
    codec = codec_for(kind)
    assert codec.encode(value) == wire
    back = codec.decode(wire)
    assert back == value
    assert type(back) is type(value)


MISFITS: list[tuple[Any, bytes, str]] = [
    (dict, b"[]", "list, not dict"),
    (int, b"true", "bool, not int"),
    (int, b"1.5", "float, not int"),
    (str, b"1", "int, not str"),
    (bool, b"1", "int, not bool"),
    (list[int], b'["a"]', "$[0]"),
    (Model, b'{"id":"x"}', "id: Input should be a valid integer"),
    (Model, b"{}", "id: Field required"),
    (Struct, b'{"id":"x"}', "$.id"),
    (Order, b'{"id":null}', "$.id"),
    (Checked, b'{"id":-1}', "must not be negative"),
    (list[Checked], b'[{"id":-1}]', "must not be negative"),
    (Row, b"{}", "id"),
]


@pytest.mark.parametrize(
    ("kind", "wire", "why"), MISFITS, ids=[f"{kind} {wire!r}" for kind, wire, _ in MISFITS]
)
def test_what_is_not_of_the_type_is_refused_and_the_cause_says_why(
    kind: Any, wire: bytes, why: str
) -> None:
    with pytest.raises(delayq.DecodeError) as caught:
        codec_for(kind).decode(wire)
    assert why in str(caught.value.__cause__)


@pytest.mark.parametrize("kind", [dict, list[int], Model, Struct, Order])
def test_what_is_no_json_is_refused(kind: Any) -> None:
    with pytest.raises(delayq.DecodeError):
        codec_for(kind).decode(b"{")


def test_the_reason_quotes_no_value() -> None:
    for kind in (Model, Order, Struct, int):
        with pytest.raises(delayq.DecodeError) as caught:
            codec_for(kind).decode(b'{                  "id":"secret"}')
        assert "secret" not in f"{caught.value}{caught.value.__cause__}"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, "1"),
        (int, True),
        (dict, []),
        (Model, {"id": 1}),
        (Struct, {"id": 1}),
        (Order, {"id": 1}),
        (Row, 1),
        (list[Model], [1]),
    ],
)
def test_a_producer_cannot_offer_another_type(kind: Any, value: Any) -> None:
    with pytest.raises(delayq.EncodeError):
        codec_for(kind).encode(value)


def test_what_needs_no_checking_has_the_plain_codecs() -> None:
    assert isinstance(codec_for(Any), JsonCodec)
    assert isinstance(codec_for(bytes), BytesCodec)


def test_a_type_that_nobody_knows_is_an_error_that_names_it() -> None:
    class Odd:
        pass

    with pytest.raises(delayq.ConfigurationError, match=r"Odd.*msgspec: .*pydantic: "):
        codec_for(Odd)


def without(*modules: str, code: str) -> str:
    program = f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n{code}"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


DATACLASS = """
import dataclasses, delayq
@dataclasses.dataclass
class Order: id: int
try: codec = delayq.codecs.codec_for(Order)
except delayq.ConfigurationError as error: print(error)
else:
    loaded = sorted({"msgspec", "pydantic"} & set(sys.modules))
    print(codec.encode(Order(1)).decode(), codec.decode(b'{"id":2}'), loaded)
"""


def test_a_dataclass_is_read_by_whichever_library_is_there_or_by_none() -> None:
    assert (
        without("msgspec", "pydantic", code=DATACLASS)
        == """{"id":1} Order(id=2) ['msgspec', 'pydantic']"""
    )
    assert without("msgspec", code=DATACLASS) == """{"id":1} Order(id=2) ['msgspec', 'pydantic']"""
    assert without("pydantic", code=DATACLASS) == """{"id":1} Order(id=2) ['msgspec', 'pydantic']"""
    # If both libraries are installed, only one is loaded.
    assert without(code=DATACLASS) == """{"id":1} Order(id=2) ['msgspec']"""


def test_a_dataclass_with_more_than_json_codec_writes_needs_one_of_two_libraries() -> None:
    code = "import pathlib\n" + DATACLASS.replace("id: int", "path: pathlib.Path")
    assert without("msgspec", "pydantic", code=code) == (
        "no codec for Order: pip install 'delayq[msgspec]'; or pip install 'delayq[pydantic]'; "
        "or json: JsonCodec does not write Path"
    )


@dataclasses.dataclass
class Line:
    item: str
    price: float = 0.0


@dataclasses.dataclass
class Basket:
    id: int
    lines: list[Line]
    notes: dict[str, str | None] = dataclasses.field(default_factory=dict)
    parent: Basket | None = None
    total: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.total = sum(line.price for line in self.lines)


BASKET = Basket(1, [Line("pen", 2.5), Line("ink")], {"a": None}, Basket(2, []))


class TestWithoutALibrary:
    codec = StandardCodec(Basket)

    def test_what_is_written_is_read(self) -> None:
        written = self.codec.encode(BASKET)
        assert self.codec.decode(written) == BASKET
        assert json.loads(written) == dataclasses.asdict(BASKET)
        assert codec_for(Basket).decode(written) == BASKET

    def test_defaults_and_unknown_fields_and_whole_floats_are_fine(self) -> None:
        text = b'{"id": 1, "new": true, "lines": [{"item": "pen", "price": 2}]}'
        assert (
            self.codec.decode(text)
            == codec_for(Basket).decode(text)
            == Basket(1, [Line("pen", 2.0)])
        )

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (b"[]", "it is list, not an object of Basket"),
            (b'{"lines": []}', "id is missing"),
            (b'{"id": true, "lines": []}', "id: it is bool, not int"),
            (b'{"id": 1, "lines": {}}', "lines: it is dict, not list"),
            (b'{"id": 1, "lines": [{"item": 1}]}', "lines: item: it is int, not str"),
            (b'{"id": 1, "lines": [], "notes": {"a": 1}}', "notes: it is int, not str | None"),
            (b'{"id": 1, "lines": [], "parent": 1}', "parent: it is int, not "),
        ],
    )
    def test_what_does_not_fit_is_told_where_and_without_the_value(
        self, text: bytes, why: str
    ) -> None:
        with pytest.raises(delayq.DecodeError) as caught:
            self.codec.decode(text)
        assert str(caught.value.__cause__).startswith(why)
        with pytest.raises(delayq.DecodeError):
            codec_for(Basket).decode(text)

    def test_another_value_is_not_written(self) -> None:
        with pytest.raises(delayq.EncodeError):
            self.codec.encode(Line("pen"))  # type: ignore[arg-type, unused-ignore]

    @pytest.mark.parametrize("kind", [bytes, complex, Sequence[int], list[bytes], dict[str, bytes]])
    def test_a_field_that_json_codec_does_not_write_is_an_error_at_once(self, kind: Any) -> None:
        with pytest.raises(TypeError, match="JsonCodec does not write "):
            StandardCodec(dataclasses.make_dataclass("Odd", [("field", kind)]))


def test_plain_types_and_a_worker_load_neither() -> None:
    code = "import delayq; delayq.Worker('redis://x'); delayq.codecs.codec_for(dict)"
    code += "; print(sorted({'msgspec', 'pydantic'} & set(sys.modules)))"
    assert without(code=code) == "[]"
