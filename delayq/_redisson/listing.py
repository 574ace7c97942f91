"""Reads a long sequence in pages, so that neither the server nor the network is held up."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_PAGE = 1000
_PAGE_BYTES = 256 * 1024
# The first page shows how long the records are.
_FIRST_PAGE = 50
# Pages overlap by this many records at most.
_OVERLAP = 100
_STEP_BACK = 200

Item = TypeVar("Item")


async def paged(
    read: Callable[[int, int], Awaitable[list[Item]]], record_of: Callable[[Item], bytes]
) -> AsyncIterator[list[Item]]:
    """Read everything in pages with a limited number of records and of bytes.

    Each page begins with the last records of the one before. If none of them is there any more, it
    is read again from further back, so that no record that is there throughout is missed.
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
        count = max(
            2,
            min(_PAGE + _OVERLAP, count * 4, count * _PAGE_BYTES // (sum(map(len, records)) or 1)),
        )
