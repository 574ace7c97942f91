"""Decides in which partition a message lies. Pure."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING
from zlib import crc32

from delayq._reliable.ids import ENDINGS, is_occurrence, schedule_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def partition_of(id: str | bytes, partitions: int) -> int:  # noqa: A002
    """Return the partition of a message id: the same in every process, and forever.

    The occurrences of a schedule are in the partition of the schedule.
    """
    name = id.encode() if isinstance(id, str) else id
    if b"@" in name and is_occurrence(name):
        name = schedule_of(name)
    # The upper bits decide, whatever the number of partitions: see endings_in().
    return crc32(name) * partitions >> 32


def home_of(name: str | bytes, partitions: int) -> int:
    """Return the partition of a schedule, or of a group."""
    return crc32(name.encode() if isinstance(name, str) else name) * partitions >> 32


def endings_in(beginning: str, partition: int, partitions: int) -> Sequence[str]:
    """Return last characters with which a generated id that begins so lies in this partition: not
    all, and in some cases none.
    """
    bits = (partitions - 1).bit_length()
    if partitions != 1 << bits:
        # Of all ranges of checksums with the same upper bits, one lies within the partition's.
        bits += 1
    upper_bits = -(-(partition << bits) // partitions)
    # Checksums of equal length differ as their endings do, whatever comes before.
    return _by_upper_bits(bits)[upper_bits ^ crc32((beginning + ENDINGS[0]).encode()) >> 32 - bits]


@cache
def _by_upper_bits(bits: int) -> Sequence[Sequence[str]]:
    """Return the endings of ids, by the upper bits in which their checksums differ from the
    first.
    """
    endings: list[list[str]] = [[] for _ in range(1 << bits)]
    first = crc32(ENDINGS[0].encode())
    for ending in ENDINGS:
        endings[(crc32(ending.encode()) ^ first) >> 32 - bits].append(ending)
    return endings
