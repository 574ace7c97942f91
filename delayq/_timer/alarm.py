"""Wakes an event loop at a given moment, as exactly as the platform allows.

asyncio rounds its own timeouts up to whole milliseconds, because epoll counts in them. A Linux
timerfd that the loop watches like a socket counts in nanoseconds, for one file descriptor. Without
a timerfd, the loop's own timer is used.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable

AlarmKind = Literal["timerfd", "loop"]

_CLOCK_MONOTONIC = 1
_NONBLOCK, _CLOEXEC = 0o4000, 0o2000000
_ABSOLUTE = 1
_NANO = 1_000_000_000
# Seconds since the system started: larger values overflow Python's nanoseconds.
_FARTHEST = 2.0**33


class Cancellable(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> object: ...


class TimerLoop(Protocol):
    """The methods of an event loop that :class:`~delayq.HashedWheelTimer` needs."""

    def time(self) -> float: ...
    def call_soon(
        self, callback: Callable[[], object], *, context: contextvars.Context
    ) -> Cancellable: ...
    def call_at(
        self, moment: float, callback: Callable[[], object], /, *, context: contextvars.Context
    ) -> Cancellable: ...


class Alarm(Protocol):
    """Calls back once, at the moment that was set last."""

    kind: AlarmKind

    def set(self, moment: float, callback: Callable[[], object]) -> None:
        """Call ``callback`` at ``moment``, seconds on the loop's clock, instead of earlier ones."""
        ...

    def close(self) -> None:
        """Cancel the call that is set, for good. Safe to repeat, and after the loop is closed."""
        ...


class LoopAlarm:
    """The loop's own timer. Up to a millisecond late on asyncio; uvloop may be early as well."""

    kind: AlarmKind = "loop"

    def __init__(
        self, loop: TimerLoop | asyncio.AbstractEventLoop, context: contextvars.Context
    ) -> None:
        self._loop = loop
        self._context = context
        self._handle: Cancellable | None = None

    def set(self, moment: float, callback: Callable[[], object]) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(moment, callback, context=self._context)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class TimerfdAlarm:
    """A Linux timerfd. Raises OSError or NotImplementedError where there is none."""

    kind: AlarmKind = "timerfd"

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: contextvars.Context, owner: object
    ) -> None:
        create, self._settime = _system_calls()
        self._fd = create()
        self._loop = loop
        # Held only while set, so that an unused owner and its alarm are collected together.
        self._callback: Callable[[], object] | None = None
        try:
            context.run(loop.add_reader, self._fd, self._ring)
        except BaseException:
            self.close()
            raise
        # A weak reference: while the alarm is set, it refers to its owner.
        weakref.finalize(owner, _close_soon, weakref.ref(self), loop).atexit = False

    def set(self, moment: float, callback: Callable[[], object]) -> None:
        self._callback = callback
        # Zero would stop the timer, and rounding down on the way must not make it early.
        self._settime(self._fd, min(max(moment, 0.0) + 2 / _NANO, _FARTHEST))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        self._callback = None
        if fd >= 0:
            # The loop is closed, or never watched it.
            with suppress(RuntimeError, NotImplementedError):
                self._loop.remove_reader(fd)
            os.close(fd)

    def __del__(self) -> None:
        # The loop that watched it no longer exists.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except (BlockingIOError, InterruptedError):
            return  # it was set again meanwhile
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


def _close_soon(weak: weakref.ref[TimerfdAlarm], loop: asyncio.AbstractEventLoop) -> None:
    alarm = weak()
    if alarm is not None:
        # The owner may have gone in any thread; a loop that is closed needs nothing.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(alarm.close)


def new_alarm(loop: Any, context: contextvars.Context, owner: object) -> Alarm:
    """Return a timerfd if there is one, or the loop's timer, to live as long as its ``owner``."""
    if isinstance(loop, asyncio.AbstractEventLoop) and sys.platform == "linux":
        with suppress(OSError, AttributeError, ImportError, NotImplementedError):
            return TimerfdAlarm(loop, context, owner)
    return LoopAlarm(loop, context)


@functools.cache
def _system_calls() -> tuple[Callable[[], int], Callable[[int, float], object]]:
    """Return functions to create a timerfd, and to set it to monotonic seconds; 0 stops it."""
    if sys.version_info >= (3, 13):
        flags = os.TFD_NONBLOCK | os.TFD_CLOEXEC
        absolute = os.TFD_TIMER_ABSTIME
        settime = os.timerfd_settime
        return (
            lambda: os.timerfd_create(_CLOCK_MONOTONIC, flags=flags),
            lambda fd, moment: settime(fd, flags=absolute, initial=moment),
        )
    return _by_ctypes()


def _by_ctypes() -> tuple[Callable[[], int], Callable[[int, float], object]]:
    import ctypes  # noqa: PLC0415 - needed only if the standard library lacks these functions

    if ctypes.sizeof(ctypes.c_long) != 8:
        raise OSError("the size of time_t is unknown on this platform")
    libc = ctypes.CDLL(None, use_errno=True)
    # Four longs: seconds and nanoseconds of the interval, then of the first expiry.
    itimerspec = ctypes.c_long * 4
    timerfd_settime = libc.timerfd_settime
    timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def create() -> int:
        fd: int = libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        return fd

    def settime(fd: int, moment: float) -> None:
        seconds = int(moment)
        value = itimerspec(0, 0, seconds, int((moment - seconds) * _NANO))
        if timerfd_settime(fd, _ABSOLUTE, value, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    return create, settime
