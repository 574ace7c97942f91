"""Our codecs against Redisson's: each side reads and writes the other's bytes, and Java reads the
values that docs/codecs.md recommends for declared fields.
"""

from __future__ import annotations

import math
import os
import random
import re
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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
)
from tests.interop.conftest import built
from tests.interop.redisson import NEWEST_3, NEWEST_4, OLD, Release
from tests.support.depth import nightly
from tests.support.vectors import CODECS, DATA, check, parse

if TYPE_CHECKING:
    import delayq
    from tests.interop.redisson import Redisson


pytestmark = pytest.mark.java

SEED = 20_260_801
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
amounts = pytest.mark.parametrize("count", [300, nightly(3_000)])


@pytest.fixture(scope="session", params=[NEWEST_4, NEWEST_3, OLD], ids=str)
def java(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Return a function that runs a Java program: name, arguments and input in, lines out."""
    release: Release = request.param
    class_path = os.pathsep.join(map(str, built(release)))

    def run(program: str, *arguments: str, lines: list[str] | None = None) -> list[str]:
        result = subprocess.run(
            ["java", "-cp", class_path, f"delayq.interop.{program}", *arguments],
            input="\n".join(lines or []),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout.splitlines()

    run.__name__ = str(release)
    return run


def _text(rng: random.Random) -> str:
    odd = [*'é€😀𝄞\ud800\udc00\0\x1f"\\\u2028/\x7f\uffff\n\t']
    length = rng.choice([0, 1, 2, 5, 31, 32, 33, 62, 63, 64, 70])
    some = rng.random() < 0.5
    return "".join(
        rng.choice(odd) if some and rng.random() < 0.4 else rng.choice("xyzAB 0")
        for _ in range(length)
    )


def _key(rng: random.Random) -> str:
    # Jackson does not read a lone surrogate in a key, and we do not write it.
    return _text(rng).encode("utf-8", "ignore").decode()


def _double(rng: random.Random) -> float:
    # Before JDK 19, Java writes some doubles with more digits than needed. These have few digits,
    # so they are not affected.
    return rng.randrange(-(10**6), 10**6) / rng.choice([1, 2, 4, 8]) * 2.0 ** rng.randrange(-3, 8)


def _any_double(rng: random.Random) -> float:
    (value,) = struct.unpack("<d", rng.randbytes(8))
    special = (0.0, -0.0, 5e-324, 1e23, math.inf, -math.inf, math.nan, -math.nan)
    return float(rng.choice([value, value, *special]))


def _bits(rng: random.Random, most: int) -> int:
    size = rng.randrange(1, most)
    return rng.randrange(-(1 << size), 1 << size)


Makers = list[Callable[[random.Random], Any]]
SHARED: Makers = [
    lambda _: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: _bits(rng, 100),
    _double,
    _text,
    _text,
    lambda rng: JavaLong(_bits(rng, 63)),
    lambda rng: JavaBigInteger(_bits(rng, 200)),
    lambda rng: EPOCH + timedelta(milliseconds=rng.randrange(-(6 * 10**13), 2 * 10**14)),
    lambda rng: Decimal(_bits(rng, 100)).scaleb(rng.randrange(-20, 1)),
]
CLASSES: Makers = [
    *SHARED,
    lambda rng: JavaShort(_bits(rng, 15)),
    lambda rng: JavaByte(_bits(rng, 7)),
    lambda rng: JavaChar(chr(rng.randrange(0x10000))),
    lambda rng: rng.randbytes(rng.randrange(300)),
    lambda rng: UUID(bytes=rng.randbytes(16)),
]
FLAT: Makers = [
    *CLASSES,
    _any_double,
    lambda rng: Decimal(_bits(rng, 100)).scaleb(rng.randrange(-200, 200)),
    lambda rng: JavaFloat(struct.unpack("<f", rng.randbytes(4))[0]),
]
NESTED: Makers = [
    *CLASSES,
    lambda rng: JavaFloat(rng.randrange(-1000, 1000) / 8),
    lambda rng: rng.choice([math.inf, -math.inf, math.nan]),
]


def _tree(rng: random.Random, depth: int = 0) -> Any:
    if depth > 3 or (depth and rng.random() < 0.6):
        return rng.choice(NESTED)(rng)
    if not depth and rng.random() < 0.3:
        return rng.choice(SHARED)(rng)
    if rng.random() < 0.5:
        items = [_tree(rng, depth + 1) for _ in range(rng.randrange(5))]
        named = [JavaList(name, items) for name in ("java.util.LinkedList", "[Ljava.lang.Object;")]
        return rng.choice([items, items, *named])
    entries = {_key(rng): _tree(rng, depth + 1) for _ in range(rng.randrange(5))}
    return entries if rng.random() < 0.7 else JavaMap("java.util.LinkedHashMap", entries)


def _json(rng: random.Random, depth: int = 0) -> Any:
    if depth > 3 or rng.random() < 0.5:
        return rng.choice(SHARED[:-4])(rng)
    if rng.random() < 0.5:
        return [_json(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {_key(rng): _json(rng, depth + 1) for _ in range(rng.randrange(5))}


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "JsonJackson": _tree,
    "TypedJson": _json,
    "Kryo5": lambda rng: rng.choice(FLAT)(rng),
    # A lone surrogate cannot be encoded in UTF-8; Java writes a question mark.
    "String": _key,
    "Long": lambda rng: _bits(rng, 63),
    "Integer": lambda rng: _bits(rng, 31),
    "Bytes": lambda rng: rng.randbytes(rng.randrange(300)),
}


@amounts
def test_java_reads_our_values_and_writes_the_same_bytes(
    java: Callable[..., list[str]], count: int
) -> None:
    payloads = list[tuple[str, bytes]]()
    for name, make in VALUES.items():
        rng = random.Random(f"{SEED} {name}")
        payloads += [(name, CODECS[name].encode(make(rng))) for _ in range(count)]
    answers = java("Codecs", lines=[f"{name} {payload.hex()}" for name, payload in payloads])
    for (name, payload), answer in zip(payloads, answers, strict=True):
        assert not answer.startswith("!"), (name, payload, answer)
        again = bytes.fromhex(answer.rpartition(" ")[2])
        assert again == payload, (name, answer)
        assert CODECS[name].encode(CODECS[name].decode(payload)) == payload


@amounts
def test_python_reads_values_of_java_and_writes_the_same_bytes(
    java: Callable[..., list[str]], count: int
) -> None:
    """Java prints random scalars, each with its class and text."""
    vectors = parse(java("Vectors", str(SEED), str(count)))
    assert len(vectors) > 2 * count
    for vector in vectors:
        codec, payload, quoted = CODECS[vector.codec], vector.payload, vector.payload[:1] == b'"'
        if vector.kind == "UUID" and vector.codec == "JsonJackson" and quoted:
            # Before 4.2.0, Redisson wrote a UUID at the top level without its class.
            assert codec.decode(payload) == vector.told
            assert JsonJacksonCodec(uuid_with_class=False).encode(UUID(vector.told)) == payload
        elif vector.kind == "Double" and vector.codec != "Kryo5" and not quoted:
            # Before JDK 19, some doubles have more digits than we would write. They keep them.
            value = codec.decode(payload)
            assert value == float(vector.told)
            assert codec.encode(value) == payload
        else:
            check(vector)


def test_the_vectors_on_file_are_what_java_writes(java: Callable[..., list[str]]) -> None:
    on_file = [
        line
        for line in (DATA / "redisson_codec_vectors_more.txt").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    different = [
        ours for ours, theirs in zip(on_file, java("Vectors"), strict=True) if ours != theirs
    ]
    if java.__name__ == str(NEWEST_4):
        assert different == []
    else:
        assert {line.split(" | ")[1].split()[0] for line in different} <= {"UUID", "="}
        assert [line.split(" | ")[:2] for line in different if " | = " in line] == [
            ["JsonJackson", "= Pojo"],
            ["JsonJackson", "= list of Pojo"],
        ]


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
