"""Counts the messages that want workers, now and soon, for autoscalers."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Literal, Protocol
from urllib.parse import parse_qsl

from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq.stats import QueueDepth

# The longest window, in seconds: a year.
_LONGEST = 366 * 86_400


class CountableQueue(Protocol):
    """A queue whose messages can be counted by state and by due time."""

    @property
    def kind(self) -> Literal["delayed", "reliable"]: ...

    async def depth(self) -> QueueDepth: ...

    async def due_counts(self, edges: Sequence[int]) -> list[int]:
        """Return how many messages come due between each of some moments and the next, and after
        the last one, in microseconds.
        """
        ...


def window_of(query: str) -> float:
    """Return the seconds in a query such as ``within=60``; 0 for an empty one.

    Raises:
        BadInput: It is not a number of seconds, or there is another parameter.
    """
    window = 0.0
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "within":
            raise BadInput(f"there is no parameter {name!r}, only within: ?within=60")
        try:
            window = float(value)
        except ValueError:
            window = math.nan
        if not 0 <= window <= _LONGEST:
            raise BadInput(
                f"within must be a number of seconds from 0 to {_LONGEST}, such as 60, not"
                f" {value!r}"
            )
    return window


async def scale_of(queue: CountableQueue, now_us: int, window: float) -> dict[str, float]:
    """Return the figures of ``/scale``. Raises ServerError.

    Args:
        queue: The queue.
        now_us: The server's time, microseconds.
        window: For ``due_within``, seconds.
    """
    depth, (soon, later) = await asyncio.gather(
        queue.depth(), queue.due_counts([now_us, now_us + round(window * 1_000_000)])
    )
    due = depth.ready
    if queue.kind == "delayed":
        # Records that are due stay among the others until a process moves them.
        due += max(0, depth.delayed - soon - later)
    return {
        # More workers would not get the messages of a paused queue.
        "due": 0 if depth.paused else due,
        "due_within": 0 if depth.paused else due + soon,
        "running": depth.leased,
        "waiting": depth.ready + depth.delayed,
        "late_seconds": 0.0 if depth.paused else round(depth.oldest_due_age, 3),
    }
