"""The interface that a queue expects of a codec."""

from __future__ import annotations

from typing import Any, Protocol

from delayq._generics import T
from delayq.errors import BadInput, DecodeError


class Codec(Protocol[T]):
    """The interface that a queue expects of a codec."""

    def encode(self, value: T, /) -> bytes:
        """Encode ``value`` as bytes, or raise :class:`~delayq.errors.EncodeError`."""
        ...

    def decode(self, payload: bytes, /) -> T:
        """Decode such bytes, or raise :class:`~delayq.errors.DecodeError`."""
        ...


def decode(codec: Codec[T], payload: bytes, queue: str, id: str = "") -> T:  # noqa: A002
    """Return the value in a payload.

    Raises:
        DecodeError: The codec cannot decode it, or raised another error. It names the queue, and
            the message if ``id`` is not empty.
    """
    try:
        return codec.decode(payload)
    except Exception as error:  # noqa: BLE001 - a codec of the user's may raise anything
        failure = decode_error(error, codec, payload, queue, id)
    raise failure


def decode_error(
    error: Exception,
    codec: Codec[Any],
    payload: bytes,
    queue: str,
    id: str,  # noqa: A002
) -> DecodeError:
    """Return the error to raise because a codec has raised ``error``."""
    if isinstance(error, DecodeError):
        failure = error
    else:
        failure = DecodeError(type(codec).__name__, payload)
        failure.__cause__ = error
    failure.queue, failure.id = queue, id
    return failure


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
