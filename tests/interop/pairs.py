"""Which codec of delayq speaks with which of Redisson, and the values with which the tests prove it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq import codecs
from tests.interop import report

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Pair:
    """A codec on both sides.

    Attributes:
        codec: Ours.
        java: The simple name of Redisson's.
        value: Makes the n-th of any number of different values.
        to_json: Writes a value into a request to Java.
        from_json: Reads one from Java's answer.
    """

    codec: codecs.Codec[Any]
    java: str
    value: Callable[[int], Any]
    to_json: Callable[[Any], Any] = lambda value: value
    from_json: Callable[[Any], Any] = lambda value: value

    def __str__(self) -> str:
        return f"{type(self.codec).__name__}-{self.java}"


def _text(n: int) -> str:
    # One, two, three and four bytes of UTF-8, a quote and a control character; and of different lengths.
    return f'{n} é€😀 "\\\n{"x" * (n % 70)}'


def _long(n: int) -> int:
    # Negative ones too, and ones that no double holds.
    return (n - 5000) * 1_000_000_007_001


def _scalar(n: int) -> Any:
    return (_text(n), n - 5000, _long(n), n + 0.5)[n % 4]


def _object(n: int) -> Any:
    # Without None: Redisson's mapper leaves out a map's entries that are null, so they cannot come back.
    return {"id": n, "text": _text(n), "lines": [{"price": n + 0.5, "paid": n % 2 == 0}]}


def _plain_object(n: int) -> Any:
    # Within Unicode's first plane: beyond it Jackson writes escapes, which JsonCodec reads and does not write.
    return {"id": n, "name": f'é€ "\\\n{n}'}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


_TABLE: tuple[tuple[Any, ...], ...] = (
    ("StringCodec", "StringCodec", _text),
    ("LongCodec", "LongCodec", _long),
    ("IntegerCodec", "IntegerCodec", lambda n: n - 5000),
    ("BytesCodec", "ByteArrayCodec", lambda n: n.to_bytes(2) + bytes(range(n % 256)), _base64, base64.b64decode),
    ("JsonCodec", "TypedJsonJacksonCodec", _plain_object),
    ("TypedJsonJacksonCodec", "TypedJsonJacksonCodec", _object),
    ("JsonJacksonCodec", "JsonJacksonCodec", _object),
    ("Kryo5Codec", "Kryo5Codec", _scalar),
)


def _pairs() -> list[Pair]:
    pairs = []
    for ours, *rest in _TABLE:
        codec = getattr(codecs, ours, None)
        if codec is None:
            report.NOT_RUN.add(f"delayq.codecs has no {ours}")
        else:
            pairs.append(Pair(codec(), *rest))
    return pairs


PAIRS = _pairs()
TEXT = PAIRS[0]
