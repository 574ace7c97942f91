"""What wakes an event loop at a moment, as exactly as the platform can.

asyncio rounds its own timeouts up to whole milliseconds, because epoll counts in them. A Linux timerfd that the loop
watches like a socket counts in nanoseconds, for one file descriptor. Where there is none, the loop's own timer does.
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

__all__ = ["Alarm", "AlarmKind", "Cancellable", "LoopAlarm", "TimerLoop", "TimerfdAlarm", "new_alarm"]

AlarmKind = Literal["timerfd", "loop"]

_CLOCK_MONOTONIC = 1
_NONBLOCK, _CLOEXEC = 0o4000, 0o2000000
_ABSOLUTE = 1
_NANO = 1_000_000_000
# Seconds after the system's start: nobody lives to see it, and more of them Python cannot count in nanoseconds.
_FARTHEST = 2.0**33


class Cancellable(Protocol):
    """A call to come."""

    def cancel(self) -> object: ...


class TimerLoop(Protocol):
    """What :class:`~delayq.HashedWheelTimer` needs of an event loop."""

    def time(self) -> float: ...
    def call_soon(self, callback: Callable[[], object], *, context: contextvars.Context) -> Cancellable: ...
    def call_at(self, when: float, callback: Callable[[], object], *, context: contextvars.Context) -> Cancellable: ...


class Alarm(Protocol):
    """Calls back once, at the moment that was set last."""

    kind: AlarmKind

    def set(self, when: float, callback: Callable[[], object]) -> None:
        """Call ``callback`` at ``when``, seconds on the loop's clock, instead of whatever was set before."""
        ...

    def clear(self) -> None:
        """Call nobody."""
        ...

    def close(self) -> None:
        """Call nobody any more. Safe again, and when the loop is closed."""
        ...


class LoopAlarm:
    """The loop's own timer. On asyncio up to a millisecond late; uvloop may be early as well."""

    kind: AlarmKind = "loop"

    def __init__(self, loop: TimerLoop | asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        self._loop = loop
        self._context = context
        self._handle: Cancellable | None = None

    def set(self, when: float, callback: Callable[[], object]) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(when, callback, context=self._context)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    close = clear


class TimerfdAlarm:
    """A Linux timerfd. Its file descriptor is closed with it, with its owner, or with the loop, whichever ends first.

    Raises:
        OSError: The system gives none.
        NotImplementedError: The loop watches no file descriptors.
    """

    kind: AlarmKind = "timerfd"

    def __init__(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context, owner: object) -> None:
        create, self._settime = _system_calls()
        self._fd = create()
        self._loop = loop
        # Held only while it is set: then an owner that nobody needs any more takes us along.
        self._callback: Callable[[], object] | None = None
        try:
            context.run(loop.add_reader, self._fd, self._ring)
        except BaseException:
            self.close()
            raise
        # Weakly: while it is set, it holds its owner.
        weakref.finalize(owner, _close_soon, weakref.ref(self), loop).atexit = False

    def set(self, when: float, callback: Callable[[], object]) -> None:
        self._callback = callback
        # Zero would stop it, and what is cut off on the way must not make it early.
        self._settime(self._fd, min(max(when, 0.0) + 2 / _NANO, _FARTHEST))

    def clear(self) -> None:
        if self._callback is not None:
            self._callback = None
            self._settime(self._fd, 0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        self._callback = None
        if fd >= 0:
            with suppress(RuntimeError, NotImplementedError):  # the loop is closed, or never watched it
                self._loop.remove_reader(fd)
            os.close(fd)

    def __del__(self) -> None:
        # The loop that watched it is gone.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except (BlockingIOError, InterruptedError):
            return  # it was set anew meanwhile
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


def _close_soon(weak: weakref.ref[TimerfdAlarm], loop: asyncio.AbstractEventLoop) -> None:
    alarm = weak()
    if alarm is not None:
        # The owner's last reference may have gone in any thread; and a loop that is closed needs nothing.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(alarm.close)


def new_alarm(loop: Any, context: contextvars.Context, owner: object) -> Alarm:
    """The most exact alarm for a loop: a timerfd where there is one, else the loop's own timer.

    Args:
        loop: An event loop, or what a test has in place of one.
        context: The callbacks run in this.
        owner: Whoever sets it. It lives no longer than this.
    """
    if isinstance(loop, asyncio.AbstractEventLoop) and sys.platform == "linux":
        with suppress(OSError, AttributeError, ImportError, NotImplementedError):
            return TimerfdAlarm(loop, context, owner)
    return LoopAlarm(loop, context)


@functools.cache
def _system_calls() -> tuple[Callable[[], int], Callable[[int, float], object]]:
    """How to make a timerfd, and how to set one to seconds on the monotonic clock; 0 stops it."""
    if sys.version_info >= (3, 13):
        flags = os.TFD_NONBLOCK | os.TFD_CLOEXEC
        absolute = os.TFD_TIMER_ABSTIME
        settime = os.timerfd_settime
        return (
            lambda: os.timerfd_create(_CLOCK_MONOTONIC, flags=flags),
            lambda fd, when: settime(fd, flags=absolute, initial=when),
        )
    return _by_ctypes()


def _by_ctypes() -> tuple[Callable[[], int], Callable[[int, float], object]]:
    import ctypes  # noqa: PLC0415 - only where the standard library has no function for it

    if ctypes.sizeof(ctypes.c_long) != 8:
        raise OSError("the size of a time_t is not known here")
    libc = ctypes.CDLL(None, use_errno=True)
    # An itimerspec is four longs: seconds and nanoseconds of the interval, then of the first expiry.
    itimerspec = ctypes.c_long * 4
    timerfd_settime = libc.timerfd_settime
    timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def create() -> int:
        fd: int = libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        return fd

    def settime(fd: int, when: float) -> None:
        seconds = int(when)
        value = itimerspec(0, 0, seconds, int((when - seconds) * _NANO))
        if timerfd_settime(fd, _ABSOLUTE, value, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    return create, settime
