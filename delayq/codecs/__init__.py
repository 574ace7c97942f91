"""Codecs turn values into bytes and back.

A queue takes any object with ``encode`` and ``decode``: see :class:`Codec`.

Except for :class:`JsonCodec` and :class:`EncryptedCodec`, each one writes the same bytes as the
Redisson codec of the same name; :class:`BytesCodec` corresponds to its ``ByteArrayCodec``.
``docs/codecs.md`` shows which value becomes which Java type. :func:`codec_for` makes a codec for a
Python type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq import _lazy_imports
from delayq.codecs.json import JsonCodec
from delayq.codecs.protocol import Codec
from delayq.codecs.string import BytesCodec, IntegerCodec, LongCodec, StringCodec

if TYPE_CHECKING:
    from delayq.codecs.encrypted import EncryptedCodec
    from delayq.codecs.java.jackson import JsonJacksonCodec, TypedJsonJacksonCodec
    from delayq.codecs.java.kryo import Kryo5Codec, KryoOpaque
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
    )
    from delayq.codecs.typed import codec_for

__all__ = [
    "BytesCodec",
    "Codec",
    "EncryptedCodec",
    "IntegerCodec",
    "JavaBigInteger",
    "JavaByte",
    "JavaChar",
    "JavaDouble",
    "JavaFloat",
    "JavaList",
    "JavaLong",
    "JavaMap",
    "JavaObject",
    "JavaShort",
    "JavaValue",
    "JsonCodec",
    "JsonJacksonCodec",
    "Kryo5Codec",
    "KryoOpaque",
    "LongCodec",
    "StringCodec",
    "TypedJsonJacksonCodec",
    "codec_for",
]

# Needed where a queue is shared with Java, or a worker reads types. Other programs are spared their
# import, some 10 ms each.
_HOMES = {
    "EncryptedCodec": "encrypted",
    "JsonJacksonCodec": "java.jackson",
    "TypedJsonJacksonCodec": "java.jackson",
    "Kryo5Codec": "java.kryo",
    "KryoOpaque": "java.kryo",
    "codec_for": "typed",
    **{name: "java.types" for name in __all__ if name.startswith("Java")},
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy_imports.names(__name__, _HOMES)
