"""Finds dead letters by why and when their messages died, and counts, redrives or purges them.

Functions take the data of a queue's partitions. Letters are read in steps of 100, so no call holds
up the server. Every function may raise the errors of :class:`~delayq.errors.ServerError`.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from delayq._durations import MICROSECOND, datetime_at
from delayq._reliable.bodies import read_reason
from delayq._reliable.dead_letters import (
    DeadLetter,
    half_way,
    purge_letters,
    read_dead_letter,
    redrive_letters,
)
from delayq._reliable.failures import unpack_error
from delayq.codecs import BytesCodec
from delayq.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._reliable.letter_store import Death, StoredLetter
    from delayq._reliable.store import ReliableStore

    # Letters of one partition.
    Letters = list[tuple[StoredLetter, "LetterFacts"]]

GroupBy = Literal["error", "type", "reason"]

OTHER_CAUSES = "(others)"
"""The name of the group for letters that came after the first 1,000 groups."""

MAX_CAUSES = 1000
"""The number of causes that a count tells apart."""
_STEP = 100
# Their names are short, so a command may return more of them.
_DEATHS = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LetterFacts(NamedTuple):
    """The facts by which dead letters are chosen and counted.

    Attributes:
        error: The last error in one line; empty if there was none.
        reason: Why the message died.
        died_us: When it died, in microseconds.
    """

    error: str
    reason: str
    died_us: int

    @classmethod
    def of(cls, stored: StoredLetter) -> LetterFacts:
        """Read the facts of a letter."""
        death = read_reason(stored.letter)
        return cls(unpack_error(death.error)[0], death.reason, stored.died_us)


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

    def matches(self, letter: LetterFacts) -> bool:
        cause = self.cause
        return (
            (cause is None or cause_of(letter.error, letter.reason, cause[0]) == cause[1])
            and self.error.lower() in letter.error.lower()
            and self.reason.lower() in letter.reason.lower()
            and not self.ends_at(letter)
        )

    def ends_at(self, letter: LetterFacts) -> bool:
        """Return whether this letter, and so each after it, is too young: letters come by age."""
        latest = self.died_before
        return latest is not None and letter.died_us > (latest - _EPOCH) // MICROSECOND


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
            matches += (read_dead_letter(stored, BytesCodec()) for stored, _ in letters)
        partitions.append(matches)
    oldest = heapq.merge(*partitions, key=lambda letter: letter.died_at)
    return [*islice(oldest, offset, offset + limit)]


class LetterCount:
    """A count of the dead letters that match, by their cause, and how far it has come.

    Letters without an error are counted by their reason. Those that come after the count has begun
    are left out.

    Attributes:
        query: The conditions.
        total: The number of letters that there were when the count began.
        examined: How many of them were examined.
        matching: How many of these match.
    """

    def __init__(self, readers: Sequence[_Reader], by: GroupBy, query: LetterQuery) -> None:
        self.query = query
        self._by = by
        self._counts: Counter[str] = Counter()
        # When the first and the last of them died, in microseconds.
        self._times: dict[str, tuple[int, int]] = {}
        # In turn, so that those examined first are about the oldest of all partitions.
        self._turns = deque(readers)
        self._readers = readers
        self.total: int = sum(reader.total for reader in readers)

    @classmethod
    async def begin(
        cls, stores: Sequence[ReliableStore], by: GroupBy, query: LetterQuery
    ) -> LetterCount:
        """Begin a count."""
        return cls(await _readers(stores, query), by, query)

    @property
    def examined(self) -> int:
        return sum(reader.examined for reader in self._readers)

    @property
    def matching(self) -> int:
        return self._counts.total()

    @property
    def is_complete(self) -> bool:
        """Whether all letters were examined."""
        return not self._turns

    async def go_on(
        self,
        deadline: float = float("inf"),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Go on with the count; begin no step but the first after ``deadline``, a moment of the
        monotonic clock.

        ``progress`` is called after each step with the number of letters examined so far, and the
        total.
        """
        while self._turns:
            reader = self._turns[0]
            letters = await reader.step()
            self._turns.popleft()
            if letters is not None:
                self._add(letters)
                if reader.examined < reader.total:
                    self._turns.append(reader)
                if progress is not None:
                    progress(self.examined, self.total)
            if time.monotonic() >= deadline:
                return

    def groups(self) -> list[LetterGroup]:
        """Return the causes so far, the most frequent first."""
        return [
            LetterGroup(cause, number, *map(datetime_at, self._times[cause]))
            for cause, number in self._counts.most_common()
        ]

    @property
    def number_of_causes(self) -> int:
        return len(self._counts)

    def newest(self, limit: int) -> list[LetterGroup]:
        """Return up to ``limit`` causes so far, those of the last deaths first."""
        newest = heapq.nlargest(limit, self._times.items(), key=lambda item: item[1][1])
        return [
            LetterGroup(cause, self._counts[cause], *map(datetime_at, times))
            for cause, times in newest
        ]

    def _add(self, letters: Letters) -> None:
        for _, (error, reason, died_us) in letters:
            cause = cause_of(error, reason, self._by)
            if cause not in self._counts and len(self._counts) >= MAX_CAUSES:
                cause = OTHER_CAUSES
            self._counts[cause] += 1
            first, last = self._times.get(cause, (died_us, died_us))
            self._times[cause] = min(first, died_us), max(last, died_us)


async def groups(
    stores: Sequence[ReliableStore],
    by: GroupBy,
    query: LetterQuery,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[LetterGroup]:
    """Count the dead letters that match by their cause, the most frequent first.

    ``progress`` is as for :meth:`LetterCount.go_on`.
    """
    counting = await LetterCount.begin(stores, by, query)
    await counting.go_on(progress=progress)
    return counting.groups()


async def count(
    stores: Sequence[ReliableStore],
    query: LetterQuery,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Return the number of dead letters that match. ``progress`` is as for :func:`groups`."""
    counting = await LetterCount.begin(stores, "reason", query)
    await counting.go_on(progress=progress)
    return counting.matching


async def redrive(
    stores: Sequence[ReliableStore],
    query: LetterQuery,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Requeue the dead letters that match, and return the number of messages that were requeued.

    A letter stays as described at :meth:`delayq.DeadLetters.redrive`. ``progress`` is as for
    :func:`groups`.

    Raises:
        OutcomeUnknown: Some were requeued, or may have been. With any other error, none was.
    """
    return await _apply(
        stores, query, lambda store, letters: redrive_letters(store, _names(letters)), progress
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
        stores, query, lambda store, letters: purge_letters(store, _names(letters)), progress
    )


class _Reader:
    """Reads the letters of one partition that there are now, oldest first.

    Attributes:
        total: The number of letters.
        examined: How many of them are read, or too young to match.
    """

    def __init__(self, store: ReliableStore, query: LetterQuery, total: int) -> None:
        self.store = store
        self.total = total
        self.examined = 0
        self._query = query
        self._offset = 0
        self._deaths: deque[Death] = deque()

    async def step(self) -> Letters | None:
        """Return those of the next letters that match; None after the last step."""
        if not self._deaths and (remaining := self.total - self.examined) > 0:
            self._deaths.extend(await self.store.deaths(self._offset, min(remaining, _DEATHS)))
            self._offset += len(self._deaths)
        page = [self._deaths.popleft() for _ in range(min(_STEP, len(self._deaths)))]
        if not page:
            return None
        stored_letters = [letter for letter in await self.store.letters_of(page) if letter]
        letters = [(stored, LetterFacts.of(stored)) for stored in stored_letters]
        self.examined += len(page)
        if letters and self._query.ends_at(letters[-1][1]):
            self._deaths.clear()
            self.examined = self.total
        return [letter for letter in letters if self._query.matches(letter[1])]

    def note_removed(self, number: int) -> None:
        """Note that letters of the last step are gone, so that the next ones are not left out."""
        self._offset -= number


def _names(letters: Letters) -> list[bytes]:
    return [stored.name for stored, _ in letters]


async def _readers(stores: Sequence[ReliableStore], query: LetterQuery) -> list[_Reader]:
    return [_Reader(store, query, await store.count_dead()) for store in stores]


async def _apply(
    stores: Sequence[ReliableStore],
    query: LetterQuery,
    act: Callable[[ReliableStore, Letters], Awaitable[int]],
    progress: Callable[[int, int], None] | None,
) -> int:
    """Apply ``act``, which returns how many letters it removed, to all letters that match. Return
    the sum of its results.
    """
    readers = await _readers(stores, query)
    total = sum(reader.total for reader in readers)
    removed = 0
    for reader in readers:
        while True:
            try:
                if (letters := await reader.step()) is None:
                    break
                count = await act(reader.store, letters) if letters else 0
            except ServerError as error:
                raise half_way(error, removed) from error.__cause__
            reader.note_removed(count)
            removed += count
            if progress is not None:
                progress(sum(reader.examined for reader in readers), total)
    return removed


def cause_of(error: str, reason: str, by: GroupBy) -> str:
    """Return the cause by which a message with this error and reason is counted."""
    if by == "reason" or not error:
        return reason
    # An error that begins with a colon names no type.
    return error if by == "error" else error.partition(":")[0] or error
