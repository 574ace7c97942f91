"""Java reads the values that docs/codecs.md recommends for declared fields, and writes the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from delayq.codecs import (
    BytesCodec,
    JavaBigInteger,
    JavaList,
    JavaLong,
    JavaMap,
    JavaObject,
    JavaValue,
    JsonJacksonCodec,
)

if TYPE_CHECKING:
    import delayq
    from tests.interop.redisson import Redisson

pytestmark = pytest.mark.java

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"
HEADING = "### What to write for a declared field"
CODE = re.compile(r"`([^`]+)`")
# Code that follows other words is an explanation.
FIRST = re.compile(r" *(?:`[^`]+`(?:, )?)+")
CLASS = "shop.Declared"


class Status(Enum):
    """As ``Status.java``, whose constants have no bodies."""

    NEW = 1
    SENT = 2


class Step(Enum):
    """As ``Step.java``, whose constants have bodies."""

    PACK = 1
    SEND = 2


@dataclass
class Item:
    count: int
    name: str


TYPES: dict[str, type[Any]] = {"shop.Status": Status, "shop.Step": Step, "shop.Item": Item}
NAMES: dict[str, Any] = {
    **{known.__name__: known for known in (Status, Step, Item, UUID, Decimal, datetime)},
    **{known.__name__: known for known in (JavaBigInteger, JavaList, JavaLong, JavaMap, JavaValue)},
    "UTC": UTC,
}


@dataclass(frozen=True)
class Declared:
    """A declaration in Java, the value to write for it, its JSON, and the value that comes back."""

    text: str
    value: Any
    json: str
    back: Any

    @property
    def payload(self) -> bytes:
        """The JSON of an object in which this field is set."""
        return f'{{"@class":"{CLASS}","{field_of(self.text)}":{self.json}}}'.encode()


def table(*, uuid_with_class: bool) -> list[Declared]:
    """Return the declarations, without those for the other form of UUIDs."""
    lines = (
        PAGE.read_text("utf-8")
        .partition(HEADING)[2]
        .partition("\n| declared")[2]
        .partition("\n\n")[0]
        .splitlines()[2:]
    )
    found: list[Declared] = []
    for line in lines:
        declared, *rest = line.strip("|").split(" | ")
        if declared.strip().startswith("`UUID`") and ("before" in declared) is uuid_with_class:
            continue
        value, json, back = (code[0] if (code := CODE.findall(cell)) else "" for cell in rest)
        texts = CODE.findall(FIRST.match(declared)[0])  # type: ignore[index]
        made = eval(value, dict(NAMES))  # from our own page
        found += [
            Declared(text, made, json, eval(back, dict(NAMES)) if back else made) for text in texts
        ]
    return found


def mistakes(*, uuid_with_class: bool) -> list[tuple[str, Any]]:
    """Return plausible mistakes: declarations with values for which Java loses the element."""
    uuid = UUID(int=5)
    return [
        ("int", JavaLong(5)),
        ("int", 2**31),
        ("Long", 5),
        ("BigInteger", 5),
        ("BigDecimal", 1.5),
        ("UUID", str(uuid) if uuid_with_class else JavaValue("java.util.UUID", str(uuid))),
        ("String[]", ["a", "b"]),
        ("Set<String>", ["a"]),
        ("LinkedHashSet<String>", ["a"]),
        ("TreeMap<String, Integer>", {"a": 5}),
        ("Map<String, Long>", {"a": 5}),
        ("List<Status>", [Status.SENT]),
        ("Status", JavaValue("shop.Status", "SENT")),
        ("Step", "SEND"),
    ]


def field_of(declared: str) -> str:
    """Return the name of the field in ``Declared.java`` for a declaration."""
    return f"f_{re.sub(r'[^A-Za-z0-9]', '_', declared)}"


def declared_object(declared: str, value: Any) -> JavaObject:
    """Return a ``Declared`` in which one field is set."""
    return JavaObject(CLASS, {field_of(declared): value})


async def test_java_reads_each_line_of_the_table_and_loses_what_has_another_form(
    client: delayq.Client, redisson: Redisson, name: str
) -> None:
    with_class = redisson.release.writes_uuids_with_class
    codec = JsonJacksonCodec(TYPES, enums_with_class=[Step], uuid_with_class=with_class)
    lines, wrong = table(uuid_with_class=with_class), mistakes(uuid_with_class=with_class)
    assert len(lines) > 60
    right = [declared_object(line.text, line.value) for line in lines]
    payloads = [line.payload for line in lines]
    assert [codec.encode(value) for value in right] == payloads

    java = await redisson.open(name, "JsonJacksonCodec", attached=False)
    await redisson.open(f"{name}-back", "JsonJacksonCodec", attached=False)
    queue = client.delayed_queue(name, codec=codec)
    await queue.offer_many([(value, 0) for value in [*right, *starmap(declared_object, wrong)]])
    errors = await java.ask("ready.pass", other=f"{name}-back", count=len(right + wrong))
    assert errors[: len(right)] == [None] * len(right)
    errors = errors[len(right) :]
    assert [text for (text, _), error in zip(wrong, errors, strict=True) if error is None] == []

    assert await client.delayed_queue(f"{name}-back", codec=BytesCodec()).drain() == payloads
    values = [codec.decode(line.payload)[field_of(line.text)] for line in lines]
    assert values == [line.back for line in lines]
    assert list(map(type, values)) == [type(line.back) for line in lines]
