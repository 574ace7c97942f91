"""Figures of a queue's depth, and the ends of a histogram's bars. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq.admin.states import undeliverable

if TYPE_CHECKING:
    from delayq.admin.catalog import QueueKind
    from delayq.stats import QueueDepth


SECOND = 1_000_000
"""One second in microseconds, the unit of all moments here."""
# Ends of the bars of a histogram. There is another bar beyond the last one. The first is the time
# between two looks: it shows how many messages become due in between.
_HORIZONS = (SECOND, 60 * SECOND, 3600 * SECOND, 86400 * SECOND)


def edges(now: int) -> list[int]:
    """Return the moments between which a histogram counts messages, microseconds."""
    return [now, *(now + horizon for horizon in _HORIZONS)]


def late_us(depth: QueueDepth, kind: QueueKind) -> int | None:
    """Return how long the oldest due message has been due, in microseconds; 0 if there is none.

    None if that is unknown: Redisson's ready list has no times.
    """
    late = round(depth.oldest_due_age * SECOND)
    return None if kind == "delayed" and depth.ready and not late else late


def count_in(depth: QueueDepth, state: str) -> int:
    """Return the number of messages in one state."""
    count: int = undeliverable(depth) if state == "unreadable" else getattr(depth, state)
    return count
