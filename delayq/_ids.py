"""Ids that delayq makes up for messages: twelve characters, in the order in which they were made."""

from __future__ import annotations

import itertools
import os
import secrets
import time

from delayq.errors import BadInput

_LONGEST = 512

# Those of base64 for URLs, in ASCII's order: so ids sort as the numbers that they stand for.
_DIGITS = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]

# The last millisecond, how its ids begin, and how they go on.
_state: tuple[int, str, itertools.count[int]] = (0, "", itertools.count())


def new_id() -> str:
    """A new id. No two of one process are equal.

    A millisecond in 42 bits, then a number in 30 that begins at random in each and counts up. Two processes make the same one
    hardly ever; the server notices if they do. It is so short because the server keeps it twice, and 12 bytes with their header
    fill the smallest piece of memory that fits.
    """
    global _state  # noqa: PLW0603
    now = time.time_ns() // 1_000_000
    milliseconds, prefix, numbers = _state
    # A clock that was set back: the ids go on where they were.
    if now > milliseconds:
        prefix = _digits(now)
        numbers = itertools.count(secrets.randbits(29))
        _state = now, prefix, numbers
    number = next(numbers)
    return f"{prefix}{_PAIRS[number >> 18 & 4095]}{_PAIRS[number >> 6 & 4095]}{_DIGITS[number & 63]}"


def _digits(milliseconds: int) -> str:
    return "".join(_DIGITS[milliseconds >> shift & 63] for shift in range(36, -1, -6))


def _after_fork() -> None:
    # Processes that were one would make the same ids.
    global _state  # noqa: PLW0603
    _state = (0, "", itertools.count())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def checked_id(id: str) -> str:  # noqa: A002
    """Return the id if it may be one. Raises BadInput."""
    if not isinstance(id, str) or not id:
        raise BadInput("an id is a non-empty str")
    try:
        size = len(id.encode())
    except UnicodeEncodeError:
        raise BadInput("an id must be writable as UTF-8") from None
    if size > _LONGEST:
        raise BadInput(f"an id has {_LONGEST} bytes at most, not {size}")
    return id
