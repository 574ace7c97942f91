"""Calls made while another is in flight share the next one. The plan decides which items leave
together, and when: no clock runs there.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._background import Background
from delayq._engine import batch_plan
from delayq._engine.batch_plan import SPAN, BatchPlan
from delayq._engine.batcher import Batcher
from delayq._redis.error_reader import Redirected
from delayq._redis.scripts import Request, Script
from delayq.errors import Closed, OutcomeUnknown, ServerRefused, ServerUnavailable
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from delayq._engine.batch_plan import CallBatch
    from delayq._redis.client import RedisClient
    from delayq._redis.pool import ConnectionPool

    Numbers = CallBatch[int, str]


Ints = Batcher[int, int]
SCRIPT = Script("redisson/offer")


class FakeWire(str):
    """A connection on which no bytes ever move."""

    __slots__ = ()
    moved_at = float("-inf")

    @property
    def pulse(self) -> FakeWire:
        return self


class Store:
    """A server that answers on demand, and a batcher that asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.retry_for = self.waits_for = 5.0
        self.batches: list[list[int]] = []
        self.answer: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.busy = False
        self.repeated: list[tuple[list[int], OutcomeUnknown | None]] = []
        self.sent_beside: list[object] = []
        self.background = Background()
        self._tasks: set[asyncio.Task[None]] = set()
        self.batcher = self.make()

    def limit(self, **limits: float) -> None:
        """Set constants of the plan, or those that the batcher imports from it."""
        for name, value in limits.items():
            module = "batcher" if name == "MAX_WAITING_SIZE" else "batch_plan"
            self._monkeypatch.setattr(f"delayq._engine.{module}.{name}", value)

    def send_now(
        self,
        _script: Script,
        _keys: Any,
        args: Sequence[int],
        told: Callable[[Any], object],
        beside: object,
    ) -> object:
        if self.busy:
            return None
        self.sent_beside.append(beside)
        self.batches.append(list(args))

        async def reply() -> None:
            told(await self.answer.get() or [item * 10 for item in args])

        self._tasks.add(task := asyncio.create_task(reply()))
        task.add_done_callback(self._tasks.discard)
        return FakeWire(f"wire of {args[0]}")

    async def repeat(
        self, request: Request, items: Sequence[int], lost: OutcomeUnknown | None
    ) -> list[int]:
        assert request.args == list(items)
        self.repeated.append((list(items), lost))
        if error := await self.answer.get():
            raise error
        return [item * 100 for item in items]

    def request(self, items: Sequence[int], slot: int) -> Request:
        return Request(SCRIPT, (f"slot {slot}",), list(items))

    def reply(self, count: int = 1) -> None:
        """Carry out calls."""
        for _ in range(count):
            self.answer.put_nowait(None)

    def make(self, **options: Any) -> Ints:
        usual: dict[str, Any] = {"request": self.request, "repeat": self.repeat}
        usual |= {"results": lambda _, reply: reply, "max_items": 3, "max_size": 100}
        return Batcher(cast("RedisClient", self), self.background, **{**usual, **options})


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    store = Store(monkeypatch)
    yield store
    await store.background.aclose()
    for task in store._tasks:
        task.cancel()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_uncancellable_item_leaves_without_its_caller_others_do_not(store: Store) -> None:
    for uncancellable in (False, True):
        batcher = store.make(uncancellable=uncancellable)
        first = batcher.submit(1, 1)
        await turns()
        batcher.submit(2, 1).cancel()
        last = batcher.submit(3, 1)
        store.reply(2)
        assert list(await asyncio.gather(first, last)) == [10, 30]
    assert store.batches == [[1], [3], [1], [2, 3]]


async def test_an_error_reaches_exactly_the_calls_it_concerns(store: Store) -> None:
    lone = store.batcher.submit(0, 1)
    failing = [store.batcher.submit(i, 1) for i in range(3)]
    fine = store.batcher.submit(9, 1)
    # The three share a batch.
    for answer in (None, ServerRefused("full"), None):
        store.answer.put_nowait(answer)
    results = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(result) for result in results] == ["full"] * 3
    assert len({id(result) for result in results}) == 3
    assert [await lone, await fine] == [0, 90]
    assert store.repeated == [], "a refused call is not repeated"


async def test_callers_that_share_a_batch_are_resumed_each_in_its_own_context(store: Store) -> None:
    place: ContextVar[int] = ContextVar("place")
    told: list[tuple[str, int]] = []

    async def caller(item: int) -> None:
        place.set(item)
        await store.batcher.submit(item, 1)
        told.append(("task", place.get()))

    # The first item leaves alone. The second has two callbacks, the others have a task.
    futures = [store.batcher.submit(item, 1) for item in range(2)]
    for name in ("first", "second"):
        futures[1].add_done_callback(lambda future, name=name: told.append((name, future.result())))  # type: ignore[misc]
    tasks = [asyncio.create_task(caller(item)) for item in (4, 5)]
    await turns()
    store.reply(2)
    await asyncio.gather(*futures, *tasks)
    assert sorted(told) == [("first", 10), ("second", 10), ("task", 4), ("task", 5)]


async def test_an_error_in_a_callback_harms_no_other(store: Store) -> None:
    loop, reported = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    first, *others = [store.batcher.submit(item, 1) for item in range(4)]

    def fail(_: asyncio.Future[int]) -> None:
        raise ZeroDivisionError

    others[0].add_done_callback(fail)
    told: list[int] = []
    for future in others[1:]:
        future.add_done_callback(lambda future: told.append(future.result()))
    store.reply(2)
    assert await first == 0
    await until(lambda: told == [20, 30])
    assert [type(error) for error in reported] == [ZeroDivisionError]


async def test_items_submitted_together_are_withdrawn_together(store: Store) -> None:
    first = store.batcher.submit(1, 1)
    together = store.batcher.submit_many([2, 3, 4, 5], [1] * 4)
    last = store.batcher.submit(6, 1)
    store.reply()
    assert await first == 10
    # The first three have left.
    together.cancel()
    store.reply(2)
    assert await last == 60
    assert store.batches == [[1], [2, 3, 4], [6]]
    assert store.batcher.unanswered == 0


async def test_items_submitted_together_have_outcomes_of_their_own(store: Store) -> None:
    together = store.batcher.submit_many([*range(7)], [1] * 7)
    for answer in (None, ServerRefused("full"), None):
        store.answer.put_nowait(answer)
    assert [str(outcome) for outcome in await together] == ["0", "10", "20", *["full"] * 3, "60"]
    together = store.batcher.submit_many([*range(4)], [1] * 4)
    store.batcher.recall(ServerRefused("recalled"))
    assert not together.done(), "some of them are in flight"
    store.reply()
    assert [str(outcome) for outcome in await together] == ["0", "10", "20", "recalled"]


async def test_a_full_batch_follows_the_first_one_on_its_connection(store: Store) -> None:
    store.limit(MIN_SECOND_BATCH=2)
    batcher = store.batcher
    together = [batcher.submit(item, 1) for item in (1, 2)]
    assert store.batches == [[1]]
    together.append(batcher.submit(3, 1))
    assert store.batches == [[1], [2, 3]]
    assert store.sent_beside == [None, "wire of 1"]
    # With two calls in flight, further items wait, however many there are.
    rest = batcher.submit_many([4, 5, 6, 7], [1] * 4)
    assert len(store.batches) == 2
    store.reply(4)
    answers = [*(await asyncio.gather(*together)), *await rest]
    assert answers == [item * 10 for item in range(1, 8)]
    assert store.batches == [[1], [2, 3], [4, 5, 6], [7]]


async def test_two_batches_that_were_not_carried_out_are_repeated_in_order(store: Store) -> None:
    """On separate connections, the second might overtake the first."""
    store.limit(MIN_SECOND_BATCH=1)
    batcher = store.batcher
    first, second = batcher.submit(1, 1), batcher.submit(2, 1)
    for _ in range(2):
        store.answer.put_nowait(ServerUnavailable("it does not know the script"))
    await turns(10)
    assert store.repeated == [([1], None)]
    store.reply()
    assert await first == 100
    await turns()
    assert store.repeated == [([1], None), ([2], None)]
    store.reply()
    assert await second == 200


async def test_callers_are_held_up_while_too_much_waits(store: Store) -> None:
    store.limit(MAX_WAITING_SIZE=100)
    most = 0

    async def caller(item: int) -> int:
        nonlocal most
        await store.batcher.wait_for_capacity()
        future = store.batcher.submit(item, 60)
        most = max(most, store.batcher._plan.waiting_size)
        return await future

    callers = [asyncio.create_task(caller(item)) for item in range(10)]
    await turns()
    # One batch is in flight and two are waiting, so callers that come now see that it is full.
    assert store.batcher.is_full
    assert most == 120
    callers[5].cancel()
    store.reply(10)
    answers = await asyncio.gather(*callers, return_exceptions=True)
    answers.pop(5)
    assert answers == [item * 10 for item in range(10) if item != 5]
    assert most <= 160
    assert not store.batcher.is_full


async def test_closing_tells_unsent_items_from_unknown_ones(store: Store) -> None:
    await store.make().aclose(5)  # it is idle
    store.limit(MIN_SECOND_BATCH=1)
    unknown = [store.batcher.submit(1, 1), store.batcher.submit(2, 1)]
    unsent = store.batcher.submit(3, 1)
    await store.batcher.aclose(0.01)
    for future in unknown:
        with pytest.raises(OutcomeUnknown):
            await future
    with pytest.raises(Closed):
        await unsent
    with pytest.raises(Closed):
        store.batcher.submit(4, 1)


async def test_closing_lets_in_callers_that_are_held_up(store: Store) -> None:
    store.limit(MAX_WAITING_SIZE=0)
    together = store.batcher.submit(1, 1), store.batcher.submit(2, 1)
    held_up = [asyncio.create_task(store.batcher.wait_for_capacity()) for _ in range(3)]
    await turns()
    assert len(store.batcher._waiting_for_capacity) == 3
    await store.batcher.aclose(0.01)
    await asyncio.wait_for(asyncio.gather(*held_up), 20)
    outcomes = await asyncio.gather(*together, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown, Closed]


async def test_waiting_callers_are_told_if_the_client_ends_its_tasks(store: Store) -> None:
    store.busy = True
    waiting = store.make().submit(1, 1)
    await until(lambda: store.repeated)
    await store.background.aclose()
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize("size", [1, 60], ids=["none is held up", "most are held up"])
async def test_in_an_outage_each_item_fails_in_its_own_time_however_many_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    skip_waits(monkeypatch)
    store.retry_for = store.waits_for = 0.4
    store.limit(SPAN=0.05, MAX_WAITING_SIZE=100)
    store.busy = True

    async def repeat(
        request: Request, items: Sequence[int], _lost: OutcomeUnknown | None
    ) -> list[int]:
        store.repeated.append((list(items), None))
        assert request.deadline is not None
        await asyncio.sleep(request.deadline - loop.time())
        raise ServerUnavailable("nobody answers")

    batcher, loop = store.make(expires=True, repeat=repeat), asyncio.get_running_loop()
    ended: list[float] = []

    async def caller(item: int) -> None:
        began = loop.time()
        with pytest.raises(ServerUnavailable):
            await batcher.submit(item, size, await batcher.wait_for_capacity())
        ended.append(loop.time() - began)

    first = [asyncio.ensure_future(caller(item)) for item in range(30)]
    await asyncio.sleep(0.2)
    assert bool(batcher._waiting_for_capacity) == (size > 1)
    later = [asyncio.ensure_future(caller(item)) for item in range(30, 60)]
    await asyncio.wait_for(asyncio.gather(*first, *later), 20)
    # One after the other, 20 batches of three would take 8 s.
    assert min(ended) >= 0.3
    assert max(ended) < 0.5
    assert all(len(items) <= 3 for items, _ in store.repeated)
    assert len(store.repeated) <= 3, "expired items were not sent"
    assert batcher.unanswered == 0


async def test_a_call_that_goes_elsewhere_is_not_why_others_could_not_be_sent(store: Store) -> None:
    store.retry_for = store.waits_for = 0.1
    store.limit(MAX_WAITING_SIZE=100)
    batcher = store.make(expires=True)
    futures = [batcher.submit(1, 1), batcher.submit(2, 200)]
    moved = Redirected("MOVED 866 10.0.0.7:6379", cast("ConnectionPool", None), asking=False)
    store.answer.put_nowait(moved)
    # The server that it goes to takes its time.
    await until(lambda: store.repeated == [([1], None)])
    with pytest.raises(ServerUnavailable, match="the server does not answer") as caught:
        await batcher.wait_for_capacity()
    assert caught.value.__cause__ is None
    for future in futures:
        future.cancel()
    await store.background.aclose()


async def test_a_request_or_a_reply_that_makes_no_sense_fails_its_items_alone(store: Store) -> None:
    def request(items: Sequence[int], slot: int) -> Request:
        if 13 in items:
            raise TypeError("not this one")
        return store.request(items, slot)

    for broken in (
        {"request": request},
        {"results": lambda _, reply: reply["no"] if reply[0] == 130 else reply},
    ):
        batcher = store.make(**broken)
        bad, good = batcher.submit(13, 1), batcher.submit(2, 1)
        store.reply(2)
        with pytest.raises(TypeError):
            await bad
        assert await good == 20


NEVER = -math.inf


def plan(
    max_items: int = 200, max_size: int = 1000, expires_after: float = math.inf
) -> BatchPlan[int, str]:
    return BatchPlan(max_items=max_items, max_size=max_size, expires_after=expires_after)


def left(plan: BatchPlan[int, str], now: float = 0.0, moved_at: float = NEVER) -> list[Numbers]:
    """Return the batches that leave now."""
    batches = []
    while (batch := plan.leave(now, moved_at)) is not None:
        batches.append(batch)
    return batches


def add(plan: BatchPlan[int, str], items: Iterable[int], submitted_at: float = 0.0) -> None:
    for item in items:
        plan.add(item, 1, str(item), submitted_at)


def test_every_success_restarts_the_time_limit() -> None:
    slow = plan(expires_after=5)
    add(slow, [1])
    (first,) = left(slow)
    add(slow, [2], submitted_at=1.0)
    slow.on_success(first, 4.0)
    assert slow.next_expiry(NEVER) == 9
    assert slow.expire(8.9, NEVER) == []
    (expired,) = slow.expire(9.0, NEVER)
    assert expired.items == [2]
    assert (slow.next_expiry(NEVER), slow.waiting_size) == (math.inf, 0)


def test_bytes_that_move_count_for_a_call_in_flight_and_not_for_its_repetition() -> None:
    slow = plan(expires_after=5)
    add(slow, [1])
    assert slow.expires_at(0.0, 3.0) == 5
    (first,) = left(slow)
    assert slow.expires_at(0.0, 3.0) == 8
    assert slow.on_failure(first, 3.0, unknown=False).give_up_at == 8
    assert slow.expires_at(0.0, 3.0) == 5


def test_items_far_apart_share_no_batch_if_they_expire() -> None:
    for expires_after, batches in ((5, 2), (math.inf, 1)):
        spread = plan(expires_after=expires_after)
        add(spread, [1])
        add(spread, [2], submitted_at=SPAN * 1.1)
        assert len(spread.waiting) == batches


class Model:
    """Everything that a plan was told, and checks of what it decides."""

    MOST_ITEMS, MOST_BYTES, ENOUGH, EXPIRES_AFTER = 4, 10, 2, 5.0

    def __init__(self) -> None:
        self.plan = plan(self.MOST_ITEMS, self.MOST_BYTES, self.EXPIRES_AFTER)
        self.now = 0.0
        self.sizes: list[int] = []
        self.submitted_at: list[float] = []
        # For each item, the call that added it.
        self.group: list[int] = []
        self.groups = 0
        # The waiters of items that were added together.
        self.shared: dict[int, str] = {}
        self.cancelled: set[int] = set()
        # The items that have not left, in order. Those that have left, and the outcomes.
        self.waiting: list[int] = []
        self.sent: list[int] = []
        self.outcomes: Counter[int] = Counter()
        # For each flush that is not over: how many items have to be done.
        self.flushing: dict[str, int] = {}

    def new_item(self, size: int) -> int:
        item = len(self.sizes)
        self.sizes.append(size)
        self.submitted_at.append(self.now)
        self.group.append(self.groups)
        self.waiting.append(item)
        return item

    def add(self, size: int) -> None:
        self.groups += 1
        item = self.new_item(size)
        if self.plan.add(item, size, str(item), self.now):
            self.leave()

    def add_small(self, count: int) -> None:
        items = []
        for _ in range(count):
            # They may leave side by side.
            self.groups += 1
            items.append(self.new_item(1))
        self.plan.add_small(items, [*map(str, items)], self.now)

    def add_many(self, sizes: list[int]) -> None:
        self.groups += 1
        items = [self.new_item(size) for size in sizes]
        waiter = f"call {self.groups}"
        self.shared |= dict.fromkeys(items, waiter)
        batches = self.plan.add_many(items, sizes, waiter, self.now)
        assert [item for batch in batches for item in batch.items if item in items] == items
        assert all(waiter in batch.shared for batch in batches)
        self.leave()

    def waiters(self, items: Iterable[int]) -> list[str]:
        return [self.shared.get(item, str(item)) for item in items]

    def leave(self) -> None:
        while True:
            before, waiting = [*self.plan.in_flight], len(self.plan.waiting)
            if (batch := self.plan.leave(self.now, NEVER)) is None:
                break
            self.check_departure(batch, before, waiting)
            if batch.slot is None:
                assert self.has_expired(batch)
                self.settle(batch)
                continue
            gone = [place for place, item in enumerate(batch.items) if item in self.cancelled]
            for place in gone:
                self.outcomes[batch.items[place]] += 1
            self.flushed(self.plan.withdraw(batch, gone))
            self.sent += batch.items
            if not batch.items:
                self.plan.end(batch)
        assert self.plan.in_flight or not self.plan.waiting, "nothing waits for no reason"

    def check_departure(self, batch: Numbers, before: list[Numbers], waiting: int) -> None:
        items = batch.items
        assert items == self.waiting[: len(items)], "items leave in order"
        del self.waiting[: len(items)]
        assert batch.waiters == self.waiters(items)
        assert 0 < len(items) <= self.MOST_ITEMS
        assert len(items) == 1 or sum(self.sizes[item] for item in items) <= self.MOST_BYTES
        if batch.slot is None:
            return
        assert len(before) < 2
        for other in before:
            assert not other.repeating
            assert batch.slot != other.slot
            assert len(items) >= self.ENOUGH or waiting > 1
            assert (
                not other.items or not items or self.group[other.items[-1]] != self.group[items[0]]
            ), "side by side"

    def has_expired(self, batch: Numbers) -> bool:
        return self.now - min(self.submitted_at[item] for item in batch.items) >= self.EXPIRES_AFTER

    def settle(self, batch: Numbers) -> None:
        items, waiters, flushed = self.plan.resolve(batch)
        assert waiters == self.waiters(items)
        self.outcomes.update(items)
        self.flushed(flushed)

    def flushed(self, waiters: Iterable[str]) -> None:
        for waiter in waiters:
            assert sum(self.outcomes.values()) >= self.flushing.pop(waiter)

    # Events

    def cancel(self, place: int) -> None:
        if place < len(self.waiting):
            self.cancelled.add(self.waiting[place])

    def succeed(self, place: int) -> None:
        if place < len(self.plan.in_flight):
            batch = self.plan.in_flight[place]
            self.plan.on_success(batch, self.now)
            self.leave()
            self.settle(batch)

    def refuse(self, place: int) -> None:
        if place < len(self.plan.in_flight):
            batch = self.plan.in_flight[place]
            self.plan.end(batch)
            self.settle(batch)
            self.leave()

    def fail(self, place: int, unknown: bool) -> None:
        if place < len(self.plan.in_flight) and not self.plan.in_flight[place].repeating:
            batch = self.plan.in_flight[place]
            repeat = self.plan.on_failure(batch, NEVER, unknown=unknown)
            assert all(each.repeating and each is not batch for each in repeat.after)
            self.leave()

    def flush(self) -> None:
        if self.plan.unanswered:
            waiter = f"flush {len(self.flushing)} {len(self.sizes)} {self.now}"
            self.flushing[waiter] = len(self.sizes)
            self.plan.flush(waiter)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for batch in self.plan.expire(self.now, NEVER):
            assert self.has_expired(batch)
            assert batch.items
            self.waiting = [item for item in self.waiting if item not in batch.items]
            self.settle(batch)
        assert self.plan.next_expiry(NEVER) > self.now

    def recall(self) -> None:
        for batch in self.plan.recall():
            self.waiting = [item for item in self.waiting if item not in batch.items]
            self.settle(batch)
        assert not self.waiting

    def check(self) -> None:
        assert self.plan.waiting_size == sum(self.sizes[item] for item in self.waiting)
        assert self.plan.unanswered == len(self.sizes) - sum(self.outcomes.values())
        assert [item for batch in self.plan.waiting for item in batch.items] == self.waiting
        assert self.sent == sorted(set(self.sent)), "each item leaves once, in order"

    def close(self) -> None:
        self.plan.closed = True
        self.leave()
        for batches in self.plan.abandon():
            for batch in batches:
                self.settle(batch)
        assert self.outcomes == Counter(range(len(self.sizes))), "each item has one outcome"
        assert not self.flushing
        assert self.plan.unanswered == 0


_PLACES, _SIZES = st.integers(0, 1), st.sampled_from([1, 2, 5, 9, 12])
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _SIZES),
        st.tuples(st.just("add_small"), st.integers(1, 12)),
        st.tuples(st.just("add_many"), st.lists(_SIZES, max_size=12)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("succeed"), _PLACES),
        st.tuples(st.just("refuse"), _PLACES),
        st.tuples(st.just("fail"), _PLACES, st.booleans()),
        st.tuples(st.just("pass_by"), st.sampled_from([0.3, 0.6, 2.0, 6.0])),
        st.tuples(st.sampled_from(["flush", "leave", "recall"])),
    ),
    max_size=40,
)


@given(_EVENTS)
def test_every_item_leaves_once_in_order_within_the_limits_and_has_one_outcome(
    events: list[tuple[Any, ...]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_plan, "MIN_SECOND_BATCH", Model.ENOUGH)
        model = Model()
        for event, *facts in events:
            getattr(model, event)(*facts)
            # As the batcher does in the next iteration of the event loop.
            model.leave()
            model.check()
        model.close()


def skip_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the running loop's clock jump to the next timer whenever there is nothing else to do.

    Only for tests that wait for nothing but timers: by that clock, data from a network come late.
    """
    loop: Any = asyncio.get_running_loop()
    now, select = loop.time(), loop._selector.select

    def jump(timeout: float | None) -> Any:
        nonlocal now
        now += timeout or 0.0
        return select(0)

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop._selector, "select", jump)
