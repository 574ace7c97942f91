"""What a queue asks of a codec."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

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


def check_codec(codec: Codec[Any] | None) -> None:
    """Raise :class:`~delayq.BadInput` unless it is a codec, or None for the default one."""
    if codec is None:
        return
    if isinstance(codec, type):
        raise BadInput(f"codec is the class {codec.__name__}: pass an instance of it, as {codec.__name__}()")
    for name in ("encode", "decode"):
        if not callable(getattr(codec, name, None)):
            raise BadInput(f"codec has no method {name}(): {type(codec).__name__} is no codec")
