"""Delayed queues, in Redisson's format, for code that is not asynchronous."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic

from delayq._generics import T
from delayq.errors import Closed, NotDurable, OutcomeUnknown
from delayq.sync._link import here

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from datetime import datetime
    from typing import Self

    from delayq._durations import Duration
    from delayq._redisson.queue import DelayedQueue as AsyncDelayedQueue
    from delayq._redisson.queue import Receipt as AsyncReceipt
    from delayq.sync._link import Door


class Receipt(Generic[T]):
    """The handle of a pending message, from :meth:`DelayedQueue.offer`, to cancel or reschedule it.

    Attributes:
        id: The message's id, 16 hexadecimal digits. Ids sort by offer order.
        due_at: When the message is due, by the server's clock (UTC), up to the year 9999.
    """

    __slots__ = ("_door", "_receipt")

    def __init__(self, door: Door[AsyncDelayedQueue[T]], receipt: AsyncReceipt[T]) -> None:
        self._door = door
        self._receipt = receipt

    @property
    def id(self) -> str:
        return self._receipt.id

    @property
    def due_at(self) -> datetime:
        return self._receipt.due_at

    def cancel(self) -> bool:
        """Remove the message from the queue, and return whether it was pending."""
        return self._door.run(lambda queue: self._receipt.through(queue).cancel())

    def reschedule(self, delay: Duration | None = None, *, at: datetime | None = None) -> bool:
        """Make the message due ``delay`` from now, or at ``at``.

        Return whether it was pending.
        """
        return self._door.run(lambda queue: self._receipt.through(queue).reschedule(delay, at=at))

    def __repr__(self) -> str:
        return repr(self._receipt)


class Ready(Generic[T]):
    """The list of messages that are due.

    The methods are those of the ``ready`` of a :class:`delayq.DelayedQueue`.
    """

    def __init__(self, door: Door[AsyncDelayedQueue[T]]) -> None:
        self._door = door

    def size(self) -> int:
        """Return the number of ready messages."""
        return self._door.run(lambda queue: queue.ready.size())

    def leased(self) -> int:
        """Return how many messages are leased by ``deliveries()``, besides these."""
        return self._door.run(lambda queue: queue.ready.leased())

    def read_all(self) -> list[T]:
        """Return every ready message, beginning with the next one to be taken; none is removed."""
        return self._door.run(lambda queue: queue.ready.read_all())

    def clear(self) -> bool:
        """Drop every ready message, and return whether there were any. Pending messages stay."""
        return self._door.run(lambda queue: queue.ready.clear())


class Pending(Generic[T]):
    """The messages that are not due yet.

    The methods are those of the ``pending`` of a :class:`delayq.DelayedQueue`.
    """

    def __init__(self, door: Door[AsyncDelayedQueue[T]]) -> None:
        self._door = door

    def size(self) -> int:
        """Return the number of pending messages."""
        return self._door.run(lambda queue: queue.pending.size())

    def peek(self) -> T | None:
        """Return the message offered first, due or not, without removing it, or None."""
        return self._door.run(lambda queue: queue.pending.peek())

    def read_all(self) -> list[T]:
        """Return every pending message, in offer order, without removing any."""
        return self._door.run(lambda queue: queue.pending.read_all())

    def entries(self) -> list[tuple[T, datetime]]:
        """Return every pending message with its due time (UTC), in due order; none is removed."""
        return self._door.run(lambda queue: queue.pending.entries())

    def contains(self, value: T) -> bool:
        """Return whether an equal message is pending."""
        return self._door.run(lambda queue: queue.pending.contains(value))

    def contains_all(self, values: Iterable[T]) -> bool:
        """Return whether an equal message is pending for each of ``values``, if there are any."""
        some = here(values)
        return self._door.run(lambda queue: queue.pending.contains_all(some))

    def remove(self, value: T) -> bool:
        """Remove the first equal message in offer order, and return whether there was one."""
        return self._door.run(lambda queue: queue.pending.remove(value))

    def remove_all(self, values: Iterable[T]) -> bool:
        """Remove every message that equals one of ``values``, and return whether there were any."""
        some = here(values)
        return self._door.run(lambda queue: queue.pending.remove_all(some))

    def retain_all(self, values: Collection[T]) -> bool:
        """Remove every message that equals none of ``values``. Return whether there were any."""
        return self._door.run(lambda queue: queue.pending.retain_all(values))

    def poll_last_and_offer_first_to(self, name: str) -> T | None:
        """Move the message that was offered last to the head of the ready list of queue ``name``.

        Return the message, or None if there is none.
        """
        return self._door.run(lambda queue: queue.pending.poll_last_and_offer_first_to(name))

    def clear(self) -> bool:
        """Drop every pending message, and return whether there were any. Ready messages stay."""
        return self._door.run(lambda queue: queue.pending.clear())

    def expire(self, duration: Duration) -> bool:
        """Make all pending messages disappear after ``duration``. Return whether there were any."""
        return self._door.run(lambda queue: queue.pending.expire(duration))


class DelayedQueue(Generic[T]):
    """A delayed queue, in Redisson's format, for code that is not asynchronous.

    Create one with :meth:`delayq.sync.Client.delayed_queue`. Each method does what the method of
    :class:`delayq.DelayedQueue` with the same name does, with the same arguments and errors.

    Attributes:
        name: The queue's name.
        ready: The messages that are due: :class:`~delayq.sync.Ready`.
        pending: The messages that are not due yet: :class:`~delayq.sync.Pending`.
    """

    def __init__(self, name: str, door: Door[AsyncDelayedQueue[T]]) -> None:
        self._name = name
        self._door = door
        self.ready: Ready[T] = Ready(door)
        self.pending: Pending[T] = Pending(door)

    @property
    def name(self) -> str:
        return self._name

    def offer(
        self,
        value: T,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
        durability: str | None = None,
    ) -> Receipt[T]:
        """Store a message that becomes due after a delay, and return its receipt.

        Calls of several threads at once share a round trip.
        """
        with self._receipts_in_errors():
            receipt = self._door.run(
                lambda queue: queue.offer(value, delay, at=at, durability=durability)
            )
        return Receipt(self._door, receipt)

    def offer_many(
        self, messages: Iterable[tuple[T, Duration]], *, durability: str | None = None
    ) -> list[Receipt[T]]:
        """Store many messages, each a pair of value and delay, and return a receipt for each."""
        some = here(messages)
        with self._receipts_in_errors():
            receipts = self._door.run(lambda queue: queue.offer_many(some, durability=durability))
        return [Receipt(self._door, each) for each in receipts]

    def close(self) -> None:
        """Close the queue on this client, for every handle of that name in this process.

        Closing twice does nothing.
        """
        with suppress(Closed):
            self._door.run(lambda queue: queue.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<delayq.sync.DelayedQueue {self.name!r}>"

    @contextmanager
    def _receipts_in_errors(self) -> Iterator[None]:
        """Let the receipts in an error be synchronous ones, too."""
        try:
            yield
        except (NotDurable, OutcomeUnknown) as error:
            stored: tuple[Any, ...] = error.stored
            error.stored = tuple(Receipt(self._door, each) for each in stored)
            raise
