"""Drives a wheel from an event loop: waits until it has work, and calls what has expired."""
# ruff: noqa: SLF001 - a driver accesses its timeouts' internals: calls would halve the speed.

from __future__ import annotations

import contextvars
import logging
import math
import time
from typing import TYPE_CHECKING

from delayq._timer.wakeup import Cancellable, LoopWakeup, TimerLoop, Wakeup, WakeupKind, new_wakeup
from delayq._timer.wheel import Wheel, spent

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_log = logging.getLogger("delayq.timer")

_NEVER = 2**70  # No wake-up is armed: every tick is earlier.
_BUSY = -1  # Awake, or about to be: no tick is earlier, so the alarm is not armed.


class WheelDriver:
    """Waits for the next tick at which a wheel has work, and calls the timeouts that have expired.

    Attributes:
        armed: The tick at which the loop will call. No bucket is due before it.
        lag: How much later than requested it has called, added up over all calls, seconds.
    """

    def __init__(self, wheel: Wheel, clock: Callable[[], float], loop: TimerLoop | None) -> None:
        self.loop: TimerLoop | asyncio.AbstractEventLoop | None = loop
        self.armed: int = _NEVER
        self.wakeups: int = 0
        self.lag: float = 0.0
        self._wheel = wheel
        self._clock = clock
        # One for all callbacks, and not that of the code that happened to arm the alarm.
        self._context = contextvars.copy_context()
        self._alarm: Wakeup | None = None
        self._due = math.inf  # The time at which the armed tick begins.
        self._next_slice: Cancellable | None = None

    @property
    def alarm_kind(self) -> WakeupKind | None:
        """The alarm that wakes the loop; None before the first one is armed."""
        return None if self._alarm is None else self._alarm.kind

    @property
    def is_armed(self) -> bool:
        """Whether the loop will call again."""
        return self.armed != _NEVER

    def arm(self, tick: int) -> None:
        """Have the loop call when a tick begins, and not at the moment armed before."""
        if self._alarm is None:
            assert self.loop is not None
            # A timerfd supports only the monotonic clock.
            exact = self._clock is time.monotonic
            self._alarm = (
                new_wakeup(self.loop, self._context, self)
                if exact
                else LoopWakeup(self.loop, self._context)
            )
        self.armed = tick
        self._due = self._wheel.time_of(tick)
        self._alarm.set(self._due, self._wake)

    def close(self) -> None:
        """Let the loop call no more. Safe to repeat."""
        if self._alarm is not None:
            self._alarm.close()
        if self._next_slice is not None:
            self._next_slice.cancel()
        self.armed = _NEVER

    def _wake(self) -> None:
        self.armed = _BUSY
        self.wakeups += 1
        # The loop may have woken us early: uvloop rounds its own timers to the nearest millisecond.
        now = self._clock()
        if now > self._due:
            self.lag += now - self._due
        self._due = math.inf
        try:
            for timeout in self._wheel.expire(now):
                callback = timeout._callback
                timeout._callback = spent
                try:
                    callback(timeout)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException:  # noqa: BLE001 - like asyncio: CancelledError and the like concern one callback only
                    _log.exception("callback %r of %r raised", callback, timeout)
        finally:
            self._arm_next(now)

    def _arm_next(self, now: float) -> None:
        tick = self._wheel.next_tick()
        if tick is None:
            self.armed = _NEVER
        elif tick <= self._wheel.tick_of(now):
            # The budget is used up. Let other callbacks run.
            assert self.loop is not None
            self._next_slice = self.loop.call_soon(self._wake, context=self._context)
        else:
            self.arm(tick)
