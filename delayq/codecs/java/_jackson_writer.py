"""Writes values as JSON as Redisson's mapper does.

Redisson's mapper (``JsonJacksonCodec.init``) writes compact JSON and a POJO's fields by name, and
leaves out nulls in a POJO or a map. ``JsonJacksonCodec`` adds type information
(``DefaultTyping.NON_FINAL``, and ``Long``): an object carries ``"@class"``, anything else is
wrapped as ``[class name, value]``. Whether a value is wrapped depends on its :class:`Site`:

======== ====================================== ==============================================
site     where that is                          what is wrapped there
======== ====================================== ==============================================
ROOT     the payload itself                     values of non-final classes, and Long; so not
                                                byte[], Float, String[]
ELEMENT  in a collection or map                 all but String, Integer, Boolean and finite
                                                Doubles
BARE     in a list or map without class: a       as ELEMENT, but an int is plain, however large
         ``long[]``, or a record in a field
FIELD    in a POJO                              as ROOT, for a field declared with the value's
                                                class
======== ====================================== ==============================================

Rules that depend on Java's declarations or on the version of Redisson are in :class:`Rules`. The
reader follows the same rules. The text of single values was observed in Jackson 2.19 under Redisson
4.7.0 and 3.20.1, on Java 17 and 25.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import struct
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

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
    fits,
    is_char,
    to_ms,
)
from delayq.codecs.protocol import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Method = Callable[[Any, Any, "Site"], str]

# The longest number that Jackson reads (StreamReadConstraints.maxNumberLength).
_LONGEST_NUMBER = 1000

# Characters below U+0020, the quote and the backslash must be escaped. Jackson also escapes
# surrogates: pairs, because it combines them into four bytes only when asked
# (JsonWriteFeature.COMBINE_UNICODE_SURROGATES_IN_UTF8), and lone ones alike. Everything else goes
# out as UTF-8, including `/`, DEL and U+2028.
_TO_ESCAPE = re.compile('[\x00-\x1f"\\\\\ud800-\udfff\U00010000-\U0010ffff]')
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_has_to_escape = _TO_ESCAPE.search
_SHORT_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}


class Site(Enum):
    """The position of a value in a payload, which decides how it is written."""

    ROOT = "root"
    ELEMENT = "element"
    BARE = "bare"
    FIELD = "field"

    # The default hash runs Python code, and sites are looked up for every value.
    __hash__ = object.__hash__


def inside(class_name: str | None) -> Site:
    """Return the site of the values in a list or array of that class."""
    of_primitives = class_name is None or (
        class_name.startswith("[") and not class_name.startswith("[L")
    )
    return Site.BARE if of_primitives else Site.ELEMENT


@dataclasses.dataclass
class Rules:
    """The rules that a codec's reader and writer follow beyond the sites.

    Attributes:
        enums_with_class: Enums whose class is not final, as their constants have bodies.
        uuid_with_class: Whether a UUID carries its class at every site, as since Redisson 4.2.0.
        enum_classes: The class that Java has written with an enum, by dataclass and field.
    """

    enums_with_class: frozenset[type[Enum]] = frozenset()
    uuid_with_class: bool = True
    # Java declares the field, so it writes it always in the same way. At most one entry for each
    # field of the codec's types.
    enum_classes: dict[tuple[type[Any], str], str] = dataclasses.field(default_factory=dict)

    def class_in(
        self, owner: Any, name: str, member: Enum, names: Mapping[type[Any], str]
    ) -> str | None:
        """Return the class that Java writes with an enum in the field ``name`` of ``owner``, a
        dataclass or :class:`JavaObject`. ``names`` has the Java classes that the codec knows.
        """
        is_object = isinstance(owner, JavaObject)
        observed = None if is_object else self.enum_classes.get((type(owner), name))
        has_class = (
            observed
            or (is_object and name in owner.with_class)
            or type(member) in self.enums_with_class
        )
        # An enum other than the one that was read has its own class.
        return names.get(type(member)) or observed if has_class else None

    def uuid_has_class(self, site: Site) -> bool:
        """Return whether Java writes a UUID's class at that site."""
        return self.uuid_with_class or site is Site.ELEMENT


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

    def write(self, value: Any, site: Site) -> str:
        """Return the JSON of a value, or raise ``Refused`` or ``RecursionError``."""
        method = _METHODS.get(type(value)) or self.method_of(value)
        return method(self, value, site)

    def method_of(self, value: Any) -> Method:
        """Return the method for a class that ``_METHODS`` does not name, or raise ``Refused``."""
        # Written as Java's enum, whatever else the Python one is: a StrEnum would go out as its
        # text otherwise.
        if isinstance(value, Enum) and type(value) in self._names:
            return Writer.enum
        for base, method in _METHODS.items():
            if isinstance(value, base):
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
        return f"[{quote(class_name)},{body}]"

    def wrapped_unless_alone(self, class_name: str, body: str, site: Site) -> str:
        """Do the same for a final class, which Jackson leaves out if the value stands alone."""
        return body if site is Site.ROOT else self.wrapped(class_name, body)

    def name_of(self, kind: type[Any]) -> str | None:
        """Return the Java class that a Python class stands for, if it is written."""
        if not self._typed:
            return None
        if kind not in self._names:
            raise Refused(f"the codec's types do not name a Java class for {kind.__name__}")
        return self._names[kind]

    def number(self, value: int, site: Site) -> str:
        digits = integer_text(value)
        if digits is None:
            raise Refused(f"an int has more than {_LONGEST_NUMBER} digits")
        if fits(value, 32) or (site in {Site.BARE, Site.FIELD} and fits(value, 64)):
            return digits
        return self.wrapped("java.lang.Long" if fits(value, 64) else "java.math.BigInteger", digits)

    def java_number(self, value: JavaInt, site: Site) -> str:
        digits = integer_text(value)
        if digits is None or not fits(value, value.bits):
            raise Refused(f"a {type(value).__name__} is out of range")
        if isinstance(value, JavaShort | JavaByte):
            return self.wrapped_unless_alone(value.class_name, digits, site)
        return self.wrapped(value.class_name, digits)

    def real(self, value: float, site: Site) -> str:
        if math.isfinite(value) or site is Site.FIELD:
            return double_text(value)
        # Without its class, it would be read as a string
        # (NumberSerializers.DoubleSerializer.serializeWithType).
        return self.wrapped_unless_alone("java.lang.Double", double_text(value), site)

    def java_double(self, value: JavaDouble, site: Site) -> str:
        return value.text or self.real(value, site)

    def java_float(self, value: JavaFloat, site: Site) -> str:
        try:
            return self.wrapped_unless_alone(
                "java.lang.Float", value.text or float_text(value), site
            )
        except OverflowError:
            raise Refused("a JavaFloat is too large for 32 bits") from None

    def char(self, value: JavaChar, site: Site) -> str:
        if not is_char(value):
            raise Refused("a JavaChar is not one UTF-16 unit")
        return self.wrapped_unless_alone("java.lang.Character", quote(value), site)

    def blob(self, value: bytes | bytearray, site: Site) -> str:
        body = f'"{base64.b64encode(value).decode()}"'
        return body if site is Site.FIELD else self.wrapped_unless_alone("[B", body, site)

    def moment(self, value: datetime, _site: Site) -> str:
        if value.utcoffset() is None:
            raise Refused("a datetime has no timezone")
        return self.wrapped("java.util.Date", str(to_ms(value)))

    def decimal(self, value: Decimal, _site: Site) -> str:
        if (body := decimal_text(value)) is None:
            raise Refused(
                f"a Decimal is not finite, or has more than {_LONGEST_NUMBER} characters when"
                " written out"
            )
        return self.wrapped("java.math.BigDecimal", body)

    def uuid(self, value: UUID, site: Site) -> str:
        body = f'"{value}"'
        return self.wrapped("java.util.UUID", body) if self._rules.uuid_has_class(site) else body

    def array(self, value: list[Any] | tuple[Any, ...], _site: Site) -> str:
        return self.elements(self._list_class, value)

    def java_list(self, value: JavaList, _site: Site) -> str:
        return self.elements(value.class_name, value)

    def elements(self, class_name: str | None, items: Iterable[Any]) -> str:
        site = inside(class_name)
        return self.wrapped(class_name, f"[{','.join([self.write(item, site) for item in items])}]")

    def mapping(self, value: dict[Any, Any], _site: Site) -> str:
        return self.entries(self._map_class, value.items(), Site.ELEMENT)

    def java_map(self, value: JavaMap, _site: Site) -> str:
        # A map without a class may be an object of a final class, whose long is plain.
        return self.entries(
            value.class_name,
            value.items(),
            Site.BARE if value.class_name is None else Site.ELEMENT,
        )

    def java_object(self, value: JavaObject, _site: Site) -> str:
        return self.entries(value.class_name, value.items(), Site.FIELD, owner=value, nulls=True)

    def dataclass(self, value: Any, _site: Site) -> str:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        # Java's compareTo compares UTF-16 units.
        by_name = sorted(
            fields.items(), key=lambda item: item[0].encode("utf-16-be", "surrogatepass")
        )
        return self.entries(self.name_of(type(value)), by_name, Site.FIELD, owner=value)

    def entries(
        self,
        class_name: str | None,
        items: Iterable[tuple[Any, Any]],
        site: Site,
        *,
        owner: Any = None,
        nulls: bool = False,
    ) -> str:
        parts = []
        if self._typed and class_name is not None:
            parts.append(f'"@class":{quote(class_name)}')
        for key, item in items:
            if not isinstance(key, str):
                raise Refused(f"a key is {type(key).__name__}, but JSON allows only str keys")
            if not key.isascii() and _LONE_SURROGATE.search(key):
                raise Refused("a key has a lone surrogate, which Jackson can write but not read")
            # The mapper's Include.NON_NULL applies to a map's entries as it does to a POJO's
            # fields.
            if item is not None or nulls:
                if (
                    owner is not None
                    and isinstance(item, Enum)
                    and (name := self._rules.class_in(owner, key, item, self._names))
                ):
                    body = self.wrapped(name, quote(item.name))
                else:
                    body = (_METHODS.get(type(item)) or self.method_of(item))(self, item, site)
                parts.append(f"{quote(key)}:{body}")
        return "{" + ",".join(parts) + "}"

    def enum(self, value: Enum, site: Site) -> str:
        body = quote(value.name)
        return (
            body
            if site in {Site.ROOT, Site.FIELD}
            else self.wrapped(self.name_of(type(value)), body)
        )

    def java_value(self, value: JavaValue, _site: Site) -> str:
        return self.wrapped(value.class_name, self.write(value.value, Site.FIELD))


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
    str: lambda _writer, value, _site: quote(value),
    bool: lambda _writer, value, _site: "true" if value else "false",
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


# --- the text of single values


def quote(text: str) -> str:
    """Return ``text`` as a JSON string."""
    # Concatenated, not formatted: a str with methods of its own, such as an enum's, is written as
    # the text that it is.
    return '"' + (_TO_ESCAPE.sub(_escape, text) if _has_to_escape(text) else text) + '"'


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if short := _SHORT_ESCAPES.get(character):
        return short
    units = character.encode("utf-16-be", "surrogatepass").hex().upper()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def integer_text(value: int) -> str | None:
    """Return an int's digits, or None if there are more than Jackson would read."""
    if -(2**63) <= value < 2**63:
        return int.__repr__(value)
    # The bits are counted first, because Python takes quadratic time for the digits, or refuses.
    if value.bit_length() > 4 * _LONGEST_NUMBER:
        return None
    digits = int.__repr__(value)
    return digits if len(digits.lstrip("-")) <= _LONGEST_NUMBER else None


def decimal_text(value: Decimal) -> str | None:
    """Write a BigDecimal without exponent, or return None if Java has none or would not read it."""
    if (
        not value.is_finite()
        or max(abs(value.adjusted()), len(value.as_tuple().digits)) > _LONGEST_NUMBER
    ):
        return None
    text = format(value, "f")
    # A BigDecimal has no negative zero.
    text = text if value else text.lstrip("-")
    return text if len(text) <= _LONGEST_NUMBER else None


def double_text(value: float) -> str:
    """Write a double as Java's ``Double.toString`` does since JDK 19: the fewest digits that read
    back as the same double.

    Those are Python's digits, but at least two; of all forms with two, the closest. So 4.9E-324,
    where Python writes 5e-324. Before JDK 19, Java sometimes wrote more digits than needed: 2.0E23
    as 1.9999999999999998E23.
    """
    # In this range neither writes an exponent, and both write the same text.
    if 1e-3 <= value < 1e7 or -1e7 < value <= -1e-3:
        return float.__repr__(value)
    if not math.isfinite(value):
        return _not_finite(value)
    text = float.__repr__(abs(value))
    if len(_digits(text)[0]) == 1:
        two = f"{abs(value):.1e}"
        # Just above a power of two the rounding interval is lopsided, so the closest one could lie
        # outside it. It never has.
        text = two if float(two) == abs(value) else text
    return _java_form(value, text)


def float_text(value: float) -> str:
    """Write a 32-bit float as Java's ``Float.toString`` does since JDK 19."""
    if not math.isfinite(value):
        return _not_finite(value)
    rounded = abs(_to_float(value))
    # Nine digits are enough for any float.
    text = next(
        text for digits in range(1, 9) if _reads_as(text := f"{rounded:.{digits}e}", rounded)
    )
    return _java_form(value, text)


def _reads_as(text: str, rounded: float) -> bool:
    try:
        return _to_float(float(text)) == rounded
    except OverflowError:
        return False


def _to_float(value: float) -> float:
    """Round to Java's ``Float``, or raise OverflowError if it is too large for 32 bits."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def _not_finite(value: float) -> str:
    # JsonWriteFeature.WRITE_NAN_AS_STRINGS is on unless switched off.
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _digits(text: str) -> tuple[str, int]:
    """Return the significant digits of a number, and the power of ten of the first one."""
    mantissa, _, exponent = text.partition("e")
    before, _, after = mantissa.partition(".")
    digits = (before + after).lstrip("0")
    power = int(exponent or 0) + (
        len(before) - 1 if before.strip("0") else len(digits) - len(after) - 1
    )
    return digits.rstrip("0"), power


def _java_form(value: float, text: str) -> str:
    """Write without exponent from 10**-3 up to 10**7; always with digits around the point."""
    sign = "-" if math.copysign(1, value) < 0 else ""
    digits, power = _digits(text)
    if not digits:
        return f"{sign}0.0"
    if -3 <= power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    if 0 <= power < 7:
        return f"{sign}{digits[: power + 1].ljust(power + 1, '0')}.{digits[power + 1 :] or '0'}"
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{power}"
