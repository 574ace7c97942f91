"""The interface that a queue expects of a codec."""

from __future__ import annotations

from typing import Any, Protocol

from delayq._generics import T
from delayq.errors import BadInput


class Codec(Protocol[T]):
    """The interface that a queue expects of a codec."""

    def encode(self, value: T, /) -> bytes:
        """Encode ``value`` as bytes, or raise :class:`~delayq.errors.EncodeError`."""
        ...

    def decode(self, payload: bytes, /) -> T:
        """Decode such bytes, or raise :class:`~delayq.errors.DecodeError`."""
        ...


def check_codec(codec: Codec[Any] | None) -> None:
    """Raise :class:`~delayq.BadInput` unless ``codec`` is a codec, or None for the default one."""
    if codec is None:
        return
    if isinstance(codec, type):
        raise BadInput(
            f"codec is the class {codec.__name__}: pass an instance, such as {codec.__name__}()"
        )
    for name in ("encode", "decode"):
        if not callable(getattr(codec, name, None)):
            raise BadInput(f"{type(codec).__name__} is not a codec: it has no method {name}()")
