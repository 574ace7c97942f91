"""What one open queue has done so far, and how many messages it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Counts:
    """Messages of one queue, counted on this client since it was opened.

    Attributes:
        offered: Stored.
        delivered: Handed out.
        acked: Acknowledged.
        retried: Given back after a failure, to be tried again.
        buried: Made dead letters by who had them.
        released: Given back untouched by who had them.
    """

    offered: int = 0
    delivered: int = 0
    acked: int = 0
    retried: int = 0
    buried: int = 0
    released: int = 0


class Depth(NamedTuple):
    """How many messages are where: as :class:`delayq.Stats`."""

    delayed: int
    ready: int
    leased: int
    dead: int
    oldest_due_age: float
    paused: bool
