"""Decides in which partition a message lies."""

from __future__ import annotations

from zlib import crc32

from delayq._reliable.recurrence import is_occurrence, schedule_of


def partition_of(id: str, partitions: int) -> int:  # noqa: A002
    """Return the partition of a message id: the same in every process, and forever.

    The occurrences of a schedule are in the partition of the schedule.
    """
    name = id.encode()
    return crc32(schedule_of(name) if is_occurrence(name) else name) % partitions


def home_of(schedule: str, partitions: int) -> int:
    """Return the partition of a schedule."""
    return crc32(schedule.encode()) % partitions
