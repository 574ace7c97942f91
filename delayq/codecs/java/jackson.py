"""JSON as Redisson's two Jackson codecs write it."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import TYPE_CHECKING, Any

from delayq.codecs.java._jackson_reader import Reader, real, refuse_constant
from delayq.codecs.java._jackson_writer import Rules, Site, Writer
from delayq.codecs.protocol import Malformed, Refused, reason_of
from delayq.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PLAIN_WRITER = Writer(None, None, None, Rules())
_PLAIN_READER = json.JSONDecoder(parse_float=real, parse_constant=refuse_constant)


class TypedJsonJacksonCodec:
    """Plain JSON, exactly as Redisson's ``TypedJsonJacksonCodec`` writes it, for use where Java
    knows the class to read.

    Writes None, bool, int, float, str, lists, tuples, dicts with str keys, dataclasses (fields by
    name), enums (by name), aware datetimes (milliseconds since the epoch), Decimal, UUID, bytes
    (base64), and the types of :mod:`delayq.codecs.java.types`. Like Redisson's mapper, it leaves
    out entries and fields that are None. NaN and the infinities become strings.

    Reads plain JSON: a datetime, UUID or bytes comes back as the number or text that stands for it.
    """

    def encode(self, value: Any, /) -> bytes:
        """Encode ``value``, or raise EncodeError: another type, or too many digits for Jackson."""
        return _encode(self, value, _PLAIN_WRITER)

    def decode(self, payload: bytes, /) -> Any:
        """Decode JSON, or raise DecodeError."""
        try:
            return _PLAIN_READER.decode(payload.decode())
        except (ValueError, RecursionError, Malformed) as error:
            reason = reason_of(error)
        raise DecodeError("TypedJsonJacksonCodec", payload, str(reason)) from reason


class JsonJacksonCodec:
    """JSON with type information, exactly as Redisson's ``JsonJacksonCodec`` writes it.

    Writes the values that :class:`TypedJsonJacksonCodec` writes, but a dataclass only if ``types``
    names it, and likewise an enum in a list or dict. Reads every payload that Redisson writes, and
    values come back as they were: a Date as an aware datetime, a BigDecimal as Decimal, a Long as
    :class:`~delayq.codecs.JavaLong`. A class that ``types`` does not name comes back as
    :class:`~delayq.codecs.JavaObject`, :class:`~delayq.codecs.JavaList`,
    :class:`~delayq.codecs.JavaMap` or :class:`~delayq.codecs.JavaValue`. No class is ever looked up
    by a name in a payload.

    In a field, Java writes an enum as its name if the field is declared with the enum's class and
    its constants have no bodies. Otherwise it writes ``[class, name]``, and it reads only the form
    that it would write. Both forms become the enum if a dataclass declares the field as one, and
    the second form also if ``types`` names the enum. Once this codec has read the second form in a
    field of a dataclass, it writes the field in that form. If your producer reads nothing, name
    such enums in ``enums_with_class``, or put a :class:`~delayq.codecs.JavaValue` into the field.

    Args:
        types: Dataclasses and enums, by the Java class that they stand for: ``{"shop.Order":
            Order}``. A field that the dataclass lacks is ignored, as Redisson ignores it.
        list_class: The Java class of a plain list or tuple.
        map_class: The Java class of a plain dict.
        enums_with_class: Enums of ``types`` that Java writes with their class in every field: those
            whose constants have bodies.
        uuid_with_class: Whether a UUID carries its class everywhere, as Redisson 4.2.0 and later
            write it and read it. False for earlier versions of Redisson, where a UUID that stands
            alone or in a field declared as one is plain text.

    Raises:
        TypeError: ``types`` or ``enums_with_class`` contains something else, or ``uuid_with_class``
            is not a bool.
    """

    def __init__(
        self,
        types: Mapping[str, type[Any]] | None = None,
        *,
        list_class: str = "java.util.ArrayList",
        map_class: str = "java.util.LinkedHashMap",
        enums_with_class: Iterable[type[Enum]] = (),
        uuid_with_class: bool = True,
    ) -> None:
        by_name = dict(types or {})
        for kind in by_name.values():
            if not (
                isinstance(kind, type)
                and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))
            ):
                raise TypeError(f"types must be dataclasses and enums, not {kind!r}")
        if not isinstance(uuid_with_class, bool):
            raise TypeError(f"uuid_with_class must be True or False, not {uuid_with_class!r}")
        rules = Rules(frozenset(enums_with_class), uuid_with_class)
        names = {kind: name for name, kind in by_name.items()}
        for enum in rules.enums_with_class:
            if not (isinstance(enum, type) and issubclass(enum, Enum) and enum in names):
                raise TypeError(f"enums_with_class must be enums that types names, not {enum!r}")
        self._writer = Writer(names, list_class, map_class, rules)
        self._reader = Reader(by_name, list_class, map_class, rules)

    def encode(self, value: Any, /) -> bytes:
        """Encode ``value``, or raise EncodeError: its Java class is unknown, or unreadable."""
        return _encode(self, value, self._writer)

    def decode(self, payload: bytes, /) -> Any:
        """Decode JSON, or raise DecodeError, also if one of ``types`` does not accept it."""
        try:
            return self._reader.read(payload)
        except (ValueError, RecursionError, Malformed) as error:
            reason = reason_of(error)
        raise DecodeError("JsonJacksonCodec", payload, str(reason)) from reason


def _encode(codec: object, value: Any, writer: Writer) -> bytes:
    try:
        # Surrogates are escaped, so this cannot fail.
        return writer.write(value, Site.ROOT).encode()
    except Refused as refused:
        reason = str(refused)
    except RecursionError:
        reason = "it is nested too deeply, or contains itself"
    raise EncodeError(f"{type(codec).__name__} cannot encode this {type(value).__name__}: {reason}")
