"""One logical reliable queue over several: each partition lies in a slot of its own, so a cluster shares the work."""
# ruff: noqa: SLF001 - the partitions are its own

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Generic, Literal, TypeVar
from zlib import crc32

from delayq._durations import Duration, seconds
from delayq._ids import checked_id, new_id
from delayq._offering import Offer, OnDuplicate, with_headers
from delayq._scheduling.recurrence import is_occurrence, schedule_of
from delayq.dead_letters import DeadLetter, check_page
from delayq.errors import BadInput, DuplicateMessage, NotDurable, OutcomeUnknown, QueueFull
from delayq.hooks import Sending
from delayq.statistics import Stats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableSequence, Sequence
    from datetime import datetime, tzinfo
    from types import TracebackType
    from typing import Self

    from delayq._scheduling.claims import Claim
    from delayq._scheduling.taker import Taken
    from delayq.message import Message, State
    from delayq.recurring import Schedule
    from delayq.reliable_queue import ReliableQueue

T = TypeVar("T")
R = TypeVar("R")

# Batches wait for a loop that handles one message for so long at most, seconds: then other consumers may have them.
_PATIENCE = 0.25


def partition_of(id: str, partitions: int) -> int:  # noqa: A002
    """Where a message of that id lies: the same in every process, and for ever. What recurs lies where its schedule does."""
    name = id.encode()
    return crc32(schedule_of(name) if is_occurrence(name) else name) % partitions


class PartitionedQueue(Generic[T]):
    """A queue in partitions, each a :class:`~delayq.ReliableQueue` with keys of its own.

    Made by :meth:`delayq.Client.reliable_queue` with ``partitions=N``. A message lies in the partition that its id names, so
    every process must say the same number. Order, ``max_size`` and the rate of one server hold within a partition.

    Attributes:
        name: The queue's name.
        partitions: The queues that it consists of.
        dead: The messages that died, of all partitions.
    """

    def __init__(self, name: str, partitions: Sequence[ReliableQueue[T]]) -> None:
        self.name: str = name
        self.partitions: tuple[ReliableQueue[T], ...] = tuple(partitions)
        self.dead: PartitionedDeadLetters[T] = PartitionedDeadLetters(self)
        self._next = 0

    def partition(self, id: str) -> ReliableQueue[T]:  # noqa: A002
        """The partition in which a message of that id lies."""
        return self.partitions[partition_of(checked_id(id), len(self.partitions))]

    # Offering

    async def offer(
        self,
        value: T,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
        id: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        on_duplicate: OnDuplicate = "raise",
        durability: str | None = None,
    ) -> str:
        """Store a message. As :meth:`delayq.ReliableQueue.offer`."""
        while True:
            chosen = new_id() if id is None else id
            try:
                return await self.partition(chosen).offer(
                    value,
                    delay,
                    at=at,
                    id=chosen,
                    headers=headers,
                    priority=priority,
                    ttl=ttl,
                    on_duplicate=on_duplicate,
                    durability=durability,
                )
            except DuplicateMessage:
                # Another process has made up the same one.
                if id is not None:
                    raise

    async def offer_many(self, offers: Iterable[Offer[T]], *, durability: str | None = None) -> list[str]:
        """Store many messages, in all partitions at once. As :meth:`delayq.ReliableQueue.offer_many`."""
        named = [offer if offer.id is not None else replace(offer, id=new_id()) for offer in offers]
        hooks = self.partitions[0]._open.hooks
        if not hooks.sending:
            return await self._offer_named(named, durability)
        with hooks.around_sending(Sending(self.name, "reliable", len(named), batch=True, delay=None)) as sending:
            sending.ids = ids = await self._offer_named(with_headers(named, sending.headers), durability)
        return ids

    async def _offer_named(self, named: Sequence[Offer[T]], durability: str | None) -> list[str]:
        parts: dict[ReliableQueue[T], list[Offer[T]]] = {}
        for offer in named:
            parts.setdefault(self.partition(str(offer.id)), []).append(offer)
        # All is checked before anything is written.
        checked = [(queue, queue._messages(some)) for queue, some in parts.items()]
        calls = [queue._store(messages, [False] * len(messages), durability) for queue, messages in checked]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            stored = [each.id for outcome in outcomes if not isinstance(outcome, BaseException) for each in outcome]
            raise _of_all(errors, stored, len(named))
        return [str(offer.id) for offer in named]

    # Taking

    async def claim(self, count: int = 1, wait: Duration = 0.0) -> list[Message[T]]:
        """Take up to ``count`` messages that are due, of all partitions. As :meth:`delayq.ReliableQueue.claim`."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadInput(f"count is an int of at least 1, not {count!r}")
        wait_s = seconds(wait, "wait")
        # Each time another one is the first to fill what is asked for.
        self._next = (self._next + 1) % len(self.partitions)
        queues = self.partitions[self._next :] + self.partitions[: self._next]
        taking = {asyncio.create_task(queue._take(count, wait_s)): queue for queue in queues}
        try:
            waiting = set(taking)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if wait_s and any(task.exception() is None and task.result() for task in done):
                    break
            # Who is cancelled in time puts back what it has; who is late has something to give.
            for task in waiting:
                task.cancel()
            await asyncio.wait(taking)
        except BaseException:
            for task, queue in taking.items():
                task.cancel()
                task.add_done_callback(partial(_give_back, queue))
            raise
        return _shared_out(taking, count)

    async def __aiter__(self) -> AsyncIterator[Message[T]]:
        """Take messages as they come due, of all partitions in turn, a batch of each, until they close. As a loop over a
        :class:`~delayq.ReliableQueue`: where handling takes long, a batch is one message.
        """
        reader = _Reader[T]()
        pumps = [_Pump(queue, reader) for queue in self.partitions]
        tasks = [asyncio.create_task(pump.run(), name=f"pump {pump.queue.name}") for pump in pumps]
        turn = reader.turn
        try:
            while True:
                if reader.moved.is_set():
                    reader.moved.clear()
                    _raise_first(tasks)
                if not turn:
                    if all(task.done() for task in tasks):
                        return
                    await reader.moved.wait()
                    continue
                pump = turn[0]
                taken = await pump.next()
                if emptied := not pump.batch:
                    pump.empty()
                if taken is not None:
                    reader.handed_out += 1
                    reader.goes_on.clear()
                    yield pump.queue._leased(taken[1], turn)
                    reader.goes_on.set()
                if emptied:
                    # A reader who never waits would keep it from fetching more while the others' batches are handled.
                    await asyncio.sleep(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # By id

    async def cancel(self, id: str) -> bool:  # noqa: A002
        """As :meth:`delayq.ReliableQueue.cancel`."""
        return await self.partition(id).cancel(id)

    async def reschedule(self, id: str, delay: Duration | None = None, *, at: datetime | None = None) -> bool:  # noqa: A002
        """As :meth:`delayq.ReliableQueue.reschedule`."""
        return await self.partition(id).reschedule(id, delay, at=at)

    async def get(self, id: str) -> Message[T] | None:  # noqa: A002
        """As :meth:`delayq.ReliableQueue.get`."""
        return await self.partition(id).get(id)

    # What recurs

    async def schedule(
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
        version: int = 0,
    ) -> datetime:
        """Let a message recur, in the partition that ``name`` names. As :meth:`delayq.ReliableQueue.schedule`."""
        return await self._home(name).schedule(
            name,
            cron=cron,
            every=every,
            value=value,
            timezone=timezone,
            headers=headers,
            priority=priority,
            ttl=ttl,
            version=version,
        )

    async def unschedule(self, name: str) -> bool:
        """As :meth:`delayq.ReliableQueue.unschedule`."""
        return await self._home(name).unschedule(name)

    async def schedules(self) -> list[Schedule]:
        """What recurs in all partitions, by name."""
        parts = await _of_each(self.partitions, lambda queue: queue.schedules())
        return sorted((each for part in parts for each in part), key=lambda each: each.name)

    # Looking, and cleaning up

    async def stats(self) -> Stats:
        """How many messages are where, in all partitions; paused if any is."""
        return Stats.total(await _of_each(self.partitions, lambda queue: queue.stats()))

    async def peek(self, count: int = 1) -> list[Message[T]]:
        """Look at the messages that are claimed next. As :meth:`delayq.ReliableQueue.peek`."""
        ready = await self.list("ready", limit=count)
        return ready if len(ready) >= count else ready + await self.list("delayed", limit=count - len(ready))

    async def list(self, state: State, *, offset: int = 0, limit: int = 100) -> list[Message[T]]:
        """Look at messages in one state, of all partitions, in the order in which they come.

        Each partition is asked for ``offset + limit``: far pages cost much.
        """
        check_page(offset, limit)
        parts = await _of_each(self.partitions, lambda queue: queue.list(state, limit=offset + limit))
        merged = heapq.merge(*parts, key=lambda message: (-message.priority if state == "ready" else 0, message.due_at))
        return [*islice(merged, offset, offset + limit)]

    async def purge(
        self, state: Literal["delayed", "ready", "all"] = "all", progress: Callable[[int], None] | None = None
    ) -> int:
        """Drop messages. As :meth:`delayq.ReliableQueue.purge`."""
        return sum(await _of_each(self.partitions, lambda queue: queue.purge(state, progress)))

    async def pause(self) -> None:
        """Let nobody claim anything any more. As :meth:`delayq.ReliableQueue.pause`."""
        await _of_each(self.partitions, lambda queue: queue.pause())

    async def resume(self) -> bool:
        """End a pause, and say whether there was one."""
        return any(await _of_each(self.partitions, lambda queue: queue.resume()))

    # Closing

    async def aclose(self) -> None:
        """Close all partitions on this client. As :meth:`delayq.ReliableQueue.aclose`."""
        await _of_each(self.partitions, lambda queue: queue.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<PartitionedQueue {self.name!r}, {len(self.partitions)} partitions>"

    def _home(self, schedule: str) -> ReliableQueue[T]:
        return self.partitions[crc32(checked_id(schedule).encode()) % len(self.partitions)]


class _Reader(Generic[T]):
    """A loop over all partitions, as those see it who fetch for it.

    Attributes:
        turn: Who has messages at hand, the one whose turn it is first.
        moved: Set when somebody has messages, or is done.
        goes_on: Set while the loop handles no message.
        handed_out: So many it has handed out.
    """

    def __init__(self) -> None:
        self.turn: deque[_Pump[T]] = deque()
        self.moved: asyncio.Event = asyncio.Event()
        self.goes_on: asyncio.Event = asyncio.Event()
        self.handed_out: int = 0


class _Pump(Generic[T]):
    """Fetches one partition's batches for a loop over all."""

    def __init__(self, queue: ReliableQueue[T], reader: _Reader[T]) -> None:
        self.queue: ReliableQueue[T] = queue
        self.batch: deque[Taken[Claim]] = deque()
        self._reader = reader
        self._emptied = asyncio.Event()

    async def run(self) -> None:
        try:
            async with aclosing(self.queue._open.claims.taker.batches()) as batches:
                async for batch in batches:
                    self.batch = batch
                    self._emptied.clear()
                    self._reader.turn.append(self)
                    self._reader.moved.set()
                    if not await self._used_up():
                        await self._reader.goes_on.wait()
        finally:
            # What is left of the batch has gone back.
            self.empty()
            self._reader.moved.set()

    async def _used_up(self) -> bool:
        """Wait until the batch is. False if the loop handles one message for long: then the batch goes to others meanwhile."""
        while True:
            before = self._reader.handed_out
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await self._emptied.wait()
                return True
            if self._reader.handed_out == before:
                self.queue._open.claims.taker.give_back(self.batch)
                self.batch.clear()
                self.empty()
                return False

    def empty(self) -> None:
        """The batch is used up: fetch the next one, while others have their turn."""
        if self in self._reader.turn:
            self._reader.turn.remove(self)
        self._emptied.set()

    async def next(self) -> Taken[Claim] | None:
        """The next one of the batch, if it is still ours and to be handed out."""
        queue = self.queue
        # The queue may have closed since: then all has gone back.
        if self.batch and queue._open.keeper.is_short(self.batch[0][1]):
            await queue._drop_lost(self.batch)
        if not self.batch:
            return None
        taken = self.batch.popleft()
        if is_occurrence(taken[1].id) and not await queue._open.recurrence.begin([taken]):
            return None
        return taken


class PartitionedDeadLetters(Generic[T]):
    """The dead letters of all partitions. As :class:`~delayq.DeadLetters`."""

    def __init__(self, queue: PartitionedQueue[T]) -> None:
        self._queue = queue

    async def size(self) -> int:
        """How many there are."""
        return sum(await _of_each(self._queue.partitions, lambda queue: queue.dead.size()))

    async def list(self, limit: int = 100, offset: int = 0) -> list[DeadLetter[T]]:
        """Some of them, the one that died first first. Each partition is asked for ``offset + limit``."""
        check_page(offset, limit)
        parts = await _of_each(self._queue.partitions, lambda queue: queue.dead.list(offset + limit))
        return [*islice(heapq.merge(*parts, key=lambda letter: letter.died_at), offset, offset + limit)]

    async def redrive(self, ids: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None) -> int:
        """Give dead letters another life. As :meth:`delayq.DeadLetters.redrive`, one partition after the other."""
        return await self._of_each_part(ids, progress, lambda queue, some, tell: queue.dead.redrive(some, tell))

    async def purge(self, ids: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None) -> int:
        """Drop dead letters for good. As :meth:`delayq.DeadLetters.purge`."""
        return await self._of_each_part(ids, progress, lambda queue, some, tell: queue.dead.purge(some, tell))

    async def _of_each_part(
        self,
        ids: Iterable[str] | None,
        progress: Callable[[int, int], None] | None,
        act: Callable[[ReliableQueue[T], MutableSequence[str] | None, Callable[[int, int], None] | None], Awaitable[int]],
    ) -> int:
        """What all partitions say that they have done, one after the other."""
        parts = self._parts(ids)
        if progress is None:
            return sum([await act(queue, some, None) for queue, some in parts])
        totals = [len(some) if some is not None else await queue.dead.size() for queue, some in parts]
        done = looked_at = 0
        for (queue, some), total in zip(parts, totals, strict=True):

            def tell(looked_at_here: int, _: int, before: int = looked_at) -> None:
                progress(min(before + looked_at_here, sum(totals)), sum(totals))

            done += await act(queue, some, tell)
            looked_at += total
        return done

    def _parts(self, ids: Iterable[str] | None) -> Sequence[tuple[ReliableQueue[T], MutableSequence[str] | None]]:
        if ids is None:
            return [(queue, None) for queue in self._queue.partitions]
        parts: dict[ReliableQueue[T], MutableSequence[str]] = {}
        for name in ids:
            parts.setdefault(self._queue.partition(name), []).append(name)
        return [*parts.items()]


def _shared_out(taking: Mapping[asyncio.Task[Sequence[Taken[Claim]]], ReliableQueue[T]], count: int) -> list[Message[T]]:
    """``count`` of what came; the rest goes back. Raises an error where only errors came."""
    messages: list[Message[T]] = []
    errors: list[BaseException] = []
    for task, queue in taking.items():
        if task.cancelled():
            continue
        if (error := task.exception()) is not None:
            errors.append(error)
            continue
        taken = task.result()
        room = count - len(messages)
        queue._open.claims.taker.give_back(taken[room:])
        messages += [queue._leased(claim) for _, claim in taken[:room]]
    if errors and not messages:
        raise errors[0]
    return messages


def _raise_first(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


def _give_back(queue: ReliableQueue[T], task: asyncio.Future[Sequence[Taken[Claim]]]) -> None:
    """What came for a caller who has gone goes back."""
    if not task.cancelled() and task.exception() is None:
        queue._open.claims.taker.give_back(task.result())


async def _of_each(queues: Iterable[ReliableQueue[T]], of: Callable[[ReliableQueue[T]], Awaitable[R]]) -> list[R]:
    """What each says, all asked at once. Everybody is waited for, and the first error raised."""
    outcomes = await asyncio.gather(*(of(queue) for queue in queues), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _of_all(errors: Sequence[BaseException], stored: Sequence[str], count: int) -> BaseException:
    """One error for what failed in several partitions: the one that leaves most open, with all that is stored for certain."""
    safe = [*stored, *(name for error in errors if not isinstance(error, NotDurable) for name in getattr(error, "stored", ()))]
    unsafe = [name for error in errors if isinstance(error, NotDurable) for name in error.stored]
    unknown = next((error for error in errors if isinstance(error, OutcomeUnknown)), None)
    other = next((error for error in errors if not isinstance(error, NotDurable | DuplicateMessage | QueueFull)), None)
    if unknown is not None or (other is not None and (safe or unsafe)):
        reason = unknown or other
        known = (*safe, *unsafe)
        return OutcomeUnknown(f"{len(known)} of {count} messages are stored, the others may be: {reason}", known)
    if other is not None:
        return other
    for kind in (DuplicateMessage, QueueFull):
        refused = [name for error in errors if isinstance(error, kind) for name in error.ids]
        if refused:
            return kind(tuple(refused), (*safe, *unsafe))
    return NotDurable(str(errors[0]), tuple(unsafe))
