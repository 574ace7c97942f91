"""Which items leave together, and when: events go in, batches come out, and no clock runs."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._engine import batch_plan
from delayq._engine.batch_plan import SPAN, BatchPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delayq._engine.batch_plan import Batch

    Numbers = Batch[int, str]

NEVER = -math.inf


def plan(
    max_items: int = 200, max_bytes: int = 1000, expires_after: float = math.inf
) -> BatchPlan[int, str]:
    return BatchPlan(max_items=max_items, max_bytes=max_bytes, expires_after=expires_after)


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
    assert (slow.next_expiry(NEVER), slow.waiting_bytes) == (math.inf, 0)


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
        assert self.plan.waiting_bytes == sum(self.sizes[item] for item in self.waiting)
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
