"""Reads values from JSON with type information. ``_jackson_writer`` describes the rules."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import typing
from decimal import Decimal, InvalidOperation
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from delayq.codecs.java._jackson_writer import Rules, Site, double_text, float_text, inside
from delayq.codecs.java.types import (
    JavaBigInteger,
    JavaByte,
    JavaChar,
    JavaDouble,
    JavaFloat,
    JavaList,
    JavaLong,
    JavaMap,
    JavaObject,
    JavaShort,
    JavaValue,
    fits,
    from_ms,
    is_char,
)
from delayq.codecs.protocol import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable

# The names that Java's reflection gives to classes, where they can be told from any other text: an
# array, or a name with a package or an outer class.
_CLASS_NAME = re.compile(r"\[+(?:[BCDFIJSZ]|L[\w.$]+;)|[\w$]+(?:\.[\w$]+)+|\w+\$[\w$]+")
_MAP_NAME = re.compile(r"java\.util\.[\w.$]*(?:Map|Hashtable|Properties)[\w$]*")


def real(text: str) -> float:
    """Read a JSON number with a point or an exponent; keep its text if we would write another."""
    value = float(text)
    return value if text == double_text(value) else JavaDouble(value, text)


def refuse_constant(_name: str) -> NoReturn:
    """Refuse NaN and Infinity without quotes, which Python's JSON parser reads."""
    raise Malformed


class Reader:
    """Builds values from JSON with type information, for the arguments of the codec."""

    def __init__(
        self, types: dict[str, type[Any]], list_class: str, map_class: str, rules: Rules
    ) -> None:
        self._types = types
        self._names = {kind: name for name, kind in types.items()}
        self._rules = rules
        self._fields = {
            kind: {field.name for field in dataclasses.fields(kind) if field.init}
            for kind in types.values()
            if not issubclass(kind, Enum)
        }
        self._enums = {kind: self._enum_fields(kind) for kind in self._fields}
        self._list_class = list_class
        self._map_class = map_class
        # JSON is read from the inside out: an object knows its class, but an array's meaning
        # depends on its surroundings.
        self._json = json.JSONDecoder(
            object_pairs_hook=self._object, parse_float=real, parse_constant=refuse_constant
        )

    def read(self, payload: bytes) -> Any:
        """Return the value in a payload, or raise Malformed, ValueError or RecursionError."""
        return self._value(self._json.decode(payload.decode()), Site.ROOT)

    def _value(self, tree: Any, site: Site) -> Any:
        # A plain list has not been interpreted yet.
        return self._array(tree, site) if type(tree) is list else tree

    def _values(self, pairs: list[tuple[str, Any]], site: Site) -> dict[str, Any]:
        return {key: self._array(item, site) if type(item) is list else item for key, item in pairs}

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        # Redisson writes the class first. A map may have a key "@class" of its own after that.
        at = next((i for i, (key, _) in enumerate(pairs) if key == "@class"), None)
        if at is None:
            return JavaMap(None, self._values(pairs, Site.ELEMENT))
        name = pairs.pop(at)[1]
        if name == self._map_class:
            return self._values(pairs, Site.ELEMENT)
        if not isinstance(name, str):
            raise Malformed
        if name not in self._types and _MAP_NAME.fullmatch(name):
            return JavaMap(name, self._values(pairs, Site.ELEMENT))
        fields = self._values(pairs, Site.FIELD)
        if name in self._types:
            return self._record(self._types[name], fields)
        # JSON itself has no enums: an enum among the fields had its class.
        return JavaObject(
            name,
            fields,
            with_class=[field for field, item in fields.items() if isinstance(item, Enum)],
        )

    def _record(self, kind: type[Any], fields: dict[str, Any]) -> Any:
        """Return an instance of a dataclass, and remember how Java writes the enums in it."""
        try:
            names, enums = self._fields[kind], self._enums[kind]
            enum_classes: dict[tuple[type[Any], str], str] = {}
            arguments = {name: item for name, item in fields.items() if name in names}
            for name, item in arguments.items():
                if isinstance(item, Enum):
                    enum_classes[kind, name] = self._names[type(item)]
                elif name in enums:
                    class_name, text = _class_and_text(item)
                    if text in enums[name].__members__:
                        arguments[name] = enums[name][text]
                        if class_name is not None:
                            enum_classes[kind, name] = class_name
            record = kind(**arguments)
        except Exception as error:
            # Whatever the dataclass objects to, the payload does not fit it.
            raise Malformed from error
        self._rules.enum_classes.update(enum_classes)
        return record

    def _enum_fields(self, owner: type[Any]) -> dict[str, type[Enum]]:
        """Return the fields of a dataclass that are declared as an enum, or as an enum or None."""
        try:
            hints = typing.get_type_hints(owner)
        except Exception:  # noqa: BLE001  # an annotation may name anything, from anywhere or nowhere
            return {}
        enums = {}
        for name in self._fields[owner]:
            hint = hints[name]
            is_union = typing.get_origin(hint) in {typing.Union, UnionType}
            kinds = typing.get_args(hint) if is_union else (hint,)
            match [kind for kind in kinds if kind is not NoneType]:
                # An enum that is text or a number as well is written as such, unless it stands for
                # a Java class.
                case [type() as kind] if issubclass(kind, Enum) and (
                    kind in self._names or not issubclass(kind, str | int | float)
                ):
                    enums[name] = kind
        return enums

    def _array(self, tree: list[Any], site: Site) -> Any:
        # Two elements, the first of which names a class, are a class and its value; anything else
        # is a Java array.
        if len(tree) == 2 and isinstance(tree[0], str):
            name, inner = tree
            if name in _SCALARS:
                try:
                    return self._scalar(name, inner, site)
                except (Malformed, ValueError, InvalidOperation):
                    # A String[] whose first text is the name of a class.
                    return self._wrapped(name, inner, site)
            # An enum looks like an array of two strings. Its class is final, so it is wrapped only
            # in a collection.
            is_wrapped = (
                site is Site.ELEMENT
                or not isinstance(inner, str)
                or name.startswith("java")
                or name in self._types
            )
            if is_wrapped and (name in self._types or _CLASS_NAME.fullmatch(name)):
                return self._wrapped(name, inner, site)
        return JavaList(None, [self._value(item, Site.BARE) for item in tree])

    def _wrapped(self, name: str, inner: Any, site: Site) -> Any:
        if type(inner) is list:
            items = [self._value(item, inside(name)) for item in inner]
            return items if name == self._list_class else JavaList(name, items)
        kind = self._types.get(name)
        # Alone, an enum is plain, so Redisson did not write this one.
        if (
            kind is None
            or not issubclass(kind, Enum)
            or not isinstance(inner, str)
            or site is Site.ROOT
        ):
            return JavaValue(name, inner)
        if inner in kind.__members__:
            return kind[inner]
        if site is Site.FIELD:
            # Two texts may also be a String[].
            return JavaValue(name, inner)
        raise Malformed

    def _scalar(self, name: str, inner: Any, site: Site) -> Any:
        try:
            value = _SCALARS[name](inner)
        except OverflowError:
            # A Date outside of Python's range stays as it was.
            return JavaValue(name, inner)
        # Plain where the class is known, as in a POJO's field that is declared with it. This field
        # is declared otherwise.
        if (name == "java.util.UUID" and not self._rules.uuid_has_class(site)) or (
            site is Site.FIELD
            and (name == "[B" or (name == "java.lang.Double" and isinstance(inner, str)))
        ):
            return JavaValue(name, inner)
        return value


def _class_and_text(item: Any) -> tuple[str | None, str]:
    """Return the class, if any, and the text of an enum that was read as another value."""
    if type(item) is str:
        return None, item
    if isinstance(item, JavaValue) and isinstance(item.value, str):
        return item.class_name, item.value
    if isinstance(item, JavaList) and item.class_name is None and [*map(type, item)] == [str, str]:
        return item[0], item[1]
    return None, ""


def _of(kind: type[Any], make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes a value from a JSON value of exactly that type."""

    def convert(tree: Any) -> Any:
        if type(tree) is not kind:
            raise Malformed
        return make(tree)

    return convert


def _int(bits: int | None, make: Callable[[int], Any]) -> Callable[[Any], Any]:
    def convert(tree: int) -> Any:
        if not fits(tree, bits):
            raise Malformed
        return make(tree)

    return _of(int, convert)


def _double(tree: Any) -> float:
    if isinstance(tree, float):
        return tree
    if isinstance(tree, bool) or not (
        isinstance(tree, int) or tree in ("NaN", "Infinity", "-Infinity")
    ):
        raise Malformed
    return float(tree)


def _float(tree: Any) -> JavaFloat:
    value = _double(tree)
    text = _as_written(tree) if isinstance(tree, float) else None
    return JavaFloat(value, None if text == float_text(value) else text)


def _decimal(tree: Any) -> Decimal:
    return Decimal(_as_written(tree)) if isinstance(tree, float) else _int(None, Decimal)(tree)


def _as_written(value: float) -> str:
    return value.text if isinstance(value, JavaDouble) and value.text else double_text(value)


def _char(tree: str) -> JavaChar:
    if not is_char(tree):
        raise Malformed
    return JavaChar(tree)


def _uuid(tree: str) -> UUID:
    # Python also reads braces and "urn:uuid:".
    if str(value := UUID(tree)) != tree.lower():
        raise Malformed
    return value


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "java.lang.Integer": _int(32, int),
    "java.lang.Long": _int(64, JavaLong),
    "java.lang.Short": _int(16, JavaShort),
    "java.lang.Byte": _int(8, JavaByte),
    "java.math.BigInteger": _int(None, JavaBigInteger),
    "java.util.Date": _int(64, from_ms),
    "java.lang.Double": _double,
    "java.lang.Float": _float,
    "java.math.BigDecimal": _decimal,
    "java.lang.Boolean": _of(bool, bool),
    "java.lang.String": _of(str, str),
    "java.lang.Character": _of(str, _char),
    "java.util.UUID": _of(str, _uuid),
    "[B": _of(str, lambda tree: base64.b64decode(tree, validate=True)),
}
