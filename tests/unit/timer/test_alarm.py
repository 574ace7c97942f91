"""A timerfd, or the loop's own timer, wakes the loop. In real time: only bounds are asserted."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayq import HashedWheelTimer
from delayq._timer import alarm as alarms
from delayq._timer.alarm import LoopAlarm, TimerfdAlarm, new_alarm
from delayq.testing import ManualLoop
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

needs_timerfd = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")


class Owner:
    """An object that owns an alarm."""


OWNER = Owner()


@pytest.fixture(params=["loop", pytest.param("timerfd", marks=needs_timerfd)])
async def alarm(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    now = asyncio.get_running_loop(), contextvars.copy_context()
    new: Any = TimerfdAlarm(*now, OWNER) if request.param == "timerfd" else LoopAlarm(*now)
    yield new
    new.close()


@pytest.fixture
def frozen() -> Iterator[None]:
    """Leave what earlier tests have left in garbage out of collections, which are quick then."""
    gc.freeze()
    yield
    gc.unfreeze()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_an_alarm_calls_once_and_not_before_its_moment(alarm: Any) -> None:
    rings, moments = list[float](), [time.monotonic() + 0.02, time.monotonic() - 5, 0.0, -1.0]
    for number, moment in enumerate(moments, 1):
        alarm.set(moment, lambda: rings.append(time.monotonic()))
        await until(partial(lambda count: len(rings) == count, number))
    await asyncio.sleep(0.02)
    assert len(rings) == len(moments)
    assert rings[0] >= moments[0]


async def test_only_the_moment_set_last_calls(alarm: Any) -> None:
    rings = list[str]()
    alarm.set(2.0**53, lambda: rings.append("in centuries"))
    alarm.set(time.monotonic() + 0.01, lambda: rings.append("first"))
    alarm.set(time.monotonic() + 0.02, lambda: rings.append("second"))
    await until(lambda: rings)
    alarm.set(time.monotonic(), lambda: rings.append("third"))
    time.sleep(0.005)  # it has gone off, but the loop does not know yet
    alarm.set(time.monotonic() + 3600, lambda: rings.append("fourth"))
    await asyncio.sleep(0.02)
    alarm.set(time.monotonic() + 0.01, lambda: rings.append("fifth"))
    alarm.close()
    await asyncio.sleep(0.03)
    assert rings == ["second"]


async def test_callbacks_run_in_the_context_of_the_timers_maker() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen = list[str]()
    for maker, clock in (("a", time.monotonic), ("b", partial(time.monotonic))):
        variable.set(maker)
        timer = HashedWheelTimer(clock=clock)
        variable.set("whoever arms it")
        timer.new_timeout(lambda _: seen.append(variable.get()), 0.001)
        # A timerfd knows one clock only.
        kind = "timerfd" if maker == "a" and sys.platform == "linux" else "loop"
        assert timer.statistics().alarm == kind
        await until(partial(seen.__contains__, maker))
        timer.stop()


@needs_timerfd
@pytest.mark.usefixtures("frozen")
class TestTimerfd:
    async def test_a_timer_needs_one_descriptor_until_it_is_stopped(self) -> None:
        before = descriptors()
        timer = HashedWheelTimer()
        assert timer.statistics().alarm is None
        for n in range(1000):
            timer.new_timeout(lambda _: None, 3600 - n)
        assert descriptors() == before + 1
        timer.stop()
        assert descriptors() == before

    async def test_a_timer_that_nobody_keeps_fires_and_gives_its_descriptor_back(self) -> None:
        before, fired = descriptors(), asyncio.Event()
        HashedWheelTimer().new_timeout(lambda _: fired.set(), 0.02)
        gc.collect()
        assert descriptors() == before + 1
        await asyncio.wait_for(fired.wait(), 20)
        await asyncio.sleep(0)
        gc.collect()
        await until(lambda: descriptors() == before)

    def test_a_loop_that_was_closed_first_leaves_nothing(self) -> None:
        before = descriptors()

        async def use() -> HashedWheelTimer:
            timer = HashedWheelTimer()
            timer.new_timeout(lambda _: None, 3600)
            return timer

        for stopped in (True, False):
            timer = asyncio.run(use())
            if stopped:
                assert len(timer.stop()) == 1
            weak = weakref.ref(timer)
            del timer
            gc.collect()
            assert weak() is None
            assert descriptors() == before, stopped


async def test_the_loops_own_timer_is_used_if_it_watches_no_files_or_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: Any) -> Any:
        raise error

    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    error: Exception = NotImplementedError()
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "add_reader", none)
        assert {new_alarm(each, context, OWNER).kind for each in (ManualLoop(), loop)} == {"loop"}
    assert descriptors() == before
    error = OSError("no more descriptors")
    monkeypatch.setattr(alarms, "_system_calls", none)
    timer, fired = HashedWheelTimer(), asyncio.Event()
    timer.new_timeout(lambda _: fired.set(), 0.01)
    assert timer.statistics().alarm == "loop"
    await asyncio.wait_for(fired.wait(), 20)
