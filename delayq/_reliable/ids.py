"""The ids of messages: those that delayq generates, the checks of yours, and the partitions that
they name.

A generated id has twelve characters, sorted by the time when it was generated.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import secrets
import threading
import time
from functools import cache
from typing import TYPE_CHECKING
from zlib import crc32

from delayq._checks import describe_value
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

_LONGEST = 512
# See lua/reliable/include/letters.lua.
_RESERVED = re.compile(r"\0[0-9]{16}\Z")

# The digits of base64 for URLs, in ASCII order, so that ids sort like the numbers they represent.
_DIGITS = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
ENDINGS = [a + b for a in _DIGITS for b in _DIGITS]
"""The last two characters of an id, in order: twelve bits of its number."""
# Of the number in an id, these bits are above its last two characters.
_UPPER_BITS = 30 - 12

# The end of the last millisecond, in nanoseconds since 1970; the ids for it that were not used yet;
# and the upper bits of the number that these share.
_until_ns = 0
_ids: Iterator[str] = iter(())
_upper = 0
_renewing = threading.Lock()


# Generated ids


def new_id() -> str:
    """Return a new id, different from all others of this process.

    It consists of the millisecond in 42 bits, and a number in 30 bits that starts at random in each
    millisecond, in the lower half, and counts up. Two processes hardly ever make the same id, and
    the server notices if they do. It is short because the server stores it twice, and 12 bytes with
    their header fill the smallest allocation they fit in.
    """
    global _ids  # noqa: PLW0603
    # If the clock was set back, the ids continue where they were.
    if time.time_ns() < _until_ns and (name := next(_ids, None)) is not None:
        return name
    with _renewing:
        now_ns = time.time_ns()
        # Another thread may have renewed them meanwhile.
        while now_ns >= _until_ns or (name := next(_ids, None)) is None:
            beginning, lower = _reserve(now_ns)
            _ids = map(beginning.__add__, map(ENDINGS.__getitem__, range(lower, len(ENDINGS))))
        return name


def new_block() -> tuple[str, int]:
    """Reserve the ids that begin with certain ten characters, whatever the last two are.

    Returns:
        The ten characters; and until when to use such ids, in nanoseconds since 1970.
    """
    with _renewing:
        return _reserve(time.time_ns())[0], _until_ns


def new_id_in(partition: int, partitions: int) -> str:
    """Return a new id whose message lies in a certain partition."""
    while True:
        beginning, _ = new_block()
        if endings := endings_in(beginning, partition, partitions):
            return beginning + endings[0]


def new_ids_in(partition: int, partitions: int) -> Iterator[str]:
    """Yield new ids whose messages lie in a certain partition."""
    while True:
        beginning, _ = new_block()
        yield from (beginning + ending for ending in endings_in(beginning, partition, partitions))


def follower_id(predecessor: bytes, number: int, partition: int, partitions: int) -> str:
    """Return the id of the ``number``-th message that follows from another one: the same whenever
    the other one is acknowledged, and in its partition.
    """
    digest = hashlib.sha256(b"%d:%b" % (number, predecessor)).digest()
    while True:
        beginning = "".join(ENDINGS[byte << 4 | digest[-1] >> 4] for byte in digest[:5])
        if endings := endings_in(beginning, partition, partitions):
            return beginning + endings[digest[5] % len(endings)]
        digest = hashlib.sha256(digest).digest()


def _reserve(now_ns: int) -> tuple[str, int]:
    """Return the first ten characters of new ids, and the number of the first ending to use."""
    global _until_ns, _ids, _upper  # noqa: PLW0603
    lower = 0
    if now_ns < _until_ns:
        _upper += 1
    else:
        _until_ns = now_ns - now_ns % 1_000_000 + 1_000_000
        _upper, lower = divmod(secrets.randbits(29), len(ENDINGS))
        _ids = iter(())
    number = (_until_ns // 1_000_000 - 1 << _UPPER_BITS) + _upper
    return "".join([ENDINGS[number >> shift & 4095] for shift in (48, 36, 24, 12, 0)]), lower


def _after_fork() -> None:
    # After a fork, parent and child would make the same ids. Another thread may have had the lock.
    global _until_ns, _renewing
    _until_ns, _renewing = 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Partitions


def partition_of(id: str | bytes, partitions: int) -> int:  # noqa: A002
    """Return the partition of a message id: the same in every process, and forever.

    The occurrences of a schedule are in the partition of the schedule.
    """
    name = id.encode() if isinstance(id, str) else id
    if AT_SIGN in name and is_occurrence(name):
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
    first = crc32((beginning + ENDINGS[0]).encode()) >> 32 - bits
    return _endings_by_bits(bits)[upper_bits ^ first]


@cache
def _endings_by_bits(bits: int) -> Sequence[Sequence[str]]:
    """Return the endings of ids, by the upper bits in which their checksums differ from the
    first.
    """
    endings: list[list[str]] = [[] for _ in range(1 << bits)]
    first = crc32(ENDINGS[0].encode())
    for ending in ENDINGS:
        endings[(crc32(ending.encode()) ^ first) >> 32 - bits].append(ending)
    return endings


# The largest number of messages in a row for one partition: as many as share a call, but few if the
# queue has a limit, of which each partition has a share that only its own messages can use.
_MESSAGES_PER_TURN, _LIMITED_MESSAGES_PER_TURN = 200, 8
# How long a partition gets messages, in nanoseconds: not for longer, because its server may hang.
_TURN_NS = 5_000_000


class PartitionRotation:
    """Chooses the partitions of messages whose ids are generated, when they are sent.

    Messages of one partition share calls, so a partition gets many messages in a row. The
    partitions take turns, except those on servers that failed lately.

    Attributes:
        partitions: The number of partitions that take turns.
    """

    def __init__(self, is_unreachable: Callable[[int], bool]) -> None:
        """``is_unreachable`` returns whether the server of a partition failed lately."""
        self._is_unreachable = is_unreachable
        self._partition = random.randrange(1024)
        # How many more messages the partition gets, and until when; the ids that are prepared for
        # them, and until when these are used.
        self._remaining = 0
        self._per_turn = _MESSAGES_PER_TURN
        self._turn_ends_ns = 0
        self._ids: Iterator[str] = iter(())
        self._ids_end_ns = 0
        self.partitions: int = 1

    def start_over(self, partitions: int, *, is_limited: bool) -> None:
        """Let this number of partitions take turns from now on.

        The turns are short if the queue ``is_limited``.
        """
        self._remaining, self.partitions = 0, partitions
        self._per_turn = _LIMITED_MESSAGES_PER_TURN if is_limited else _MESSAGES_PER_TURN

    def next(self, failed: Container[int] = ()) -> tuple[int, str]:
        """Return the partition of a message that is sent now, and a new id that lies there.

        Of ``failed`` partitions, it is known that their servers are not available.
        """
        if self.partitions == 1:
            return 0, new_id()
        if self._partition in failed:
            self._remaining = 0
        # If the clock was set back, the ids continue where they were.
        while not (
            self._remaining
            and time.time_ns() < self._ids_end_ns
            and (name := next(self._ids, None)) is not None
        ):
            self._renew(failed)
        self._remaining -= 1
        return self._partition, name

    def _renew(self, failed: Container[int]) -> None:
        """Prepare more ids, for the next partition if its turn has come."""
        count, now_ns = self.partitions, time.time_ns()
        # The clock may have been set back.
        if not self._remaining or not 0 < self._turn_ends_ns - now_ns <= _TURN_NS:
            self._remaining, self._turn_ends_ns = self._per_turn, now_ns + _TURN_NS
            following = [(self._partition + step) % count for step in range(1, count + 1)]
            self._partition = next(
                (
                    partition
                    for partition in following
                    if not (partition in failed or self._is_unreachable(partition))
                ),
                following[0],
            )
        beginning, self._ids_end_ns = new_block()
        self._ids = map(beginning.__add__, endings_in(beginning, self._partition, count))


# Occurrences of schedules

OCCURRENCE_DIGITS = 16
"""The id of an occurrence is the name of its schedule, "@", and the microseconds since the epoch,
which have sixteen digits from 2001 to 2286.
"""
# To look for in an id: bytes find a number twenty times as fast as they find b"@".
AT_SIGN = ord("@")


def is_occurrence(id: bytes) -> bool:  # noqa: A002
    """Return whether a message may be an occurrence, judging by its id."""
    return (
        id[-OCCURRENCE_DIGITS - 1 : -OCCURRENCE_DIGITS] == b"@"
        and id[-OCCURRENCE_DIGITS:].isdigit()
    )


def schedule_of(occurrence: bytes) -> bytes:
    """Return the name of the schedule to which the occurrence with this id belongs."""
    return occurrence[: -OCCURRENCE_DIGITS - 1]


# Names that callers give


def checked_id(id: str) -> str:  # noqa: A002
    """Return the id if it is valid. Raises BadInput otherwise."""
    return _checked(id, "id")


def checked_new_id(id: str) -> str:  # noqa: A002
    """Return the id of a new message if it is valid. Raises BadInput otherwise."""
    if _RESERVED.search(checked_id(id)):
        raise BadInput(
            f"an id must not end in NUL and 16 digits, as {id!r} does: delayq names dead letters of"
            " the same id so"
        )
    return id


def checked_group(group: str) -> str:
    """Return the name of a group if it is valid. Raises BadInput otherwise."""
    if "\0" in _checked(group, "group"):
        raise BadInput(f"group must not contain NUL, as {group!r} does")
    return group


def _checked(name: str, kind: str) -> str:
    if not isinstance(name, str) or not name:
        raise BadInput(f"{kind} must be a non-empty str, not {describe_value(name)}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadInput(f"{kind} must be encodable as UTF-8") from None
    if size > _LONGEST:
        raise BadInput(f"{kind} must have at most {_LONGEST} bytes, not {size}")
    return name
