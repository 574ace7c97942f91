"""What a queue asks of a codec."""

from __future__ import annotations

from typing import Protocol, TypeVar

from delayq.errors import BadInput

T = TypeVar("T")


class Codec(Protocol[T]):
    """What a queue asks of a codec."""

    def encode(self, value: T, /) -> bytes:
        """Turn ``value`` into bytes, or raise :class:`~delayq.errors.EncodeError`."""
        ...

    def decode(self, payload: bytes, /) -> T:
        """Turn bytes that :meth:`encode` wrote back into a value, or raise :class:`~delayq.errors.DecodeError`."""
        ...


def check_codec(codec: object) -> None:
    """Raise :class:`~delayq.BadInput` unless an object can be a codec."""
    if isinstance(codec, type):
        raise BadInput(f"codec is an object, not a class: codec={codec.__name__}()")
    if not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
        raise BadInput(f"codec is an object with encode(value) and decode(payload), which a {type(codec).__name__} has not")
