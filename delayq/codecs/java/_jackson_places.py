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
from typing import TYPE_CHECKING, Any

from delayq.codecs.java.types import JavaObject

if TYPE_CHECKING:
    from collections.abc import Mapping


class Place(Enum):
    """The place of a value in a payload."""

    ROOT = "root"
    ELEMENT = "element"
    BARE = "bare"
    FIELD = "field"

    # The default hash runs Python code, and places are looked up for every value.
    __hash__ = object.__hash__


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
        enums_with_class: Enums whose class is not final, as their constants have bodies.
        uuid_with_class: Whether a UUID carries its class in every place, as since Redisson 4.2.0.
        seen: The class that Java has written with an enum, by dataclass and field.
    """

    enums_with_class: frozenset[type[Enum]] = frozenset()
    uuid_with_class: bool = True
    # Java declares the field, so it writes it always in the same way. At most one entry for each
    # field of the codec's types.
    seen: dict[tuple[type[Any], str], str] = field(default_factory=dict)

    def class_in(
        self, owner: Any, name: str, member: Enum, names: Mapping[type[Any], str]
    ) -> str | None:
        """Return the class that Java writes with an enum in the field ``name`` of ``owner``, a
        dataclass or :class:`JavaObject`. ``names`` has the Java classes that the codec knows.
        """
        is_object = isinstance(owner, JavaObject)
        seen = None if is_object else self.seen.get((type(owner), name))
        written = seen or (is_object and name in owner.with_class)
        # An enum other than the one that was read has its own class.
        return (
            names.get(type(member)) or seen
            if written or type(member) in self.enums_with_class
            else None
        )

    def uuid_has_class(self, place: Place) -> bool:
        """Tell whether Java writes a UUID's class in that place."""
        return self.uuid_with_class or place is Place.ELEMENT
