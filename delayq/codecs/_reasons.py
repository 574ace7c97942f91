"""What is wrong with a value or payload, in words that quote nothing of it: they may be private, and errors are logged."""

from __future__ import annotations

import json
import re

# msgspec quotes what is no member of an enum, no tag, or no field.
_QUOTED = re.compile(r"(Invalid (?:enum )?value|Object contains unknown field) .*?( - at `[^`]*`)?", re.DOTALL)


def reason_of(error: BaseException) -> ValueError:
    """An error with the reason, to be the cause of a codec's, raised outside of the ``except``: causes are shown as well."""
    if isinstance(error, UnicodeError):
        # It holds all of the text, or the bytes.
        return ValueError("it has a lone surrogate" if isinstance(error, UnicodeEncodeError) else "it is not UTF-8")
    if isinstance(error, RecursionError):
        return ValueError("it is nested too deeply, or contains itself")
    if isinstance(error, json.JSONDecodeError):
        return ValueError(f"{error.msg}: line {error.lineno} column {error.colno}")
    return ValueError(f"a {type(error).__name__} was raised")


def said(error: BaseException) -> ValueError:
    """The same for an error whose text is known to quote nothing, but for what msgspec does."""
    if isinstance(error, UnicodeError | RecursionError):
        return reason_of(error)
    text = str(error)
    found = _QUOTED.fullmatch(text)
    return ValueError(f"{found[1]}{found[2] or ''}" if found else text)
