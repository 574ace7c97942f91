"""The records of pending messages, read in pages so that the server is not held up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from delayq._delayed.records import id_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from delayq._delayed.keys import DelayedKeys
    from delayq._redis.client import RedisClient

_PAGE = 1000
_PAGE_BYTES = 256 * 1024
# The first page shows how long the records are.
_FIRST_PAGE = 50
# Pages overlap by this many records at most.
_OVERLAP = 100
_STEP_BACK = 200

Item = TypeVar("Item")


class Listing(Protocol):
    """A way to read the records of a queue's pending messages."""

    async def size(self) -> int:
        """Return the number of records."""
        ...

    async def at(self, place: int) -> bytes | None:
        """Return the record at a position, counted from 0 in polling order; None beyond the last."""
        ...

    def pages(self) -> AsyncIterator[list[bytes]]:
        """Return all records that are there throughout, in overlapping pages."""
        ...

    def offer_order(self, records: Iterable[bytes]) -> list[bytes]:
        """Return records from :meth:`pages` in the order in which they were offered."""
        ...


class OrderedList:
    """The ordered list: Redisson's own, in offer order."""

    def __init__(self, keys: DelayedKeys, server: RedisClient) -> None:
        self._key = keys.ordered
        self._server = server

    async def size(self) -> int:
        return int(await self._server.command("LLEN", self._key))

    async def at(self, place: int) -> bytes | None:
        record: bytes | None = await self._server.command("LINDEX", self._key, place)
        return record

    async def pages(self) -> AsyncIterator[list[bytes]]:
        """Read the records from the newest to the oldest."""

        async def read(start: int, count: int) -> list[bytes]:
            # Counted from the tail: messages leave at the head as they come due, which moves no page.
            page: list[bytes] = await self._server.command("LRANGE", self._key, -(start + count), -(start + 1))
            return page[::-1]

        async for page in _paged(read, lambda record: record):
            yield page

    def offer_order(self, records: Iterable[bytes]) -> list[bytes]:
        return list(records)[::-1]


class DueOrder:
    """The sorted set of due times."""

    def __init__(self, keys: DelayedKeys, server: RedisClient) -> None:
        self._key = keys.timeout
        self._server = server

    async def size(self) -> int:
        return int(await self._server.command("ZCARD", self._key))

    async def at(self, place: int) -> bytes | None:
        head: list[bytes] = await self._server.command("ZRANGE", self._key, place, place)
        return head[0] if head else None

    async def pages(self) -> AsyncIterator[list[bytes]]:
        """Read the records from the one that is due last to the next one due."""
        async for page in self.scored_pages():
            yield list(page)

    async def scored_pages(self) -> AsyncIterator[dict[bytes, float]]:
        """Read the same pages, with due times in ms."""

        async def read(start: int, count: int) -> list[tuple[bytes, float]]:
            # From the far end: messages that come due meanwhile leave at the other end, which moves no page.
            flat = await self._server.command("ZREVRANGE", self._key, start, start + count - 1, "WITHSCORES")
            return list(zip(flat[::2], map(float, flat[1::2]), strict=True))

        async for page in _paged(read, lambda pair: pair[0]):
            yield dict(page)

    def offer_order(self, records: Iterable[bytes]) -> list[bytes]:
        # Our ids sort by offer order. Messages that Java offered have random ids, and come in any order.
        return sorted(records, key=id_of)


async def _paged(
    read: Callable[[int, int], Awaitable[list[Item]]], record_of: Callable[[Item], bytes]
) -> AsyncIterator[list[Item]]:
    """Read everything in pages with a limited number of records and of bytes, to suit both the server and the network.

    Each page begins with the last records of the one before. If none of them is there any more, more records have left meanwhile
    than pages overlap, and the page is read again from further back. So no record that is there throughout is missed.
    """
    start, count, seen = 0, _FIRST_PAGE, frozenset[bytes]()
    while True:
        page = await read(start, count)
        records = [record_of(item) for item in page]
        if seen and seen.isdisjoint(records):
            start, seen = max(0, start - _STEP_BACK), frozenset()
            continue
        yield page
        if len(page) < count:
            return
        overlap = min(_OVERLAP, -(-count // 4))
        start, seen = start + count - overlap, frozenset(records[-overlap:])
        count = max(2, min(_PAGE + _OVERLAP, count * 4, count * _PAGE_BYTES // (sum(map(len, records)) or 1)))
