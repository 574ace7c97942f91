"""Figures of a queue's depth, and the states that follow from them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

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


def undeliverable(depth: QueueDepth) -> int:
    """Return the number of dead letters, or of a delayed queue's unreadable records."""
    return depth.dead + (depth.quarantined or 0)


Tone = Literal["bad", "warn", "good", "idle"]

LATE = 60.0
"""The age of a due message from which its queue is late, in seconds, as in ``delayq doctor``."""


@dataclass(frozen=True)
class State:
    """A state of a queue: a label, a tone that selects its colour, and an explanation."""

    label: str
    tone: Tone
    about: str


REFUSED = State("unreadable", "bad", "The server refuses to count the queue's messages.")
UNATTENDED = State(
    "no consumers",
    "bad",
    "Messages have been due for a minute or longer, and no consumer holds any: start a worker.",
)
OVERDUE = State(
    "late",
    "warn",
    "Messages have been due for a minute or longer: start more workers, or raise their"
    " concurrency.",
)
FAILING = State(
    "failing",
    "warn",
    "In the last three minutes, at least ten attempts failed, and a tenth or more of all.",
)
DEAD = State("dead letters", "warn", "Redrive or drop the messages that workers gave up on.")
UNREADABLE = State("unreadable records", "warn", "Records that are not in Redisson's format.")
PAUSED = State("paused", "warn", "No messages are delivered until an operator resumes the queue.")
WORKING = State("working", "good", "Messages are due or being handled, and none is late.")
WAITING = State("waiting", "idle", "No message is due yet.")
EMPTY = State("empty", "idle", "The queue holds no messages.")

STATES = (REFUSED, UNATTENDED, OVERDUE, FAILING, DEAD, UNREADABLE, PAUSED, WORKING, WAITING, EMPTY)
"""All states, the worst first."""


def states(depth: QueueDepth | str, kind: QueueKind, *, is_failing: bool = False) -> list[State]:
    """Return the states of a queue, the worst first: all troubles, or how it is doing."""
    if isinstance(depth, str):
        return [REFUSED]
    if troubles := list(_troubles(depth, kind, is_failing=is_failing)):
        return troubles
    if depth.ready or depth.leased:
        return [WORKING]
    return [WAITING if depth.delayed else EMPTY]


def is_late(some_states: Collection[State]) -> bool:
    """Return whether a queue in these states has messages that have been due for long."""
    return UNATTENDED in some_states or OVERDUE in some_states


def _troubles(depth: QueueDepth, kind: QueueKind, *, is_failing: bool) -> Iterator[State]:
    if depth.oldest_due_age > LATE and (depth.ready or kind == "delayed"):
        # Records of a delayed queue become late only while no process has the queue open.
        yield UNATTENDED if kind == "delayed" or not (depth.leased or depth.paused) else OVERDUE
    if is_failing:
        yield FAILING
    if undeliverable(depth):
        yield DEAD if kind == "reliable" else UNREADABLE
    if depth.paused:
        yield PAUSED
