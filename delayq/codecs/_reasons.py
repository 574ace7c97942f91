"""Errors that do not quote a value or payload: it may be private, and errors are logged."""

from __future__ import annotations

import json
import re
import typing
from typing import Any

# msgspec quotes a value that is not in an enum, an unknown tag, or an unknown field.
_QUOTED = re.compile(
    r"(Invalid (?:enum )?value|Object contains unknown field) .*?( - at `[^`]*`)?", re.DOTALL
)
# Where msgspec found it: the same fault in another payload is elsewhere.
_AT_BYTE = re.compile(r" \(byte \d+\)")


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
        # Without the place, which would make many causes of one.
        return ValueError(f"it is not JSON: {error.msg}")
    if isinstance(error, Malformed):
        return ValueError("it is not in the format that the codec writes")
    return ValueError(f"it led to a {type(error).__name__}")


def said(error: BaseException) -> ValueError:
    """Do the same for an error whose text quotes nothing but what msgspec quotes."""
    if isinstance(error, UnicodeError | RecursionError | json.JSONDecodeError):
        return reason_of(error)
    text = _AT_BYTE.sub("", str(error))
    found = _QUOTED.fullmatch(text)
    return ValueError(f"{found[1]}{found[2] or ''}" if found else text)


def shown(kind: Any) -> str:
    """Return a type as you would write it."""
    is_class = isinstance(kind, type) and typing.get_origin(kind) is None
    return kind.__qualname__ if is_class else str(kind)
