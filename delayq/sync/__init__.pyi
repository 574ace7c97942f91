"""Written by ``make stubs``: the methods are those of the asynchronous classes."""

import builtins
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Container
from collections.abc import Coroutine
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from datetime import datetime
from datetime import tzinfo
from delayq import client as asynchronous
from delayq._durations import Duration
from delayq._generics import T
from delayq._reliable.batches import BatchStatus
from delayq._reliable.dead_letters import DeadLetter
from delayq._reliable.following import MessageEvent
from delayq._reliable.groups import Group
from delayq._reliable.limits import Limit
from delayq._reliable.message import Message
from delayq._reliable.offer import Offer
from delayq._reliable.offer import OnDuplicate
from delayq._reliable.outcomes import MessageHistory
from delayq._reliable.replies import LiveState
from delayq._reliable.schedules import Schedule
from delayq._reliable.settings import HandleOptions
from delayq._reliable.settings import QueueOptions
from delayq._reliable.settings import QueueSettings
from delayq.codecs import Codec
from delayq.errors import ServerError
from delayq.instrumentation import Observer
from delayq.stats import Activity
from delayq.stats import ClientStats
from delayq.stats import QueueDepth
from delayq.stats import QueueStats
from delayq.sync._client import P
from delayq.sync._client import R
from delayq.tasks import Tasks
from redis.asyncio import Redis
from redis.asyncio import RedisCluster
from typing import Any
from typing import Concatenate
from typing import Generic
from typing import Literal
from typing import Self
from typing import Unpack
from typing import overload

__all__ = ['Batch', 'Client', 'DeadLetters', 'DelayedQueue', 'Groups', 'Pending', 'Ready', 'Receipt', 'ReliableQueue', 'connect']

class Batch:
    """A batch of messages, from :meth:`ReliableQueue.offer_batch`, for code that is not
    asynchronous. The methods are those of :class:`delayq.Batch`.
    """
    id: str
    def status(self) -> BatchStatus:
        """Return how far its messages are."""
    def wait(self, timeout: Duration | None = None) -> BatchStatus:
        """Wait until all of its messages have ended, and return how."""
    def cancel(self, *, running: bool = False) -> int:
        """Cancel the messages that have not ended."""
    def results(self) -> dict[str, Any]:
        """Return the results of the messages that were handled, by their ids."""

class Client:
    """A connection to one server, and the queues on it, for code that is not asynchronous."""
    def __enter__(self) -> Self:
        """Open the client now: make a first call to the server."""
    def __exit__(self, *_: object) -> None:
        ...
    @overload
    def delayed_queue(
        self,
        name: str,
        *,
        max_payload: int = ...,
        ordered_list: bool = ...,
        durability: str = ...,
    ) -> DelayedQueue[Any]:
        """Declare a queue, which the next call opens."""
    @overload
    def delayed_queue(
        self,
        name: str,
        *,
        codec: Codec[T],
        max_payload: int = ...,
        ordered_list: bool = ...,
        durability: str = ...,
    ) -> DelayedQueue[T]:
        ...
    @overload
    def reliable_queue(
        self,
        name: str,
        *,
        codec: None = None,
        **settings: Unpack[HandleOptions],
    ) -> ReliableQueue[Any]:
        """Declare a queue, which the next call opens."""
    @overload
    def reliable_queue(
        self,
        name: str,
        *,
        codec: Codec[T],
        **settings: Unpack[HandleOptions],
    ) -> ReliableQueue[T]:
        ...
    def run(
        self,
        function: Callable[Concatenate[asynchronous.Client, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a coroutine function with an asynchronous client, and return its result."""
    async def arun(
        self,
        function: Callable[Concatenate[asynchronous.Client, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a coroutine function as :meth:`run` does, for code in any other event loop."""
    @property
    def endpoint(self) -> tuple[str, int | None] | None:
        """The server's host and port, or the path of its socket and None; None if unknown."""
    def observe(self, observer: Observer) -> None:
        """Notify ``observer`` of what happens to messages, from the next call on."""
    def unobserve(self, observer: Observer) -> None:
        """Stop notifying ``observer``, from the next call on. Does nothing if it is unknown."""
    def close(self) -> None:
        """Close every queue and connection of this process, as :meth:`delayq.Client.aclose` does.
        """
    def server_time(self) -> datetime:
        """Return the time on the server's clock (UTC), which decides when a message is due."""
    def statistics(self) -> ClientStats:
        """Return what the client holds and has done so far."""
    def queue_statistics(self) -> builtins.list[QueueStats]:
        """Return what the client has done with each open queue."""
    def queue_depths(
        self,
        *,
        exclude: Container[tuple[str, str]] = ...,
    ) -> dict[tuple[str, str], QueueDepth | ServerError]:
        """Return how many messages each open queue holds, by the queue's kind and name as in
        :meth:`queue_statistics`.
        """

class DeadLetters(Generic[T]):
    """The dead letters of one queue. The methods are those of :class:`delayq.DeadLetters`."""
    def size(self) -> int:
        """Return the number of dead letters."""
    def list(self, *, offset: int = 0, limit: int = 100) -> builtins.list[DeadLetter[T]]:
        """List dead letters, oldest first."""
    def redrive(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Requeue dead letters: they are due now, and have all their attempts again."""
    def purge(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop dead letters for good."""

class DelayedQueue(Generic[T]):
    """A delayed queue, in Redisson's format, for code that is not asynchronous."""
    ready: Ready[T]
    pending: Pending[T]
    def offer(
        self,
        value: T,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
        durability: str | None = None,
    ) -> Receipt[T]:
        """Store a message that becomes due after a delay."""
    def offer_many(
        self,
        messages: Iterable[tuple[T, Duration]],
        *,
        durability: str | None = None,
    ) -> builtins.list[Receipt[T]]:
        """Store many messages, each a pair of value and delay, in few round trips."""
    @property
    def name(self) -> str:
        ...
    def close(self) -> None:
        """Close the queue on this client, for every handle of that name in this process."""
    def __enter__(self) -> Self:
        ...
    def __exit__(self, *_: object) -> None:
        ...

class Groups:
    """The groups of one queue. The methods are those of :class:`delayq.Groups`."""
    def set_limit(self, group: str, limit: Limit | None) -> None:
        """Give a group a limit of its own, instead of the queue's ``group_limit``."""
    def get(self, group: str) -> Group:
        """Return a group. One that has no messages, and never had any, is empty."""
    def list(self, *, after: str | None = None, limit: int = 100) -> builtins.list[Group]:
        """List groups by name."""
    def pause(self, group: str) -> None:
        """Stop handing out messages of a group, in every process, until :meth:`resume`."""
    def resume(self, group: str) -> bool:
        """End a group's pause, and return whether there was one."""

class Pending(Generic[T]):
    """The messages that are not due yet."""
    def size(self) -> int:
        """Return the number of pending messages."""
    def peek(self) -> T | None:
        """Return the message offered first, due or not, without removing it, or None."""
    def read_all(self) -> builtins.list[T]:
        """Return every pending message, in offer order, without removing any."""
    def entries(self) -> builtins.list[tuple[T, datetime]]:
        """Return every pending message with its due time (UTC), in due order; none is removed."""
    def contains(self, value: T) -> bool:
        """Return whether an equal message is pending."""
    def contains_all(self, values: Iterable[T]) -> bool:
        """Return whether an equal message is pending for each of ``values``, if there are any."""
    def remove(self, value: T) -> bool:
        """Remove the first equal message in offer order, and return whether there was one."""
    def remove_all(self, values: Iterable[T]) -> bool:
        """Remove every message that equals one of ``values``, and return whether there were any."""
    def retain_all(self, values: Collection[T]) -> bool:
        """Remove every message that equals none of ``values``. Return whether there were any."""
    def poll_last_and_offer_first_to(self, name: str) -> T | None:
        """Move the message that was offered last to the head of the ready list of queue ``name``,
        without further delay.
        """
    def clear(self) -> bool:
        """Drop every pending message, and return whether there were any. Ready messages stay."""
    def expire(self, duration: Duration) -> bool:
        """Make all pending messages disappear after ``duration``. Return whether there were any."""

class Ready(Generic[T]):
    """The list of messages that are due."""
    def size(self) -> int:
        """Return the number of ready messages."""
    def leased(self) -> int:
        """Return how many messages are leased by :meth:`DelayedQueue.deliveries`, besides these."""
    def read_all(self) -> builtins.list[T]:
        """Return every ready message, beginning with the next one to be taken; none is removed."""
    def clear(self) -> bool:
        """Drop every ready message, and return whether there were any. Pending messages stay."""

class Receipt(Generic[T]):
    """A receipt for a pending message, from :meth:`DelayedQueue.offer`, to cancel or reschedule it.
    """
    @property
    def id(self) -> str:
        ...
    @property
    def due_at(self) -> datetime:
        ...
    def cancel(self) -> bool:
        """Remove the message from the queue."""
    def reschedule(self, delay: Duration | None = None, *, at: datetime | None = None) -> bool:
        """Make the message due ``delay`` from now, or at ``at``, instead of at its previous time.
        """

class ReliableQueue(Generic[T]):
    """A reliable queue for code that is not asynchronous."""
    dead: DeadLetters[T]
    groups: Groups
    def follow(self, id: str, timeout: Duration | None = None) -> Iterator[MessageEvent]:
        """Follow a message: yield its state now, each change, and at last how it ended."""
    def offer(
        self,
        value: T,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
        id: str | None = None,
        headers: Mapping[str, str] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        unique_for: Duration | None = None,
        on_duplicate: OnDuplicate = "raise",
        group: str | None = None,
        durability: str | None = None,
    ) -> str:
        """Store a message that becomes due after a delay. Concurrent calls share a round trip."""
    def offer_many(
        self,
        offers: Iterable[Offer[T]],
        *,
        durability: str | None = None,
    ) -> builtins.list[str]:
        """Store many messages in few round trips. All of them are checked before any is written."""
    def offer_batch(
        self,
        offers: Iterable[Offer[T]],
        *,
        then: Offer[T] | None = None,
        on_failure: Offer[T] | None = None,
        durability: str | None = None,
    ) -> Batch:
        """Store messages that belong together, and what follows when all of them have ended."""
    def batch(self, id: str) -> Batch:
        """Return the batch with an id. Its methods tell whether there is one."""
    def cancel(self, id: str, *, running: bool = False) -> bool:
        """Remove a message, due or not, unless a worker has it."""
    def cancel_many(self, ids: Iterable[str], *, running: bool = False) -> builtins.list[bool]:
        """Remove messages as :meth:`cancel` does, up to 100 in a round trip."""
    def bury(self, id: str, reason: str) -> bool:
        """Make a message a dead letter, due or not, unless a worker has it. It is not tried again,
        unless it is redriven.
        """
    def bury_many(self, ids: Iterable[str], reason: str) -> builtins.list[bool]:
        """Make messages dead letters as :meth:`bury` does, up to 100 in a round trip."""
    def reschedule(
        self,
        id: str,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> bool:
        """Make a message due ``delay`` from now, or at ``at``, unless a worker has it."""
    def reschedule_many(
        self,
        ids: Iterable[str],
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> builtins.list[bool]:
        """Reschedule messages as :meth:`reschedule` does, up to 100 in a round trip."""
    def get(self, id: str) -> Message[T] | None:
        """Return a live message without leasing it to you; None if there is no message with that
        id.
        """
    def result(self, id: str, timeout: Duration | None = None) -> Any:
        """Return what the handler of a message has returned, or :meth:`Message.ack` was given."""
    def history(self, id: str) -> MessageHistory | None:
        """Return what is known about a message, alive or not; None if that is nothing."""
    def stats(self) -> QueueDepth:
        """Return the number of messages in each state."""
    def activity(
        self,
        *,
        minutes: int | None = None,
        hours: int | None = None,
    ) -> builtins.list[Activity]:
        """Return what happened in the queue, in all processes, minute by minute or hour by hour."""
    def peek(self, limit: int = 1) -> builtins.list[Message[T]]:
        """Return the messages to be claimed next: the ready ones, then those that come due."""
    def list(
        self,
        state: LiveState,
        *,
        offset: int = 0,
        limit: int = 100,
    ) -> builtins.list[Message[T]]:
        """Return messages in one state, in the order in which they will come."""
    def purge(
        self,
        state: Literal["delayed", "ready", "all"] = "all",
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop messages, in steps that do not block the server, and return how many."""
    def pause(self) -> None:
        """Stop all claims, in every process, until :meth:`resume`."""
    def resume(self) -> bool:
        """End a pause, and return whether there was one."""
    def settings(self) -> QueueSettings:
        """Return the queue's settings, which all its clients share."""
    def configure(self, **changes: Unpack[QueueOptions]) -> QueueSettings:
        """Change settings of the queue, for all its clients, and return all of them."""
    def schedule(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        value: T,
        timezone: str | tzinfo = ...,
        headers: Mapping[str, str] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        version: int = 0,
    ) -> datetime:
        """Schedule a recurring message."""
    def unschedule(self, name: str) -> bool:
        """Delete a schedule, and drop its waiting message."""
    def pause_schedule(self, name: str) -> bool:
        """Pause a schedule, and drop its waiting message."""
    def resume_schedule(self, name: str) -> bool:
        """Resume a paused schedule."""
    def schedules(self) -> builtins.list[Schedule]:
        """Return the queue's schedules, by name."""
    @property
    def name(self) -> str:
        ...
    def close(self) -> None:
        """Close the queue on this client, for every handle of that name in this process."""
    def __enter__(self) -> Self:
        ...
    def __exit__(self, *_: object) -> None:
        ...

def connect(
    address: str | Redis | RedisCluster | None = None,
    *,
    resync_interval: Duration = 5.0,
    max_connections: int = ...,
    retry_for: Duration | None = None,
    name_mapper: Callable[[str], str] | None = None,
    tasks: Iterable[Tasks] = ...,
) -> Client:
    """Create a client for code that is not asynchronous."""
