"""Pages of messages and dead letters over all partitions of a queue.

An offset counts live messages, in the order in which they are listed: those that have expired while
no worker had them neither count nor take the place of others. So pages that follow one another
neither skip nor repeat a message, unless it moves in between. No script looks at more than
:data:`~delayq._reliable.scripts.PAGE` messages, and only the bodies of a page are read.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple

from delayq._background import gather_all
from delayq._generics import T
from delayq._reliable.scripts import PAGE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._reliable.letter_store import Death, StoredLetter
    from delayq._reliable.replies import MessageHead, StoredMessage
    from delayq._reliable.store import ReliableStore

    Order = tuple[int, ...]

# The names of letters are short, so a command may return more of them.
_DEATHS = 1000


class LivePage(NamedTuple):
    """Some live messages of a queue.

    Attributes:
        messages: Each with the number of its partition.
        is_cut: Whether there may be more that were not looked at, because too many come before
            them.
    """

    messages: list[tuple[int, StoredMessage]]
    is_cut: bool


async def live_page(
    stores: Sequence[ReliableStore],
    state: str,
    offset: int,
    limit: int,
    *,
    farthest: int | None = None,
) -> LivePage:
    """List up to ``limit`` live messages in one state, after the first ``offset`` of them.

    If there are several partitions, or messages that have expired, this takes time in proportion to
    ``offset`` and to their number. ``farthest`` bounds it: the number
    of messages of each partition to look at, including those that have expired.
    """
    if not limit:
        return LivePage([], False)
    readers = [_Reader(store, state, limit, farthest) for store in stores]
    if len(readers) == 1 and offset and not await stores[0].count_expired(state):
        # All of them are live.
        readers[0].start(offset)
        readers[0].farthest = None
    elif offset:
        await _skip(readers, offset)
    merged = Merged([reader.messages for reader in readers], readers[0].order)
    items = await merged.take(limit)
    messages = [(number, message) for number, (_, message) in items]
    return LivePage(messages, any(reader.is_cut for reader in readers))


async def _skip(readers: Sequence[_Reader], offset: int) -> None:
    """Let readers begin behind the first messages of all partitions."""
    merged = Merged([reader.heads for reader in readers], readers[0].order)
    ends = [0] * len(readers)
    while offset and (page := await merged.take(min(offset, PAGE))):
        offset -= len(page)
        for number, (position, _) in page:
            ends[number] = position + 1
    for reader, end in zip(readers, ends, strict=True):
        reader.start(end)


async def letters_page(
    stores: Sequence[ReliableStore], offset: int, limit: int, *, newest_first: bool = False
) -> list[tuple[int, StoredLetter]]:
    """List up to ``limit`` dead letters of all partitions, after ``offset`` of them; each with the
    number of its partition.

    Only their names are merged. If there are several partitions, this takes time in proportion to
    ``offset``.
    """
    if not limit:
        return []
    if len(stores) == 1:
        read = stores[0].newest_dead if newest_first else stores[0].dead_page
        return [(0, letter) for letter in await read(offset, limit)]
    merged = Merged(
        [_Deaths(store, offset + limit, newest_first=newest_first).read for store in stores],
        lambda death: (-death.died_us if newest_first else death.died_us,),
    )
    await merged.skip(offset)
    deaths = await merged.take(limit)
    by_partition: dict[int, list[Death]] = {}
    for number, death in deaths:
        by_partition.setdefault(number, []).append(death)
    calls = (stores[number].letters_of(part) for number, part in by_partition.items())
    parts = await gather_all([*calls])
    unread = {number: iter(part) for number, part in zip(by_partition, parts, strict=True)}
    letters = [(number, next(unread[number])) for number, _ in deaths]
    return [(number, letter) for number, letter in letters if letter is not None]


class _Reader:
    """Reads the live messages of one partition in one state, step by step.

    Attributes:
        at: How many messages lie before the next step, with those that have expired.
        farthest: The largest number of messages to look at, with those that have expired.
        is_cut: Whether there may be more beyond that.
    """

    def __init__(self, store: ReliableStore, state: str, limit: int, farthest: int | None) -> None:
        self._store = store
        self._state = state
        self._limit = min(limit, PAGE)
        self._is_at_end = False
        self.at = 0
        self.farthest = farthest
        self.is_cut = False

    def start(self, at: int) -> None:
        """Begin behind this many messages."""
        self.at, self._is_at_end, self.is_cut = at, False, False

    def order(self, item: tuple[int, MessageHead | StoredMessage]) -> Order:
        """Return what decides which partition's message comes first."""
        _, message = item
        return (-message.priority if self._state == "ready" else 0, message.moment_us)

    async def messages(self) -> Sequence[tuple[int, StoredMessage]]:
        """Return the next live messages and their positions; none at the end."""
        while not self._is_at_end:
            if messages := await self._step(self._store.page, self._limit):
                return messages
            # All of them have expired. Find the next one without reading bodies.
            if not (heads := await self.heads()):
                break
            self.start(heads[0][0])
        return []

    async def heads(self) -> Sequence[tuple[int, MessageHead]]:
        """Return the next live messages and their positions, without bodies; none at the end."""
        while not self._is_at_end:
            if heads := await self._step(self._store.heads, PAGE):
                return heads
        return []

    async def _step(
        self, read: Callable[[str, int, int], Awaitable[Sequence[T | None]]], size: int
    ) -> list[tuple[int, T]]:
        start = self.at
        limit = size if self.farthest is None else min(size, self.farthest - start)
        if limit <= 0:
            self.is_cut = self._is_at_end = True
            return []
        page = await read(self._state, start, limit)
        self.at += len(page)
        self._is_at_end = len(page) < limit
        return [(position, item) for position, item in enumerate(page, start) if item is not None]


class _Deaths:
    """Reads the names of one partition's dead letters, step by step."""

    def __init__(self, store: ReliableStore, limit: int, *, newest_first: bool) -> None:
        self._store = store
        self._at = 0
        self._step = min(limit, _DEATHS)
        self._newest_first = newest_first

    async def read(self) -> Sequence[Death]:
        """Return the next ones; none at the end."""
        if self._newest_first:
            deaths = (await self._store.deaths(-self._at - self._step, self._step))[::-1]
        else:
            deaths = await self._store.deaths(self._at, self._step)
        self._at += len(deaths)
        return deaths


class Merged(Generic[T]):
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
        items: list[tuple[int, T]] = []
        while len(items) < count:
            await self._read_on()
            if not self._firsts:
                break
            _, number = heapq.heappop(self._firsts)
            items.append((number, self._parts[number].popleft()))
            self._file(number)
        return items

    async def skip(self, count: int) -> None:
        """Take items, and forget them."""
        while count and (items := await self.take(min(count, _DEATHS))):
            count -= len(items)

    async def _read_on(self) -> None:
        if not self._unknown:
            return
        numbers, self._unknown = self._unknown, []
        pages = await gather_all([self._reads[number]() for number in numbers])
        for number, page in zip(numbers, pages, strict=True):
            if page:
                self._parts[number].extend(page)
                self._file(number)

    def _file(self, number: int) -> None:
        if part := self._parts[number]:
            heapq.heappush(self._firsts, (self._order(part[0]), number))
        else:
            self._unknown.append(number)
