"""When a wheel is looked at: :class:`~delayq._timer.driver.WheelDriver`, in frozen time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayq._timer.driver import WheelDriver
from delayq._timer.wheel import Wheel
from delayq.testing import ManualLoop

if TYPE_CHECKING:
    from delayq._timer.wheel import Timeout

TICK = 0.25


class Desk:
    """A driver with its wheel, and the moments at which timeouts were called."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.wheel = Wheel(TICK, 512, self.loop.time())
        self.driver = WheelDriver(self.wheel, self.loop.time, self.loop)
        self.called_at: list[float] = []

    def add(self, delay: float) -> Timeout:
        now = self.loop.time()
        timeout = self.wheel.add(
            lambda _: self.called_at.append(self.loop.time() - now), now + delay, now
        )
        tick = self.wheel.next_tick()
        assert tick is not None
        if tick < self.driver.armed:
            self.driver.arm(tick)
        return timeout


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_it_waits_only_while_the_wheel_has_work(desk: Desk) -> None:
    armed = [desk.driver.is_armed]
    desk.add(1)
    armed.append(desk.driver.is_armed)
    desk.loop.advance(2)
    armed.append(desk.driver.is_armed)
    assert armed == [False, True, False]
    assert len(desk.called_at) == 1


def test_it_wakes_up_once_for_each_moment_at_which_there_is_work(desk: Desk) -> None:
    for delay in (1, 1, 30, 2):
        desk.add(delay)
    desk.loop.advance(60)
    assert desk.called_at == [pytest.approx(delay, abs=TICK) for delay in (1, 1, 2, 30)]
    assert desk.driver.wakeups == 3


def test_an_earlier_moment_replaces_a_later_one(desk: Desk) -> None:
    desk.add(30)
    later = desk.driver.armed
    desk.add(1)
    assert desk.driver.armed < later
    desk.loop.advance(2)
    assert desk.driver.armed == later


def test_lag_adds_up_the_lateness_of_the_loop_and_nothing_else(desk: Desk) -> None:
    desk.add(1)
    desk.loop.advance(10)
    assert desk.driver.lag == pytest.approx(0)
    for _ in range(2):
        desk.add(1)
        desk.loop.stall(5)
        desk.loop.advance(1)
    assert desk.driver.lag == pytest.approx(2 * (5 - 1), abs=2 * TICK)


def test_a_driver_that_is_closed_calls_nothing_more(desk: Desk) -> None:
    for _ in range(3000):
        desk.add(1)
    # Too many for one call: the loop is asked to call again at once.
    desk.loop.clock.advance(2)
    desk.loop.turn()
    desk.driver.close()
    called = len(desk.called_at)
    assert 0 < called < 3000
    desk.loop.advance(60)
    assert len(desk.called_at) == called
    assert not desk.driver.is_armed
    desk.driver.close()
