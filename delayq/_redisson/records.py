"""Redisson's records, as ``lua/redisson/include/record.lua`` reads and writes them, with their due
times. Pure.

A record is one pending message: ``08`` + 8 id bytes + little-endian length + payload. Older
versions of Redisson wrote the id as an IEEE double, without a leading ``08``; on 32-bit and Windows
servers the length has 4 bytes instead of 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from delayq._durations import DueTime, moment_in

Offer = tuple[DueTime, bytes]
"""When the message is due, and the payload."""
Stored = tuple[Sequence[Any], int, DueTime]
"""The reply to the call that stored a message, its place in that call, and when it is due.

:func:`id_of_stored` and :func:`due_us_of_stored` work out the rest, which few programs ask for.
"""

UNIT_US = 1000
"""One unit of the moments in Redisson's layout, in microseconds."""
# Beyond 2**53 ms a score is not exact.
_MAX_SCORE = 2.0**53


def pack(record_id: bytes, payload: bytes, length_bytes: int) -> bytes:
    """Build the record in the current form (Redisson 3.21.1 and later)."""
    return b"\x08" + record_id + len(payload).to_bytes(length_bytes, "little") + payload


def any_id_of(record: bytes) -> bytes | None:
    """Return the id of a record in any of the four forms, or None if it has none of them."""
    payload = payload_of(record)
    if payload is None:
        return None
    return record[1:9] if len(record) - len(payload) in (17, 13) else record[:8]


def id_of(record: bytes) -> bytes:
    """Return the id of a record in the current form."""
    return record[1:9]


def payload_of(record: bytes) -> bytes | None:
    """Return the payload of a record in any of the four forms, or None if it has none of them."""
    # The size of the header, then the offset of the length in it.
    forms = ((17, 9), (13, 9)) if record[:1] == b"\x08" else ()
    for header, at in (*forms, (16, 8), (12, 8)):
        if (
            len(record) >= header
            and int.from_bytes(record[at:header], "little") == len(record) - header
        ):
            return record[header:]
    return None


def id_of_stored(stored: Stored) -> bytes:
    """Return the id of a message: within one call, ids count up."""
    (_, _, first), place, _ = stored
    return (int.from_bytes(first, "big") + place).to_bytes(8, "big")


def due_us_of_stored(stored: Stored) -> int:
    """Return when a message is due, in microseconds, as ``lua/include/clock.lua`` works it out."""
    now_us: int = stored[0][1]
    due_time = stored[2]
    this_ms = now_us // UNIT_US * UNIT_US
    if not due_time:
        return this_ms
    moment = moment_in(due_time)
    # Lua's numbers are floats, which makes a difference after the year 2255.
    due = float(now_us) + cast("int", due_time) if moment is None else float(max(moment, this_ms))
    fraction = due - float(math.floor(due / UNIT_US)) * UNIT_US
    return int((due - fraction + UNIT_US if fraction > 0 else due) / UNIT_US) * UNIT_US


class PendingRecord(NamedTuple):
    """A record that is not due yet, or not moved yet, and its due time as on the server, in ms."""

    record: bytes
    score: bytes

    @property
    def due_us(self) -> int:
        """When the message is due, in microseconds."""
        return parse_score(self.score)

    @property
    def payload(self) -> bytes | None:
        """The payload; None if the record cannot be read."""
        return payload_of(self.record)

    @property
    def start(self) -> bytes:
        """The record up to the end of its id, for :meth:`DelayedStore.find_at`."""
        return self.record[:9] if self.record[:1] == b"\x08" else self.record[:8]


def parse_score(score: bytes | float) -> int:
    """Return the moment of a score, in microseconds; fractions of a millisecond are rounded up."""
    # Another program may have left an infinity.
    return math.ceil(min(max(float(score), 0.0), _MAX_SCORE)) * UNIT_US


def score_of(moment_us: float) -> str:
    """Return the score of a moment, with a fraction between two milliseconds."""
    return f"{moment_us / UNIT_US:.16g}"
