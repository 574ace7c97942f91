"""The rules that the writer and the reader of the two Jackson codecs share.

Redisson's mapper (``JsonJacksonCodec.init``) writes compact JSON and a POJO's fields by name, and
leaves out nulls in a POJO or a map. ``JsonJacksonCodec`` adds type information
(``DefaultTyping.NON_FINAL``, and ``Long``): an object carries ``"@class"``, anything else is
wrapped as ``[class name, value]``. Whether a value is wrapped depends on its place:

======== ====================================== ==============================================
place    where that is                          what is wrapped there
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

Rules that depend on more than the place, on Java's declarations or on the version of Redisson, are
in :class:`Rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from delayq.codecs.java.types import JavaObject


class Place(Enum):
    """The place of a value in a payload."""

    ROOT = "root"
    ELEMENT = "element"
    BARE = "bare"
    FIELD = "field"

    # The default hash runs Python code, and places are looked up for every value.
    __hash__ = object.__hash__


class Refused(Exception):
    """The value cannot be written. The message does not quote it."""


class Malformed(Exception):
    """The payload is not one that these codecs write."""


def inside(class_name: str | None) -> Place:
    """Return the place of the values in a list or array of that class."""
    of_primitives = class_name is None or (
        class_name.startswith("[") and not class_name.startswith("[L")
    )
    return Place.BARE if of_primitives else Place.ELEMENT


@dataclass
class Rules:
    """The rules that a codec's reader and writer follow beyond the places.

    Attributes:
        enums_with_class: Enums that carry their class in every field: their constants have bodies,
            so their class is not final.
        uuid_with_class: Whether a UUID carries its class in every place, as since Redisson 4.2.0,
            or like any other final class.
        seen: Fields of dataclasses in which Java has written an enum with its class, and that
            class.
    """

    enums_with_class: frozenset[type[Enum]] = frozenset()
    uuid_with_class: bool = True
    # Java declares the field, so it writes it always in the same way. At most one entry for each
    # field of the codec's types.
    seen: dict[tuple[type[Any], str], str] = field(default_factory=dict)

    def class_in(self, owner: Any, name: str, member: Enum, known_as: str | None) -> str | None:
        """Return the class that Java writes for an enum in the field ``name`` of ``owner``, or None
        if it writes none.

        Args:
            owner: A dataclass or :class:`JavaObject`.
            name: The field.
            member: The enum.
            known_as: The Java class that the enum stands for, if the codec knows one.
        """
        if isinstance(owner, JavaObject):
            return (
                known_as
                if name in owner.with_class or type(member) in self.enums_with_class
                else None
            )
        seen = self.seen.get((type(owner), name))
        # An enum other than the one that was read has its own class.
        return known_as or seen if seen or type(member) in self.enums_with_class else None

    def uuid_has_class(self, place: Place) -> bool:
        """Tell whether Java writes a UUID's class in that place."""
        return self.uuid_with_class or place is Place.ELEMENT
