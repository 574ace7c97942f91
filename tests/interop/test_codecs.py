"""Our codecs against Redisson's: each side reads and writes the other's bytes."""

from __future__ import annotations

import math
import os
import random
import struct
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from delayq.codecs import (
    JavaBigInteger,
    JavaByte,
    JavaChar,
    JavaFloat,
    JavaList,
    JavaLong,
    JavaMap,
    JavaShort,
    JsonJacksonCodec,
)
from tests.interop.conftest import built
from tests.interop.redisson import NEWEST_3, NEWEST_4, OLD, Release
from tests.support.depth import nightly
from tests.support.vectors import CODECS, DATA, check, parse

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
