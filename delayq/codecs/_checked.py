"""Turns values into those that JSON has, and refuses those that a worker would not read as they
were by their own type.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from delayq.codecs import _plain
from delayq.codecs._libraries import FAILURES, LibraryCodec, library_codec
from delayq.codecs._plain import Unencodable, encode_json
from delayq.codecs._shapes import Shape, shape_of
from delayq.errors import ConfigurationError

_CERTAIN = Shape()


def plain(value: Any, /) -> Any:
    """Return what :func:`delayq.codecs._plain.plain` does, or raise TypeError if the value would
    not come back as it was.
    """
    _check(value, "value")
    return _plain.plain(value)


def to_plain(value: Any, /) -> Any:
    """Do the same for :func:`delayq.codecs._plain.to_plain`."""
    return _plain.to_plain(value, _check)


def _check(value: Any, path: str) -> None:
    kind: Any = type(value)
    if _shape_of_class(kind).decides() or (codec := _codec(kind)) is None:
        return
    try:
        if codec.flaw(value, codec.write(value)) is None:
            return
    except FAILURES:
        # It has parts that the library does not write.
        pass
    # Of a dataclass, JsonCodec writes some parts otherwise.
    if reason := codec.flaw(value, encode_json(_plain.to_plain(value)).encode()):
        # It begins with "value".
        raise Unencodable(path + reason[5:])


@lru_cache(maxsize=1024)
def _shape_of_class(kind: Any) -> Shape:
    """Return the shape of a class whose instances are turned into plain values as a whole."""
    if not _plain.is_record(kind):
        return _CERTAIN
    shape = shape_of(kind)
    if not hasattr(kind, "__dataclass_fields__"):
        # A library writes the texts of these itself.
        shape.is_certain &= not (shape.has_decimals or shape.has_moments)
    return shape


@lru_cache(maxsize=1024)
def _codec(kind: Any) -> LibraryCodec | None:
    """Return the codec by which a worker reads a class."""
    try:
        return library_codec(kind)
    except ConfigurationError:
        # No worker reads the class, only what it is written as.
        return None
