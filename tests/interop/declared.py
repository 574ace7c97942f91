"""The table of docs/codecs.md that tells what to write for a declared field: each line is tried with Java."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

from delayq.codecs import JavaBigInteger, JavaList, JavaLong, JavaMap, JavaObject, JavaValue, JsonJacksonCodec

_PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"
_HEADING = "### What to write for a declared field"
_CODE = re.compile(r"`([^`]+)`")
# What is in code after other words is an explanation.
_FIRST = re.compile(r" *(?:`[^`]+`(?:, )?)+")
_CLASS = "shop.Declared"


class Status(Enum):
    """``Status.java``: its constants have no bodies."""

    NEW = 1
    SENT = 2


class Step(Enum):
    """``Step.java``: its constants have bodies."""

    PACK = 1
    SEND = 2


@dataclass
class Item:
    """``Item.java``."""

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
    """One declaration of the table.

    Attributes:
        text: What Java declares.
        value: What to write for it.
        json: Its JSON.
        back: What comes back.
    """

    text: str
    value: Any
    json: str
    back: Any

    @property
    def payload(self) -> bytes:
        """The JSON of an object in which this field is set."""
        return f'{{"@class":"{_CLASS}","{field_of(self.text)}":{self.json}}}'.encode()


def codec(*, uuid_with_class: bool) -> JsonJacksonCodec:
    """The codec that the table speaks of."""
    return JsonJacksonCodec(_TYPES, enums_with_class=[Step], uuid_with_class=uuid_with_class)


def table(*, uuid_with_class: bool) -> list[Declared]:
    """The declarations, without those of the other kind of UUID."""
    lines = _PAGE.read_text("utf-8").partition(_HEADING)[2].partition("\n| declared")[2].partition("\n\n")[0].splitlines()[2:]
    found: list[Declared] = []
    for line in lines:
        declared, *rest = line.strip("|").split(" | ")
        if declared.strip().startswith("`UUID`") and ("before" in declared) is uuid_with_class:
            continue
        value, json, back = (code[0] if (code := _CODE.findall(cell)) else "" for cell in rest)
        texts = _CODE.findall(_FIRST.match(declared)[0])  # type: ignore[index]
        made = eval(value, dict(_NAMES))  # our own page
        found += [Declared(text, made, json, eval(back, dict(_NAMES)) if back else made) for text in texts]
    return found


def mistakes(*, uuid_with_class: bool) -> list[tuple[str, Any]]:
    """What one might write instead: a declaration and a value with which Java loses the element."""
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
    """The field of ``Declared.java`` for a declaration."""
    return f"f_{re.sub(r'[^A-Za-z0-9]', '_', declared)}"


def declared_object(declared: str, value: Any) -> JavaObject:
    """A ``Declared`` in which one field is set."""
    return JavaObject(_CLASS, {field_of(declared): value})
