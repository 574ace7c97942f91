"""The codec that queues use by default."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from delayq.codecs.protocol import own_attribute, reason_of
from delayq.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.codecs.protocol import Codec


def _plain(value: Any) -> Any:
    # Many programs never need it, nor the modules that it imports.
    from delayq.codecs._type_codecs import plain  # noqa: PLC0415

    return plain(value)


def _plain_unchecked(value: Any) -> Any:
    from delayq.codecs._plain import plain  # noqa: PLC0415 - likewise

    return plain(value)


def _new_writer(plain: Callable[[Any], Any]) -> Callable[[Any], str]:
    """Return a function that writes compact JSON, and calls ``plain`` for a value that JSON has no
    form for. Once it has failed, it must be replaced: it still believes that it is inside the
    containers of that value.
    """
    try:
        # JSONEncoder makes one for each value, which takes as long as the value.
        chunks = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
            {}, plain, encode_basestring, None, ":", ",", False, False, False
        )
    except (AttributeError, TypeError):
        # Another implementation of Python.
        return json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain
        ).encode
    return lambda value: "".join(chunks(value, 0))


# Without the checks of JSONDecoder.decode(), and it raises StopIteration where no value begins.
_read: Any = vars(json.JSONDecoder())["scan_once"]
_write = _new_writer(_plain)
_write_result = _new_writer(_plain_unchecked)
# Raised by values that JSON has no form for.
_FAILURES = (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


class JsonCodec:
    """Compact JSON as UTF-8, of whatever a worker can read by its type, see :func:`codec_for`.

    Dicts, lists, strings, numbers, booleans and None come back as they were. Without a type to read
    them by, other values come back as the plain ones that they are written as:

    - dataclasses, pydantic models (by alias) and ``msgspec.Struct`` as dicts;
    - tuples, named tuples and sets as lists;
    - ``datetime``, ``date`` and ``time`` as in RFC 3339, ``timedelta`` as in ISO 8601;
    - ``UUID`` and ``Decimal`` as strings, and enums by value.

    Keys of dicts can be any of these that are written as a string or a number.
    """

    def encode(self, value: Any, /) -> bytes:
        """Encode ``value`` as JSON.

        Raises:
            EncodeError: JSON has no form for it: a value of another type, a NaN or infinity, a lone
                surrogate, a value that contains itself. The text names the path to the part.
        """
        global _write  # noqa: PLW0603
        try:
            # A string needs no encoder.
            return (encode_basestring(value) if type(value) is str else _write(value)).encode()
        except _FAILURES:
            _write = _new_writer(_plain)
        # It has keys that need conversion, another thread is writing a part of it, or JSON cannot
        # hold it.
        from delayq.codecs._type_codecs import to_plain  # noqa: PLC0415

        return _encode_plain(value, to_plain)

    def decode(self, payload: bytes, /) -> Any:
        """Decode JSON, or raise DecodeError."""
        try:
            text = payload.decode()
            value, end = _read(text, 0)
            if end == len(text):
                return value
        except (ValueError, RecursionError, StopIteration):
            pass
        # Not compact, not UTF-8 or not JSON: json.loads can tell, but takes twice as long.
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as error:
            reason = reason_of(error)
        raise DecodeError("JsonCodec", payload, str(reason)) from reason


class ResultCodec(JsonCodec):
    """JSON of what handlers return. No worker reads it by its type, so it need not come back as it
    was: a model for responses leaves out fields.
    """

    def encode(self, value: Any, /) -> bytes:
        """Encode ``value`` as JSON, or raise EncodeError as :meth:`JsonCodec.encode` does."""
        global _write_result  # noqa: PLW0603
        try:
            text = encode_basestring(value) if type(value) is str else _write_result(value)
            return text.encode()
        except _FAILURES:
            _write_result = _new_writer(_plain_unchecked)
        from delayq.codecs._plain import to_plain  # noqa: PLC0415

        return _encode_plain(value, to_plain)


_RESULT_JSON = ResultCodec()


def result_codec(codec: Codec[Any]) -> Codec[Any]:
    """Return the codec of results in a queue of values that ``codec`` encodes.

    A codec of one type, or of calls, is none for results: they are JSON then. Where they are JSON,
    they need not come back as they were.
    """
    results: Codec[Any] = own_attribute(codec, "results", codec)
    # A subclass may write something else.
    return _RESULT_JSON if type(results) is JsonCodec else results


def _encode_plain(value: Any, to_plain: Callable[[Any], Any]) -> bytes:
    """Encode what ``to_plain`` makes of a value, or tell why that cannot be."""
    from delayq.codecs._plain import Unencodable, encode_json  # noqa: PLC0415

    try:
        return encode_json(to_plain(value)).encode()
    except Unencodable as error:
        reason = str(error)
    except (ValueError, RecursionError) as error:
        reason = str(reason_of(error))
    raise EncodeError(f"JsonCodec cannot encode this {type(value).__name__}: {reason}")
