"""HashedWheelTimer, the wheel in an event loop. Time is manual except in the last test."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayq._timer.timer import HashedWheelTimer
from delayq.errors import BadDelay, TimerFull, TimerStopped
from delayq.testing import ManualClock, ManualLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._timer.wheel import Timeout

TICK = 0.001
ROUNDING = 1e-9


class Bench:
    """A timer in frozen time, with a record of the timeouts that fired, and when."""

    def __init__(self, tick: float | timedelta = TICK, limit: int = 0) -> None:
        self.loop = ManualLoop(ManualClock(1000.0))
        self.timer = HashedWheelTimer(
            tick, max_pending_timeouts=limit, clock=self.loop.time, loop=self.loop
        )
        self.advance = self.loop.advance
        self.fired: list[Timeout] = []
        self.at: list[float] = []

    def record(self, timeout: Timeout) -> None:
        self.fired.append(timeout)
        self.at.append(self.loop.time())

    def add(
        self, delay: float | timedelta, callback: Callable[[Timeout], object] | None = None
    ) -> Timeout:
        return self.timer.new_timeout(callback or self.record, delay)

    @property
    def pending(self) -> int:
        return self.timer.pending_timeouts


@pytest.fixture
def bench() -> Bench:
    return Bench()


def nothing(_timeout: Timeout) -> None:
    pass


class TestFiring:
    def test_a_timer_fires_once_not_before_its_time(self) -> None:
        minute = timedelta(minutes=1)
        for delay in (0.0004, 0.001, 0.0105, 0.5, 5.12, minute, 263.0, 3600, 86400 * 30.0):
            bench = Bench()
            timeout = bench.add(delay)
            seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
            assert timeout.deadline == 1000 + seconds
            bench.advance(seconds)
            assert bench.fired == [], delay
            bench.advance(TICK + ROUNDING)
            assert timeout.deadline < bench.at[0] <= timeout.deadline + TICK + ROUNDING
            bench.advance(10_000)
            assert bench.fired == [timeout], delay

    def test_no_delay_means_the_next_tick_and_never_at_once(self, bench: Bench) -> None:
        delays: list[Any] = [0, -1, -1e300, -math.inf, timedelta(0), timedelta(-1), -(10**400)]
        for delay in delays:
            bench.add(delay)
        bench.loop.run_ready()
        assert bench.fired == []
        bench.advance(TICK)
        assert len(bench.fired) == len(delays)

    def test_a_huge_delay_neither_overflows_nor_fires(self, bench: Bench) -> None:
        delays: list[Any] = [math.inf, 1e300, 10**400, timedelta.max]
        timeouts = [bench.add(delay) for delay in delays]
        bench.advance(1e9)
        assert bench.fired == []
        assert all(timeout.cancel() for timeout in timeouts)

    def test_a_timeout_with_a_bad_duration_is_refused_and_not_counted(self, bench: Bench) -> None:
        with pytest.raises(BadDelay) as caught:
            bench.add(math.nan)
        assert isinstance(caught.value, ValueError)
        wrong: list[Any] = ["1", None, b"", [1]]
        for delay in wrong:
            with pytest.raises(TypeError):
                bench.add(delay)
        with pytest.raises(TypeError):
            bench.timer.new_timeout(None, 1)  # type: ignore[arg-type]
        assert bench.pending == 0

    def test_the_clock_is_read_again_when_the_loop_wakes_early(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call_at: Any = bench.loop.call_at
        early: Any = lambda when, *rest, **more: call_at(when - 0.0014, *rest, **more)
        monkeypatch.setattr(bench.loop, "call_at", early)
        bench.add(0.01)
        for _ in range(200):
            bench.loop.clock.advance(0.0001)
            bench.loop.turn()
        assert len(bench.at) == 1
        assert bench.at[0] > 1000.01


class TestWakingUp:
    """An idle timer does not tick, however short its ticks are."""

    def test_a_timer_an_hour_away_wakes_the_loop_three_times_at_most(self) -> None:
        for tick in (0.001, timedelta(microseconds=250)):
            bench = Bench(tick)
            bench.advance(86400)
            assert bench.loop.calls_made == 0
            bench.add(3600)
            bench.advance(7200)
            assert len(bench.fired) == 1
            assert bench.loop.calls_made <= 3

    def test_after_cancelling_everything_there_is_one_wake_up_at_most(self, bench: Bench) -> None:
        for timeout in [bench.add(number / 10) for number in range(1000)]:
            timeout.cancel()
        bench.advance(1000)
        assert bench.loop.calls_made <= 1
        assert bench.loop.scheduled == []
        for _ in range(100):
            bench.add(0.5).cancel()
        timeout = bench.add(0.5)
        bench.advance(0.501)
        assert bench.fired == [timeout], "the bucket was emptied and filled again"

    def test_at_most_one_call_is_armed(self, bench: Bench) -> None:
        for number in range(1000, 0, -1):
            bench.add(number / 7)
            assert len(bench.loop.scheduled) == 1

    def test_after_a_stall_of_hours_all_fire_in_order(self, bench: Bench) -> None:
        delays = [number * 1.7 for number in range(3000)]
        random.Random(4).shuffle(delays)
        for delay in delays:
            bench.add(delay)
        bench.loop.stall(10 * 3600)
        deadlines = [timeout.deadline for timeout in bench.fired]
        assert deadlines == sorted(deadlines)
        assert len(deadlines) == 3000
        # It works in slices, not tick by tick: 36 million ticks went by.
        assert bench.loop.calls_made < 50

    def test_statistics_count_and_lag_adds_up_the_lateness_of_the_loop(self, bench: Bench) -> None:
        bench.add(0.1)
        bench.add(0.2)
        bench.advance(0.15)
        assert bench.timer.statistics() == (1, 1, True, "loop", 0.0)
        bench.advance(1)
        assert bench.timer.statistics()[:3] == (0, 2, False)
        for _ in range(2):
            bench.add(0.25)
            bench.loop.stall(5)
        assert bench.timer.statistics().lag == pytest.approx(2 * (5 - 0.25), abs=5 * TICK)


class TestHoldingTheLoop:
    def test_many_due_at_once_are_fired_in_slices_with_others_between(self, bench: Bench) -> None:
        added = [bench.add(0.5) for _ in range(5_000)]
        bench.loop.clock.advance(1)
        slices: list[int] = []
        while bench.pending:
            bench.loop.call_soon(lambda: slices.append(len(bench.fired)))
            bench.loop.turn()
        assert max(after - before for before, after in itertools.pairwise(slices)) <= 2000
        assert bench.fired == added

    def test_a_timer_that_is_stopped_between_slices_calls_nothing_more(self, bench: Bench) -> None:
        for _ in range(3_000):
            bench.add(0.5)
        bench.loop.clock.advance(1)
        bench.loop.turn()
        called = len(bench.fired)
        assert 0 < called < 3_000
        assert len(bench.timer.stop()) == 3_000 - called
        bench.advance(60)
        assert len(bench.fired) == called

    def test_a_callback_that_re_adds_at_once_does_not_hold_the_loop(self, bench: Bench) -> None:
        runs: list[float] = []

        def again(_timeout: Timeout) -> None:
            runs.append(bench.loop.time())
            bench.add(0, again)

        bench.add(0, again)
        bench.advance(0.1)
        assert 90 <= len(runs) <= 100
        assert len(set(runs)) == len(runs)


class TestCallbacks:
    def test_a_callback_that_raises_stops_no_other_and_is_logged_unless_it_exits(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(kind: type[BaseException]) -> None:
            raise kind

        kinds = (LookupError, asyncio.CancelledError, KeyboardInterrupt)
        for kind in kinds:
            bench.add(0.1, lambda _, kind=kind: fail(kind))  # type: ignore[misc]
        others = [bench.add(0.1), bench.add(0.2)]
        with pytest.raises(KeyboardInterrupt):
            bench.advance(1)
        bench.advance(1)
        assert bench.fired == others
        raised = [entry.exc_info[0] for entry in caplog.records if entry.exc_info]
        assert raised == [*kinds[:2]]

    def test_a_timeout_that_is_over_lets_go_of_its_callback(self, bench: Bench) -> None:
        seen: list[tuple[bool, bool, bool]] = []

        class Callback:
            def __call__(self, timeout: Timeout) -> None:
                # It fires now: it is too late to cancel it.
                seen.append((timeout.expired, timeout.cancelled, timeout.cancel()))

        callbacks = [Callback(), Callback()]
        kept = [bench.add(0.1, callback) for callback in callbacks]
        alive = [weakref.ref(callback) for callback in callbacks]
        callbacks.clear()
        kept[0].cancel()
        assert alive[0]() is None
        bench.advance(1)
        assert [callback() for callback in alive] == [None, None]
        assert seen == [(True, False, False)]
        assert kept[1].expired


class TestLimit:
    def test_beyond_the_limit_a_timeout_is_refused_and_not_counted(self) -> None:
        bench = Bench(limit=1)
        first = bench.add(0.1)
        for _ in range(3):
            with pytest.raises(TimerFull):
                bench.add(1)
        assert bench.pending == 1
        bench.advance(1)
        second = bench.add(1)
        # Cancelling makes room once, and neither twice nor too late.
        for timeout in (first, second, second, second):
            timeout.cancel()
        bench.add(0.1, lambda _: bench.add(1, nothing))
        with pytest.raises(TimerFull):
            bench.add(1)
        bench.advance(0.5)
        assert bench.pending == 1, "a callback may add one at the limit"
        unlimited = Bench(limit=-1)
        unlimited.add(1)
        unlimited.add(1)


class TestStop:
    def test_stop_returns_pending_timeouts_and_cancels_each_once(self, bench: Bench) -> None:
        assert HashedWheelTimer().stop() == [], "it was never used"
        fired = bench.add(0.1)
        bench.add(5).cancel()
        left = [bench.add(delay) for delay in (3600, 5, 0.7)]
        bench.advance(0.2)
        assert bench.timer.stop() == left[::-1]
        assert all(timeout.cancelled and not timeout.expired for timeout in left)
        assert bench.timer.stop() == []
        with pytest.raises(TimerStopped) as caught:
            bench.add(1)
        assert isinstance(caught.value, RuntimeError)
        assert bench.pending == 0
        bench.advance(7200)
        assert bench.fired == [fired]
        assert bench.loop.scheduled == []


class TestConstruction:
    def test_no_running_loop_is_needed_before_the_first_timeout(self) -> None:
        timer = HashedWheelTimer()
        with pytest.raises(RuntimeError, match="running event loop"):
            timer.new_timeout(nothing, 1)
        assert timer.pending_timeouts == 0

    def test_a_second_event_loop_is_told_so(self) -> None:
        timer = HashedWheelTimer()

        async def use() -> None:
            timer.new_timeout(nothing, 3600)

        asyncio.run(use())
        with pytest.raises(RuntimeError, match="one timer per loop"):
            asyncio.run(use())
        assert len(timer.stop()) == 1


def test_a_manual_loop_calls_each_at_its_moment_and_its_clock_does_not_go_back() -> None:
    loop = ManualLoop()
    calls: list[tuple[str, float]] = []
    for name, delay in (("b", 2), ("a", 1), ("late", 9)):
        loop.call_at(delay, lambda name=name: calls.append((name, loop.time())))
    loop.call_soon(calls.append, ("soon", 0.0))
    loop.call_at(1.5, calls.append, ("cancelled", 1.5)).cancel()
    loop.advance(3)
    assert calls == [("soon", 0), ("a", 1), ("b", 2)]
    assert (loop.clock(), loop.scheduled, loop.calls_made) == (3, [9], 3)
    with pytest.raises(ValueError, match="cannot advance"):
        loop.clock.advance(-1)
