"""A search reads messages step by step, says how far it came, and can go on from there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from delayq.admin.search import Search, Shelf

if TYPE_CHECKING:
    from collections.abc import Sequence


def shelf(numbers: Sequence[int | None], asked: list[int] | None = None) -> Shelf[int]:
    async def page(offset: int, limit: int) -> Sequence[int | None]:
        if asked is not None:
            asked.append(limit)
        return numbers[offset : offset + limit]

    return Shelf(len(numbers), page)


def tenth(number: int) -> bool:
    return number % 10 == 0


async def test_a_search_goes_on_where_it_stopped() -> None:
    asked: list[int] = []
    found: list[int] = []
    offset: int | None = 0
    while offset is not None:
        shelves = [shelf(range(700), asked), shelf([], asked), shelf(range(700, 1000), asked)]
        work = Search(shelves, tenth, offset)
        found += await work.run(most=300, limit=7)
        assert work.searched <= 300
        assert work.total == 1000
        offset = work.next_offset
    assert found == [*range(0, 1000, 10)]
    assert max(asked) <= 100


async def test_a_search_ends_at_its_bounds_and_says_so() -> None:
    work = Search([shelf(range(1000))], tenth)
    told: list[tuple[int, int]] = []
    await work.run(most=450, limit=1000, progress=lambda *step: told.append(step))
    assert told == [(done, 450) for done in (100, 200, 300, 400, 450)]
    assert (work.searched, work.next_offset) == (450, 450)
    # Without time, it still gets ahead.
    late = Search([shelf(range(1000))], tenth)
    assert await late.run(most=1000, limit=1000, until=time.monotonic() - 1) == [*range(0, 100, 10)]
    assert late.next_offset == 100


async def test_a_search_passes_over_messages_that_are_gone_or_have_expired() -> None:
    async def gone(offset: int, limit: int) -> Sequence[int]:
        return []

    work = Search([Shelf(5, gone), shelf([10])], tenth)
    assert await work.run(most=100, limit=10) == [10]
    assert work.next_offset is None
    messages = [None if number % 3 else number for number in range(900)]
    messages[:400] = [None] * 400
    found: list[int] = []
    offset: int | None = 0
    while offset is not None:
        work = Search([shelf(messages)], tenth, offset)
        found += await work.run(most=10_000, limit=4)
        offset = work.next_offset
    assert found == [*range(420, 900, 30)]
