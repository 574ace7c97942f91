"""The states of queues, as the dashboard and the command line name them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from delayq.admin.catalog import QueueKind
    from delayq.admin.delays import Delay
    from delayq.stats import QueueDepth


def undeliverable(depth: QueueDepth) -> int:
    """Return the number of dead letters, or of a delayed queue's unreadable records."""
    return depth.dead + (depth.quarantined or 0)


Tone = Literal["bad", "warn", "good", "idle"]

LATE = 60.0
"""The age of a due message from which its queue is late, in seconds, as in ``delayq doctor``."""


@dataclass(frozen=True)
class QueueState:
    """A state of a queue: a label, a tone that selects its colour, and an explanation."""

    label: str
    tone: Tone
    about: str


REFUSED = QueueState("unreadable", "bad", "The server refuses to count the queue's messages.")
UNATTENDED = QueueState(
    "no consumers",
    "bad",
    "Messages have been due for a minute or longer, and no process takes any: start a worker.",
)
OVERDUE = QueueState(
    "late",
    "warn",
    "Messages have been due for a minute or longer: start more workers, or raise their"
    " concurrency.",
)
FAILING = QueueState(
    "failing",
    "warn",
    "In the last three minutes, at least ten attempts failed, and a tenth or more of all.",
)
DEAD = QueueState("dead letters", "warn", "Redrive or drop the messages that workers gave up on.")
UNREADABLE = QueueState("unreadable records", "warn", "Records that are not in Redisson's format.")
PAUSED = QueueState(
    "paused", "warn", "No messages are delivered until an operator resumes the queue."
)
WORKING = QueueState("working", "good", "Messages are due or being handled, and none is late.")
WAITING = QueueState("waiting", "idle", "No message is due yet.")
EMPTY = QueueState("empty", "idle", "The queue holds no messages.")

STATES = (REFUSED, UNATTENDED, OVERDUE, FAILING, DEAD, UNREADABLE, PAUSED, WORKING, WAITING, EMPTY)
"""All states, the worst first."""


def states(
    depth: QueueDepth | str,
    kind: QueueKind,
    *,
    is_failing: bool = False,
    delay: Delay | None = None,
) -> list[QueueState]:
    """Return the states of a queue, the worst first: all troubles, or how it is doing.

    Args:
        depth: The number of its messages by state; a text says why it is unknown.
        kind: Its kind.
        is_failing: Whether many of its attempts fail.
        delay: Why its messages are late, if that is known. Otherwise, a queue of which nothing is
            leased counts as one without consumers.
    """
    if isinstance(depth, str):
        return [REFUSED]
    if troubles := list(_troubles(depth, kind, delay, is_failing=is_failing)):
        return troubles
    if depth.ready or depth.leased:
        return [WORKING]
    return [WAITING if depth.delayed else EMPTY]


def is_late(some_states: Collection[QueueState]) -> bool:
    """Return whether a queue in these states has messages that have been due for long."""
    return UNATTENDED in some_states or OVERDUE in some_states


def _troubles(
    depth: QueueDepth, kind: QueueKind, delay: Delay | None, *, is_failing: bool
) -> Iterator[QueueState]:
    if depth.oldest_due_age > LATE and (depth.ready or kind == "delayed"):
        if delay is not None:
            lacks_consumers = delay.reason == "no_consumers"
        else:
            # Records of a delayed queue become late only while no process has the queue open.
            lacks_consumers = kind == "delayed" or not (depth.leased or depth.paused)
        yield UNATTENDED if lacks_consumers else OVERDUE
    if is_failing:
        yield FAILING
    if undeliverable(depth):
        yield DEAD if kind == "reliable" else UNREADABLE
    if depth.paused:
        yield PAUSED
