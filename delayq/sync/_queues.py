"""The queues for code that is not asynchronous. Their methods are those of the asynchronous ones.

The stub ``delayq/sync/__init__.pyi`` lists them with their types.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic

from delayq._generics import T
from delayq._redisson.queue import DelayedQueue as AsyncDelayedQueue
from delayq._redisson.queue import Receipt as AsyncReceipt
from delayq._redisson.views import Pending as AsyncPending
from delayq._redisson.views import Ready as AsyncReady
from delayq._reliable.batches import Batch as AsyncBatch
from delayq._reliable.dead_letters import DeadLetters as AsyncDeadLetters
from delayq._reliable.groups import Groups as AsyncGroups
from delayq._reliable.queue import ReliableQueue as AsyncReliableQueue
from delayq.errors import Closed, NotDurable, OutcomeUnknown
from delayq.sync._bridge import forwards, signed_as

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
    from datetime import datetime
    from typing import Self

    from delayq._reliable.following import MessageEvent
    from delayq.sync._bridge import QueueRef


class _Queue:
    def __init__(self, name: str, queue: QueueRef[Any]) -> None:
        self._name = name
        self._queue = queue

    @property
    def name(self) -> str:
        return self._name

    def close(self) -> None:
        """Close the queue on this client, for every handle of that name in this process.

        Closing twice does nothing.
        """
        with suppress(Closed):
            self._queue.run(lambda queue: queue.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<delayq.sync.{type(self).__name__} {self.name!r}>"

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        return self._queue.run(call)


class _Part:
    """A part of a queue, under the name that the queue has for it."""

    _NAME: str

    def __init__(self, queue: QueueRef[Any]) -> None:
        self._queue = queue

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        return self._queue.run(lambda queue: call(getattr(queue, self._NAME)))


@forwards(AsyncDeadLetters)
class DeadLetters(_Part, Generic[T]):
    """The dead letters of one queue. The methods are those of :class:`delayq.DeadLetters`."""

    _NAME = "dead"


@forwards(AsyncGroups)
class Groups(_Part):
    """The groups of one queue. The methods are those of :class:`delayq.Groups`."""

    _NAME = "groups"


@forwards(AsyncBatch)
class Batch:
    """A batch of messages, from :meth:`ReliableQueue.offer_batch`, for code that is not
    asynchronous. The methods are those of :class:`delayq.Batch`.

    Attributes:
        id: The batch's id.
    """

    id: str

    def __init__(self, queue: QueueRef[AsyncReliableQueue[Any]], batch: str) -> None:
        self.id = batch
        self._queue = queue

    def __repr__(self) -> str:
        return f"<delayq.sync.Batch {self.id!r}>"

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        return self._queue.run(lambda queue: call(queue.batch(self.id)))


@forwards(AsyncReliableQueue)
class ReliableQueue(_Queue, Generic[T]):
    """A reliable queue for code that is not asynchronous.

    Create one with :meth:`delayq.sync.Client.reliable_queue`. Each method does what the method of
    :class:`delayq.ReliableQueue` with the same name does, with the same arguments and errors.
    Functions that are passed to it as ``progress`` are called in the thread that does the clients'
    work.

    Attributes:
        name: The queue's name.
        dead: The queue's dead letters: :class:`~delayq.sync.DeadLetters`.
        groups: The groups of its messages: :class:`~delayq.sync.Groups`.
    """

    dead: DeadLetters[T]
    groups: Groups

    def __init__(self, name: str, queue: QueueRef[AsyncReliableQueue[T]]) -> None:
        super().__init__(name, queue)
        self.dead = DeadLetters(queue)
        self.groups = Groups(queue)

    @signed_as(AsyncReliableQueue.follow)
    def follow(self, *args: Any, **kwargs: Any) -> Iterator[MessageEvent]:
        async def begin(queue: AsyncReliableQueue[T]) -> AsyncGenerator[MessageEvent, None]:
            return queue.follow(*args, **kwargs)  # type: ignore[return-value]  # it is a generator

        return self._events(super()._run(begin))

    def _events(self, events: AsyncGenerator[MessageEvent, None]) -> Iterator[MessageEvent]:
        try:
            while (event := super()._run(lambda _: anext(events, None))) is not None:
                yield event
        finally:
            super()._run(lambda _: events.aclose())

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        result = super()._run(call)
        return Batch(self._queue, result.id) if isinstance(result, AsyncBatch) else result


@forwards(AsyncReceipt)
class Receipt(Generic[T]):
    """A receipt for a pending message, from :meth:`DelayedQueue.offer`, to cancel or reschedule it.

    Attributes:
        id: The message's id, 16 hexadecimal digits. Ids sort by offer order.
        due_at: When the message is due, by the server's clock (UTC), up to the year 9999.
    """

    __slots__ = ("_queue", "_receipt")

    def __init__(self, queue: QueueRef[AsyncDelayedQueue[T]], receipt: AsyncReceipt[T]) -> None:
        self._queue = queue
        self._receipt = receipt

    @property
    def id(self) -> str:
        return self._receipt.id

    @property
    def due_at(self) -> datetime:
        return self._receipt.due_at

    def __repr__(self) -> str:
        return repr(self._receipt)

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        return self._queue.run(lambda queue: call(self._receipt.through(queue)))


@forwards(AsyncReady)
class Ready(_Part, Generic[T]):
    """The list of messages that are due.

    The methods are those of the ``ready`` of a :class:`delayq.DelayedQueue`.
    """

    _NAME = "ready"


@forwards(AsyncPending)
class Pending(_Part, Generic[T]):
    """The messages that are not due yet.

    The methods are those of the ``pending`` of a :class:`delayq.DelayedQueue`.
    """

    _NAME = "pending"


@forwards(AsyncDelayedQueue)
class DelayedQueue(_Queue, Generic[T]):
    """A delayed queue, in Redisson's format, for code that is not asynchronous.

    Create one with :meth:`delayq.sync.Client.delayed_queue`. Each method does what the method of
    :class:`delayq.DelayedQueue` with the same name does, with the same arguments and errors.

    Attributes:
        name: The queue's name.
        ready: The messages that are due: :class:`~delayq.sync.Ready`.
        pending: The messages that are not due yet: :class:`~delayq.sync.Pending`.
    """

    ready: Ready[T]
    pending: Pending[T]

    def __init__(self, name: str, queue: QueueRef[AsyncDelayedQueue[T]]) -> None:
        super().__init__(name, queue)
        self.ready = Ready(queue)
        self.pending = Pending(queue)

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        try:
            return self._synchronous(super()._run(call))
        except (NotDurable, OutcomeUnknown) as error:
            error.stored = tuple(map(self._synchronous, error.stored))
            raise

    def _synchronous(self, result: Any) -> Any:
        """Return a result with receipts of this module."""
        if isinstance(result, AsyncReceipt):
            return Receipt(self._queue, result)
        return [*map(self._synchronous, result)] if isinstance(result, list) else result
