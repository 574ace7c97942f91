"""Plans which items leave together, and when: the decisions of group commit. Pure.

:class:`delayq._engine.batcher.Batcher` carries them out, with futures, tasks and connections.
Methods that depend on the time take ``now``, in local seconds. ``moved_at`` is the local time at
which bytes last moved on the connection. The size of an item is its number of bytes if it is an
offer, and the room that it takes in a call if it is an acknowledgement.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from delayq.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item")
Waiter = TypeVar("Waiter")

# The maximum number of batches in flight, and the number of items that the second one needs.
SLOTS = 2
MIN_SECOND_BATCH = 50
# Items submitted further apart than this, in seconds, do not share a batch that expires.
SPAN = 0.5
# If more than this is waiting, new items are held up: 16 MiB of offers.
MAX_WAITING_SIZE = 16 * 1024 * 1024


class CallBatch(Generic[Item, Waiter]):
    """Items that leave together: waiting, in flight, or being repeated.

    Attributes:
        submitted_at: When its first item was submitted, in local seconds.
        items: The items. Each has a waiter at the same index.
        size: The size of all items.
        slot: The slot that the batch takes from the moment it leaves, 0 or 1; None if it has not
            left.
        follows: Whether it continues a batch that is waiting or in flight, and must not overtake
            it.
        shared: The waiters of items that were submitted together; those of one waiter are in a row.
        repeating: Whether it failed and is being repeated.
    """

    __slots__ = (
        "follows",
        "items",
        "repeating",
        "shared",
        "size",
        "slot",
        "submitted_at",
        "waiters",
    )

    def __init__(self, submitted_at: float) -> None:
        self.submitted_at = submitted_at
        self.items: list[Item] = []
        self.waiters: list[Waiter] = []
        self.size = 0
        self.slot: int | None = None
        self.follows = False
        self.shared: list[Waiter] = []
        self.repeating = False


class Repeat(NamedTuple, Generic[Item, Waiter]):
    """Repeat a batch, once the batches in ``after`` have been repeated, and give up at
    ``give_up_at``, in local seconds.
    """

    after: Sequence[CallBatch[Item, Waiter]]
    give_up_at: float


class BatchPlan(Generic[Item, Waiter]):
    """Decides which items share a batch, and when batches leave.

    A lone item never waits for others. Items that are added while a batch is in flight wait for its
    reply, or leave in a second batch behind it if there are enough of them. Both batches use one
    connection and are therefore carried out in order, unless the server is not ready for the first
    one and is for the second. For that reason, items passed to :meth:`add_many` never leave side by
    side, and nothing leaves while a batch is being repeated.

    A batch that expires fails if it has not left within some time. The time counts from its
    submission, and starts again with every sign that the server carries out earlier ones.

    A waiter is whatever the caller wants to find again beside its item.

    Attributes:
        expires_after: How long a batch may wait, in seconds; inf for any time.
        waiting: The batches that wait. The last one accepts more items.
        in_flight: The batches that have left, in that order.
        waiting_size: The size of all waiting items.
        unanswered: The number of items that wait or are in flight.
        closed: Whether no more items are accepted.
    """

    def __init__(self, *, max_items: int, max_size: int, expires_after: float = math.inf) -> None:
        """Put ``max_items`` in a batch at most, and ``max_size`` in one with several items."""
        self.expires_after: float = expires_after
        self.waiting: deque[CallBatch[Item, Waiter]] = deque()
        self.in_flight: list[CallBatch[Item, Waiter]] = []
        self.waiting_size: int = 0
        self.unanswered: int = 0
        self.closed: bool = False
        self._max_items = max_items
        self._max_size = max_size
        self._span = SPAN if expires_after < math.inf else math.inf
        self._succeeded_at = -math.inf
        # How many items are done, and the waiters for a number of items to be done.
        self._done = 0
        self._flushing: deque[tuple[int, Waiter]] = deque()

    # Items

    def add(self, item: Item, size: int, waiter: Waiter, submitted_at: float) -> bool:
        """Add an item of a size, submitted at ``submitted_at``.

        Returns whether to call :meth:`leave` now, because a batch may leave. Raises
        :class:`Closed`.
        """
        if self.closed:
            raise Closed("the queue is closed")
        waiting = self.waiting
        if (
            not waiting
            or len((batch := waiting[-1]).items) >= self._max_items
            or batch.size + size > self._max_size
            or not -self._span <= submitted_at - batch.submitted_at <= self._span
        ):
            waiting.append(batch := CallBatch(submitted_at))
        items = batch.items
        items.append(item)
        batch.waiters.append(waiter)
        batch.size += size
        self.waiting_size += size
        self.unanswered += 1
        return not (in_flight := self.in_flight) or (
            len(items) >= MIN_SECOND_BATCH and len(in_flight) < SLOTS
        )

    def add_small(
        self, items: Sequence[Item], waiters: Sequence[Waiter], submitted_at: float
    ) -> None:
        """Add items of size 1, submitted at ``submitted_at``, all at once.

        Call :meth:`leave` afterwards. :attr:`closed` is not checked.
        """
        at, waiting = 0, self.waiting
        while at < len(items):
            room = 0
            if waiting and abs(submitted_at - waiting[-1].submitted_at) <= self._span:
                batch = waiting[-1]
                room = min(self._max_items - len(batch.items), self._max_size - batch.size)
            if room <= 0:
                waiting.append(batch := CallBatch(submitted_at))
                room = min(self._max_items, self._max_size)
            added = items[at : at + room]
            batch.items += added
            batch.waiters += waiters[at : at + room]
            batch.size += len(added)
            at += room
        self.waiting_size += len(items)
        self.unanswered += len(items)

    def add_many(
        self, items: Sequence[Item], sizes: Sequence[int], waiter: Waiter, submitted_at: float
    ) -> list[CallBatch[Item, Waiter]]:
        """Add items with their sizes, which share a waiter, and return the batches that they are
        in. These leave one after the other.

        Raises :class:`Closed`.
        """
        batches: list[CallBatch[Item, Waiter]] = []
        start = 0
        while start < len(items):
            self.add(items[start], sizes[start], waiter, submitted_at)
            batch = self.waiting[-1]
            batch.follows = batch.follows or bool(batches)
            batch.shared.append(waiter)
            batches.append(batch)
            start = self._fill(batch, items, sizes, start + 1)
        return batches

    def _fill(
        self,
        batch: CallBatch[Item, Waiter],
        items: Sequence[Item],
        sizes: Sequence[int],
        start: int,
    ) -> int:
        """Add the items from ``start`` on that fit, for the batch's last waiter, and return where
        they end.
        """
        end = min(start + self._max_items - len(batch.items), len(items))
        size = sum(sizes[start:end])
        while batch.size + size > self._max_size and end > start:
            end -= 1
            size -= sizes[end]
        batch.items += items[start:end]
        batch.waiters += batch.waiters[-1:] * (end - start)
        batch.size += size
        self.waiting_size += size
        self.unanswered += end - start
        return end

    def withdraw(self, batch: CallBatch[Item, Waiter], indexes: Sequence[int]) -> Sequence[Waiter]:
        """Remove items from a batch that was not sent. Return the waiters whose flush is done."""
        for index in sorted(indexes, reverse=True):
            del batch.items[index], batch.waiters[index]
        return self._count(len(indexes))

    # Batches

    def leave(self, now: float, moved_at: float) -> CallBatch[Item, Waiter] | None:
        """Let the next batch leave, if it may. Call this after every event, until it returns None.

        Send the batch: if another one is in flight, behind it on the same connection. One that has
        no slot has expired.
        """
        waiting, in_flight = self.waiting, self.in_flight
        if not waiting or (
            in_flight
            and (
                len(in_flight) >= SLOTS
                or in_flight[0].repeating
                or waiting[0].follows
                or (len(waiting) == 1 and len(waiting[0].items) < MIN_SECOND_BATCH)
            )
        ):
            return None
        batch = waiting.popleft()
        self.waiting_size -= batch.size
        if self.expires_after < math.inf and self.expires_at(batch.submitted_at, moved_at) <= now:
            return batch
        batch.slot = 1 if in_flight and in_flight[0].slot == 0 else 0
        in_flight.append(batch)
        return batch

    def on_success(self, batch: CallBatch[Item, Waiter], now: float) -> None:
        """Record that a batch was carried out. Its slot is free. :meth:`resolve` must follow."""
        self._succeeded_at = now
        if batch in self.in_flight:
            self.in_flight.remove(batch)

    def on_failure(
        self, batch: CallBatch[Item, Waiter], moved_at: float, *, unknown: bool
    ) -> Repeat[Item, Waiter]:
        """Record that a batch failed, and is being repeated.

        ``unknown`` tells whether it may have been carried out.
        """
        # If neither was carried out, one could overtake the other when retried alone.
        after = [
            other_batch
            for other_batch in self.in_flight
            if other_batch is not batch and other_batch.repeating and not unknown
        ]
        give_up_at = self.expires_at(batch.submitted_at, moved_at)
        batch.repeating = True
        return Repeat(after, give_up_at)

    def end(self, batch: CallBatch[Item, Waiter]) -> None:
        """Free the slot of a batch, if it has one. :meth:`resolve` must follow."""
        if batch in self.in_flight:
            self.in_flight.remove(batch)

    def resolve(
        self, batch: CallBatch[Item, Waiter]
    ) -> tuple[list[Item], list[Waiter], Sequence[Waiter]]:
        """Remove the items of a batch, because their outcome is known. Return them, their waiters,
        and the waiters of :meth:`flush` for whom all items are done now.
        """
        items, waiters, batch.items, batch.waiters = batch.items, batch.waiters, [], []
        return items, waiters, self._count(len(items))

    # Time

    def expires_at(self, submitted_at: float, moved_at: float) -> float:
        """Return when an item fails, unless the server shows by then that it carries out others."""
        progress_at = self._succeeded_at
        if self.in_flight and not self.in_flight[0].repeating:
            # A large call takes its time.
            progress_at = max(progress_at, moved_at)
        return max(submitted_at, progress_at) + self.expires_after

    def expire(self, now: float, moved_at: float) -> list[CallBatch[Item, Waiter]]:
        """Remove and return the batches that have waited too long. Resolve each."""
        expired = [
            batch for batch in self.waiting if self.expires_at(batch.submitted_at, moved_at) <= now
        ]
        for batch in expired:
            self.waiting.remove(batch)
            self.waiting_size -= batch.size
        return expired

    def next_expiry(self, moved_at: float) -> float:
        """Return when the first waiting batch expires; inf if none does."""
        return min(
            (self.expires_at(batch.submitted_at, moved_at) for batch in self.waiting),
            default=math.inf,
        )

    # Flushing and closing

    def flush(self, waiter: Waiter) -> None:
        """Have ``waiter`` returned once all items added so far are done."""
        self._flushing.append((self._done + self.unanswered, waiter))

    def abandon(self) -> tuple[list[CallBatch[Item, Waiter]], list[CallBatch[Item, Waiter]]]:
        """Remove and return the batches in flight, and those that were never sent. Resolve each."""
        in_flight, self.in_flight = self.in_flight, []
        return in_flight, self.recall()

    def recall(self) -> list[CallBatch[Item, Waiter]]:
        """Remove and return the batches that were never sent. Resolve each."""
        unsent = [*self.waiting]
        self.waiting.clear()
        self.waiting_size = 0
        return unsent

    def _count(self, done: int) -> Sequence[Waiter]:
        """Count items as done, and return the waiters of :meth:`flush` for whom all are."""
        self.unanswered -= done
        self._done += done
        flushed: list[Waiter] = []
        while self._flushing and self._flushing[0][0] <= self._done:
            flushed.append(self._flushing.popleft()[1])
        return flushed
