"""Turns values into JSON as Redisson's mapper does, by the rules in ``_jackson_places``."""

from __future__ import annotations

import base64
import dataclasses
import math
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from delayq.codecs._reasons import Refused
from delayq.codecs.java import _jackson_text as text
from delayq.codecs.java._jackson_places import Place, Rules, inside
from delayq.codecs.java._limits import fits, is_char, to_ms, utf16_order
from delayq.codecs.java.types import (
    JavaByte,
    JavaChar,
    JavaDouble,
    JavaFloat,
    JavaInt,
    JavaList,
    JavaMap,
    JavaObject,
    JavaShort,
    JavaValue,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Method = Callable[[Any, Any, Place], str]


class Writer:
    """Writes JSON for the arguments of the codec; without type information if names is None."""

    def __init__(
        self,
        names: dict[type[Any], str] | None,
        list_class: str | None,
        map_class: str | None,
        rules: Rules,
    ) -> None:
        self._typed = names is not None
        self._names = names or {}
        self._list_class = list_class
        self._map_class = map_class
        self._rules = rules

    def write(self, value: Any, place: Place) -> str:
        """Return the JSON of a value, or raise ``Refused`` or ``RecursionError``."""
        method = _METHODS.get(type(value)) or self.method_of(value)
        return method(self, value, place)

    def method_of(self, value: Any) -> Method:
        """Return the method for a class that ``_METHODS`` does not name, or raise ``Refused``."""
        # Written as Java's enum, whatever else the Python one is: a StrEnum would go out as its
        # text otherwise.
        if isinstance(value, Enum) and type(value) in self._names:
            return Writer.enum
        for known, method in _METHODS.items():
            if isinstance(value, known):
                return method
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return Writer.dataclass
        hint = (
            " (its order is undefined: use JavaList)" if isinstance(value, set | frozenset) else ""
        )
        raise Refused(f"no Java type is known for {type(value).__name__}{hint}")

    def wrapped(self, class_name: str | None, body: str) -> str:
        """Return ``body``, with its class if Jackson writes one."""
        if class_name is None or not self._typed:
            return body
        return f"[{text.quote(class_name)},{body}]"

    def wrapped_inside(self, class_name: str, body: str, place: Place) -> str:
        """Do the same for a final class, which Jackson leaves out if the value stands alone."""
        return body if place is Place.ROOT else self.wrapped(class_name, body)

    def name_of(self, known: type[Any]) -> str | None:
        """Return the Java class that a Python class stands for, if it is written."""
        if not self._typed:
            return None
        if known not in self._names:
            raise Refused(f"the codec's types do not name a Java class for {known.__name__}")
        return self._names[known]

    def number(self, value: int, place: Place) -> str:
        digits = text.whole(value)
        if digits is None:
            raise Refused(f"an int has more than {text.LONGEST_NUMBER} digits")
        if fits(value, 32) or (place in {Place.BARE, Place.FIELD} and fits(value, 64)):
            return digits
        return self.wrapped("java.lang.Long" if fits(value, 64) else "java.math.BigInteger", digits)

    def java_number(self, value: JavaInt, place: Place) -> str:
        digits = text.whole(value)
        if digits is None or not fits(value, value.bits):
            raise Refused(f"a {type(value).__name__} is out of range")
        if isinstance(value, JavaShort | JavaByte):
            return self.wrapped_inside(value.class_name, digits, place)
        return self.wrapped(value.class_name, digits)

    def real(self, value: float, place: Place) -> str:
        if math.isfinite(value) or place is Place.FIELD:
            return text.double(value)
        # Without its class, it would be read as a string
        # (NumberSerializers.DoubleSerializer.serializeWithType).
        return self.wrapped_inside("java.lang.Double", text.double(value), place)

    def java_double(self, value: JavaDouble, place: Place) -> str:
        return value.text or self.real(value, place)

    def java_float(self, value: JavaFloat, place: Place) -> str:
        try:
            return self.wrapped_inside("java.lang.Float", value.text or text.single(value), place)
        except OverflowError:
            raise Refused("a JavaFloat is too large for 32 bits") from None

    def char(self, value: JavaChar, place: Place) -> str:
        if not is_char(value):
            raise Refused("a JavaChar is not one UTF-16 unit")
        return self.wrapped_inside("java.lang.Character", text.quote(value), place)

    def blob(self, value: bytes | bytearray, place: Place) -> str:
        body = f'"{base64.b64encode(value).decode()}"'
        return body if place is Place.FIELD else self.wrapped_inside("[B", body, place)

    def moment(self, value: datetime, _place: Place) -> str:
        if value.utcoffset() is None:
            raise Refused("a datetime has no timezone")
        return self.wrapped("java.util.Date", str(to_ms(value)))

    def decimal(self, value: Decimal, _place: Place) -> str:
        if (written := text.decimal(value)) is None:
            raise Refused(
                f"a Decimal is not finite, or has more than {text.LONGEST_NUMBER} characters when"
                " written out"
            )
        return self.wrapped("java.math.BigDecimal", written)

    def uuid(self, value: UUID, place: Place) -> str:
        body = f'"{value}"'
        return self.wrapped("java.util.UUID", body) if self._rules.uuid_has_class(place) else body

    def array(self, value: list[Any] | tuple[Any, ...], _place: Place) -> str:
        return self.elements(self._list_class, value)

    def java_list(self, value: JavaList, _place: Place) -> str:
        return self.elements(value.class_name, value)

    def elements(self, class_name: str | None, items: Iterable[Any]) -> str:
        place = inside(class_name)
        return self.wrapped(
            class_name, f"[{','.join([self.write(item, place) for item in items])}]"
        )

    def mapping(self, value: dict[Any, Any], _place: Place) -> str:
        return self.entries(self._map_class, value.items(), Place.ELEMENT)

    def java_map(self, value: JavaMap, _place: Place) -> str:
        # A map without a class may be an object of a final class, whose long is plain.
        return self.entries(
            value.class_name,
            value.items(),
            Place.BARE if value.class_name is None else Place.ELEMENT,
        )

    def java_object(self, value: JavaObject, _place: Place) -> str:
        return self.entries(value.class_name, value.items(), Place.FIELD, owner=value, nulls=True)

    def dataclass(self, value: Any, _place: Place) -> str:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        by_name = sorted(fields.items(), key=lambda item: utf16_order(item[0]))
        return self.entries(self.name_of(type(value)), by_name, Place.FIELD, owner=value)

    def entries(
        self,
        class_name: str | None,
        items: Iterable[tuple[Any, Any]],
        place: Place,
        *,
        owner: Any = None,
        nulls: bool = False,
    ) -> str:
        parts = []
        if self._typed and class_name is not None:
            parts.append(f'"@class":{text.quote(class_name)}')
        for key, item in items:
            if not isinstance(key, str):
                raise Refused(f"a key is {type(key).__name__}, but JSON allows only str keys")
            if not key.isascii() and text.has_lone_surrogate(key):
                raise Refused("a key has a lone surrogate, which Jackson can write but not read")
            # The mapper's Include.NON_NULL applies to a map's entries as it does to a POJO's
            # fields.
            if item is not None or nulls:
                if (
                    owner is not None
                    and isinstance(item, Enum)
                    and (name := self._rules.class_in(owner, key, item, self._names))
                ):
                    written = self.wrapped(name, text.quote(item.name))
                else:
                    written = (_METHODS.get(type(item)) or self.method_of(item))(self, item, place)
                parts.append(f"{text.quote(key)}:{written}")
        return "{" + ",".join(parts) + "}"

    def enum(self, value: Enum, place: Place) -> str:
        body = text.quote(value.name)
        return (
            body
            if place in {Place.ROOT, Place.FIELD}
            else self.wrapped(self.name_of(type(value)), body)
        )

    def java_value(self, value: JavaValue, _place: Place) -> str:
        return self.wrapped(value.class_name, self.write(value.value, Place.FIELD))


# A class that is not listed uses the first entry that fits, so a class precedes those that it is
# derived from.
_METHODS: dict[type[Any], Method] = {
    JavaInt: Writer.java_number,
    JavaFloat: Writer.java_float,
    JavaDouble: Writer.java_double,
    JavaChar: Writer.char,
    JavaList: Writer.java_list,
    JavaObject: Writer.java_object,
    JavaMap: Writer.java_map,
    JavaValue: Writer.java_value,
    str: lambda _writer, value, _place: text.quote(value),
    bool: lambda _writer, value, _place: "true" if value else "false",
    int: Writer.number,
    float: Writer.real,
    type(None): lambda *_: "null",
    dict: Writer.mapping,
    list: Writer.array,
    tuple: Writer.array,
    bytes: Writer.blob,
    bytearray: Writer.blob,
    datetime: Writer.moment,
    Decimal: Writer.decimal,
    UUID: Writer.uuid,
    Enum: Writer.enum,
}
