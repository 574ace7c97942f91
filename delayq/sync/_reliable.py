"""Reliable queues for code that is not asynchronous."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC
from typing import TYPE_CHECKING, Any, Generic, Literal

from delayq._functions import spell_out
from delayq._generics import T
from delayq._reliable.settings import QueueOptions
from delayq.errors import Closed
from delayq.sync._link import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime, tzinfo
    from typing import Self, Unpack

    from delayq._durations import Duration
    from delayq._reliable.dead_letters import DeadLetter
    from delayq._reliable.groups import Group
    from delayq._reliable.limits import Limit
    from delayq._reliable.message import Message
    from delayq._reliable.offering import Offer, OnDuplicate
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.queue import ReliableQueue as AsyncReliableQueue
    from delayq._reliable.replies import State
    from delayq._reliable.schedules import Schedule
    from delayq._reliable.settings import QueueSettings
    from delayq.stats import Activity, QueueDepth
    from delayq.sync._link import Door


class DeadLetters(Generic[T]):
    """The dead letters of one queue. The methods are those of :class:`delayq.DeadLetters`."""

    def __init__(self, door: Door[AsyncReliableQueue[T]]) -> None:
        self._door = door

    def size(self) -> int:
        """Return the number of dead letters."""
        return self._door.run(lambda queue: queue.dead.size())

    def list(self, *, offset: int = 0, limit: int = 100) -> list[DeadLetter[T]]:
        """List dead letters, oldest first."""
        return self._door.run(lambda queue: queue.dead.list(offset=offset, limit=limit))

    def redrive(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Requeue dead letters, and return how many.

        ``progress`` is called in the thread that does the clients' work.
        """
        some = None if ids is None else here(ids)
        return self._door.run(lambda queue: queue.dead.redrive(some, progress=progress))

    def purge(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop dead letters for good, and return how many.

        ``progress`` is called in the thread that does the clients' work.
        """
        some = None if ids is None else here(ids)
        return self._door.run(lambda queue: queue.dead.purge(some, progress=progress))


class Groups(Generic[T]):
    """The groups of one queue. The methods are those of :class:`delayq.Groups`."""

    def __init__(self, door: Door[AsyncReliableQueue[T]]) -> None:
        self._door = door

    def set_limit(self, group: str, limit: Limit | None) -> None:
        """Give a group a limit of its own, instead of the queue's ``group_limit``."""
        return self._door.run(lambda queue: queue.groups.set_limit(group, limit))

    def get(self, group: str) -> Group:
        """Return a group."""
        return self._door.run(lambda queue: queue.groups.get(group))

    def list(self, *, after: str | None = None, limit: int = 100) -> list[Group]:
        """List groups by name."""
        return self._door.run(lambda queue: queue.groups.list(after=after, limit=limit))

    def pause(self, group: str) -> None:
        """Stop handing out messages of a group, in every process, until :meth:`resume`."""
        return self._door.run(lambda queue: queue.groups.pause(group))

    def resume(self, group: str) -> bool:
        """End a group's pause, and return whether there was one."""
        return self._door.run(lambda queue: queue.groups.resume(group))


class ReliableQueue(Generic[T]):
    """A reliable queue for code that is not asynchronous.

    Create one with :meth:`delayq.sync.Client.reliable_queue`. Each method does what the method of
    :class:`delayq.ReliableQueue` with the same name does, with the same arguments and errors.

    Attributes:
        name: The queue's name.
        dead: The queue's dead letters: :class:`~delayq.sync.DeadLetters`.
        groups: The groups of its messages: :class:`~delayq.sync.Groups`.
    """

    def __init__(self, name: str, door: Door[AsyncReliableQueue[T]]) -> None:
        self._name = name
        self._door = door
        self.dead: DeadLetters[T] = DeadLetters(door)
        self.groups: Groups[T] = Groups(door)

    @property
    def name(self) -> str:
        return self._name

    # Offering

    def offer(
        self,
        value: T,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
        id: str | None = None,  # noqa: A002
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
        """Store a message that becomes due after a delay, and return its id.

        Calls of several threads at once share a round trip.
        """
        return self._door.run(
            lambda queue: queue.offer(
                value,
                delay,
                at=at,
                id=id,
                headers=headers,
                priority=priority,
                ttl=ttl,
                max_attempts=max_attempts,
                timeout=timeout,
                unique_for=unique_for,
                on_duplicate=on_duplicate,
                group=group,
                durability=durability,
            )
        )

    def offer_many(self, offers: Iterable[Offer[T]], *, durability: str | None = None) -> list[str]:
        """Store many messages in few round trips, and return their ids, in order."""
        some = here(offers)
        return self._door.run(lambda queue: queue.offer_many(some, durability=durability))

    # By id

    def cancel(self, id: str, *, running: bool = False) -> bool:  # noqa: A002
        """Remove a message unless a worker has it and ``running`` is false. Return whether it was
        there.
        """
        return self._door.run(lambda queue: queue.cancel(id, running=running))

    def cancel_many(self, ids: Iterable[str], *, running: bool = False) -> list[bool]:
        """Remove messages in few round trips. Return which of them were there."""
        some = here(ids)
        return self._door.run(lambda queue: queue.cancel_many(some, running=running))

    def reschedule(
        self,
        id: str,  # noqa: A002
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> bool:
        """Make a message due ``delay`` from now, or at ``at``, unless a worker has it.

        Return whether it was there.
        """
        return self._door.run(lambda queue: queue.reschedule(id, delay, at=at))

    def reschedule_many(
        self,
        ids: Iterable[str],
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> list[bool]:
        """Reschedule messages in few round trips. Return which of them were there."""
        some = here(ids)
        return self._door.run(lambda queue: queue.reschedule_many(some, delay, at=at))

    def get(self, id: str) -> Message[T] | None:  # noqa: A002
        """Return a live message to look at; None if there is no message with that id."""
        return self._door.run(lambda queue: queue.get(id))

    # Recurring messages

    def schedule(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        value: T,
        timezone: str | tzinfo = UTC,
        headers: Mapping[str, str] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        version: int = 0,
    ) -> datetime:
        """Schedule a recurring message, and return when the next occurrence is due."""
        return self._door.run(
            lambda queue: queue.schedule(
                name,
                cron=cron,
                every=every,
                value=value,
                timezone=timezone,
                headers=headers,
                priority=priority,
                ttl=ttl,
                max_attempts=max_attempts,
                timeout=timeout,
                version=version,
            )
        )

    def unschedule(self, name: str) -> bool:
        """Delete a schedule and drop its waiting message. Return whether there was one."""
        return self._door.run(lambda queue: queue.unschedule(name))

    def pause_schedule(self, name: str) -> bool:
        """Pause a schedule and drop its waiting message. Return whether there is that schedule."""
        return self._door.run(lambda queue: queue.pause_schedule(name))

    def resume_schedule(self, name: str) -> bool:
        """Resume a schedule. Return whether there is one of that name."""
        return self._door.run(lambda queue: queue.resume_schedule(name))

    def schedules(self) -> list[Schedule]:
        """Return the queue's schedules, by name."""
        return self._door.run(lambda queue: queue.schedules())

    # Results

    def result(self, id: str, timeout: Duration | None = None) -> Any:  # noqa: A002
        """Return what the handler of a message has returned, once it has."""
        return self._door.run(lambda queue: queue.result(id, timeout))

    def history(self, id: str) -> MessageHistory | None:  # noqa: A002
        """Return what is known about a message, alive or not; None if that is nothing."""
        return self._door.run(lambda queue: queue.history(id))

    # Inspection and cleanup

    def stats(self) -> QueueDepth:
        """Return the number of messages in each state."""
        return self._door.run(lambda queue: queue.stats())

    def activity(self, *, minutes: int | None = None, hours: int | None = None) -> list[Activity]:
        """Return what happened in the queue, in all processes, minute by minute or hour by hour."""
        return self._door.run(lambda queue: queue.activity(minutes=minutes, hours=hours))

    def peek(self, limit: int = 1) -> list[Message[T]]:
        """Return the messages to be claimed next: the ready ones, then those that come due."""
        return self._door.run(lambda queue: queue.peek(limit))

    def list(self, state: State, *, offset: int = 0, limit: int = 100) -> list[Message[T]]:
        """Return messages in one state, in the order in which they will come."""
        return self._door.run(lambda queue: queue.list(state, offset=offset, limit=limit))

    def purge(
        self,
        state: Literal["delayed", "ready", "all"] = "all",
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop messages, in steps that do not block the server, and return how many.

        ``progress`` is called in the thread that does the clients' work.
        """
        return self._door.run(lambda queue: queue.purge(state, progress=progress))

    def pause(self) -> None:
        """Stop all claims, in every process, until :meth:`resume`."""
        self._door.run(lambda queue: queue.pause())

    def resume(self) -> bool:
        """End a pause, and return whether there was one."""
        return self._door.run(lambda queue: queue.resume())

    # Settings

    def settings(self) -> QueueSettings:
        """Return the queue's settings, which all its clients share."""
        return self._door.run(lambda queue: queue.settings())

    @spell_out(QueueOptions)
    def configure(self, **settings: Unpack[QueueOptions]) -> QueueSettings:
        """Change settings of the queue, for all its clients, and return all of them."""
        return self._door.run(lambda queue: queue.configure(**settings))

    # Closing

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
        return f"<delayq.sync.ReliableQueue {self.name!r}>"
