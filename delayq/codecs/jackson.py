"""JSON as Redisson's two Jackson codecs write it."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import TYPE_CHECKING, Any

from delayq.codecs._jackson_places import Malformed, Place, Refused
from delayq.codecs._jackson_reader import Reader, real, refuse_constant
from delayq.codecs._jackson_writer import PlainWriter, TypedWriter
from delayq.codecs._reasons import reason_of
from delayq.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN_WRITER = PlainWriter()
_PLAIN_READER = json.JSONDecoder(parse_float=real, parse_constant=refuse_constant)


class TypedJsonJacksonCodec:
    """Plain JSON, in the very text of Redisson's ``TypedJsonJacksonCodec``, where Java knows the class to read.

    Writes None, bool, int, float, str, lists, tuples, dicts with str keys, dataclasses (fields by name), enums (by name),
    aware datetimes (milliseconds since the epoch), Decimal, UUID, bytes (base64), and the types of
    :mod:`delayq.codecs.java`. Like Redisson's mapper it leaves out entries and fields that are None. NaN and the infinities
    become strings.

    Reads plain JSON: what was a datetime, UUID or bytes comes back as the number or text that stands for it.
    """

    def encode(self, value: Any, /) -> bytes:
        """Turn ``value`` into JSON.

        Raises:
            EncodeError: It, or something in it, is of another type, or of more digits than Jackson reads.
        """
        return _encode(self, value, _PLAIN_WRITER)

    def decode(self, payload: bytes, /) -> Any:
        """Read JSON.

        Raises:
            DecodeError: It is none.
        """
        try:
            return _PLAIN_READER.decode(payload.decode())
        except (ValueError, RecursionError, Malformed) as error:
            reason = reason_of(error)
        raise DecodeError("TypedJsonJacksonCodec", payload) from reason


class JsonJacksonCodec:
    """JSON with type information, in the very text of Redisson's ``JsonJacksonCodec``.

    Writes what :class:`TypedJsonJacksonCodec` writes; a dataclass only if ``types`` names it, an enum in a list or dict
    likewise. Reads every payload that Redisson writes, and values come back as they went: a Date as an aware datetime, a
    BigDecimal as Decimal, a Long as :class:`~delayq.codecs.JavaLong`. A class that ``types`` does not name comes back as
    :class:`~delayq.codecs.JavaObject`, :class:`~delayq.codecs.JavaList`, :class:`~delayq.codecs.JavaMap` or
    :class:`~delayq.codecs.JavaValue`. No class is ever looked up by a name in a payload.

    Args:
        types: Dataclasses and enums by the Java class that they stand for: ``{"shop.Order": Order}``. A field that the
            dataclass lacks is ignored, as Redisson ignores it.
        list_class: The Java class of a plain list or tuple.
        map_class: The Java class of a plain dict.

    Raises:
        TypeError: ``types`` holds something else.
    """

    def __init__(
        self,
        types: Mapping[str, type[Any]] | None = None,
        *,
        list_class: str = "java.util.ArrayList",
        map_class: str = "java.util.LinkedHashMap",
    ) -> None:
        by_name = dict(types or {})
        for known in by_name.values():
            if not (isinstance(known, type) and (dataclasses.is_dataclass(known) or issubclass(known, Enum))):
                raise TypeError(f"types takes dataclasses and enums, not {known!r}")
        self._writer = TypedWriter({known: name for name, known in by_name.items()}, list_class, map_class)
        self._reader = Reader(by_name, list_class, map_class)

    def encode(self, value: Any, /) -> bytes:
        """Turn ``value`` into JSON with Java's classes.

        Raises:
            EncodeError: No Java class is known for it, or for something in it, or Jackson could not read it.
        """
        return _encode(self, value, self._writer)

    def decode(self, payload: bytes, /) -> Any:
        """Read JSON with Java's classes.

        Raises:
            DecodeError: It is none, or one of ``types`` does not take it.
        """
        try:
            return self._reader.read(payload)
        except (ValueError, RecursionError, Malformed) as error:
            reason = reason_of(error)
        raise DecodeError("JsonJacksonCodec", payload) from reason


def _encode(codec: object, value: Any, writer: PlainWriter) -> bytes:
    try:
        # Surrogates stand escaped, so this cannot fail.
        return writer.write(value, Place.ROOT).encode()
    except Refused as refused:
        reason = str(refused)
    except RecursionError:
        reason = "it is nested too deeply, or contains itself"
    raise EncodeError(f"{type(codec).__name__} cannot encode this {type(value).__name__}: {reason}")
