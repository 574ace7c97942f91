"""A timerfd, or the loop's own timer, wakes the loop. In real time: only bounds are asserted."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayq import HashedWheelTimer
from delayq._timer import wakeup as alarm
from delayq._timer.wakeup import LoopWakeup, TimerfdWakeup, new_wakeup
from delayq.testing import ManualLoop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

needs_timerfd = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")


class Owner:
    """An object that owns an alarm."""


OWNER = Owner()


@pytest.fixture(params=["loop", pytest.param("timerfd", marks=needs_timerfd)])
async def wakeup(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    now = asyncio.get_running_loop(), contextvars.copy_context()
    made: Any = TimerfdWakeup(*now, OWNER) if request.param == "timerfd" else LoopWakeup(*now)
    yield made
    made.close()


def descriptors() -> int:
    # Earlier tests may have left some in garbage.
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_it_calls_once_and_not_before_the_moment(wakeup: Any) -> None:
    rings, rang = list[float](), asyncio.Event()

    def ring() -> None:
        rings.append(time.monotonic())
        rang.set()

    when = time.monotonic() + 0.02
    wakeup.set(when, ring)
    await asyncio.wait_for(rang.wait(), 10)
    await asyncio.sleep(0.02)
    assert len(rings) == 1
    assert rings[0] >= when


async def test_a_moment_that_has_passed_is_now(wakeup: Any) -> None:
    for when in (time.monotonic() - 5, 0.0, -1.0):
        rang = asyncio.Event()
        wakeup.set(when, rang.set)
        await asyncio.wait_for(rang.wait(), 10)


async def test_a_moment_may_be_centuries_away(wakeup: Any) -> None:
    rings, rang = list[str](), asyncio.Event()
    wakeup.set(2.0**53, lambda: rings.append("far"))
    wakeup.set(time.monotonic() + 0.01, rang.set)
    await asyncio.wait_for(rang.wait(), 10)
    assert rings == []


@pytest.mark.parametrize("how", ["set", "close"])
async def test_what_was_set_before_does_not_ring(wakeup: Any, how: str) -> None:
    rings, rang = list[str](), asyncio.Event()
    wakeup.set(time.monotonic() + 0.01, lambda: rings.append("first"))
    if how == "set":
        wakeup.set(time.monotonic() + 0.02, rang.set)
    else:
        wakeup.close()
        asyncio.get_running_loop().call_later(0.03, rang.set)
    await asyncio.wait_for(rang.wait(), 10)
    assert rings == []


async def test_a_ring_that_is_on_its_way_is_taken_back(wakeup: Any) -> None:
    rings = list[str]()
    wakeup.set(time.monotonic(), lambda: rings.append("first"))
    time.sleep(0.005)  # it has gone off, but the loop does not know yet
    wakeup.set(time.monotonic() + 3600, lambda: rings.append("second"))
    await asyncio.sleep(0.02)
    assert rings == []


async def test_it_can_be_set_anew_while_it_rings(wakeup: Any) -> None:
    rings, done = list[float](), asyncio.Event()

    def ring() -> None:
        rings.append(time.monotonic())
        if len(rings) == 5:
            done.set()
        else:
            wakeup.set(time.monotonic() + 0.001, ring)

    wakeup.set(time.monotonic(), ring)
    await asyncio.wait_for(done.wait(), 10)
    wakeup.close()


@needs_timerfd
class TestTimerfd:
    async def test_its_callbacks_run_in_the_context_that_was_given(self) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="plain")
        context = contextvars.copy_context()
        context.run(variable.set, "given")
        seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        made = TimerfdWakeup(asyncio.get_running_loop(), context, OWNER)
        variable.set("of whoever sets it")
        made.set(0, lambda: seen.set_result(variable.get()))
        assert await asyncio.wait_for(seen, 10) == "given"
        made.close()

    async def test_closing_gives_its_descriptor_back(self) -> None:
        before = descriptors()
        made = TimerfdWakeup(asyncio.get_running_loop(), contextvars.copy_context(), OWNER)
        assert descriptors() == before + 1
        made.close()
        assert descriptors() == before

    async def test_a_timer_that_nobody_keeps_gives_its_descriptor_back(self) -> None:
        before = descriptors()
        timer = HashedWheelTimer()
        timer.new_timeout(lambda _: None, 0.001)
        await asyncio.sleep(0.02)
        assert timer.statistics()[:4] == (0, 1, False, "timerfd")
        del timer
        gc.collect()
        await asyncio.sleep(0)
        assert descriptors() == before

    async def test_a_timer_that_nobody_keeps_fires_first(self) -> None:
        fired = asyncio.Event()
        HashedWheelTimer().new_timeout(lambda _: fired.set(), 0.02)
        gc.collect()
        await asyncio.wait_for(fired.wait(), 10)

    @pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "left"])
    def test_a_loop_that_was_closed_first_leaves_nothing(self, *, stopped: bool) -> None:
        before = descriptors()

        async def use() -> HashedWheelTimer:
            timer = HashedWheelTimer()
            timer.new_timeout(lambda _: None, 3600)
            return timer

        timer = asyncio.run(use())
        if stopped:
            assert len(timer.stop()) == 1
        weak = weakref.ref(timer)
        del timer
        gc.collect()
        assert weak() is None
        assert descriptors() == before

    async def test_one_timer_needs_one_descriptor(self) -> None:
        before = descriptors()
        timer = HashedWheelTimer()
        for n in range(1000):
            timer.new_timeout(lambda _: None, 3600 - n)
        assert descriptors() == before + 1
        timer.stop()
        assert descriptors() == before


class TestFallingBack:
    async def test_to_the_loops_own_timer_where_the_system_gives_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none() -> Any:
            raise OSError("no more descriptors")

        monkeypatch.setattr(alarm, "_system_calls", none)
        timer, fired = HashedWheelTimer(), asyncio.Event()
        timer.new_timeout(lambda _: fired.set(), 0.01)
        assert timer.statistics().alarm == "loop"
        await asyncio.wait_for(fired.wait(), 10)

    @needs_timerfd
    async def test_if_the_loop_watches_no_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before, loop = descriptors(), asyncio.get_running_loop()

        def none(*_: Any) -> None:
            raise NotImplementedError

        monkeypatch.setattr(loop, "add_reader", none)
        assert new_wakeup(loop, contextvars.copy_context(), OWNER).kind == "loop"
        assert descriptors() == before

    def test_with_a_loop_or_a_clock_of_a_test(self) -> None:
        assert new_wakeup(ManualLoop(), contextvars.copy_context(), OWNER).kind == "loop"

        async def use() -> None:
            timer = HashedWheelTimer(clock=lambda: time.monotonic() + 1000)
            timer.new_timeout(lambda _: None, 1)
            assert timer.statistics().alarm == "loop"
            timer.stop()

        asyncio.run(use())

    def test_before_the_first_timeout_there_is_none(self) -> None:
        assert HashedWheelTimer().statistics().alarm is None
