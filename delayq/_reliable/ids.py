"""The ids of messages: those that delayq generates, of twelve characters, sorted by the time they
were made; those of occurrences; and checks of the caller's own.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from typing import TYPE_CHECKING

from delayq._wording import given
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 512
# See lua/reliable/include/letters.lua.
_RESERVED = re.compile(r"\0[0-9]{16}\Z")

# The digits of base64 for URLs, in ASCII order, so that ids sort like the numbers they represent.
_DIGITS = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
ENDINGS = [a + b for a in _DIGITS for b in _DIGITS]
"""The last two characters of an id, in order."""
# Of the number in an id: its lower twelve bits are the last two characters.
_UPPER_BITS = 30 - 12

# The end of the last millisecond, in nanoseconds since 1970; the ids for it that are left; and the
# upper bits of the number that these share.
_until_ns = 0
_ids: Iterator[str] = iter(())
_upper = 0
_renewing = threading.Lock()


def new_id() -> str:
    """Return a new id, different from all others of this process.

    It consists of the millisecond in 42 bits, and a number in 30 bits that starts at random in each
    millisecond, in the lower half, and counts up. Two processes hardly ever make the same id, and
    the server notices if they do. It is short because the server stores it twice, and 12 bytes with
    their header fill the smallest allocation they fit in.
    """
    # If the clock was set back, the ids continue where they were.
    if time.time_ns() < _until_ns and (found := next(_ids, None)) is not None:
        return found
    return _renew_and_take()


def new_block() -> tuple[str, int]:
    """Reserve the ids that begin with certain ten characters, whatever the last two are.

    Returns:
        The ten characters; and until when to use such ids, in nanoseconds since 1970.
    """
    with _renewing:
        return _reserve(time.time_ns())[0], _until_ns


def _renew_and_take() -> str:
    """Prepare the ids of this millisecond, or more of them, and return the first one."""
    global _ids  # noqa: PLW0603
    with _renewing:
        now_ns = time.time_ns()
        # Another thread may have renewed it meanwhile.
        while now_ns >= _until_ns or (found := next(_ids, None)) is None:
            prefix, lower = _reserve(now_ns)
            _ids = map(prefix.__add__, map(ENDINGS.__getitem__, range(lower, len(ENDINGS))))
        return found


def _reserve(now_ns: int) -> tuple[str, int]:
    """Return the first ten characters of new ids, and the number of the first ending to use."""
    global _until_ns, _ids, _upper  # noqa: PLW0603
    lower = 0
    if now_ns < _until_ns:
        _upper += 1
    else:
        _until_ns = now_ns - now_ns % 1_000_000 + 1_000_000
        _upper, lower = divmod(secrets.randbits(29), len(ENDINGS))
        _ids = iter(())
    return _digits((_until_ns // 1_000_000 - 1 << _UPPER_BITS) + _upper, 10), lower


def _digits(number: int, count: int) -> str:
    return "".join(_DIGITS[number >> shift & 63] for shift in range(6 * count - 6, -1, -6))


def _after_fork() -> None:
    # After a fork, parent and child would make the same ids. Another thread may have had the lock.
    global _until_ns, _renewing
    _until_ns, _renewing = 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


OCCURRENCE_DIGITS = 16
"""The id of an occurrence of a recurring message ends in "@" and the microseconds since the epoch,
which have sixteen digits from 2001 to 2286.
"""


def is_occurrence(id: bytes) -> bool:  # noqa: A002
    """Return whether a message may be an occurrence, judging by its id."""
    digits = id[-OCCURRENCE_DIGITS:]
    return id[-OCCURRENCE_DIGITS - 1 : -OCCURRENCE_DIGITS] == b"@" and digits.isdigit()


def schedule_of(occurrence: bytes) -> bytes:
    """Return the name of the schedule to which the occurrence with this id belongs."""
    return occurrence[: -OCCURRENCE_DIGITS - 1]


def checked_id(id: str) -> str:  # noqa: A002
    """Return the id if it is valid. Raises BadInput otherwise."""
    return _checked(id, "id")


def checked_new_id(id: str) -> str:  # noqa: A002
    """Return the id of a new message if it is valid. Raises BadInput otherwise."""
    if _RESERVED.search(checked_id(id)):
        raise BadInput(
            f"an id must not end in NUL and 16 digits, as {id!r} does: delayq names dead letters of"
            " the same id so"
        )
    return id


def checked_group(group: str) -> str:
    """Return the name of a group if it is valid. Raises BadInput otherwise."""
    if "\0" in _checked(group, "group"):
        raise BadInput(f"group must not contain NUL, as {group!r} does")
    return group


def _checked(name: str, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise BadInput(f"{what} must be a non-empty str, not {given(name)}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadInput(f"{what} must be encodable as UTF-8") from None
    if size > _LONGEST:
        raise BadInput(f"{what} must have at most {_LONGEST} bytes, not {size}")
    return name
