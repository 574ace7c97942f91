"""The pure wheel: unless a test says otherwise, of eight ticks, each a second. Random operations
are checked against a plain dict of deadlines.
"""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delayq._timer.wheel import Timeout, Wheel
from tests.support.depth import examples

if TYPE_CHECKING:
    from collections.abc import Iterable


WHEEL = 8
WHEELS = WHEEL * WHEEL  # the far level ends after one or two of these


def nothing(_timeout: Timeout) -> None:
    pass


def fill(wheel: Wheel, deadlines: Iterable[float], now: float = 0.0) -> list[Timeout]:
    return [wheel.add(nothing, deadline, now) for deadline in deadlines]


def expire(wheel: Wheel, now: float, budget: int = 10**9) -> list[Timeout]:
    expired = list(wheel.expire(now, budget))
    check(wheel)
    return expired


@pytest.fixture
def wheel() -> Wheel:
    return Wheel(1.0, WHEEL)


def test_a_coarse_bucket_is_spread_before_its_first_timer_is_due(wheel: Wheel) -> None:
    timeout, *_ = fill(wheel, [24.0] * 100, 6)
    tick = wheel.next_tick()
    assert tick is not None
    assert tick <= 24 - WHEEL
    assert expire(wheel, wheel.time_of(tick), budget=10) == []
    assert wheel.next_tick() == tick  # the rest is due now
    expire(wheel, wheel.time_of(tick))
    assert wheel.next_tick() == 25
    assert expire(wheel, 25.0)[0] is timeout


def test_memory_is_free_as_soon_as_timers_are_cancelled() -> None:
    wheel = Wheel(0.001, 512)
    chance = random.Random(3)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        timeouts = fill(wheel, [chance.uniform(60, 3600) for _ in range(10_000)])
        held = tracemalloc.get_traced_memory()[0] - before
        while timeouts:
            timeouts.pop().cancel()
        gc.collect(0)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 10_000 * 150
    assert kept < held / 4  # empty buckets: a few hundred, however many timers there were


def test_empty_buckets_do_not_pile_up_and_live_timers_survive_their_sweeping() -> None:
    for spacing in (1, WHEEL, WHEELS):
        wheel, kept = Wheel(1.0, WHEEL), []
        for number in range(3000):
            (timeout,) = fill(wheel, [number * spacing])
            if number % 100:
                timeout.cancel()
            else:
                kept.append(timeout)
        buckets = len(wheel.near.buckets) + len(wheel.far.buckets) + len(wheel.very_far.buckets)
        assert buckets <= 1000, spacing
        assert expire(wheel, 1e9) == kept, spacing


def test_clearing_ends_the_expiry_and_abandoning_it_loses_nothing(wheel: Wheel) -> None:
    first, *rest = fill(wheel, [5, 5, 6, 600])
    for _ in wheel.expire(1000):
        break
    check(wheel)
    assert first.expired
    seen = []
    for timeout in wheel.expire(1000):
        seen.append(timeout)
        assert wheel.clear() == rest[1:]
    assert seen == rest[:1]
    check(wheel)


def test_a_wheel_has_a_sensible_size() -> None:
    ticks: list[Any] = [0, -1, 2**30 + 1, 10**100, 1.5, 512.0, "512", None]
    for length, number, wrong in (
        *((length, 512, "tick_duration") for length in (0, -0.001, math.nan, math.inf, 1e-12)),
        *((0.001, number, "ticks_per_wheel") for number in ticks),
        (1e8, 512, "292 years"),
    ):
        with pytest.raises(ValueError, match=wrong):
            Wheel(length, number)
    for number, rounded in ((1, 1), (2, 2), (3, 4), (511, 512), (512, 512), (513, 1024)):
        assert Wheel(1.0, number).near_end == 2 * rounded
    for number in (1, 2**30):
        wheel = Wheel(0.001, number)
        (timeout,) = fill(wheel, [1e5])
        assert expire(wheel, 1e5) == []
        assert expire(wheel, 1e5 + 0.002) == [timeout]


# Seconds. With ticks of 1 ms and wheels of 4 to 512 ticks, they reach every level and the borders
# between levels.
DELAYS = st.one_of(
    st.just(0.0),
    st.floats(-5, 0),
    st.floats(0, 0.02),
    st.integers(0, 300).map(lambda ticks: ticks / 1000),
    st.floats(0, 1),
    st.floats(0, 300),
    st.floats(0, 1e5),
    st.sampled_from([1e15, 1e300, math.inf]),
)
STEPS = st.one_of(
    st.just(0.0), st.floats(0, 0.005), st.floats(0, 0.3), st.floats(0, 30), st.floats(0, 1e5)
)
BUDGETS = st.sampled_from([1, 2, 3, 10, 1000])


class WheelModel(RuleBasedStateMachine):
    """A model of each pending timer: its number in the order of adding, and its deadline."""

    @initialize(
        start=st.sampled_from([0.0, 0.1234567, 1e6 + 1 / 3]),
        tick=st.sampled_from([0.001, 0.00025, 1 / 3000]),
        ticks_per_wheel=st.sampled_from([1, 2, 4, 16, 512]),
    )
    def make(self, start: float, tick: float, ticks_per_wheel: int) -> None:
        self.now = start
        self.tick = tick
        self.wheel = Wheel(tick, ticks_per_wheel, start)
        self.pending: dict[Timeout, tuple[int, float]] = {}
        self.done: list[Timeout] = []
        self.serial = 0

    def settle(self, timeout: Timeout) -> tuple[int, int]:
        """Check one expired timer, remove it from the model, and return its place in the order."""
        assert timeout.expired
        # KeyError: it expired twice, or after it was cancelled.
        serial, deadline = self.pending.pop(timeout)
        assert self.now > deadline, "early"
        assert self.wheel.pending == len(self.pending)
        self.done.append(timeout)
        return self.wheel.tick_of(timeout.deadline), serial

    def expire(self, budget: int) -> None:
        places = [self.settle(timeout) for timeout in self.wheel.expire(self.now, budget)]
        assert places == sorted(places), "out of order"
        assert len(places) <= budget

    def add_one(self, delay: float) -> Timeout:
        timeout = self.wheel.add(nothing, self.now + delay, self.now)
        # Deadlines are clamped: an overdue one counts from now, and one that is too far away counts
        # as the latest possible.
        assert timeout.deadline == min(max(self.now + delay, self.now), self.wheel.latest)
        self.pending[timeout] = (self.serial, timeout.deadline)
        self.serial += 1
        return timeout

    @rule(delays=st.lists(DELAYS, min_size=1, max_size=20))
    def add(self, delays: list[float]) -> None:
        for delay in delays:
            self.add_one(delay)

    @rule(delay=DELAYS, count=st.integers(2, 30))
    def add_a_crowd(self, delay: float, count: int) -> None:
        for _ in range(count):
            self.add_one(delay)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        timeout = list(self.pending)[data.draw(st.integers(0, len(self.pending) - 1))]
        assert timeout.cancel()
        assert timeout.cancelled
        del self.pending[timeout]
        self.done.append(timeout)

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def cancel_too_late(self, data: Any) -> None:
        timeout = self.done[data.draw(st.integers(0, len(self.done) - 1))]
        state = timeout.cancelled, timeout.expired
        assert not timeout.cancel()
        assert (timeout.cancelled, timeout.expired) == state

    @rule(step=STEPS, budget=BUDGETS)
    def one_slice(self, step: float, budget: int) -> None:
        self.now += step
        self.expire(budget)

    @rule(step=STEPS, budget=BUDGETS)
    def until_nothing_is_overdue(self, step: float, budget: int) -> None:
        self.now += step
        while (tick := self.wheel.next_tick()) is not None and tick <= self.wheel.tick_of(self.now):
            self.expire(budget)
        late = [
            deadline
            for _, deadline in self.pending.values()
            if deadline <= self.now - self.tick * 1.000001
        ]
        assert not late, "more than a tick late"

    @rule(step=STEPS, delay=DELAYS, budget=BUDGETS)
    def add_and_cancel_while_expiring(self, step: float, delay: float, budget: int) -> None:
        self.now += step
        for timeout in self.wheel.expire(self.now, budget):
            self.settle(timeout)
            self.add_one(delay)
            if len(self.pending) > 1:
                self.add_one(0)
                victim = next(iter(self.pending))
                assert victim.cancel()
                del self.pending[victim]

    @rule()
    def stop(self) -> None:
        unprocessed = self.wheel.clear()
        assert set(unprocessed) == set(self.pending)
        assert len(unprocessed) == len(self.pending)
        assert all(timeout.cancelled for timeout in unprocessed)
        self.done += unprocessed
        self.pending.clear()

    @invariant()
    def the_wheel_is_sound(self) -> None:
        if not hasattr(self, "wheel"):
            return
        check(self.wheel)
        assert self.wheel.pending == len(self.pending)
        assert not any(timeout.cancelled or timeout.expired for timeout in self.pending)

    @invariant()
    def the_next_look_is_not_after_the_first_timer_is_due(self) -> None:
        if not hasattr(self, "wheel"):
            return
        tick = self.wheel.next_tick()
        if not self.pending:
            assert tick is None
        else:
            assert tick is not None
            assert (
                tick
                <= self.wheel.tick_of(min(deadline for _, deadline in self.pending.values())) + 1
            )


TestWheelModel = WheelModel.TestCase
TestWheelModel.settings = settings(max_examples=examples(400))


def check(wheel: Wheel) -> None:
    """Assert every invariant of a wheel, visiting every timer."""
    near, far, very_far = wheel.near, wheel.far, wheel.very_far
    assert wheel.near_end <= wheel.far_end
    assert wheel.near_end % (1 << far.shift) == 0
    assert wheel.far_end % (1 << very_far.shift) == 0
    assert not far.keys or min(far.keys) << far.shift >= wheel.near_end
    assert not very_far.keys or min(very_far.keys) << very_far.shift >= wheel.far_end
    counted = 0
    for level in (near, far, very_far):
        assert sorted(level.keys) == sorted(level.buckets)
        assert not level.keys or level.keys[0] == min(level.keys)
        for key, bucket in level.buckets.items():
            node = bucket
            while (after := node._next) is not bucket:
                assert after._prev is node
                assert after._wheel is wheel
                assert wheel.tick_of(after._deadline) >> level.shift == key
                node = after
                counted += 1
            assert bucket._prev is node
    assert counted == wheel.pending
