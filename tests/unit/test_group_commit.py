"""Calls made while another is in flight share the next one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from delayq._background import Background
from delayq._engine.batcher import Batcher
from delayq._redis.scripts import Request, Script
from delayq.errors import Closed, OutcomeUnknown, ServerRefused, ServerUnavailable
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from delayq._redis.client import RedisClient


SCRIPT = Script("delayed/offer", (), (), repeatable=False)


class FakeWire(str):
    """A connection on which no bytes ever move."""

    __slots__ = ()
    moved_at = float("-inf")


class Store:
    """A server that answers on demand: batch by batch, with results or an error."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.answer: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.busy = False
        self.repeated: list[tuple[list[int], OutcomeUnknown | None]] = []
        self.sent_beside: list[object] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def run_soon(self, _script: Script, _keys: Any, args: Sequence[int], told: Callable[[Any], object], beside: object) -> object:
        if self.busy:
            return None
        self.sent_beside.append(beside)
        self.batches.append(list(args))

        async def reply() -> None:
            told(await self.answer.get() or [item * 10 for item in args])

        self._tasks.add(task := asyncio.create_task(reply()))
        task.add_done_callback(self._tasks.discard)
        return FakeWire(f"wire of {args[0]}")

    async def repeat(self, request: Request, items: Sequence[int], lost: OutcomeUnknown | None) -> list[int]:
        assert request.args == list(items)
        self.repeated.append((list(items), lost))
        if error := await self.answer.get():
            raise error
        return [item * 100 for item in items]

    def group(self, background: Background, *, final: bool = False) -> Batcher[int, int]:
        return Batcher(
            cast("RedisClient", self),
            background,
            request=lambda items, lane: Request(SCRIPT, (f"lane {lane}",), list(items)),
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
async def group(store: Store) -> AsyncIterator[Batcher[int, int]]:
    background = Background()
    yield store.group(background)
    await background.aclose()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_lone_item_leaves_at_once_and_the_next_ones_together(store: Store, group: Batcher[int, int]) -> None:
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


async def test_batches_are_bounded_in_items_and_bytes(store: Store, group: Batcher[int, int]) -> None:
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


async def test_an_error_reaches_exactly_the_calls_it_concerns(store: Store, group: Batcher[int, int]) -> None:
    failing = group.submit_many((i, 1) for i in range(3))
    fine = group.submit(9, 1)
    # Answer the failing batch, then the next one.
    for answer in (ServerRefused("full"), None):
        store.answer.put_nowait(answer)
    results = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(result) for result in results] == ["full"] * 3
    assert len({id(result) for result in results}) == 3
    assert await fine == 90
    assert store.repeated == [], "what was refused is not asked for again"


async def test_what_fails_is_repeated_and_the_next_ones_wait_for_that(store: Store, group: Batcher[int, int]) -> None:
    first = group.submit(1, 1)
    later = group.submit(2, 1)
    store.answer.put_nowait(ServerUnavailable("restarting"))
    await until(lambda: store.repeated == [([1], None)])
    assert store.batches == [[1]]
    store.answer.put_nowait(None)
    assert await first == 100
    store.answer.put_nowait(None)
    assert await later == 20


async def test_whoever_repeats_knows_whether_it_may_have_been_carried_out(store: Store, group: Batcher[int, int]) -> None:
    lost = OutcomeUnknown("the line broke")
    first = group.submit(1, 1)
    store.answer.put_nowait(lost)
    await until(lambda: store.repeated == [([1], lost)])
    store.answer.put_nowait(lost)
    with pytest.raises(OutcomeUnknown):
        await first


async def test_where_nothing_can_be_sent_at_once_a_task_waits_for_it(store: Store, group: Batcher[int, int]) -> None:
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


async def test_a_caller_who_leaves_in_time_takes_the_item_back(store: Store, group: Batcher[int, int]) -> None:
    first = group.submit(1, 1)
    await turns()
    gone, stays = group.submit(2, 1), group.submit(3, 1)
    gone.cancel()
    store.answer.put_nowait(None)
    store.answer.put_nowait(None)
    assert [await first, await stays] == [10, 30]
    assert store.batches == [[1], [3]]


async def test_a_caller_who_leaves_too_late_harms_nobody(store: Store, group: Batcher[int, int]) -> None:
    gone, stays = group.submit_many([(1, 1), (2, 1)])
    gone.cancel()
    store.answer.put_nowait(None)
    assert await stays == 20


async def test_what_nobody_waits_for_leaves_together_and_what_becomes_of_it_is_told(store: Store) -> None:
    background = Background()
    told: list[tuple[int, int | BaseException]] = []
    group = store.group(background)
    group._unattended = lambda item, outcome: told.append((item, outcome))
    group._max_items = 6
    group.submit_unattended(1, 1)
    group.submit_unattended(2, 1)
    assert store.batches == []
    await turns()
    assert store.batches == [[1, 2]]
    assert group.unanswered == 2
    store.answer.put_nowait(None)
    await group.flush()
    assert told == [(1, 10), (2, 20)]
    assert group.unanswered == 0
    # Half a batch is sent at once, without waiting for the loop's turn to end.
    for item in (3, 4, 5):
        group.submit_unattended(item, 1)
    assert store.batches[1:] == [[3, 4, 5]]
    refused = ServerRefused("no")
    for _ in range(2):
        store.answer.put_nowait(refused)
    await group.flush()
    assert [(item, str(outcome)) for item, outcome in told[2:]] == [(3, "no"), (4, "no"), (5, "no")]
    await background.aclose()


async def test_flushing_waits_for_what_came_before_it_and_not_for_what_comes_after(
    store: Store, group: Batcher[int, int]
) -> None:
    await group.flush()
    first = group.submit(1, 1)
    second = group.submit(2, 1)
    flushed = asyncio.create_task(group.flush())
    await turns()
    third = group.submit(3, 1)
    for _ in range(2):
        store.answer.put_nowait(None)
        await turns()
    # The second and the third travel together here.
    assert flushed.done()
    assert [await first, await second, await third] == [10, 20, 30]
    gone = group.submit(4, 1), group.submit(5, 1)
    gone[1].cancel()
    flushed = asyncio.create_task(group.flush())
    store.answer.put_nowait(None)
    await asyncio.wait_for(flushed, 10)


async def test_closing_sends_what_was_to_leave_soon_and_tells_of_what_cannot(store: Store) -> None:
    background = Background()
    told: list[str] = []
    for answer in (True, False):
        group = store.group(background)
        group._unattended = lambda _, outcome: told.append(type(outcome).__name__)
        group.submit_unattended(1, 1)
        if answer:
            store.answer.put_nowait(None)
        await group.aclose(5 if answer else 0.01)
        await group.flush()
        with pytest.raises(Closed):
            group.submit_unattended(2, 1)
    assert told == ["int", "OutcomeUnknown"]
    await background.aclose()


async def test_where_enough_waits_a_second_call_leaves_behind_the_first_on_the_same_connection(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = Background()
    monkeypatch.setattr("delayq._engine.batcher._ENOUGH", 2)
    group = store.group(background)
    first = group.submit(1, 1)
    second = group.submit(2, 1)
    assert store.batches == [[1]]
    third = group.submit(3, 1)
    assert store.batches == [[1], [2, 3]]
    assert store.sent_beside == [None, "wire of 1"]
    # With two calls in flight, further items wait, however many there are.
    rest = group.submit_many((item, 1) for item in (4, 5, 6, 7))
    assert len(store.batches) == 2
    for _ in range(4):
        store.answer.put_nowait(None)
    assert [await future for future in (first, second, third, *rest)] == [10, 20, 30, 40, 50, 60, 70]
    assert store.batches == [[1], [2, 3], [4, 5, 6], [7]]
    await background.aclose()


async def test_each_lane_has_one_call_on_its_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    background = Background()
    monkeypatch.setattr("delayq._engine.batcher._ENOUGH", 1)
    group = store.group(background)
    lanes: list[str] = []
    request = group._request

    def noted(items: Sequence[int], lane: int) -> Request:
        assert all(call.lane != lane for call in group._calls)
        lanes.append(f"{items} in {lane}")
        return request(items, lane)

    group._request = noted
    futures = [group.submit(item, 1) for item in range(9)]
    for _ in range(5):
        store.answer.put_nowait(None)
    await asyncio.gather(*futures)
    assert lanes == ["[0] in 0", "[1] in 1", "[2, 3, 4] in 0", "[5, 6, 7] in 1", "[8] in 0"]
    await background.aclose()


async def test_while_one_is_repeated_nothing_leaves_and_the_other_gets_its_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = Background()
    monkeypatch.setattr("delayq._engine.batcher._ENOUGH", 1)
    group = store.group(background)
    first, second = group.submit(1, 1), group.submit(2, 1)
    store.answer.put_nowait(ServerUnavailable("restarting"))
    store.answer.put_nowait(None)
    assert await second == 20
    third = group.submit(3, 1)
    await turns()
    assert store.batches == [[1], [2]]
    assert not first.done()
    for _ in range(2):
        store.answer.put_nowait(None)
    assert await first == 100
    assert await third == 30
    await background.aclose()


async def test_two_that_were_not_carried_out_are_repeated_in_their_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if the server did not know the script. On separate connections, the second might overtake the first."""
    background = Background()
    monkeypatch.setattr("delayq._engine.batcher._ENOUGH", 1)
    group = store.group(background)
    first, second = group.submit(1, 1), group.submit(2, 1)
    for _ in range(2):
        store.answer.put_nowait(ServerUnavailable("it does not know the script"))
    await turns(10)
    assert store.repeated == [([1], None)]
    store.answer.put_nowait(None)
    assert await first == 100
    await turns()
    assert store.repeated == [([1], None), ([2], None)]
    store.answer.put_nowait(None)
    assert await second == 200
    await background.aclose()


async def test_closing_with_two_on_their_way_tells_both(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    background = Background()
    monkeypatch.setattr("delayq._engine.batcher._ENOUGH", 1)
    group = store.group(background)
    futures = [group.submit(1, 1), group.submit(2, 1)]
    await group.aclose(0.01)
    for outcome in await asyncio.gather(*futures, return_exceptions=True):
        assert isinstance(outcome, OutcomeUnknown)
    await background.aclose()


async def test_whoever_comes_while_too_much_waits_is_held_up_until_there_is_room(
    store: Store, group: Batcher[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.batcher._MOST_WAITING", 100)
    most = 0

    async def caller(item: int) -> int:
        nonlocal most
        await group.room()
        future = group.submit(item, 60)
        most = max(most, group._waiting_bytes)
        return await future

    callers = [asyncio.create_task(caller(item)) for item in range(10)]
    await turns()
    # One batch is in flight and two are waiting, so callers that come now see that it is full.
    assert group.is_full
    assert most == 120
    callers[5].cancel()
    for _ in range(10):
        store.answer.put_nowait(None)
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert [answer for answer in answers if not isinstance(answer, BaseException)] == [0, 10, 20, 30, 40, 60, 70, 80, 90]
    assert most <= 160
    assert not group.is_full


async def test_closing_lets_in_whoever_is_held_up(
    store: Store, group: Batcher[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.batcher._MOST_WAITING", 0)
    with suppress(Closed, OutcomeUnknown):
        first, second = group.submit(1, 1), group.submit(2, 1)
        held_up = [asyncio.create_task(group.room()) for _ in range(3)]
        await turns()
        await group.aclose(0.01)
        await asyncio.wait_for(asyncio.gather(*held_up), 10)
        await asyncio.gather(first, second)


async def test_closing_says_what_is_unsent_and_what_is_unknown(store: Store, group: Batcher[int, int]) -> None:
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


async def test_closing_waits_for_what_is_on_its_way(store: Store, group: Batcher[int, int]) -> None:
    future = group.submit(1, 1)
    await turns()
    closing = asyncio.create_task(group.aclose(5))
    await turns()
    store.answer.put_nowait(None)
    await closing
    assert await future == 10


async def test_closing_an_idle_one_is_nothing(group: Batcher[int, int]) -> None:
    await group.aclose(5)


async def test_a_background_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    background = Background()
    with suppress(RuntimeError):
        await background.spawn(fail(), "test")
    await turns()
    assert "background task 'delayq test' failed" in caplog.text


@pytest.fixture
def in_an_outage(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Batcher[int, int]]:
    """Return a factory of groups that cannot send. A call is tried for 0.4 s, as its request says, and then gives up."""
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.4)
    monkeypatch.setattr("delayq._engine.batcher._SPAN", 0.05)
    store.busy = True

    async def repeat(request: Request, items: Sequence[int], _lost: OutcomeUnknown | None) -> list[int]:
        store.repeated.append((list(items), None))
        assert request.until is not None
        await asyncio.sleep(request.until - asyncio.get_running_loop().time())
        if store.busy:
            raise ServerUnavailable("nobody answers")
        return [item * 100 for item in items]

    def group() -> Batcher[int, int]:
        group = store.group(Background())
        group._expires, group._repeat = True, repeat
        return group

    return group


async def test_in_an_outage_each_item_fails_in_its_own_time_however_many_wait(
    store: Store, in_an_outage: Callable[[], Batcher[int, int]]
) -> None:
    group, loop = in_an_outage(), asyncio.get_running_loop()
    ended: list[float] = []

    async def caller(item: int) -> None:
        began = loop.time()
        with pytest.raises(ServerUnavailable):
            await group.submit(item, 1)
        ended.append(loop.time() - began)

    first = [asyncio.ensure_future(caller(item)) for item in range(30)]
    await asyncio.sleep(0.2)
    later = [asyncio.ensure_future(caller(item)) for item in range(30, 60)]
    await asyncio.wait_for(asyncio.gather(*first, *later), 20)
    # One after the other, 20 batches of three would take 8 s.
    assert min(ended) >= 0.3
    assert max(ended) < 2
    assert all(len(items) <= 3 for items, _ in store.repeated)
    assert len(store.repeated) <= 3, "what has waited for too long was not sent"
    assert group.unanswered == 0


async def test_what_waits_does_not_fail_while_others_are_carried_out(
    store: Store, in_an_outage: Callable[[], Batcher[int, int]]
) -> None:
    """A slow server does not count as an outage: ten batches, each of which takes half of the time that an item may wait."""
    store.busy = False
    group = in_an_outage()
    store.busy = False
    futures = group.submit_many((item, 1) for item in range(30))
    for _ in range(10):
        await asyncio.sleep(0.2)
        store.answer.put_nowait(None)
    assert await asyncio.wait_for(asyncio.gather(*futures), 20) == [item * 10 for item in range(30)]


async def test_callers_who_are_held_up_fail_in_their_own_time_too(
    store: Store, in_an_outage: Callable[[], Batcher[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.batcher._MOST_WAITING", 100)
    group, loop = in_an_outage(), asyncio.get_running_loop()
    began = loop.time()

    async def caller(item: int) -> None:
        since = await group.room()
        await group.submit(item, 60, since)

    outcomes = await asyncio.wait_for(asyncio.gather(*(caller(item) for item in range(20)), return_exceptions=True), 20)
    assert {type(outcome) for outcome in outcomes} == {ServerUnavailable}
    assert loop.time() - began < 2


async def test_batches_of_one_call_do_not_leave_side_by_side(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not ready for the first batch but is for the second would store them in the wrong order."""
    background = Background()
    monkeypatch.setattr("delayq._engine.batcher._ENOUGH", 1)
    group = store.group(background)
    futures = group.submit_many((item, 1) for item in range(6))
    assert store.batches == [[0, 1, 2]]
    store.answer.put_nowait(ServerUnavailable("BUSY"))
    await until(lambda: store.repeated == [([0, 1, 2], None)])
    assert store.batches == [[0, 1, 2]]
    for _ in range(2):
        store.answer.put_nowait(None)
    assert await asyncio.gather(*futures) == [0, 100, 200, 30, 40, 50]
    await background.aclose()


async def test_a_request_that_cannot_be_made_fails_those_whom_it_concerns(store: Store) -> None:
    background = Background()
    group = store.group(background)
    request = group._request

    def broken(items: Sequence[int], lane: int) -> Request:
        if 13 in items:
            raise TypeError("not this one")
        return request(items, lane)

    group._request = broken
    bad, good = group.submit(13, 1), group.submit(2, 1)
    store.answer.put_nowait(None)
    with pytest.raises(TypeError):
        await bad
    assert await good == 20
    await background.aclose()
