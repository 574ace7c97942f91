"""Ids that delayq generates for messages: twelve characters, sorted by the time they were made."""

from __future__ import annotations

import itertools
import os
import secrets
import time

from delayq.errors import BadInput

_LONGEST = 512

# The digits of base64 for URLs, in ASCII order, so that ids sort like the numbers they represent.
_DIGITS = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]

# The last millisecond, the prefix of its ids, and the counter for the rest of each id.
_state: tuple[int, str, itertools.count[int]] = (0, "", itertools.count())


def new_id() -> str:
    """Return a new id, different from all others of this process.

    It consists of the millisecond in 42 bits, and a number in 30 bits that starts at random in each
    millisecond and counts up. Two processes hardly ever make the same id, and the server notices if
    they do. It is short because the server stores it twice, and 12 bytes with their header fill the
    smallest allocation they fit in.
    """
    global _state  # noqa: PLW0603
    now = time.time_ns() // 1_000_000
    milliseconds, prefix, numbers = _state
    # If the clock was set back, the ids continue where they were.
    if now > milliseconds:
        prefix = _digits(now)
        numbers = itertools.count(secrets.randbits(29))
        _state = now, prefix, numbers
    number = next(numbers)
    return (
        f"{prefix}{_PAIRS[number >> 18 & 4095]}{_PAIRS[number >> 6 & 4095]}{_DIGITS[number & 63]}"
    )


def _digits(milliseconds: int) -> str:
    return "".join(_DIGITS[milliseconds >> shift & 63] for shift in range(36, -1, -6))


def _after_fork() -> None:
    # After a fork, parent and child would make the same ids.
    global _state  # noqa: PLW0603
    _state = (0, "", itertools.count())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def checked_id(id: str) -> str:  # noqa: A002
    """Return the id if it is valid. Raises BadInput otherwise."""
    if not isinstance(id, str) or not id:
        raise BadInput("an id must be a non-empty str")
    try:
        size = len(id.encode())
    except UnicodeEncodeError:
        raise BadInput("an id must be encodable as UTF-8") from None
    if size > _LONGEST:
        raise BadInput(f"an id must have at most {_LONGEST} bytes, not {size}")
    return id
