"""The codec that queues use unless told otherwise."""

from __future__ import annotations

import json
from typing import Any

from delayq.errors import DecodeError, EncodeError

# Made once: json.dumps makes one for each call that has options.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_read = json.JSONDecoder().raw_decode


class JsonCodec:
    """Compact JSON as UTF-8: dicts, lists, strings, numbers, booleans and None."""

    def encode(self, value: Any, /) -> bytes:
        """Turn ``value`` into JSON.

        Raises:
            EncodeError: JSON has no form for it: another type, a NaN or infinity, a lone surrogate, a value that contains itself.
        """
        try:
            return _ENCODER.encode(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EncodeError(f"JsonCodec cannot encode this {type(value).__name__}: {_without_value(error)}") from error

    def decode(self, payload: bytes, /) -> Any:
        """Read JSON.

        Raises:
            DecodeError: It is none.
        """
        try:
            text = payload.decode()
            value, end = _read(text)
            if end == len(text):
                return value
        except (ValueError, RecursionError):
            pass
        # Not compact, or not UTF-8, or no JSON: who takes twice as long for each can tell.
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise DecodeError("JsonCodec", payload) from error


def _without_value(error: Exception) -> str:
    """The error's reason, without the value that it may quote: values may be private."""
    return "it has a lone surrogate" if isinstance(error, UnicodeEncodeError) else str(error)
