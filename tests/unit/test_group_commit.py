"""Calls made while one is on its way share the next one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from delayq._background import Background
from delayq._redis.group_commit import GroupCommit
from delayq.errors import Closed, OutcomeUnknown, ServerRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class Store:
    """Commits when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.answer: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def commit(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        error = await self.answer.get()
        if error:
            raise error
        return [item * 10 for item in items]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def group(store: Store) -> AsyncIterator[GroupCommit[int, int]]:
    background = Background()
    yield GroupCommit(store.commit, background, max_items=3, max_bytes=100)
    await background.aclose()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_lone_item_leaves_at_once_and_the_next_ones_together(store: Store, group: GroupCommit[int, int]) -> None:
    first = group.submit(1, 1)
    await turns()
    later = [group.submit(i, 1) for i in (2, 3)]
    await turns()
    assert store.batches == [[1]]
    store.answer.put_nowait(None)
    assert await first == 10
    store.answer.put_nowait(None)
    assert [await future for future in later] == [20, 30]
    assert store.batches == [[1], [2, 3]]


async def test_batches_are_bounded_in_items_and_bytes(store: Store, group: GroupCommit[int, int]) -> None:
    for _ in range(5):
        store.answer.put_nowait(None)
    futures = [group.submit(i, size) for i, size in enumerate((1, 1, 1, 1, 99, 500, 1))]
    await asyncio.gather(*futures)
    assert store.batches == [[0, 1, 2], [3, 4], [5], [6]]


async def test_an_error_reaches_exactly_the_calls_it_concerns(store: Store, group: GroupCommit[int, int]) -> None:
    failing = [group.submit(i, 1) for i in range(3)]
    fine = group.submit(9, 1)
    store.answer.put_nowait(ServerRefused("full"))
    store.answer.put_nowait(None)
    results = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(result) for result in results] == ["full"] * 3
    assert len({id(result) for result in results}) == 3
    assert await fine == 90


async def test_a_caller_who_leaves_in_time_takes_the_item_back(store: Store, group: GroupCommit[int, int]) -> None:
    first = group.submit(1, 1)
    await turns()
    gone, stays = group.submit(2, 1), group.submit(3, 1)
    gone.cancel()
    store.answer.put_nowait(None)
    store.answer.put_nowait(None)
    assert [await first, await stays] == [10, 30]
    assert store.batches == [[1], [3]]


async def test_a_caller_who_leaves_too_late_harms_nobody(store: Store, group: GroupCommit[int, int]) -> None:
    gone, stays = group.submit(1, 1), group.submit(2, 1)
    await turns()
    gone.cancel()
    store.answer.put_nowait(None)
    assert await stays == 20


async def test_closing_says_what_is_unsent_and_what_is_unknown(store: Store, group: GroupCommit[int, int]) -> None:
    unknown = group.submit(1, 1)
    await turns()
    unsent = group.submit(2, 1)
    await group.aclose(0.01)
    with pytest.raises(OutcomeUnknown):
        await unknown
    with pytest.raises(Closed):
        await unsent
    with pytest.raises(Closed):
        group.submit(3, 1)


async def test_closing_waits_for_what_is_on_its_way(store: Store, group: GroupCommit[int, int]) -> None:
    future = group.submit(1, 1)
    await turns()
    closing = asyncio.create_task(group.aclose(5))
    await turns()
    store.answer.put_nowait(None)
    await closing
    assert await future == 10


async def test_closing_an_idle_one_is_nothing(group: GroupCommit[int, int]) -> None:
    await group.aclose(5)


async def test_a_background_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    background = Background()
    with suppress(RuntimeError):
        await background.spawn(fail(), "test")
    await turns()
    assert "delayq test ended with an error" in caplog.text
