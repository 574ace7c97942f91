"""Try each line of the table for declared fields in docs/codecs.md with Java."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

from delayq.codecs import (
    JavaBigInteger,
    JavaList,
    JavaLong,
    JavaMap,
    JavaObject,
    JavaValue,
    JsonJacksonCodec,
)

_PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"
_HEADING = "### What to write for a declared field"
_CODE = re.compile(r"`([^`]+)`")
# Code that follows other words is an explanation.
_FIRST = re.compile(r" *(?:`[^`]+`(?:, )?)+")
_CLASS = "shop.Declared"


class Status(Enum):
    """The Python side of ``Status.java``, whose constants have no bodies."""

    NEW = 1
    SENT = 2


class Step(Enum):
    """The Python side of ``Step.java``, whose constants have bodies."""

    PACK = 1
    SEND = 2


@dataclass
class Item:
    """The Python side of ``Item.java``."""

    count: int
    name: str


_TYPES: dict[str, type[Any]] = {"shop.Status": Status, "shop.Step": Step, "shop.Item": Item}
_NAMES: dict[str, Any] = {
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
        return f'{{"@class":"{_CLASS}","{field_of(self.text)}":{self.json}}}'.encode()


def codec(*, uuid_with_class: bool) -> JsonJacksonCodec:
    """Return the codec to which the table applies."""
    return JsonJacksonCodec(_TYPES, enums_with_class=[Step], uuid_with_class=uuid_with_class)


def table(*, uuid_with_class: bool) -> list[Declared]:
    """Return the declarations, without those for the other form of UUIDs."""
    lines = (
        _PAGE.read_text("utf-8")
        .partition(_HEADING)[2]
        .partition("\n| declared")[2]
        .partition("\n\n")[0]
        .splitlines()[2:]
    )
    found: list[Declared] = []
    for line in lines:
        declared, *rest = line.strip("|").split(" | ")
        if declared.strip().startswith("`UUID`") and ("before" in declared) is uuid_with_class:
            continue
        value, json, back = (code[0] if (code := _CODE.findall(cell)) else "" for cell in rest)
        texts = _CODE.findall(_FIRST.match(declared)[0])  # type: ignore[index]
        made = eval(value, dict(_NAMES))  # from our own page
        found += [
            Declared(text, made, json, eval(back, dict(_NAMES)) if back else made) for text in texts
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
    return JavaObject(_CLASS, {field_of(declared): value})
