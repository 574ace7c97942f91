"""What the two Jackson codecs' writer and reader have to agree on.

Redisson's mapper (``JsonJacksonCodec.init``) writes compact JSON, a POJO's fields by name, nothing that is null in a POJO or
a map. ``JsonJacksonCodec`` adds type information (``DefaultTyping.NON_FINAL``, and ``Long``): an object carries ``"@class"``,
anything else is wrapped as ``[class name, value]``. What is wrapped depends on where a value stands:

======== ====================================== ===================================================================
place    where that is                          what is wrapped there
======== ====================================== ===================================================================
ROOT     the payload itself                     what is of no final class, and Long; so not byte[], Float, String[]
ELEMENT  in a collection or map                 all but String, Integer, Boolean and finite Doubles
BARE     in a ``long[]``, or list without class as ELEMENT, but an int stands plain, however large
FIELD    in a POJO                              as ROOT, for a field declared with the value's class
======== ====================================== ===================================================================
"""

from __future__ import annotations

from enum import Enum


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
