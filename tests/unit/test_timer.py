"""HashedWheelTimer, the wheel in an event loop. Time is manual except in the last class."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayq._timer.timer import HashedWheelTimer
from delayq.errors import BadDelay, TimerFull, TimerStopped
from delayq.testing import ManualClock, ManualLoop

if TYPE_CHECKING:
    from delayq._timer.wheel import Timeout

TICK = 0.001
ROUNDING = 1e-9


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def loop() -> ManualLoop:
    return ManualLoop(ManualClock(1000.0))


@pytest.fixture
def timer(loop: ManualLoop) -> HashedWheelTimer:
    return make_timer(loop)


def make_timer(loop: ManualLoop, tick: float = TICK, limit: int = 0) -> HashedWheelTimer:
    return HashedWheelTimer(tick, max_pending_timeouts=limit, clock=loop.time, loop=loop)


class Recorder:
    """A callback that records the timers that fired, and when."""

    def __init__(self, loop: ManualLoop) -> None:
        self.loop = loop
        self.fired: list[Timeout] = []
        self.at: list[float] = []

    def __call__(self, timeout: Timeout) -> None:
        self.fired.append(timeout)
        self.at.append(self.loop.time())


@pytest.fixture
def record(loop: ManualLoop) -> Recorder:
    return Recorder(loop)


def nothing(_timeout: Timeout) -> None:
    pass


class TestFiring:
    @pytest.mark.parametrize(
        "delay", [0.0004, 0.001, 0.0105, 0.5, 1, 5.12, 60, 263.0, 3600, 86400 * 30.0]
    )
    def test_a_timer_fires_at_its_time_and_not_before(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder, delay: float
    ) -> None:
        timeout = timer.new_timeout(record, delay)
        loop.advance(delay)
        assert record.fired == []
        loop.advance(TICK + ROUNDING)
        assert record.fired == [timeout]
        assert timeout.deadline < record.at[0] <= timeout.deadline + TICK + ROUNDING

    def test_the_callback_gets_the_timeout(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        timeout = timer.new_timeout(record, 1)
        loop.advance(2)
        assert record.fired == [timeout]

    def test_a_timer_fires_once(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        timer.new_timeout(record, 1)
        loop.advance(10_000)
        assert len(record.fired) == 1

    @pytest.mark.parametrize(
        "delay",
        [
            0,
            0.0,
            -1,
            -1e300,
            pytest.param(-(10**400), id="huge-int"),
            -math.inf,
            timedelta(0),
            timedelta(-1),
        ],
    )
    def test_no_delay_means_the_next_tick_and_never_at_once(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder, delay: float | timedelta
    ) -> None:
        timer.new_timeout(record, delay)
        loop.run_ready()
        assert record.fired == []
        loop.advance(TICK)
        assert len(record.fired) == 1

    def test_a_delay_may_be_a_timedelta(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        timeout = timer.new_timeout(record, timedelta(minutes=1))
        assert timeout.deadline == 1060.0
        loop.advance(60.001)
        assert record.fired == [timeout]

    @pytest.mark.parametrize(
        "delay", [math.inf, 1e300, pytest.param(10**400, id="huge-int"), timedelta.max]
    )
    def test_a_huge_delay_neither_overflows_nor_fires(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder, delay: float | timedelta
    ) -> None:
        timeout = timer.new_timeout(record, delay)
        loop.advance(1e9)
        assert record.fired == []
        assert timeout.cancel()

    def test_a_nan_delay_is_refused_and_not_counted(self, timer: HashedWheelTimer) -> None:
        with pytest.raises(BadDelay):
            timer.new_timeout(nothing, math.nan)
        assert timer.pending_timeouts == 0

    @pytest.mark.parametrize("delay", ["1", None, b"", [1]])
    def test_what_is_no_duration_is_a_type_error(
        self, timer: HashedWheelTimer, delay: float
    ) -> None:
        with pytest.raises(TypeError):
            timer.new_timeout(nothing, delay)
        assert timer.pending_timeouts == 0

    def test_no_callback_is_a_type_error(self, timer: HashedWheelTimer) -> None:
        with pytest.raises(TypeError):
            timer.new_timeout(None, 1)  # type: ignore[arg-type]
        assert timer.pending_timeouts == 0

    def test_within_a_tick_the_order_is_that_of_adding(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        added = [timer.new_timeout(record, 0.5 + fraction * TICK) for fraction in (0.9, 0.1, 0.5)]
        loop.advance(1)
        assert record.fired == added

    def test_the_clock_is_read_again_when_the_loop_wakes_early(
        self, loop: ManualLoop, record: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call_at = loop.call_at
        monkeypatch.setattr(
            loop, "call_at", lambda when, *rest, **more: call_at(when - 0.0014, *rest, **more)
        )
        timer = make_timer(loop)
        timer.new_timeout(record, 0.01)
        for _ in range(200):
            loop.clock.advance(0.0001)
            loop.turn()
        assert len(record.at) == 1
        assert record.at[0] > 1000.01

    def test_ticks_may_be_shorter_than_a_millisecond(
        self, loop: ManualLoop, record: Recorder
    ) -> None:
        make_timer(loop, tick=0.00025).new_timeout(record, 0.0101)
        loop.advance(0.0101)
        assert record.fired == []
        loop.advance(0.00025)
        assert len(record.fired) == 1

    def test_callbacks_run_in_the_context_of_the_timers_maker(self, loop: ManualLoop) -> None:
        variable = contextvars.ContextVar("variable", default="none")
        variable.set("maker")
        timer = make_timer(loop)
        variable.set("whoever arms it")
        seen: list[str] = []
        timer.new_timeout(lambda _: seen.append(variable.get()), 0.01)
        loop.advance(1)
        assert seen == ["maker"]


class TestWakingUp:
    """An idle timer does not tick, however short its ticks are."""

    @pytest.mark.parametrize("tick", [0.001, 0.00025])
    def test_an_empty_timer_never_wakes_the_loop(self, loop: ManualLoop, tick: float) -> None:
        make_timer(loop, tick)
        loop.advance(86400)
        assert loop.calls_made == 0

    @pytest.mark.parametrize("tick", [0.001, 0.00025])
    def test_a_lone_timer_an_hour_away_wakes_the_loop_three_times_at_most(
        self, loop: ManualLoop, tick: float
    ) -> None:
        make_timer(loop, tick).new_timeout(nothing, 3600)
        loop.advance(7200)
        assert loop.calls_made <= 3

    def test_once_everything_has_fired_the_loop_is_left_alone(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        timer.new_timeout(nothing, 0.5)
        loop.advance(1)
        assert loop.scheduled == []
        assert not timer.statistics().armed

    def test_after_cancelling_everything_there_is_one_wake_up_at_most(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        for timeout in [timer.new_timeout(nothing, number / 10) for number in range(1000)]:
            timeout.cancel()
        loop.advance(1000)
        assert loop.calls_made <= 1
        assert loop.scheduled == []

    def test_at_most_one_call_is_armed(self, loop: ManualLoop, timer: HashedWheelTimer) -> None:
        for number in range(1000, 0, -1):
            timer.new_timeout(nothing, number / 7)
            assert len(loop.scheduled) == 1

    def test_an_earlier_timer_re_arms_and_a_later_one_does_not(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        timer.new_timeout(nothing, 0.2)
        (before,) = loop.scheduled
        timer.new_timeout(nothing, 0.3)
        assert loop.scheduled == [before]
        timer.new_timeout(nothing, 0.1)
        assert loop.scheduled[0] < before

    def test_a_bucket_that_was_emptied_is_armed_when_it_is_filled_again(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        for _ in range(100):
            timer.new_timeout(record, 0.5).cancel()
        timeout = timer.new_timeout(record, 0.5)
        loop.advance(0.501)
        assert record.fired == [timeout]

    def test_after_a_stall_of_hours_all_fire_in_order(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        delays = [number * 1.7 for number in range(3000)]
        random.Random(4).shuffle(delays)
        for delay in delays:
            timer.new_timeout(record, delay)
        loop.stall(10 * 3600)
        deadlines = [timeout.deadline for timeout in record.fired]
        assert deadlines == sorted(deadlines)
        assert len(deadlines) == 3000
        assert loop.calls_made < 50  # works in slices, not tick by tick: 36 million ticks went by

    def test_timers_work_as_before_after_a_long_sleep(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        loop.advance(1e7)
        timer.new_timeout(record, 0.01)
        loop.advance(0.011)
        assert len(record.fired) == 1
        assert loop.calls_made == 1

    def test_statistics_count(self, loop: ManualLoop, timer: HashedWheelTimer) -> None:
        timer.new_timeout(nothing, 0.1)
        timer.new_timeout(nothing, 0.2)
        loop.advance(0.15)
        assert timer.statistics() == (1, 1, True, "loop", 0.0)


class TestHoldingTheLoop:
    def test_many_due_at_once_are_fired_in_slices(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        added = [timer.new_timeout(record, 0.5) for _ in range(10_000)]
        loop.clock.advance(1)
        largest = before = 0
        while timer.pending_timeouts:
            loop.turn()
            largest, before = max(largest, len(record.fired) - before), len(record.fired)
        assert largest <= 2000
        assert record.fired == added

    def test_others_get_their_turn_in_between(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        for _ in range(10_000):
            timer.new_timeout(record, 0.5)
        loop.clock.advance(1)
        loop.turn()
        fired: list[int] = []
        loop.call_soon(lambda: fired.append(len(record.fired)))
        loop.turn()
        assert fired[0] < 10_000

    def test_a_callback_that_re_adds_without_delay_does_not_hold_the_loop(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        runs: list[float] = []

        def again(_timeout: Timeout) -> None:
            runs.append(loop.time())
            timer.new_timeout(again, 0)

        timer.new_timeout(again, 0)
        loop.advance(0.1)
        assert 90 <= len(runs) <= 100
        assert len(set(runs)) == len(runs)


class TestCallbacks:
    def test_expired_is_true_while_the_callback_runs(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        seen: list[tuple[bool, bool, bool]] = []
        timer.new_timeout(
            lambda timeout: seen.append((timeout.expired, timeout.cancelled, timeout.cancel())), 0.1
        )
        loop.advance(1)
        assert seen == [(True, False, False)]

    def test_pending_falls_before_the_callback_runs(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        seen: list[int] = []
        for _ in range(3):
            timer.new_timeout(lambda _: seen.append(timer.pending_timeouts), 0.1)
        loop.advance(1)
        assert seen == [2, 1, 0]

    def test_a_callback_may_re_add_at_the_limit(self, loop: ManualLoop) -> None:
        timer = make_timer(loop, limit=1)
        added: list[Timeout] = []
        timer.new_timeout(lambda _: added.append(timer.new_timeout(nothing, 0.1)), 0.1)
        loop.advance(1)
        assert added[0].expired

    def test_a_callback_may_cancel_its_neighbour(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        results: list[bool] = []
        timer.new_timeout(lambda _: results.append(neighbour.cancel()), 0.1)
        neighbour = timer.new_timeout(record, 0.1)
        last = timer.new_timeout(record, 0.1)
        loop.advance(1)
        assert results == [True]
        assert record.fired == [last]

    def test_a_timer_that_a_callback_adds_fires_at_its_time(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        timer.new_timeout(nothing, 50)
        timer.new_timeout(lambda _: timer.new_timeout(record, 0.02), 0.1)
        loop.advance(1)
        assert 1000.12 < record.at[0] <= 1000.12 + 2 * TICK + ROUNDING

    def test_a_callback_that_raises_stops_nobody(
        self,
        loop: ManualLoop,
        timer: HashedWheelTimer,
        record: Recorder,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fail(_timeout: Timeout) -> None:
            raise LookupError("broken")

        timer.new_timeout(fail, 0.1)
        others = [timer.new_timeout(record, 0.1), timer.new_timeout(record, 0.2)]
        with caplog.at_level(logging.ERROR, "delayq.timer"):
            loop.advance(1)
        assert record.fired == others
        (entry,) = caplog.records
        assert entry.name == "delayq.timer"
        assert entry.exc_info is not None
        assert isinstance(entry.exc_info[1], LookupError)

    def test_cancelled_error_from_a_callback_stops_nobody(
        self,
        loop: ManualLoop,
        timer: HashedWheelTimer,
        record: Recorder,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fail(_timeout: Timeout) -> None:
            raise asyncio.CancelledError

        timer.new_timeout(fail, 0.1)
        timer.new_timeout(record, 0.1)
        loop.advance(1)
        assert len(record.fired) == 1
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_an_exit_goes_through_and_the_timer_lives_on(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder, kind: type[BaseException]
    ) -> None:
        def leave(_timeout: Timeout) -> None:
            raise kind

        timer.new_timeout(leave, 0.1)
        others = [timer.new_timeout(record, 0.1), timer.new_timeout(record, 0.2)]
        with pytest.raises(kind):
            loop.advance(1)
        loop.advance(1)
        assert record.fired == others

    def test_a_fired_timeout_lets_go_of_its_callback(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        timeout = timer.new_timeout(lambda _: None, 0.1)
        before = timeout._callback
        loop.advance(1)
        assert timeout._callback is not before


class TestLimit:
    def test_beyond_the_limit_a_timeout_is_refused_and_not_counted(self, loop: ManualLoop) -> None:
        timer = make_timer(loop, limit=2)
        timer.new_timeout(nothing, 1)
        timer.new_timeout(nothing, 1)
        for _ in range(3):
            with pytest.raises(TimerFull):
                timer.new_timeout(nothing, 1)
        assert timer.pending_timeouts == 2

    def test_cancelling_makes_room_at_once(self, loop: ManualLoop) -> None:
        timer = make_timer(loop, limit=1)
        timer.new_timeout(nothing, 1).cancel()
        timer.new_timeout(nothing, 1)
        assert timer.pending_timeouts == 1

    def test_cancelling_twice_or_too_late_does_not_raise_the_limit(self, loop: ManualLoop) -> None:
        timer = make_timer(loop, limit=1)
        first = timer.new_timeout(nothing, 0.1)
        loop.advance(1)
        second = timer.new_timeout(nothing, 1)
        for timeout in (first, second, second, second):
            timeout.cancel()
        timer.new_timeout(nothing, 1)
        with pytest.raises(TimerFull):
            timer.new_timeout(nothing, 1)

    @pytest.mark.parametrize("limit", [0, -1])
    def test_zero_or_less_means_no_limit(self, loop: ManualLoop, limit: int) -> None:
        timer = make_timer(loop, limit=limit)
        for _ in range(1000):
            timer.new_timeout(nothing, 1)
        assert timer.pending_timeouts == 1000


class TestStop:
    def test_it_returns_what_was_pending_each_cancelled_now(
        self, loop: ManualLoop, timer: HashedWheelTimer
    ) -> None:
        timer.new_timeout(nothing, 0.1)
        timer.new_timeout(nothing, 5).cancel()
        left = [timer.new_timeout(nothing, delay) for delay in (3600, 5, 0.7)]
        loop.advance(0.2)
        assert timer.stop() == left[::-1]
        assert all(timeout.cancelled and not timeout.expired for timeout in left)

    def test_nothing_is_pending_afterwards(self, timer: HashedWheelTimer) -> None:
        for _ in range(5):
            timer.new_timeout(nothing, 1)
        timer.stop()
        assert timer.pending_timeouts == 0

    def test_nothing_fires_afterwards(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        timer.new_timeout(record, 0.1)
        timer.stop()
        loop.advance(10)
        assert record.fired == []
        assert loop.calls_made == 0

    def test_the_second_time_it_returns_nothing(self, timer: HashedWheelTimer) -> None:
        timer.new_timeout(nothing, 1)
        timer.stop()
        assert timer.stop() == []

    def test_a_timer_that_was_never_used_can_be_stopped(self) -> None:
        assert HashedWheelTimer().stop() == []

    def test_new_timeouts_are_refused_and_not_counted(self, timer: HashedWheelTimer) -> None:
        timer.stop()
        with pytest.raises(TimerStopped) as caught:
            timer.new_timeout(nothing, 1)
        assert isinstance(caught.value, RuntimeError)
        assert timer.pending_timeouts == 0

    def test_a_callback_may_stop_the_timer(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        stopped: list[list[Timeout]] = []
        timer.new_timeout(lambda _: stopped.append(timer.stop()), 0.1)
        left = [timer.new_timeout(record, delay) for delay in (0.1, 0.2, 3600)]
        loop.advance(7200)
        assert stopped == [left]
        assert record.fired == []
        assert loop.scheduled == []

    def test_it_can_be_stopped_between_two_slices(
        self, loop: ManualLoop, timer: HashedWheelTimer, record: Recorder
    ) -> None:
        for _ in range(5000):
            timer.new_timeout(record, 0.5)
        loop.clock.advance(1)
        loop.turn()
        fired = len(record.fired)
        assert len(timer.stop()) == 5000 - fired
        loop.run_ready()
        assert len(record.fired) == fired


class TestConstruction:
    def test_no_running_loop_is_needed_before_the_first_timeout(self) -> None:
        timer = HashedWheelTimer()
        with pytest.raises(RuntimeError, match="running event loop"):
            timer.new_timeout(nothing, 1)
        assert timer.pending_timeouts == 0

    @pytest.mark.parametrize(
        ("tick", "ticks"),
        [
            (0, 512),
            (-1, 512),
            (math.nan, 512),
            (0.001, 0),
            (0.001, -1),
            (0.001, 2**31),
            (0.001, 1.5),
        ],
    )
    def test_bad_arguments_are_value_errors(self, tick: float, ticks: int) -> None:
        with pytest.raises(ValueError):
            HashedWheelTimer(tick, ticks)

    def test_a_tick_may_be_a_timedelta(self, loop: ManualLoop, record: Recorder) -> None:
        timer = HashedWheelTimer(timedelta(milliseconds=100), clock=loop.time, loop=loop)
        timer.new_timeout(record, 0.05)
        loop.advance(0.1)
        assert len(record.fired) == 1

    def test_it_shows_what_it_is_in_a_debugger(self, timer: HashedWheelTimer) -> None:
        timeout = timer.new_timeout(nothing, 1)
        assert repr(timer) == "<HashedWheelTimer pending=1 tick_duration=0.001>"
        assert repr(timeout) == "<Timeout pending deadline=1001.000000>"
        timer.stop()
        assert repr(timer) == "<HashedWheelTimer stopped tick_duration=0.001>"
        assert repr(timeout) == "<Timeout cancelled deadline=1001.000000>"

    def test_a_second_event_loop_is_told_so(self) -> None:
        timer = HashedWheelTimer()

        async def use() -> None:
            timer.new_timeout(nothing, 3600)

        asyncio.run(use())
        with pytest.raises(RuntimeError, match="one timer per loop"):
            asyncio.run(use())
        assert len(timer.stop()) == 1


class TestManualLoop:
    def test_a_clock_does_not_go_back(self) -> None:
        with pytest.raises(ValueError, match="cannot advance"):
            ManualClock().advance(-1)

    def test_the_clock_can_be_called_for_the_time(self) -> None:
        clock = ManualClock(5)
        assert clock.advance(1.5) == clock() == clock.now == 6.5

    def test_advancing_calls_each_at_its_moment(self) -> None:
        loop = ManualLoop()
        seen: list[tuple[str, float]] = []
        for name, delay in (("b", 2), ("a", 1), ("late", 9)):
            loop.call_later(delay, lambda name=name: seen.append((name, loop.time())))
        loop.call_soon(seen.append, ("soon", 0.0))
        loop.call_at(1.5, seen.append, ("cancelled", 1.5)).cancel()
        loop.advance(3)
        assert seen == [("soon", 0), ("a", 1), ("b", 2)]
        assert (loop.time(), loop.scheduled, loop.calls_made) == (3, [9], 3)

    def test_stalling_calls_all_late(self) -> None:
        loop = ManualLoop()
        seen: list[float] = []
        loop.call_at(1, lambda: seen.append(loop.time()))
        loop.stall(3)
        assert seen == [3]


class TestInRealTime:
    async def test_a_timer_fires(self) -> None:
        timer = HashedWheelTimer()
        fired: asyncio.Future[Timeout] = asyncio.get_running_loop().create_future()
        timeout = timer.new_timeout(fired.set_result, 0.01)
        assert await asyncio.wait_for(fired, 30) is timeout
        assert time.monotonic() > timeout.deadline

    @pytest.mark.parametrize("tick", [0.001, 0.00025])
    async def test_two_thousand_timers_fire_in_order_and_never_early(self, tick: float) -> None:
        timer = HashedWheelTimer(tick)
        chance = random.Random(5)
        done = asyncio.Event()
        early: list[Timeout] = []
        deadlines: list[float] = []

        def fired(timeout: Timeout) -> None:
            if time.monotonic() < timeout.deadline:
                early.append(timeout)
            deadlines.append(timeout.deadline)
            if len(deadlines) == 2000:
                done.set()

        for _ in range(2000):
            timer.new_timeout(fired, chance.uniform(0, 0.3))
        await asyncio.wait_for(done.wait(), 30)
        assert early == []
        assert all(later > earlier - tick for earlier, later in itertools.pairwise(deadlines))
        assert timer.pending_timeouts == 0
        assert not timer.statistics().armed

    async def test_an_idle_timer_leaves_the_loop_alone(self) -> None:
        timer = HashedWheelTimer(0.00025)
        timer.new_timeout(nothing, 3600)
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, done.set)
        await done.wait()
        assert timer.statistics().wakeups == 0
        timer.stop()
