"""The interface that a queue expects of a codec, and the words in which codecs refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from delayq._generics import T
from delayq.errors import BadInput, DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable


class Codec(Protocol[T]):
    """The interface that a queue expects of a codec.

    It may have two more methods. ``for_queue(name)`` returns the codec of one queue: each queue
    calls it once, when it is opened. ``fingerprint(payload)`` is for a codec that writes equal
    values as different bytes: it returns bytes that are equal for them.
    """

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


def codec_of_queue(codec: Codec[T], queue: str) -> Codec[T]:
    """Return the codec of one queue: ``codec`` itself, unless it has another one for each."""
    for_queue: Callable[[str], Codec[T]] | None = own_attribute(codec, "for_queue")
    return codec if for_queue is None else for_queue(queue)


def own_attribute(codec: Codec[Any], name: str, default: Any = None) -> Any:
    """Return an attribute of a codec, or ``default`` if it has none.

    One that ``__getattr__`` passes on does not count: it would be that of a codec inside, which
    would then take the place of the one around it.
    """
    is_own = hasattr(type(codec), name) or name in getattr(codec, "__dict__", ())
    return getattr(codec, name) if is_own else default


class Refused(Exception):
    """A value cannot be written, for the reason in the message."""


class Malformed(Exception):
    """A payload is not one that the codec writes."""


def reason_of(error: BaseException) -> ValueError:
    """Return an error with the reason, as the cause of a codec's error.

    Raise that outside of the ``except`` block, which would add ``error`` as its context.
    """
    if isinstance(error, UnicodeError):
        # The error holds all of the text, or the bytes.
        return ValueError(
            "it has a lone surrogate"
            if isinstance(error, UnicodeEncodeError)
            else "it is not UTF-8"
        )
    if isinstance(error, RecursionError):
        return ValueError("it is nested too deeply, or contains itself")
    if isinstance(error, json.JSONDecodeError):
        # Without the position, which would make many causes of one.
        return ValueError(f"it is not JSON: {error.msg}")
    if isinstance(error, Malformed):
        return ValueError("it is not in the format that the codec writes")
    return ValueError(f"it led to a {type(error).__name__}")
