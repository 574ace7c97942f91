"""Values to bytes and back. A queue takes any object with these two methods."""

from __future__ import annotations

import json
from typing import Any, Protocol, TypeVar

from delayq.errors import DecodeError, EncodeError

T = TypeVar("T")


class Codec(Protocol[T]):
    """What a queue asks of a codec."""

    def encode(self, value: T, /) -> bytes:
        """Turn ``value`` into bytes, or raise :class:`~delayq.errors.EncodeError`."""
        ...

    def decode(self, payload: bytes, /) -> T:
        """Turn bytes that :meth:`encode` wrote back into a value, or raise :class:`~delayq.errors.DecodeError`."""
        ...


class JsonCodec:
    """Compact JSON as UTF-8: dicts, lists, strings, numbers, booleans and None."""

    def encode(self, value: Any, /) -> bytes:
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EncodeError(f"JsonCodec cannot encode this {type(value).__name__}: {_without_value(error)}") from error

    def decode(self, payload: bytes, /) -> Any:
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise DecodeError("JsonCodec", payload) from error


class StringCodec:
    """Text as UTF-8, without quotes."""

    def encode(self, value: str, /) -> bytes:
        if not isinstance(value, str):
            raise EncodeError(f"StringCodec encodes str, not {type(value).__name__}")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise EncodeError("StringCodec cannot encode this str: it has a lone surrogate") from error

    def decode(self, payload: bytes, /) -> str:
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise DecodeError("StringCodec", payload) from error


def _without_value(error: Exception) -> str:
    """The error's reason, without the value that it may quote: values may be private."""
    return "it has a lone surrogate" if isinstance(error, UnicodeEncodeError) else str(error)
