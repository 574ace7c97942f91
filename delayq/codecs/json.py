"""The codec that queues use by default."""

from __future__ import annotations

import json
from typing import Any

from delayq.codecs._reasons import reason_of
from delayq.errors import DecodeError, EncodeError

# Made once, because json.dumps makes one for each call that has options.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_read = json.JSONDecoder().raw_decode


class JsonCodec:
    """Compact JSON as UTF-8: dicts, lists, strings, numbers, booleans and None."""

    def encode(self, value: Any, /) -> bytes:
        """Encode ``value`` as JSON.

        Raises:
            EncodeError: JSON has no form for it: another type, a NaN or infinity, a lone surrogate,
                a value that contains itself.
        """
        try:
            return _ENCODER.encode(value).encode()
        except TypeError as error:
            # The message names a type.
            reason = str(error)
        except ValueError as error:
            unsaid = "it contains NaN, an infinity, or itself"
            reason = str(reason_of(error)) if isinstance(error, UnicodeError) else unsaid
        except RecursionError as error:
            reason = str(reason_of(error))
        raise EncodeError(f"JsonCodec cannot encode this {type(value).__name__}: {reason}")

    def decode(self, payload: bytes, /) -> Any:
        """Decode JSON.

        Raises:
            DecodeError: The payload is not JSON.
        """
        try:
            text = payload.decode()
            value, end = _read(text)
            if end == len(text):
                return value
        except (ValueError, RecursionError):
            pass
        # Not compact, not UTF-8 or not JSON: json.loads can tell, but takes twice as long.
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as error:
            reason = reason_of(error)
        raise DecodeError("JsonCodec", payload) from reason
