"""Finds dead letters by why and when their messages died, and counts, redrives or purges them.

Functions take the data of a queue's partitions. Letters are read in steps of 100, so no call holds
up the server. Every function may raise the errors of :class:`~delayq.errors.ServerError`.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from delayq._reliable.dead_letters import (
    DeadLetter,
    half_way,
    purge_letters,
    read_dead_letter,
    redrive_letters,
)
from delayq.codecs import BytesCodec
from delayq.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from delayq._reliable.store import ReliableStore

    # Letters of one partition, by their names on the server.
    Letters = dict[bytes, DeadLetter[bytes]]

GroupBy = Literal["error", "type", "reason"]

OTHER_CAUSES = "(others)"
"""The name of the group for letters that came after the first 1,000 groups."""

_STEP = 100
_MAX_GROUPS = 1000


@dataclass(frozen=True)
class LetterQuery:
    """A choice of dead letters: those that meet all conditions.

    Attributes:
        error: Text that the line of the last error contains, in any case.
        reason: Text that the reason contains, in any case.
        died_before: The latest time of death.
        cause: The cause of their group, exactly, and how they are grouped; None for all groups.
    """

    error: str = ""
    reason: str = ""
    died_before: datetime | None = None
    cause: tuple[GroupBy, str] | None = None

    def matches(self, letter: DeadLetter[bytes]) -> bool:
        return (
            (self.cause is None or _cause(letter, self.cause[0]) == self.cause[1])
            and self.error.lower() in letter.error.lower()
            and self.reason.lower() in letter.reason.lower()
            and not self.ends_at(letter)
        )

    def ends_at(self, letter: DeadLetter[bytes]) -> bool:
        """Return whether this letter, and so each after it, is too young: letters come by age."""
        return self.died_before is not None and letter.died_at > self.died_before


@dataclass(frozen=True)
class LetterGroup:
    """Dead letters that died for the same cause.

    Attributes:
        cause: Their error, its type, or their reason, as asked for.
        count: The number of letters.
        first: The time the first of them died.
        last: The time the last of them died.
    """

    cause: str
    count: int
    first: datetime
    last: datetime


async def find(
    stores: Sequence[ReliableStore], query: LetterQuery, *, offset: int = 0, limit: int = 100
) -> list[DeadLetter[bytes]]:
    """Return the dead letters that match, oldest first."""
    partitions = []
    for reader in await _readers(stores, query):
        matches: list[DeadLetter[bytes]] = []
        # Each partition may have all the letters that come first.
        while len(matches) < offset + limit and (letters := await reader.step()) is not None:
            matches += letters.values()
        partitions.append(matches)
    oldest = heapq.merge(*partitions, key=lambda letter: letter.died_at)
    return [*islice(oldest, offset, offset + limit)]


async def groups(
    stores: Sequence[ReliableStore],
    by: GroupBy,
    query: LetterQuery,
    *,
    progress: Callable[[int, int], None] | None = None,
    max_examined: int | None = None,
    deadline: float = float("inf"),
) -> list[LetterGroup]:
    """Count the dead letters that match by their cause, the most frequent first.

    Letters without an error are counted by their reason. ``progress`` is called after each step
    with the number of letters examined so far, and the total. All are examined, or about
    ``max_examined``, or those for which there is time before ``deadline``, a moment of the
    monotonic clock.
    """
    counts: Counter[str] = Counter()
    moments: dict[str, tuple[datetime, datetime]] = {}

    async def count_causes(_: ReliableStore, letters: Letters) -> int:
        for letter in letters.values():
            cause = _cause(letter, by)
            if cause not in counts and len(counts) >= _MAX_GROUPS:
                cause = OTHER_CAUSES
            counts[cause] += 1
            first, last = moments.get(cause, (letter.died_at, letter.died_at))
            moments[cause] = min(first, letter.died_at), max(last, letter.died_at)
        return 0

    await _apply(stores, query, count_causes, progress, max_examined, deadline)
    return [LetterGroup(cause, number, *moments[cause]) for cause, number in counts.most_common()]


async def count(
    stores: Sequence[ReliableStore],
    query: LetterQuery,
    *,
    progress: Callable[[int, int], None] | None = None,
    max_examined: int | None = None,
    deadline: float = float("inf"),
) -> int:
    """Return the number of dead letters that match.

    ``progress``, ``max_examined`` and ``deadline`` are as for :func:`groups`.
    """
    matching = 0

    async def add(_: ReliableStore, letters: Letters) -> int:
        nonlocal matching
        matching += len(letters)
        return 0

    await _apply(stores, query, add, progress, max_examined, deadline)
    return matching


async def redrive(
    stores: Sequence[ReliableStore],
    query: LetterQuery,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Requeue the dead letters that match, and return the number of messages that were requeued.

    A letter stays as described at :meth:`delayq.DeadLetters.redrive`. ``progress`` is called after
    each step with the number of letters examined so far, and the total.

    Raises:
        OutcomeUnknown: Some were requeued, or may have been. With any other error, none was.
    """
    return await _apply(
        stores, query, lambda store, letters: redrive_letters(store, [*letters]), progress
    )


async def purge(
    stores: Sequence[ReliableStore],
    query: LetterQuery,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Drop the dead letters that match for good, and return how many there were.

    ``progress`` and errors are as for :func:`redrive`.
    """
    return await _apply(
        stores, query, lambda store, letters: purge_letters(store, [*letters]), progress
    )


class _Reader:
    """Reads the letters of one partition that there are now, oldest first.

    Attributes:
        total: The number of letters.
        examined: How many of them are read, or too young to match.
        read: How many of them are read.
    """

    def __init__(self, store: ReliableStore, query: LetterQuery, total: int) -> None:
        self.store = store
        self.total = total
        self.examined = 0
        self.read = 0
        self._query = query
        self._offset = 0

    async def step(self) -> Letters | None:
        """Return the next letters that match; None after the last step."""
        page = []
        if (remaining := self.total - self.examined) > 0:
            page = await self.store.dead_page(self._offset, min(remaining, _STEP))
        if not page:
            return None
        letters = {stored.name: read_dead_letter(stored, BytesCodec()) for stored in page}
        self.examined += len(page)
        self.read += len(page)
        self._offset += len(page)
        if self._query.ends_at(letters[page[-1].name]):
            self.examined = self.total
        return {name: letter for name, letter in letters.items() if self._query.matches(letter)}

    def note_removed(self, number: int) -> None:
        """Note that letters of the last step are gone, so that the next ones are not left out."""
        self._offset -= number


async def _readers(stores: Sequence[ReliableStore], query: LetterQuery) -> list[_Reader]:
    return [_Reader(store, query, await store.count_dead()) for store in stores]


async def _apply(
    stores: Sequence[ReliableStore],
    query: LetterQuery,
    act: Callable[[ReliableStore, Letters], Awaitable[int]],
    progress: Callable[[int, int], None] | None,
    max_examined: int | None = None,
    deadline: float = float("inf"),
) -> int:
    """Apply ``act``, which returns how many letters it removed, to the letters that match among the
    first ``max_examined``, or all; begin no step but the first after ``deadline``, a moment of the
    monotonic clock. Return the sum of its results.
    """
    readers = await _readers(stores, query)
    total = sum(reader.total for reader in readers)
    removed = read = 0
    # In turn, so that the first ``max_examined`` are about the oldest of all partitions.
    turns = deque(readers)
    while (
        turns
        and (max_examined is None or read < max_examined)
        and (not read or time.monotonic() < deadline)
    ):
        reader = turns.popleft()
        try:
            if (letters := await reader.step()) is None:
                continue
            count = await act(reader.store, letters) if letters else 0
        except ServerError as error:
            raise half_way(error, removed) from error.__cause__
        turns.append(reader)
        reader.note_removed(count)
        removed += count
        read = sum(reader.read for reader in readers)
        if progress is not None:
            progress(sum(reader.examined for reader in readers), total)
    return removed


def _cause(letter: DeadLetter[bytes], by: GroupBy) -> str:
    if by == "reason" or not letter.error:
        return letter.reason
    return letter.error if by == "error" else letter.error.partition(":")[0]
