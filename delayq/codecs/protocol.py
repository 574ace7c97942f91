"""What a queue asks of a codec."""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class Codec(Protocol[T]):
    """What a queue asks of a codec."""

    def encode(self, value: T, /) -> bytes:
        """Turn ``value`` into bytes, or raise :class:`~delayq.errors.EncodeError`."""
        ...

    def decode(self, payload: bytes, /) -> T:
        """Turn bytes that :meth:`encode` wrote back into a value, or raise :class:`~delayq.errors.DecodeError`."""
        ...
