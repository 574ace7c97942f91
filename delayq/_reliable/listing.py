"""Pages of dead letters over all partitions of a queue."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._generics import T

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._reliable.replies import Death, StoredLetter
    from delayq._reliable.store import ReliableStore

    Order = tuple[int, ...]

R = TypeVar("R")

# The names of letters are short, so a command may return more of them.
_DEATHS = 1000


async def letters_page(
    stores: Sequence[ReliableStore], offset: int, limit: int
) -> list[tuple[int, StoredLetter]]:
    """List up to ``limit`` dead letters of all partitions, oldest first, after ``offset`` of them;
    each with the number of its partition.

    Only their names are merged. If there are several partitions, this takes time in proportion to
    ``offset``.
    """
    if not limit:
        return []
    if len(stores) == 1:
        return [(0, letter) for letter in await stores[0].dead_page(offset, limit)]
    merged = _Merged([_Deaths(store, offset + limit).read for store in stores], _by_death)
    while offset and (some := await merged.take(min(offset, _DEATHS))):
        offset -= len(some)
    deaths = await merged.take(limit)
    named: dict[int, list[Death]] = {}
    for number, death in deaths:
        named.setdefault(number, []).append(death)
    parts = await _all([stores[number].letters_of(some) for number, some in named.items()])
    read = {number: iter(letters) for number, letters in zip(named, parts, strict=True)}
    found = [(number, next(read[number])) for number, _ in deaths]
    return [(number, letter) for number, letter in found if letter is not None]


class _Deaths:
    """Reads the names of one partition's dead letters, step by step."""

    def __init__(self, store: ReliableStore, most: int) -> None:
        self._store = store
        self._at = 0
        self._step = min(most, _DEATHS)

    async def read(self) -> Sequence[Death]:
        """Return the next ones, oldest first; none at the end."""
        found = await self._store.deaths(self._at, self._step)
        self._at += len(found)
        return found


def _by_death(death: Death) -> Order:
    return (death.died_us,)


class _Merged(Generic[T]):
    """The items of all partitions in one order. They are read as far as they are needed."""

    def __init__(
        self,
        reads: Sequence[Callable[[], Awaitable[Sequence[T]]]],
        order: Callable[[T], Order],
    ) -> None:
        """Args:
        reads: Each returns the next items of one partition; none at its end.
        order: Returns what decides which item comes first.
        """
        self._reads = reads
        self._order = order
        self._parts: list[deque[T]] = [deque() for _ in reads]
        # The partitions that have items, by their first one; those whose next items are unknown.
        self._firsts: list[tuple[Order, int]] = []
        self._unknown = [*range(len(reads))]

    async def take(self, count: int) -> list[tuple[int, T]]:
        """Return the next items, each with the number of its partition."""
        taken: list[tuple[int, T]] = []
        while len(taken) < count:
            await self._read_on()
            if not self._firsts:
                break
            _, number = heapq.heappop(self._firsts)
            taken.append((number, self._parts[number].popleft()))
            self._file(number)
        return taken

    async def _read_on(self) -> None:
        if not self._unknown:
            return
        numbers, self._unknown = self._unknown, []
        pages = await _all([self._reads[number]() for number in numbers])
        for number, page in zip(numbers, pages, strict=True):
            if page:
                self._parts[number].extend(page)
                self._file(number)

    def _file(self, number: int) -> None:
        if part := self._parts[number]:
            heapq.heappush(self._firsts, (self._order(part[0]), number))
        else:
            self._unknown.append(number)


async def _all(calls: Sequence[Awaitable[R]]) -> list[R]:
    """Wait for all calls, so that none continues behind the others, then raise the first error."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
