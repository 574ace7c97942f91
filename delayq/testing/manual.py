"""Time that moves only when a test moves it.

::

    loop = ManualLoop()
    timer = HashedWheelTimer(clock=loop.time, loop=loop)
    timer.new_timeout(callback, 3600)
    loop.advance(3601)      # an hour goes by; the callback has run
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable


class ManualClock:
    """A monotonic clock moved by hand. Call it to get the time, like ``time.monotonic``.

    Args:
        now: The first reading, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now: float = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move time forward, and return the new reading.

        Raises:
            ValueError: ``seconds`` is negative or NaN. A monotonic clock does not go back.
        """
        if not seconds >= 0:
            raise ValueError(f"a monotonic clock cannot advance by {seconds} s")
        self.now += seconds
        return self.now


class ManualHandle:
    """The handle that :class:`ManualLoop` returns for a scheduled call."""

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        run = callback if context is None else partial(context.run, callback)
        self._call: Callable[[], object] | None = partial(run, *args)

    def cancel(self) -> None:
        """Drop the call."""
        self._call = None

    def cancelled(self) -> bool:
        """Return whether the call will not be made: it was cancelled, or already made."""
        return self._call is None

    def run(self) -> None:
        """Make the call, unless it was dropped or made before."""
        call, self._call = self._call, None
        if call is not None:
            call()


class ManualLoop:
    """The part of an event loop that the timer needs, on a :class:`ManualClock`.

    It runs callbacks only inside :meth:`advance` and :meth:`stall`. Exceptions propagate from
    there, and the next call runs the remaining callbacks.

    Args:
        clock: The clock to share. By default a new one, which starts at 0.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock: ManualClock = clock if clock is not None else ManualClock()
        self.calls_made: int = 0
        """The number of callbacks that were run, as often as a real loop would have woken up."""
        self._ready: deque[ManualHandle] = deque()
        self._scheduled: list[tuple[float, int, ManualHandle]] = []
        self._sequence = 0

    def time(self) -> float:
        """Return the clock's reading, in seconds."""
        return self.clock.now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> ManualHandle:
        """Run the callback in the next turn."""
        handle = ManualHandle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> ManualHandle:
        """Run the callback once the clock shows ``when``, in seconds."""
        handle = ManualHandle(callback, args, context)
        self._sequence += 1
        heappush(self._scheduled, (when, self._sequence, handle))
        return handle

    @property
    def scheduled(self) -> list[float]:
        """The moments at which callbacks are scheduled, in order, without cancelled ones."""
        return sorted(moment for moment, _, handle in self._scheduled if not handle.cancelled())

    def turn(self) -> int:
        """Run the callbacks that are ready now, not those they make ready. Return how many ran."""
        while self._scheduled and self._scheduled[0][0] <= self.clock.now:
            self._ready.append(heappop(self._scheduled)[2])
        earlier_calls = self.calls_made
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                self.calls_made += 1
                handle.run()
        return self.calls_made - earlier_calls

    def run_ready(self) -> None:
        """Run turns until there is nothing left to do at this moment."""
        self.turn()
        while self._ready or (self._scheduled and self._scheduled[0][0] <= self.clock.now):
            self.turn()

    def advance(self, seconds: float) -> None:
        """Move time forward as an idle loop sees it: from call to call, each exactly on time."""
        self.run_ready()
        end = self.clock.now + seconds
        while (moment := self._scheduled[0][0] if self._scheduled else math.inf) <= end:
            self.clock.advance(max(0.0, moment - self.clock.now))
            # The sum above may be rounded to an earlier moment.
            self.clock.now = max(self.clock.now, moment)
            self.run_ready()
        self.clock.advance(max(0.0, end - self.clock.now))

    def stall(self, seconds: float) -> None:
        """Move time forward as a blocked loop sees it: all at once. Then run what is overdue."""
        self.clock.advance(seconds)
        self.run_ready()
