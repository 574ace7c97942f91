"""The records of what is pending, read in pages, so that the server is not held up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from delayq._redis.records import id_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from delayq._redis.keys import DelayedKeys
    from delayq._redis.server import Server

_PAGE = 1000
# Pages overlap by so much: as many messages may leave the middle of a list between two pages without one being missed.
_OVERLAP = 100


class Listing(Protocol):
    """Where the records of a queue's pending messages stand."""

    async def size(self) -> int:
        """How many there are."""
        ...

    async def first(self) -> bytes | None:
        """The one that a poll takes."""
        ...

    def pages(self) -> AsyncIterator[list[bytes]]:
        """All that are there all the while; pages overlap."""
        ...

    def offer_order(self, records: Iterable[bytes]) -> list[bytes]:
        """Records out of :meth:`pages`, in the order in which they were offered."""
        ...


class OrderedList:
    """The ordered list: Redisson's, in offer order."""

    def __init__(self, keys: DelayedKeys, server: Server) -> None:
        self._key = keys.ordered
        self._server = server

    async def size(self) -> int:
        return int(await self._server.command("LLEN", self._key))

    async def first(self) -> bytes | None:
        record: bytes | None = await self._server.command("LINDEX", self._key, 0)
        return record

    async def pages(self) -> AsyncIterator[list[bytes]]:
        """From the newest to the oldest."""
        start = 0
        while True:
            # Counted from the tail: messages leave at the head as they come due, and that moves no page.
            page = await self._server.command("LRANGE", self._key, -(start + _PAGE + _OVERLAP), -(start + 1))
            page.reverse()
            yield page
            if len(page) < _PAGE + _OVERLAP:
                return
            start += _PAGE

    def offer_order(self, records: Iterable[bytes]) -> list[bytes]:
        return list(records)[::-1]


class DueOrder:
    """The sorted set of due times."""

    def __init__(self, keys: DelayedKeys, server: Server) -> None:
        self._key = keys.timeout
        self._server = server

    async def size(self) -> int:
        return int(await self._server.command("ZCARD", self._key))

    async def first(self) -> bytes | None:
        head: list[bytes] = await self._server.command("ZRANGE", self._key, 0, 0)
        return head[0] if head else None

    async def pages(self) -> AsyncIterator[list[bytes]]:
        """From the one that is due last to the next."""
        async for page in self.scored_pages():
            yield list(page)

    async def scored_pages(self) -> AsyncIterator[dict[bytes, float]]:
        """The same, with due times in ms."""
        start = 0
        while True:
            # From the far end: what comes due meanwhile leaves at the other one, and moves no page.
            page = await self._server.command("ZREVRANGE", self._key, start, start + _PAGE + _OVERLAP - 1, "WITHSCORES")
            yield dict(zip(page[::2], map(float, page[1::2]), strict=True))
            if len(page) // 2 < _PAGE + _OVERLAP:
                return
            start += _PAGE

    def offer_order(self, records: Iterable[bytes]) -> list[bytes]:
        # Our ids sort by offer order. What Java offered has random ones, and comes in any order.
        return sorted(records, key=id_of)
