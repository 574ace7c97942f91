"""Counts what one open queue has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Counters:
    """Message counters of one queue on this client, from the moment the queue was opened.

    Attributes:
        offered: Messages stored.
        delivered: Messages handed out.
        acked: Messages acknowledged.
        retried: Messages given back after a failure, to be tried again.
        buried: Messages made dead letters by their holder.
        released: Messages given back untouched by their holder.
        lease_ended: Messages of a delayed queue found with their lease ended.
        quarantined: Unreadable records of a delayed queue.
        slots: Messages that workers handle at a time now, at most. The first partition counts for
            all, because workers take from all of them alike.
        free_slots: Return how many of them are free, one for each worker.
    """

    offered: int = 0
    delivered: int = 0
    acked: int = 0
    retried: int = 0
    buried: int = 0
    released: int = 0
    lease_ended: int = 0
    quarantined: int = 0
    slots: int = 0
    free_slots: list[Callable[[], int]] = field(default_factory=list)
