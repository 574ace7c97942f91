"""Estimates the server's clock from its replies. Pure: the local clock is handed to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# How far two clocks may drift apart, in seconds per second. The next reply corrects it.
_DRIFT = 1e-5
# By how much a time in whole microseconds may be off, in seconds.
_ROUNDING = 2e-6
# For how long a quick call counts, in seconds: in that time, the clocks drift apart by less than a
# call takes.
_RECENT = 10.0
# For how long a quick wake-up counts, in seconds: one clock measures it, and it may be a rare one.
_LONG = 100.0


class _RecentLeast:
    """The lowest value of the last ``span`` seconds, or up to twice as many."""

    __slots__ = ("_newer", "_older", "_span", "_started", "value")

    def __init__(self, span: float) -> None:
        self.value = self._newer = self._older = math.inf
        self._started = 0.0
        self._span = span

    def add(self, value: float, now: float) -> None:
        if (age := now - self._started) >= self._span:
            self._older = self._newer if age < 2 * self._span else math.inf
            self._newer, self._started = math.inf, now
        self._newer = min(self._newer, value)
        self.value = min(self._older, self._newer)


class ServerClock:
    """Estimates the server's time.

    A reply carries the time at which the server wrote it, which lies after the request left here
    and before the reply arrived. Each reply thus bounds the offset between the two clocks from
    both sides. The lower bound never runs ahead; it lags by the travel time of the reply. The
    highest of the recent lower bounds lags least, so it is kept until a reply contradicts it.

    The upper bound includes the travel time of the request. It is what the server's clock shows
    when a request that leaves now arrives. The lowest one, of the quickest recent request, tells
    when to call for a message: the call arrives when the message is due, and not before, unless it
    is quicker than all recent ones. If a timer starts the call, the time that passes until the
    request leaves counts in the same way.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """Create an estimate. ``now`` returns monotonic seconds."""
        self.local: Callable[[], float] = now
        self._offset: float | None = None
        self._observed_at = 0.0
        # By how much the server's clock is ahead of ours when the quickest request arrives.
        self._on_arrival = _RecentLeast(_RECENT)
        # The shortest time from the moment for which a timer was set until its request left.
        self._after_timer = _RecentLeast(_LONG)

    def observe(self, server_us: int, asked_at: float, timer_at: float | None = None) -> None:
        """Record the time in a reply, microseconds, for a request that left at ``asked_at``,
        because of a timer that was set for ``timer_at``, if there was one.
        """
        arrived = self.local()
        # The server truncates its time to microseconds.
        lowest, highest = server_us / 1_000_000 - arrived, (server_us + 1) / 1_000_000 - asked_at
        offset = self._offset
        # If the offset is above the highest, one of the clocks was set.
        if (
            offset is None
            or not lowest <= offset - _DRIFT * (arrived - self._observed_at) <= highest
        ):
            self._offset, self._observed_at = lowest, arrived
        if lowest > self._on_arrival.value + _ROUNDING:
            # The clocks have drifted apart, or one of them was set.
            self._on_arrival = _RecentLeast(_RECENT)
        self._on_arrival.add(server_us / 1_000_000 - asked_at, arrived)
        if timer_at is not None:
            self._after_timer.add(asked_at - timer_at, arrived)

    def seconds_until(self, due_us: int) -> float:
        """Return the seconds until ``due_us``; 0 if that has passed, or before any reply."""
        return max(0.0, self.seconds_from_now(due_us))

    def seconds_from_now(self, due_us: float, now: float | None = None) -> float:
        """Return the seconds until ``due_us``, from the local time ``now`` or the present one.

        Negative if that has passed; 0 before any reply.
        """
        if self._offset is None:
            return 0.0
        if now is None:
            now = self.local()
        return due_us / 1_000_000 - self._offset + _DRIFT * (now - self._observed_at) - now

    def seconds_until_call(self, due_us: float, now: float) -> float:
        """Return the seconds from ``now`` until a call can leave that arrives at ``due_us``.

        Negative if that has passed; 0 before any reply.
        """
        if self._offset is None:
            return 0.0
        return due_us / 1_000_000 - self._on_arrival.value - now

    def seconds_until_timer(self, due_us: float, now: float) -> float:
        """Return the seconds from ``now`` until a timer has to fire, so that the call that it
        starts arrives at ``due_us``.

        Negative if that has passed; 0 before any reply.
        """
        lag = self._after_timer.value
        return self.seconds_until_call(due_us, now) - (lag if lag < math.inf else 0.0)
