"""Random operations on the wheel, checked against a plain dict of deadlines."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delayq._timer.wheel import Timeout, Wheel
from tests.support.depth import examples
from tests.support.wheels import check

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


def nothing(_timeout: Timeout) -> None:
    pass


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
