"""Derives from a queue's figures what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from delayq._dashboard.depths import undeliverable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq.admin.catalog import QueueKind
    from delayq.stats import QueueDepth

Tone = Literal["bad", "warn", "good", "idle"]

LATE = 60.0
"""The age of a due message from which its queue is late, in seconds, as in ``delayq doctor``."""


@dataclass(frozen=True)
class State:
    """A state of a queue: a word, a tone that selects its colour, and an explanation."""

    word: str
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
DEAD = State("dead letters", "warn", "Redrive or drop the messages that workers gave up on.")
UNREADABLE = State("unreadable records", "warn", "Records that are not in Redisson's format.")
PAUSED = State("paused", "warn", "No messages are delivered until an operator resumes the queue.")
WORKING = State("working", "good", "Messages are due or being handled, and none is late.")
WAITING = State("waiting", "idle", "No message is due yet.")
EMPTY = State("empty", "idle", "The queue holds no messages.")

STATES = (REFUSED, UNATTENDED, OVERDUE, DEAD, UNREADABLE, PAUSED, WORKING, WAITING, EMPTY)
"""All states, the worst first."""


def states(depth: QueueDepth | str, kind: QueueKind) -> list[State]:
    """Return the states of a queue, the worst first: all troubles, or how it is doing."""
    if isinstance(depth, str):
        return [REFUSED]
    if troubles := list(_troubles(depth, kind)):
        return troubles
    if depth.ready or depth.leased:
        return [WORKING]
    return [WAITING if depth.delayed else EMPTY]


def _troubles(depth: QueueDepth, kind: QueueKind) -> Iterator[State]:
    if depth.oldest_due_age > LATE and (depth.ready or kind == "delayed"):
        # Records of a delayed queue become late only while no process has the queue open.
        yield UNATTENDED if kind == "delayed" or not (depth.leased or depth.paused) else OVERDUE
    if undeliverable(depth):
        yield DEAD if kind == "reliable" else UNREADABLE
    if depth.paused:
        yield PAUSED
