"""What the two Jackson codecs' writer and reader have to agree on.

Redisson's mapper (``JsonJacksonCodec.init``) writes compact JSON, a POJO's fields by name, nothing that is null in a POJO or
a map. ``JsonJacksonCodec`` adds type information (``DefaultTyping.NON_FINAL``, and ``Long``): an object carries ``"@class"``,
anything else is wrapped as ``[class name, value]``. What is wrapped depends on where a value stands:

======== ====================================== ===================================================================
place    where that is                          what is wrapped there
======== ====================================== ===================================================================
ROOT     the payload itself                     what is of no final class, and Long; so not byte[], Float, String[]
ELEMENT  in a collection or map                 all but String, Integer, Boolean and finite Doubles
BARE     in a list or map without class: a       as ELEMENT, but an int stands plain, however large
         ``long[]``, or a record in a field
FIELD    in a POJO                              as ROOT, for a field declared with the value's class
======== ====================================== ===================================================================

What depends on more than the place, on Java's declarations or on the version of Redisson, is in :class:`Rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from delayq.codecs.java import JavaObject


class Place(Enum):
    """Where a value stands."""

    ROOT = "root"
    ELEMENT = "element"
    BARE = "bare"
    FIELD = "field"

    # The default goes through Python code, and these are looked up for every value.
    __hash__ = object.__hash__


class Refused(Exception):
    """What cannot be written, in words that do not quote it."""


class Malformed(Exception):
    """The payload is none of ours."""


def inside(class_name: str | None) -> Place:
    """The place of what stands in a list or array of that class."""
    of_primitives = class_name is None or (class_name.startswith("[") and not class_name.startswith("[L"))
    return Place.BARE if of_primitives else Place.ELEMENT


@dataclass
class Rules:
    """What a codec's reader and writer know beyond the places.

    Attributes:
        enums_with_class: Enums that carry their class in every field: their constants have bodies, so their class is not final.
        uuid_with_class: Whether a UUID carries its class in every place, as since Redisson 4.2.0, or as any other final class.
        seen: Fields of dataclasses in which Java has written an enum with its class.
    """

    enums_with_class: frozenset[type[Enum]] = frozenset()
    uuid_with_class: bool = True
    # Java declares the field, so what it wrote once it always writes. At most one entry for each field of the codec's types.
    seen: set[tuple[type[Any], str]] = field(default_factory=set)

    def enum_has_class(self, owner: Any, name: str, member: Enum) -> bool:
        """Tell whether Java writes the enum's class in the field ``name`` of ``owner``, a dataclass or :class:`JavaObject`."""
        if type(member) in self.enums_with_class:
            return True
        return name in owner.with_class if isinstance(owner, JavaObject) else (type(owner), name) in self.seen

    def uuid_has_class(self, place: Place) -> bool:
        """Tell whether Java writes a UUID's class in that place."""
        return self.uuid_with_class or place is Place.ELEMENT
