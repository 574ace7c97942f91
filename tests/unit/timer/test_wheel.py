"""The pure wheel: unless a test says otherwise, of eight ticks, each a second."""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from delayq._timer.wheel import Timeout, Wheel
from delayq.errors import BadDelay, DelayqError
from tests.support.wheels import check

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


# One deadline on each level, on the borders between levels, and many revolutions away.
DEADLINES = [
    *(0, 0.5, 1, 6.9, 7, 8, 15.9),
    *(16, 17, 63, 64, 127.9),
    *(128, 129, 511, 512.5, 4096, 1e6, 1e9),
]


class TestExpiry:
    @pytest.mark.parametrize("deadline", DEADLINES)
    def test_a_timer_expires_once_after_its_deadline(self, wheel: Wheel, deadline: float) -> None:
        (timeout,) = fill(wheel, [deadline])
        assert expire(wheel, deadline) == []
        assert expire(wheel, deadline + 1) == [timeout]
        assert expire(wheel, deadline + 2) == []
        assert expire(wheel, deadline * 3 + 1000) == []

    @pytest.mark.parametrize("deadline", DEADLINES)
    def test_at_each_next_tick_a_timer_takes_three_looks_and_is_a_tick_late_at_most(
        self, wheel: Wheel, deadline: float
    ) -> None:
        (timeout,) = fill(wheel, [deadline])
        looks = []
        while (tick := wheel.next_tick()) is not None:
            looks.append(wheel.time_of(tick))
            expire(wheel, looks[-1])
        assert timeout.expired
        assert deadline < looks[-1] <= deadline + 1
        assert len(looks) <= 3

    def test_timers_expire_in_the_order_of_their_ticks(self, wheel: Wheel) -> None:
        deadlines = list(range(0, 2000, 7))
        random.Random(1).shuffle(deadlines)
        fill(wheel, deadlines)
        assert [t.deadline for t in expire(wheel, 3000)] == sorted(deadlines)

    def test_within_a_tick_the_order_is_that_of_adding(self, wheel: Wheel) -> None:
        added = fill(wheel, [5.9, 5.1, 5.5, 5.0])
        assert expire(wheel, 6) == added

    @pytest.mark.parametrize("deadline", [100, 1000])
    def test_the_order_of_adding_survives_the_spreading_of_coarse_buckets(
        self, wheel: Wheel, deadline: int
    ) -> None:
        # Timers are added on every level that the tick passes through as it comes nearer, and
        # between slices of spreading.
        added = []
        for now in range(deadline):
            expire(wheel, now, budget=1)
            added += fill(wheel, [deadline + 0.5, deadline + 0.1], now)
            check(wheel)
        assert expire(wheel, deadline + 1) == added

    def test_a_deadline_in_the_past_expires_with_the_next_tick(self, wheel: Wheel) -> None:
        (timeout,) = fill(wheel, [-1000.0], now=50.0)
        assert expire(wheel, 50.0) == []
        assert expire(wheel, 51.0) == [timeout]

    def test_past_deadlines_queue_up_behind_those_due_in_the_tick(self, wheel: Wheel) -> None:
        added = [*fill(wheel, [50.5], now=50.0), *fill(wheel, [-5.0, -math.inf], now=50.6)]
        assert expire(wheel, 51.0) == added

    def test_many_revolutions_late_still_means_once_and_in_order(self, wheel: Wheel) -> None:
        added = fill(wheel, [3, 30, 300, 3000])
        assert expire(wheel, 1e12) == added

    def test_a_wheel_of_one_tick_works(self) -> None:
        wheel = Wheel(1.0, 1)
        added = fill(wheel, [0, 1, 2, 3, 10, 100])
        check(wheel)
        for timeout in added:
            assert expire(wheel, timeout.deadline) == []
            assert expire(wheel, timeout.deadline + 1) == [timeout]

    @pytest.mark.parametrize("tick", [0.001, 0.00025, 0.1, 1 / 3, 7e-5, 1e-9])
    def test_rounding_makes_nobody_early_at_any_length_of_tick(self, tick: float) -> None:
        chance = random.Random(2)
        start = chance.uniform(0, 1e7)
        wheel = Wheel(tick, 512, start)
        fill(wheel, [start + chance.uniform(0, 3000 * tick) for _ in range(500)], start)
        fired = 0
        while (number := wheel.next_tick()) is not None:
            now = wheel.time_of(number)
            for timeout in expire(wheel, now):
                assert timeout.deadline < now
                fired += 1
        assert fired == 500


class TestNextTick:
    def test_an_empty_wheel_has_none(self, wheel: Wheel) -> None:
        assert wheel.next_tick() is None

    def test_it_is_never_later_than_the_first_timer(self, wheel: Wheel) -> None:
        for deadline in reversed(DEADLINES):
            fill(wheel, [deadline])
            tick = wheel.next_tick()
            assert tick is not None
            assert tick <= wheel.tick_of(deadline) + 1

    def test_cancelled_timers_before_the_first_do_not_count(self, wheel: Wheel) -> None:
        early, late = fill(wheel, [2, 5])
        early.cancel()
        assert wheel.next_tick() == wheel.tick_of(late.deadline) + 1

    @pytest.mark.parametrize("tick", [0.001, 0.00025, 0.1, 1 / 3, 7e-5])
    def test_the_moment_of_a_tick_lies_in_that_tick(self, tick: float) -> None:
        wheel = Wheel(tick, 512)
        for number in [*range(2000), 10**9 + 7, 2**40 + 1]:
            assert wheel.tick_of(wheel.time_of(number)) == number

    def test_a_stall_of_years_costs_no_step_per_tick(self) -> None:
        wheel = Wheel(0.001, 512)
        (before,) = fill(wheel, [1.0])
        century = 100 * 365 * 86400.0  # 3e12 ticks
        assert expire(wheel, century) == [before]
        (after,) = fill(wheel, [century + 0.01], century)
        # Placed directly on the near level again.
        assert wheel.next_tick() == wheel.tick_of(after.deadline) + 1


class TestCancel:
    def test_a_timeout_is_cancelled_once_or_expires(self, wheel: Wheel) -> None:
        cancelled, expired, pending = fill(wheel, [5, 5, 500])
        assert [cancelled.cancel(), wheel.pending, cancelled.cancel()] == [True, 2, False]
        expire(wheel, 6)
        assert [expired.cancel(), wheel.pending] == [False, 1]
        states = [(each.cancelled, each.expired) for each in (pending, cancelled, expired)]
        assert states == [(False, False), (True, False), (False, True)]

    def test_the_others_of_the_bucket_stay(self, wheel: Wheel) -> None:
        first, second, third = fill(wheel, [5, 5, 5])
        second.cancel()
        assert expire(wheel, 6) == [first, third]

    def test_a_cancelled_timer_lets_go_of_its_callback(self, wheel: Wheel) -> None:
        class Payload:
            alive = 0

            def __init__(self) -> None:
                Payload.alive += 1

            def __del__(self) -> None:
                Payload.alive -= 1

            def __call__(self, _timeout: Timeout) -> None: ...

        timeout = wheel.add(Payload(), 5, 0)
        timeout.cancel()
        assert Payload.alive == 0

    def test_memory_is_free_as_soon_as_timers_are_cancelled(self) -> None:
        wheel = Wheel(0.001, 512)
        chance = random.Random(3)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            timeouts = fill(wheel, [chance.uniform(60, 3600) for _ in range(20_000)])
            held = tracemalloc.get_traced_memory()[0] - before
            while timeouts:
                timeouts.pop().cancel()
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held < 20_000 * 150
        assert kept < held / 5  # empty buckets: a few hundred, however many timers there were

    @pytest.mark.parametrize("spacing", [1, WHEEL, WHEELS])
    def test_empty_buckets_do_not_pile_up(self, wheel: Wheel, spacing: int) -> None:
        for number in range(5000):
            fill(wheel, [number * spacing])[0].cancel()
        buckets = len(wheel.near.buckets) + len(wheel.far.buckets) + len(wheel.very_far.buckets)
        assert buckets <= 1000

    def test_live_timers_survive_the_sweeping_of_empty_buckets(self, wheel: Wheel) -> None:
        kept = []
        for number in range(5000):
            timeout, *_ = fill(wheel, [number * WHEELS])
            if number % 10:
                timeout.cancel()
            else:
                kept.append(timeout)
        check(wheel)
        assert expire(wheel, 1e9) == kept


class TestBetweenTwoSteps:
    """Callbacks change the wheel while it expires timers."""

    def test_pending_has_fallen_before_each_timer_is_handed_out(self, wheel: Wheel) -> None:
        fill(wheel, [5, 5, 5])
        assert [wheel.pending for _ in wheel.expire(6)] == [2, 1, 0]

    def test_a_sibling_in_the_same_bucket_can_be_cancelled(self, wheel: Wheel) -> None:
        first, second, third = fill(wheel, [5, 5, 5])
        seen = []
        for timeout in wheel.expire(6):
            seen.append(timeout)
            assert second.cancel() == (timeout is first)
        assert seen == [first, third]

    def test_a_timer_that_is_added_without_delay_waits_for_a_tick(self, wheel: Wheel) -> None:
        fill(wheel, [5])
        added = [wheel.add(nothing, 0, 6.0) for _ in wheel.expire(6.0)]
        check(wheel)
        assert wheel.next_tick() == 7
        assert expire(wheel, 7.0) == added

    def test_clearing_ends_the_expiry(self, wheel: Wheel) -> None:
        first, *rest = fill(wheel, [5, 5, 6, 600])
        seen = []
        for timeout in wheel.expire(1000):
            seen.append(timeout)
            assert wheel.clear() == rest
        assert seen == [first]
        check(wheel)

    def test_abandoning_the_expiry_loses_nothing(self, wheel: Wheel) -> None:
        first, *rest = fill(wheel, [5, 5, 6, 600])
        for _ in wheel.expire(1000):
            break
        check(wheel)
        assert first.expired
        assert expire(wheel, 1000) == rest

    def test_filling_and_emptying_many_buckets_meanwhile_is_harmless(self, wheel: Wheel) -> None:
        added = fill(wheel, [5, 5, 6])
        seen = []
        for timeout in wheel.expire(8):
            seen.append(timeout)
            for number in range(1000):
                fill(wheel, [9 + number * WHEELS], 8)[0].cancel()  # enough to trigger sweeps
            check(wheel)
        assert seen == added


class TestBudget:
    def test_expiry_stops_when_the_budget_is_spent(self, wheel: Wheel) -> None:
        added = fill(wheel, [5] * 10)
        assert expire(wheel, 6, budget=4) == added[:4]
        assert wheel.pending == 6

    def test_the_next_tick_is_not_in_the_future_while_work_is_left(self, wheel: Wheel) -> None:
        fill(wheel, [5] * 10)
        expire(wheel, 6, budget=4)
        tick = wheel.next_tick()
        assert tick is not None
        assert tick <= 6

    def test_spreading_a_coarse_bucket_counts_as_work(self, wheel: Wheel) -> None:
        fill(wheel, [20] * 100)
        tick = wheel.next_tick()
        assert tick is not None
        assert expire(wheel, wheel.time_of(tick), budget=10) == []
        assert len(wheel.far.buckets) == 1  # spread in part
        assert wheel.next_tick() == tick  # the rest is due now

    def test_a_coarse_bucket_is_spread_before_its_first_timer_is_due(self, wheel: Wheel) -> None:
        (timeout,) = fill(wheel, [24.0])  # the first tick of its far bucket
        tick = wheel.next_tick()
        assert tick is not None
        assert tick <= 24 - WHEEL
        expire(wheel, wheel.time_of(tick))
        assert not wheel.far.buckets
        assert wheel.next_tick() == 25
        assert expire(wheel, 25.0) == [timeout]


class TestDeadlinesOutOfRange:
    @pytest.mark.parametrize("deadline", [math.inf, 1e300, 2.0**63, 2.0**62])
    def test_a_huge_deadline_is_merely_very_far(self, wheel: Wheel, deadline: float) -> None:
        (timeout,) = fill(wheel, [deadline])
        assert expire(wheel, 1e15) == []
        assert not timeout.expired
        check(wheel)

    def test_nan_is_refused_and_nothing_stays(self, wheel: Wheel) -> None:
        with pytest.raises(BadDelay) as caught:
            fill(wheel, [math.nan])
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, DelayqError)
        assert wheel.pending == 0


class TestClear:
    def test_it_cancels_everything_and_returns_it_in_order(self, wheel: Wheel) -> None:
        timeouts = fill(wheel, [900, 3, 40, 3])
        first, second, third, fourth = timeouts
        assert wheel.clear() == [second, fourth, third, first]
        assert all(timeout.cancelled for timeout in timeouts)
        assert wheel.pending == 0
        check(wheel)
        assert wheel.clear() == []


class TestConstruction:
    @pytest.mark.parametrize("tick", [0, -1, -0.001, math.nan, math.inf, -math.inf, 1e-12])
    def test_a_tick_must_have_a_length(self, tick: float) -> None:
        with pytest.raises(ValueError, match="tick_duration"):
            Wheel(tick, 512)

    @pytest.mark.parametrize("ticks", [0, -1, 2**30 + 1, 10**100, 1.5, 512.0, "512", None])
    def test_ticks_per_wheel_must_be_a_sensible_whole_number(self, ticks: int) -> None:
        with pytest.raises(ValueError, match="ticks_per_wheel"):
            Wheel(0.001, ticks)

    def test_a_wheel_must_not_take_centuries(self) -> None:
        with pytest.raises(ValueError, match="292 years"):
            Wheel(1e8, 512)

    @pytest.mark.parametrize(
        ("asked", "given"), [(1, 1), (2, 2), (3, 4), (5, 8), (511, 512), (512, 512), (513, 1024)]
    )
    def test_ticks_per_wheel_is_rounded_up_to_a_power_of_two(self, asked: int, given: int) -> None:
        assert Wheel(1.0, asked).near_end == 2 * given

    def test_the_largest_wheel_takes_no_room(self) -> None:
        wheel = Wheel(0.001, 2**30)
        (timeout,) = fill(wheel, [1e5])
        assert expire(wheel, 1e5 + 0.002) == [timeout]
