"""A hashed timer wheel, for very many timers most of which are cancelled. Pure.

It takes ``now``, and returns what has expired and the tick at which there is more to do.
:class:`~delayq._timer.timer.HashedWheelTimer` drives one from an event loop.

Time is divided into ticks, counted from the clock's zero. A timer fires when the tick of its
deadline is over, so it is never early and at most one tick late. Ticks are kept in buckets on three
levels::

    near        one bucket per tick                the next 1 to 2 wheels
    far         one bucket per wheel               the next 1 to 2 wheels of wheels
    very far    one bucket per wheel of wheels     everything later

A wheel is ``ticks_per_wheel`` ticks.

A coarse bucket is spread over the finer level one bucket's length before its time, so spreading
delays no timer. Buckets are stored in dicts under their absolute number, with a heap of those
numbers per level: an empty stretch of time costs nothing, however short the ticks are. A bucket is
a circular doubly linked list whose nodes are the timeouts themselves. That makes
:meth:`Timeout.cancel` four stores, which leave nothing behind.

Timers are ordered by tick, and within a tick by the order in which they were added. Spreading
preserves this order because each stretch of time is open on one level only: ``near_end`` and
``far_end`` move past a coarse bucket when it is empty, not before.
"""
# ruff: noqa: SLF001 - a bucket is a list of timeouts: these classes share internals, because
# calls would halve the speed.

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from math import floor  # Four times as fast as int().
from typing import TYPE_CHECKING

from delayq.errors import BadDelay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Timers fired or moved per iteration: a third of a millisecond, plus the callbacks.
_BUDGET = 1000
_LAST_TICK = 2**62  # Later deadlines count as this one. Years away even with ticks of a nanosecond.
_SWEEP_FLOOR = 256


class Timeout:
    """A pending callback, created by :meth:`~delayq.HashedWheelTimer.new_timeout`."""

    # It is the list node itself. It is pending while it refers to its wheel; afterwards both links
    # hold a marker that says how it ended, and keep no neighbour alive. The tick is not stored,
    # because it follows from the deadline.
    __slots__ = ("_callback", "_deadline", "_next", "_prev", "_wheel")
    _callback: Callable[[Timeout], object]
    _deadline: float
    _next: Timeout
    _prev: Timeout
    _wheel: Wheel | None

    def cancel(self) -> bool:
        """Remove the timeout from the timer at once, with everything its callback refers to.

        Returns:
            True if it was pending. False if it was already cancelled, or has expired (and may be
            running).
        """
        wheel = self._wheel
        if wheel is None:
            return False
        after, before = self._next, self._prev
        before._next = after
        after._prev = before
        self._next = self._prev = _CANCELLED
        self._wheel = None
        self._callback = spent
        wheel.pending -= 1
        return True

    @property
    def cancelled(self) -> bool:
        """Whether the timeout was cancelled, by :meth:`cancel` or by stopping the timer."""
        return self._next is _CANCELLED

    @property
    def expired(self) -> bool:
        """Whether the timeout's time has come. Already true while the callback runs."""
        return self._next is _EXPIRED

    @property
    def deadline(self) -> float:
        """The requested time, in seconds on the timer's clock."""
        return self._deadline

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "expired" if self.expired else "pending"
        return f"<Timeout {state} deadline={self._deadline:.6f}>"


def spent(_timeout: Timeout) -> None:
    """Do nothing, in place of a callback that a kept timeout must not keep alive."""


_CANCELLED = Timeout()
_EXPIRED = Timeout()


class Level:
    """The buckets of one length, some of them empty for a while, and a heap of their numbers."""

    __slots__ = ("buckets", "keys", "lead", "scale", "shift", "sweep_at")

    def __init__(self, per_tick: float, shift: int, lead: int) -> None:
        self.shift = shift  # A bucket holds 2**shift ticks.
        # Buckets per second. Exact, so that the levels agree on where a tick begins.
        self.scale = per_tick / 2**shift
        # A bucket is due this many lengths before it begins; -1 means when it is over.
        self.lead = lead
        self.buckets: dict[int, Timeout] = {}
        self.keys: list[int] = []
        self.sweep_at = _SWEEP_FLOOR

    def open(self, key: int) -> Timeout:
        """Add an empty bucket, and return its sentinel."""
        if len(self.keys) >= self.sweep_at:
            self._sweep()
        bucket = Timeout()
        bucket._next = bucket._prev = bucket
        self.buckets[key] = bucket
        heappush(self.keys, key)
        return bucket

    def due_tick(self, key: int) -> int:
        """Return the tick at which the bucket is due."""
        return (key - self.lead) << self.shift

    def drop_first(self) -> None:
        del self.buckets[heappop(self.keys)]

    def next_tick(self) -> int | None:
        """Return the tick at which the first bucket is due that is not empty, and drop those before
        it.
        """
        keys, buckets = self.keys, self.buckets
        while keys:
            bucket = buckets[keys[0]]
            if bucket._next is not bucket:
                return self.due_tick(keys[0])
            self.drop_first()
        return None

    def clear(self) -> None:
        self.buckets.clear()
        self.keys.clear()

    def _sweep(self) -> None:
        # As many buckets as are kept must be opened before the next: constant cost on average.
        for key in [key for key, bucket in self.buckets.items() if bucket._next is bucket]:
            del self.buckets[key]
        self.keys[:] = self.buckets
        heapify(self.keys)
        self.sweep_at = _SWEEP_FLOOR + 2 * len(self.keys)


class Wheel:
    """The timers, without a clock. The caller passes ``now``, in seconds, which must not go back.

    To use it, :meth:`add` timers, run what :meth:`expire` yields, and come back at
    :meth:`next_tick` (:meth:`time_of` converts it to seconds).

    Args:
        tick_duration: Length of a tick in seconds.
        ticks_per_wheel: Ticks of the near level; rounded up to a power of two.
        now: The present moment, in seconds.

    Raises:
        ValueError: A tick is shorter than a nanosecond, ``ticks_per_wheel`` is not in 1..2**30, or
            a wheel takes longer than 292 years.
    """

    __slots__ = (
        "far",
        "far_end",
        "far_until",
        "latest",
        "near",
        "near_end",
        "near_until",
        "pending",
        "per_tick",
        "tick_duration",
        "very_far",
    )

    def __init__(self, tick_duration: float, ticks_per_wheel: int, now: float = 0.0) -> None:
        if not 1e-9 <= tick_duration < math.inf:
            raise ValueError(
                "tick_duration must be a number of seconds, at least a nanosecond, not"
                f" {tick_duration!r}"
            )
        if not isinstance(ticks_per_wheel, int) or not 1 <= ticks_per_wheel <= 2**30:
            raise ValueError(
                f"ticks_per_wheel must be a whole number in 1..2**30, not {ticks_per_wheel!r}"
            )
        if tick_duration * ticks_per_wheel * 1e9 >= 2**63:
            raise ValueError(
                f"a wheel of {ticks_per_wheel} ticks of {tick_duration} s takes longer than 292"
                " years"
            )
        self.tick_duration: float = float(tick_duration)
        self.per_tick: float = 1.0 / self.tick_duration
        self.latest: float = _LAST_TICK * self.tick_duration
        bits = (ticks_per_wheel - 1).bit_length()
        self.near: Level = Level(self.per_tick, shift=0, lead=-1)
        self.far: Level = Level(self.per_tick, shift=bits, lead=1)
        self.very_far: Level = Level(self.per_tick, shift=2 * bits, lead=1)
        self.pending: int = 0
        # The first tick beyond each level, and the first moment of that tick.
        self.near_end: int = 0
        self.far_end: int = 0
        self.near_until: float = 0.0
        self.far_until: float = 0.0
        self._slide(self.tick_of(now))

    def tick_of(self, now: float) -> int:
        """Return the number of the tick that contains ``now``. Timers of earlier ticks are due."""
        return floor(now * self.per_tick)

    def time_of(self, tick: int) -> float:
        """Return the first moment within the tick, in seconds."""
        moment = tick * self.tick_duration
        # Rounding: a wake-up at this moment would find nothing due.
        while self.tick_of(moment) < tick:
            moment = math.nextafter(moment, math.inf)
        return moment

    def add(self, callback: Callable[[Timeout], object], deadline: float, now: float) -> Timeout:
        """Add a timer, which expires with the next tick at the earliest. BadDelay if it is NaN."""
        deadline, bucket, _ = self.bucket_of(deadline, now)
        node = Timeout()
        node._callback = callback
        node._deadline = deadline
        node._wheel = self
        node._next = bucket
        node._prev = last = bucket._prev
        last._next = bucket._prev = node
        self.pending += 1
        return node

    def bucket_of(self, deadline: float, now: float) -> tuple[float, Timeout, int | None]:
        """Return a deadline, brought into ``now <= deadline <= latest``, its bucket, and, if that
        was opened for it, the tick at which the bucket is due. BadDelay if the deadline is NaN.
        """
        if not now <= deadline < self.latest:
            if math.isnan(deadline):
                raise BadDelay("the delay must not be NaN")
            deadline = now if deadline < now else self.latest
        if deadline >= self.near_until:
            self._slide(self.tick_of(now))  # The windows did not move while the wheel slept.
        level = (
            self.near
            if deadline < self.near_until
            else self.far
            if deadline < self.far_until
            else self.very_far
        )
        key = floor(deadline * level.scale)
        bucket = level.buckets.get(key)
        if bucket is not None:
            return deadline, bucket, None
        return deadline, level.open(key), level.due_tick(key)

    def expire(self, now: float, budget: int = _BUDGET) -> Iterator[Timeout]:
        """Yield the due timers, in order, each one already off the wheel.

        Then prepare those that are due soon. Between two steps the caller may add, cancel and
        clear, and may abandon the iterator. After firing or moving ``budget`` timers it stops, and
        :meth:`next_tick` is not after ``now``.
        """
        present = self.tick_of(now)
        near, far, very_far = self.near, self.far, self.very_far
        keys, buckets = near.keys, near.buckets
        while budget > 0:
            # Not past near_end, nor past far_end below: timers from a bucket that is spread only in
            # part must wait for the rest, or the order would change.
            while keys and (key := keys[0]) < present and key < self.near_end and budget > 0:
                bucket = buckets[key]
                node = bucket._next
                if node is bucket:
                    near.drop_first()
                    budget -= 1
                    continue
                # After a callback, only the head of this list can be trusted.
                while node is not bucket and budget > 0:
                    budget -= 1
                    bucket._next = after = node._next
                    after._prev = bucket
                    node._next = node._prev = _EXPIRED
                    node._wheel = None
                    self.pending -= 1
                    yield node
                    node = bucket._next
            if (
                far.keys
                and far.due_tick(far.keys[0]) <= present
                and far.keys[0] << far.shift < self.far_end
            ):
                budget = self._spread(far, near, budget)
            elif very_far.keys and very_far.due_tick(very_far.keys[0]) <= present:
                budget = self._spread(very_far, far, budget)
            elif not self._slide(present):
                return

    def next_tick(self) -> int | None:
        """Return the next tick at which there is work, or None if nothing is pending."""
        if not self.pending:
            self.clear()
            return None
        first: int | None = None
        for level in (self.near, self.far, self.very_far):
            tick = level.next_tick()
            if tick is not None and (first is None or tick < first):
                first = tick
        return first

    def clear(self) -> list[Timeout]:
        """Cancel everything, and return the pending timers in the order of their expiry."""
        nodes: list[Timeout] = []
        if self.pending:
            for level in (self.near, self.far, self.very_far):
                for key in sorted(level.buckets):
                    bucket = node = level.buckets[key]
                    while (node := node._next) is not bucket:
                        nodes.append(node)
            nodes.sort(key=lambda node: self.tick_of(node._deadline))
            for node in nodes:
                # One by one, because an expire() in progress must find its bucket empty.
                node.cancel()
        for level in (self.near, self.far, self.very_far):
            level.clear()
        return nodes

    def _slide(self, present: int) -> bool:
        """Move the windows to the present unless a bucket must be spread; return if one moved."""
        far, very_far = self.far, self.very_far
        near_end, far_end = self.near_end, self.far_end
        wheels_end = ((present >> very_far.shift) + 2) << very_far.shift
        if wheels_end > far_end and not (
            very_far.keys and very_far.keys[0] << very_far.shift < wheels_end
        ):
            far_end = wheels_end
        wheel_end = ((present >> far.shift) + 2) << far.shift
        if near_end < wheel_end <= far_end and not (
            far.keys and far.keys[0] << far.shift < wheel_end
        ):
            near_end = wheel_end
        return self._open_until(near_end, far_end)

    def _open_until(self, near_end: int, far_end: int) -> bool:
        """Move the ends of the levels, and return if one of them has moved."""
        if (near_end, far_end) == (self.near_end, self.far_end):
            return False
        self.near_end, self.far_end = near_end, far_end
        self.near_until, self.far_until = self._start_of(near_end), self._start_of(far_end)
        return True

    def _start_of(self, tick: int) -> float:
        """Return the least float within a tick, which :meth:`time_of` may miss by its rounding."""
        moment = self.time_of(tick)
        # Towards zero, floats get too small to be told apart.
        while tick and self.tick_of(before := math.nextafter(moment, -math.inf)) >= tick:
            moment = before
        return moment

    def _spread(self, source: Level, target: Level, budget: int) -> int:
        """Move the first bucket to the finer level, and return what is left of the budget."""
        key = source.keys[0]
        bucket = source.buckets[key]
        node = bucket._next
        while node is not bucket and budget > 0:
            budget -= 1
            after = node._next
            slot = floor(node._deadline * target.scale)
            home = target.buckets.get(slot)
            if home is None:
                home = target.open(slot)
            node._next = home
            node._prev = last = home._prev
            last._next = home._prev = node
            node = after
        bucket._next = node
        node._prev = bucket
        if node is bucket:
            source.drop_first()
            end = (key + 1) << source.shift
            if source is self.far:
                self._open_until(max(self.near_end, end), self.far_end)
            else:
                self._open_until(self.near_end, max(self.far_end, end))
            budget -= 1
        return budget
