"""Calls made while one is on its way share the next one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from delayq._background import Background
from delayq._redis.group_commit import GroupCommit, Request
from delayq._redis.scripts import Script
from delayq.errors import Closed, OutcomeUnknown, ServerRefused, ServerUnavailable
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from delayq._redis.server import Server


SCRIPT = Script("delayed/offer", (), (), repeatable=False)


class Store:
    """A server that answers when it is told to: batch by batch, with results or an error."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.answer: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.busy = False
        self.repeated: list[tuple[list[int], OutcomeUnknown | None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def run_soon(self, _script: Script, _keys: Any, args: Sequence[int], told: Callable[[Any], object]) -> bool:
        if self.busy:
            return False
        self.batches.append(list(args))

        async def reply() -> None:
            told(await self.answer.get() or [item * 10 for item in args])

        self._tasks.add(task := asyncio.create_task(reply()))
        task.add_done_callback(self._tasks.discard)
        return True

    async def repeat(self, request: Request, items: Sequence[int], lost: OutcomeUnknown | None) -> list[int]:
        assert request.args == list(items)
        self.repeated.append((list(items), lost))
        if error := await self.answer.get():
            raise error
        return [item * 100 for item in items]

    def group(self, background: Background, *, final: bool = False) -> GroupCommit[int, int]:
        return GroupCommit(
            cast("Server", self),
            background,
            request=lambda items: Request(SCRIPT, (), list(items)),
            repeat=self.repeat,
            results=lambda _, answer: answer,
            max_items=3,
            max_bytes=100,
            final=final,
        )


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store()
    yield store
    for task in store._tasks:
        task.cancel()


@pytest.fixture
async def group(store: Store) -> AsyncIterator[GroupCommit[int, int]]:
    background = Background()
    yield store.group(background)
    await background.aclose()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_lone_item_leaves_at_once_and_the_next_ones_together(store: Store, group: GroupCommit[int, int]) -> None:
    first = group.submit(1, 1)
    assert store.batches == [[1]]
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
    futures = group.submit_many(enumerate((1, 1, 1, 1, 99, 500, 1)))
    assert await asyncio.gather(*futures) == [0, 10, 20, 30, 40, 50, 60]
    assert store.batches == [[0, 1, 2], [3, 4], [5], [6]]


async def test_a_final_item_leaves_though_its_caller_is_cancelled_and_others_do_not(store: Store) -> None:
    background = Background()
    for final in (False, True):
        group = store.group(background, final=final)
        first = group.submit(1, 1)
        await turns()
        group.submit(2, 1).cancel()
        last = group.submit(3, 1)
        for _ in range(2):
            store.answer.put_nowait(None)
        assert list(await asyncio.gather(first, last)) == [10, 30]
    assert store.batches == [[1], [3], [1], [2, 3]]
    await background.aclose()


async def test_an_error_reaches_exactly_the_calls_it_concerns(store: Store, group: GroupCommit[int, int]) -> None:
    failing = group.submit_many((i, 1) for i in range(3))
    fine = group.submit(9, 1)
    # The answer, then that of the repetition, then that of the next one.
    for answer in (ServerRefused("full"), ServerRefused("full"), None):
        store.answer.put_nowait(answer)
    results = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(result) for result in results] == ["full"] * 3
    assert len({id(result) for result in results}) == 3
    assert await fine == 90


async def test_what_fails_is_repeated_and_the_next_ones_wait_for_that(store: Store, group: GroupCommit[int, int]) -> None:
    first = group.submit(1, 1)
    later = group.submit(2, 1)
    store.answer.put_nowait(ServerUnavailable("restarting"))
    await until(lambda: store.repeated == [([1], None)])
    assert store.batches == [[1]]
    store.answer.put_nowait(None)
    assert await first == 100
    store.answer.put_nowait(None)
    assert await later == 20


async def test_whoever_repeats_knows_whether_it_may_have_been_carried_out(store: Store, group: GroupCommit[int, int]) -> None:
    lost = OutcomeUnknown("the line broke")
    first = group.submit(1, 1)
    store.answer.put_nowait(lost)
    await until(lambda: store.repeated == [([1], lost)])
    store.answer.put_nowait(lost)
    with pytest.raises(OutcomeUnknown):
        await first


async def test_where_nothing_can_be_sent_at_once_a_task_waits_for_it(store: Store, group: GroupCommit[int, int]) -> None:
    store.busy = True
    first = group.submit(1, 1)
    store.answer.put_nowait(None)
    assert await first == 100
    assert store.repeated == [([1], None)]


async def test_an_answer_that_makes_no_sense_is_an_error_and_the_next_one_is_fine(store: Store) -> None:
    background = Background()
    group = store.group(background)
    group._results = lambda _, answer: answer if answer[0] > 10 else answer["no"]
    first, later = group.submit(1, 1), group.submit(2, 1)
    for _ in range(2):
        store.answer.put_nowait(None)
    with pytest.raises(TypeError):
        await first
    assert await later == 20
    await background.aclose()


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
    gone, stays = group.submit_many([(1, 1), (2, 1)])
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


async def test_when_the_client_ends_its_tasks_whoever_waits_is_told(store: Store) -> None:
    background = Background()
    store.busy = True
    waiting = store.group(background).submit(1, 1)
    await until(lambda: store.repeated)
    await background.aclose()
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(waiting, 10)


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
