"""The timer wheel in an event loop, with one alarm for all of its timeouts."""
# ruff: noqa: SLF001 - the timer accesses its timeouts' internals: calls would halve the speed.

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from datetime import timedelta
from math import floor  # Four times as fast as int().
from typing import TYPE_CHECKING, NamedTuple

from delayq._checks import describe_value
from delayq._timer.alarm import Alarm, AlarmKind, Cancellable, LoopAlarm, TimerLoop, new_alarm
from delayq._timer.wheel import Timeout, Wheel, spent
from delayq.errors import TimerFull, TimerStopped

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HashedWheelTimer", "TimerLoop", "TimerStatistics"]

_log = logging.getLogger("delayq.timer")

_NEVER = 2**70  # No alarm is set: every tick is earlier.
_BUSY = -1  # Awake, or about to be: no tick is earlier, so the alarm is not set.


class TimerStatistics(NamedTuple):
    """The figures that :meth:`HashedWheelTimer.statistics` returns."""

    pending: int
    """The number of pending timeouts."""
    wakeups: int
    """The number of times the loop has called the timer."""
    armed: bool
    """Whether the loop will call it again."""
    alarm: AlarmKind | None
    """The alarm that wakes the loop: a Linux timerfd, or the loop's own timer.

    None before the first timeout.
    """
    lag: float
    """How much later than requested the loop has called the timer, added up over all calls,
    seconds.
    """


class HashedWheelTimer:
    """Run callbacks later, in the running event loop. Never early, and at most about one tick late.

    It is made for very many timeouts: adding and cancelling take constant time, and a cancelled
    timeout is removed at once. The loop is woken only if there is work. A timer that is empty, or
    has only distant timeouts, does not tick, so short ticks cost nothing (cancelling does not
    disarm the alarm: one wake-up may find nothing to do).

    A timer belongs to the event loop that is running at the first :meth:`new_timeout`, and is not
    thread-safe: from another thread, use ``loop.call_soon_threadsafe(timer.new_timeout, callback,
    delay)``.

    Args:
        tick_duration: Length of a tick, in seconds or as a timedelta.
        ticks_per_wheel: Size of the finest level, rounded up to a power of two. The default suits
            nearly every use.
        max_pending_timeouts: The largest number of pending timeouts; more are refused. 0 or less
            for no limit.
        clock: Monotonic seconds, on the scale of ``loop.time()``. For tests.
        loop: The loop to use, running or not. For tests.

    Raises:
        ValueError: An argument is invalid.
    """

    def __init__(
        self,
        tick_duration: float | timedelta = 0.001,
        ticks_per_wheel: int = 512,
        max_pending_timeouts: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        loop: TimerLoop | None = None,
    ) -> None:
        if isinstance(tick_duration, timedelta):
            tick_duration = tick_duration.total_seconds()
        self._clock = clock
        self._wheel = Wheel(tick_duration, ticks_per_wheel, clock())
        self._max_pending = max_pending_timeouts
        self._is_stopped = False
        self._loop: TimerLoop | asyncio.AbstractEventLoop | None = loop
        # One for all callbacks, and not that of the code that happened to set the alarm.
        self._context = contextvars.copy_context()
        self._alarm: Alarm | None = None
        # The tick at which the loop will call. No bucket is due before it.
        self._armed = _NEVER
        self._next_slice: Cancellable | None = None
        self._wakeups = 0
        self._lag = 0.0
        # Tells whether another timeout is accepted: one function, because every new_timeout() calls
        # it.
        self._accepts: Callable[[], bool] = _never
        if loop is not None:
            self._accept_while(_always)

    def new_timeout(
        self, callback: Callable[[Timeout], object], delay: float | timedelta
    ) -> Timeout:
        """Call ``callback(timeout)`` once the delay is over, unless the returned timeout is
        cancelled before.

        The callback must not block. If it raises, the error is logged and affects no other
        callback.

        Args:
            callback: Receives the timeout. It may do anything: add, cancel, stop the timer.
            delay: Seconds or a timedelta. Zero or less: with the next tick, not before this method
                returns. Timeouts with infinite or huge delays never expire.

        Raises:
            BadDelay: The delay is NaN.
            TimerFull: ``max_pending_timeouts`` timeouts are pending.
            TimerStopped: The timer was stopped.
            RuntimeError: No event loop is running, or the loop of the first call no longer is.
        """
        # Called as locals, because Python looks up methods of a class first.
        wheel, accepts, clock = self._wheel, self._accepts, self._clock
        if callback is None or not accepts():
            self._admit(callback)
        now = clock()
        # The same as Wheel.add(), without its calls if a bucket exists.
        try:
            deadline: float = now + delay  # type: ignore[operator]
            if deadline >= wheel.far_until:
                level = wheel.very_far
            elif deadline >= wheel.near_until:
                level = wheel.far
            elif deadline < now:
                deadline, level = now, wheel.near
            else:
                level = wheel.near
            bucket = level.buckets.get(floor(deadline * level.scale))
        except (TypeError, ValueError, OverflowError):
            # It is a timedelta, or infinite, or no delay at all.
            deadline, bucket = now + _seconds(delay), None
        if bucket is None:
            deadline, bucket = self._open_bucket(deadline, now)
        node = Timeout()
        node._callback = callback
        node._deadline = deadline
        node._wheel = wheel
        node._next = bucket
        node._prev = last = bucket._prev
        last._next = bucket._prev = node
        wheel.pending += 1
        return node

    @property
    def pending_timeouts(self) -> int:
        """The number of pending timeouts.

        It falls when one is cancelled, and before a callback is called.
        """
        return self._wheel.pending

    def stop(self) -> list[Timeout]:
        """Stop for good. Safe to call in a callback, without a running loop, and repeatedly.

        Returns:
            The timeouts that were pending, in the order in which they would have expired; each is
            now cancelled. Empty the second time.
        """
        self._is_stopped, self._accepts = True, _never
        if self._alarm is not None:
            self._alarm.close()
        if self._next_slice is not None:
            self._next_slice.cancel()
        self._armed = _NEVER
        return self._wheel.clear()

    def statistics(self) -> TimerStatistics:
        """Return a few counts."""
        return TimerStatistics(
            self._wheel.pending,
            self._wakeups,
            self._armed != _NEVER,
            None if self._alarm is None else self._alarm.kind,
            self._lag,
        )

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped else f"pending={self._wheel.pending}"
        return f"<HashedWheelTimer {state} tick_duration={self._wheel.tick_duration}>"

    def _open_bucket(self, deadline: float, now: float) -> tuple[float, Timeout]:
        """Return a deadline that the wheel can hold, and its bucket."""
        deadline, bucket, tick = self._wheel.bucket_of(deadline, now)
        if tick is not None and tick < self._armed:
            self._arm(tick)
        return deadline, bucket

    def _arm(self, tick: int) -> None:
        """Have the loop call when a tick begins, and not at the moment set before."""
        if self._alarm is None:
            assert self._loop is not None
            # A timerfd supports only the monotonic clock.
            exact = self._clock is time.monotonic
            self._alarm = (
                new_alarm(self._loop, self._context, self)
                if exact
                else LoopAlarm(self._loop, self._context)
            )
        self._armed = tick
        self._alarm.set(self._wheel.time_of(tick), self._wake)

    def _wake(self) -> None:
        """Call the timeouts that have expired, and arm the timer for the next ones."""
        armed, self._armed = self._armed, _BUSY
        self._wakeups += 1
        # The loop may have woken us early: uvloop rounds its own timers to the nearest millisecond.
        now = self._clock()
        if armed != _BUSY:
            self._lag += max(0.0, now - self._wheel.time_of(armed))
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
            tick = self._wheel.next_tick()
            if tick is None:
                self._armed = _NEVER
            elif tick <= self._wheel.tick_of(now):
                # The budget is used up. Let other callbacks run.
                assert self._loop is not None
                self._next_slice = self._loop.call_soon(self._wake, context=self._context)
            else:
                self._arm(tick)

    def _admit(self, callback: Callable[[Timeout], object] | None) -> None:
        """Refuse a call that new_timeout() cannot accept, or adopt the loop at the first one."""
        if self._is_stopped:
            raise TimerStopped("the timer was stopped")
        if callback is None:
            raise TypeError("callback must not be None")
        if 0 < self._max_pending <= self._wheel.pending:
            raise TimerFull(
                f"{self._max_pending} timeouts are pending, the most that max_pending_timeouts"
                " allows"
            )
        if self._loop is not None:
            raise RuntimeError(
                "this timer belongs to an event loop that is no longer running: create one timer"
                " per loop"
            )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("new_timeout() needs a running event loop") from None
        self._loop = loop
        # Not get_running_loop(): on Python 3.11 it asks the system for the process id, every time.
        self._accept_while(loop.is_running)

    def _accept_while(self, is_running: Callable[[], bool]) -> None:
        wheel, limit = self._wheel, self._max_pending
        self._accepts = is_running if limit <= 0 else lambda: wheel.pending < limit and is_running()


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _seconds(delay: object) -> float:
    """Convert a delay that could not be added to a float."""
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    if isinstance(delay, int | float):
        try:
            return float(delay)
        except OverflowError:
            return math.inf if delay > 0 else -math.inf
    raise TypeError(f"delay must be seconds or a timedelta, not {describe_value(delay)}")
