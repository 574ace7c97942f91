"""One logical reliable queue over several: each partition is in a cluster slot of its own, so the
servers share the work.
"""
# ruff: noqa: SLF001 - it owns its partitions

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Generic, Literal, TypeVar
from zlib import crc32

from delayq._durations import Duration, seconds
from delayq._engine.leaving import Paced
from delayq._engine.prefetch import fetches_more, next_batch
from delayq._engine.waiters import shares
from delayq._reliable.dead_letters import DeadLetter, check_page
from delayq._reliable.ids import checked_id, new_id
from delayq._reliable.offering import Offer, OnDuplicate, with_headers
from delayq._reliable.recurrence import is_occurrence, schedule_of
from delayq._reliable.store import which_are_due
from delayq.errors import (
    BadInput,
    Closed,
    DelayqError,
    DuplicateMessage,
    NotDurable,
    OutcomeUnknown,
    QueueFull,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)
from delayq.instrumentation import OfferEvent
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        MutableSequence,
        Sequence,
    )
    from datetime import datetime, tzinfo
    from types import TracebackType
    from typing import Self

    from delayq._engine.waiters import Taken
    from delayq._reliable.message import Message
    from delayq._reliable.queue import ReliableQueue
    from delayq._reliable.replies import Claim, State
    from delayq._reliable.schedules import Schedule

T = TypeVar("T")
R = TypeVar("R")

if TYPE_CHECKING:
    _Taken = tuple[ReliableQueue[T], Taken[Claim]]

# While messages are in hand, how long to wait for servers that have not answered, seconds.
_MOMENT = 0.05


def partition_of(id: str, partitions: int) -> int:  # noqa: A002
    """Return the partition of a message id: the same in every process, and forever.

    The occurrences of a schedule are in the partition of the schedule.
    """
    name = id.encode()
    return crc32(schedule_of(name) if is_occurrence(name) else name) % partitions


class PartitionedQueue(Generic[T]):
    """A queue in partitions, each a :class:`~delayq.ReliableQueue` with keys of its own.

    Create one with :meth:`delayq.Client.reliable_queue` and ``partitions=N``. A message's id
    determines its partition, so every process must use the same number of partitions. Ordering,
    ``max_size`` and the throughput of one server apply to each partition.

    Attributes:
        name: The queue's name.
        partitions: The queues it consists of.
        dead: The dead letters of all partitions.
    """

    def __init__(self, name: str, partitions: Sequence[ReliableQueue[T]]) -> None:
        self.name: str = name
        self.partitions: tuple[ReliableQueue[T], ...] = tuple(partitions)
        self.dead: PartitionedDeadLetters[T] = PartitionedDeadLetters(self)
        self._next = 0

    def partition(self, id: str) -> ReliableQueue[T]:  # noqa: A002
        """Return the partition that holds messages with that id."""
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
        """Store a message. As :meth:`delayq.ReliableQueue.offer`.

        Without an ``id``, the message goes to another partition if the server of one is
        unavailable.
        """
        while True:
            chosen = self._new_id() if id is None else id
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
                # Another process has generated the same id.
                if id is not None:
                    raise
            except ServerUnavailable:
                # It is not stored there. In a cluster, other partitions are on other servers.
                if (
                    id is not None
                    or not self._is_away(self.partition(chosen))
                    or all(map(self._is_away, self.partitions))
                ):
                    raise

    def _new_id(self) -> str:
        """Generate an id in a partition whose server is available, as far as we know."""
        chosen = new_id()
        for _ in range(10 * len(self.partitions)):
            if not self._is_away(self.partition(chosen)):
                break
            chosen = new_id()
        return chosen

    def _is_away(self, queue: ReliableQueue[T]) -> bool:
        return queue._session.nodes.failed_lately(queue._keys.wake)

    async def offer_many(
        self, offers: Iterable[Offer[T]], *, durability: str | None = None
    ) -> list[str]:
        """Store many messages, in all partitions at once.

        As :meth:`delayq.ReliableQueue.offer_many`.
        """
        named = [
            offer if offer.id is not None else replace(offer, id=self._new_id()) for offer in offers
        ]
        hooks = self.partitions[0]._open.hooks
        if not hooks.sending:
            return await self._offer_named(named, durability)
        with hooks.around_sending(
            OfferEvent(self.name, "reliable", len(named), batch=True, delay=None)
        ) as sending:
            sending.ids = ids = await self._offer_named(
                with_headers(named, sending.headers), durability
            )
        return ids

    async def _offer_named(self, named: Sequence[Offer[T]], durability: str | None) -> list[str]:
        parts: dict[ReliableQueue[T], list[Offer[T]]] = {}
        for offer in named:
            parts.setdefault(self.partition(str(offer.id)), []).append(offer)
        # Check all messages before writing any.
        checked = [(queue, queue._messages(some)) for queue, some in parts.items()]
        calls = [
            queue._offer_messages(messages, [False] * len(messages), durability)
            for queue, messages in checked
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            stored = [
                each.id
                for outcome in outcomes
                if not isinstance(outcome, BaseException)
                for each in outcome
            ]
            raise _of_all(errors, stored, len(named))
        return [str(offer.id) for offer in named]

    # Taking

    async def claim(self, limit: int = 1, wait: Duration = 0.0) -> list[Message[T]]:
        """Take up to ``limit`` due messages from all partitions.

        As :meth:`delayq.ReliableQueue.claim`.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise BadInput(f"limit must be an int of at least 1, not {limit!r}")
        return [
            queue._leased(taken[1])
            for queue, taken in await self._take(limit, seconds(wait, "wait"))
        ]

    async def __aiter__(self) -> AsyncIterator[Message[T]]:
        """Take messages as they come due, from all partitions in turn, until they close.

        Works like a loop over a :class:`~delayq.ReliableQueue`: where handling takes long, few
        messages are claimed ahead.
        """
        loop = asyncio.get_running_loop()
        fetching: asyncio.Task[None] | None = None
        want = 1
        with ExitStack() as stack:
            hands = {
                queue: stack.enter_context(queue._open.claims.taker.at_hand())
                for queue in self.partitions
            }
            ahead = _Ahead(hands)
            try:
                while True:
                    if fetching is not None:
                        await fetching
                        fetching = None
                    if not ahead:
                        with suppress(Closed):
                            ahead.extend(await self._take(want, None))
                    if not ahead or any(queue._open.closed for queue in self.partitions):
                        return
                    count, started = len(ahead), loop.time()
                    if fetches_more(want, count):
                        # Fetch while these are handled, so that neither this process nor the server
                        # waits for the other.
                        fetching = asyncio.create_task(
                            self._fetch(ahead, want), name=f"fetch {self.name}"
                        )
                        # A consumer that never awaits anything would keep the call from being sent.
                        await asyncio.sleep(0)
                    ahead.waited = 0.0
                    for _ in range(count):
                        if (message := await ahead.next()) is not None:
                            yield message
                    want = next_batch(want, count, loop.time() - started - ahead.waited)
            finally:
                if fetching is not None:
                    fetching.cancel()
                    await asyncio.wait({fetching})

    async def _fetch(self, ahead: _Ahead[T], want: int) -> None:
        # If messages cannot be fetched now, the loop asks again.
        with suppress(DelayqError):
            ahead.extend(await self._take(want, 0.0))

    async def _take(self, count: int, wait: float | None) -> deque[_Taken[T]]:
        """Take up to ``count`` messages from all partitions, waiting ``wait`` seconds for the first
        (None: without limit).
        """
        for queue in self.partitions:
            queue._check_open()
        loop = asyncio.get_running_loop()
        until = None if wait is None else loop.time() + wait
        taken = await self._take_due(count, waits=wait != 0)
        left = None if until is None else until - loop.time()
        if taken or (left is not None and left <= 0):
            return taken
        # Nothing is due: wait for one message per partition, which is enough to continue with.
        taking = {asyncio.create_task(queue._take(1, left)): queue for queue in self.partitions}
        try:
            waiting = set(taking)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() is not None or task.result() for task in done):
                    break
            # Calls that are cancelled in time put back what they took; the others return something.
            for task in waiting:
                task.cancel()
            await asyncio.wait(taking)
        except BaseException:
            for task, queue in taking.items():
                task.cancel()
                task.add_done_callback(partial(_give_back_late, queue))
            raise
        found = _shared_out(taking, count)
        if found and len(found) < count:
            # Messages that came due together are returned together.
            try:
                with suppress(DelayqError):
                    found.extend(await self._take_due(count - len(found), waits=True))
            except BaseException:
                _give_back(found)
                raise
        return found

    async def _take_due(self, count: int, *, waits: bool) -> deque[_Taken[T]]:
        """Take up to ``count`` due messages.

        No more are claimed than that, so none is withheld from other consumers.

        A first look finds the partitions that have something due. A partition whose server does not
        answer holds up no other.

        Args:
            count: The largest number of messages to take.
            waits: Whether the caller waits for messages, and thus for servers that do not answer.
                Then the look ends soon after the first answer, and raises only errors that waiting
                would not resolve.
        """
        # Start with a different partition each time.
        self._next = (self._next + 1) % len(self.partitions)
        queues = self.partitions[self._next :] + self.partitions[: self._next]
        looking = {asyncio.create_task(_due_of(some)) for some in _by_server(queues)}
        taken: deque[_Taken[T]] = deque()
        errors: list[BaseException] = []
        answered = False
        try:
            while looking and len(taken) < count:
                # With messages in hand, take only what is known by now.
                patience = _MOMENT if taken or (waits and answered) else None
                done, looking = await asyncio.wait(
                    looking, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                due: set[ReliableQueue[T]] = set()
                for look in done:
                    if (error := look.exception()) is not None:
                        errors.append(error)
                    else:
                        answered = True
                        due |= look.result()
                await _take_of([queue for queue in queues if queue in due], count, taken, errors)
                # A missing permission does not go away with time: tell the caller.
                if any(isinstance(error, ServerRefused) for error in errors):
                    break
        except BaseException:
            _give_back(taken)
            raise
        finally:
            for look in looking:
                look.cancel()
        refused = next((error for error in errors if isinstance(error, ServerRefused)), None)
        error = refused or next(
            (error for error in errors if not (waits and isinstance(error, ServerError))), None
        )
        if error is not None and (refused is not None or not taken):
            _give_back(taken)
            raise error
        return taken

    # By id

    async def cancel(self, id: str) -> bool:  # noqa: A002
        """Remove a message, due or not, unless a worker has it.

        As :meth:`delayq.ReliableQueue.cancel`.
        """
        return await self.partition(id).cancel(id)

    async def reschedule(
        self,
        id: str,  # noqa: A002
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> bool:
        """Change when a message is due, unless a worker has it.

        As :meth:`delayq.ReliableQueue.reschedule`.
        """
        return await self.partition(id).reschedule(id, delay, at=at)

    async def get(self, id: str) -> Message[T] | None:  # noqa: A002
        """Return a live message without leasing it to you. As :meth:`delayq.ReliableQueue.get`."""
        return await self.partition(id).get(id)

    # Recurring messages

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
        """Schedule a recurring message, in the partition that ``name`` determines.

        As :meth:`delayq.ReliableQueue.schedule`.
        """
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
        """Delete a schedule and its waiting message. As :meth:`delayq.ReliableQueue.unschedule`."""
        return await self._home(name).unschedule(name)

    async def schedules(self) -> list[Schedule]:
        """Return the schedules of all partitions, by name."""
        parts = await _of_each(self.partitions, lambda queue: queue.schedules())
        return sorted((each for part in parts for each in part), key=lambda each: each.name)

    # Inspection and cleanup

    async def stats(self) -> QueueDepth:
        """Return the number of messages in each state, over all partitions; ``paused`` if any
        partition is.
        """
        return QueueDepth.total(await _of_each(self.partitions, lambda queue: queue.stats()))

    async def peek(self, limit: int = 1) -> list[Message[T]]:
        """Return the messages to be claimed next. As :meth:`delayq.ReliableQueue.peek`."""
        ready = await self.list("ready", limit=limit)
        return (
            ready
            if len(ready) >= limit
            else ready + await self.list("delayed", limit=limit - len(ready))
        )

    async def list(self, state: State, *, offset: int = 0, limit: int = 100) -> list[Message[T]]:
        """Return messages in one state, from all partitions, in the order in which they will come.

        Each partition is asked for ``offset + limit`` messages, so later pages cost more.
        """
        check_page(offset, limit)
        parts = await _of_each(
            self.partitions, lambda queue: queue.list(state, limit=offset + limit)
        )
        merged = heapq.merge(
            *parts,
            key=lambda message: (-message.priority if state == "ready" else 0, message.due_at),
        )
        return [*islice(merged, offset, offset + limit)]

    async def purge(
        self,
        state: Literal["delayed", "ready", "all"] = "all",
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop messages. As :meth:`delayq.ReliableQueue.purge`."""
        if progress is None:
            return sum(await _of_each(self.partitions, lambda queue: queue.purge(state)))
        so_far: dict[ReliableQueue[T], tuple[int, int]] = {}

        def report(queue: ReliableQueue[T], done: int, total: int) -> None:
            so_far[queue] = done, total
            # The total is unknown until each partition has counted its messages.
            if len(so_far) == len(self.partitions):
                dones, totals = zip(*so_far.values(), strict=True)
                progress(sum(dones), sum(totals))

        return sum(
            await _of_each(
                self.partitions, lambda queue: queue.purge(state, progress=partial(report, queue))
            )
        )

    async def pause(self) -> None:
        """Stop all claims. As :meth:`delayq.ReliableQueue.pause`."""
        await _of_each(self.partitions, lambda queue: queue.pause())

    async def resume(self) -> bool:
        """End a pause, and return whether there was one."""
        return any(await _of_each(self.partitions, lambda queue: queue.resume()))

    # Closing

    async def aclose(self) -> None:
        """Close all partitions on this client. As :meth:`delayq.ReliableQueue.aclose`."""
        await _of_each(self.partitions, lambda queue: queue.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<PartitionedQueue {self.name!r}, {len(self.partitions)} partitions>"

    def _home(self, schedule: str) -> ReliableQueue[T]:
        return self.partitions[crc32(checked_id(schedule).encode()) % len(self.partitions)]


class PartitionedDeadLetters(Generic[T]):
    """The dead letters of all partitions. As :class:`~delayq.DeadLetters`."""

    def __init__(self, queue: PartitionedQueue[T]) -> None:
        self._queue = queue

    async def size(self) -> int:
        """Return the number of dead letters."""
        return sum(await _of_each(self._queue.partitions, lambda queue: queue.dead.size()))

    async def list(self, *, offset: int = 0, limit: int = 100) -> list[DeadLetter[T]]:
        """List dead letters, oldest first. Each partition is asked for ``offset + limit``
        letters.
        """
        check_page(offset, limit)
        parts = await _of_each(
            self._queue.partitions, lambda queue: queue.dead.list(limit=offset + limit)
        )
        return [
            *islice(heapq.merge(*parts, key=lambda letter: letter.died_at), offset, offset + limit)
        ]

    async def redrive(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Requeue dead letters.

        As :meth:`delayq.DeadLetters.redrive`, one partition after the other.
        """
        return await self._of_each_part(
            ids, progress, lambda queue, some, tell: queue.dead.redrive(some, progress=tell)
        )

    async def purge(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop dead letters for good. As :meth:`delayq.DeadLetters.purge`."""
        return await self._of_each_part(
            ids, progress, lambda queue, some, tell: queue.dead.purge(some, progress=tell)
        )

    async def _of_each_part(
        self,
        ids: Iterable[str] | None,
        progress: Callable[[int, int], None] | None,
        act: Callable[
            [ReliableQueue[T], MutableSequence[str] | None, Callable[[int, int], None] | None],
            Awaitable[int],
        ],
    ) -> int:
        """Apply ``act`` to the partitions, one after the other, and return the sum of its
        results.
        """
        parts = self._parts(ids)
        if progress is None:
            return sum([await act(queue, some, None) for queue, some in parts])
        totals = [
            len(some) if some is not None else await queue.dead.size() for queue, some in parts
        ]
        done = looked_at = 0
        for (queue, some), total in zip(parts, totals, strict=True):

            def tell(looked_at_here: int, _: int, before: int = looked_at) -> None:
                progress(min(before + looked_at_here, sum(totals)), sum(totals))

            done += await act(queue, some, tell)
            looked_at += total
        return done

    def _parts(
        self, ids: Iterable[str] | None
    ) -> Sequence[tuple[ReliableQueue[T], MutableSequence[str] | None]]:
        if ids is None:
            return [(queue, None) for queue in self._queue.partitions]
        parts: dict[ReliableQueue[T], MutableSequence[str]] = {}
        for name in ids:
            parts.setdefault(self._queue.partition(name), []).append(name)
        return [*parts.items()]


class _Ahead(Paced, Generic[T]):
    """The messages that a loop over all partitions has fetched.

    Each partition's taker knows its share, and gives it back.
    """

    def __init__(self, hands: Mapping[ReliableQueue[T], deque[Taken[Claim]]]) -> None:
        self._hands = hands
        self._order: deque[ReliableQueue[T]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._hands.values()))

    def __bool__(self) -> bool:
        return any(self._hands.values())

    def extend(self, taken: Iterable[_Taken[T]]) -> None:
        for queue, each in taken:
            if queue._open.closed:
                queue._open.claims.taker.give_back([each])
            else:
                self._hands[queue].append(each)
                self._order.append(queue)

    async def next(self) -> Message[T] | None:
        """Return the next message; None if its lease was lost, it must not be handed out, or there
        is none.
        """
        while self._order:
            queue = self._order.popleft()
            if hand := self._hands[queue]:
                return await self._hand_out(queue, hand)
        return None

    async def _hand_out(
        self, queue: ReliableQueue[T], hand: deque[Taken[Claim]]
    ) -> Message[T] | None:
        if queue._open.keeper.is_short(hand[0][1]):
            await queue._drop_lost(hand)
            # The queue may have closed meanwhile, and then everything has gone back.
            if not hand:
                return None
        taken = hand.popleft()
        if is_occurrence(taken[1].id) and not await queue._open.recurrence.begin([taken]):
            return None
        return queue._leased(taken[1], self)


def _by_server(queues: Sequence[ReliableQueue[T]]) -> list[Sequence[ReliableQueue[T]]]:
    """Group partitions by the server that holds them, since each server is asked separately."""
    parts: dict[object, list[ReliableQueue[T]]] = {}
    for queue in queues:
        try:
            server: object = queue._session.scheduler.services.nodes.of(queue._keys.wake)
        except ServerError:
            server = queue
        parts.setdefault(server, []).append(queue)
    return [*parts.values()]


async def _due_of(queues: Sequence[ReliableQueue[T]]) -> set[ReliableQueue[T]]:
    """Return those of these partitions, all on one server, that have something due."""
    due = await which_are_due([queue._store for queue in queues])
    return {queue for queue, is_due in zip(queues, due, strict=True) if is_due}


async def _take_of(
    candidates: list[ReliableQueue[T]],
    count: int,
    taken: deque[_Taken[T]],
    errors: list[BaseException],
) -> None:
    """Append up to ``count`` messages from these partitions to ``taken``.

    They have some, unless another client is faster.
    """
    while candidates and len(taken) < count:
        wants = shares(count - len(taken), [count] * len(candidates))
        asked = [(queue, want) for queue, want in zip(candidates, wants, strict=True) if want]
        for (queue, want), outcome in zip(asked, await _all_of(asked), strict=True):
            if isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                taken.extend((queue, each) for each in outcome)
            if isinstance(outcome, BaseException) or len(outcome) < want:
                candidates.remove(queue)


async def _all_of(
    asked: Sequence[tuple[ReliableQueue[T], int]],
) -> Sequence[Sequence[Taken[Claim]] | BaseException]:
    """Take the given number of messages from each, concurrently.

    If the caller is cancelled, they go back.
    """
    taking = {asyncio.create_task(queue._take(want, 0.0)): queue for queue, want in asked}
    try:
        return await asyncio.gather(*taking, return_exceptions=True)
    except BaseException:
        for task, queue in taking.items():
            task.cancel()
            task.add_done_callback(partial(_give_back_late, queue))
        raise


def _shared_out(
    taking: Mapping[asyncio.Task[Sequence[Taken[Claim]]], ReliableQueue[T]], count: int
) -> deque[_Taken[T]]:
    """Return ``count`` of the messages that came, and give the rest back.

    Raises an error if there were only errors.
    """
    found: deque[_Taken[T]] = deque()
    errors: list[BaseException] = []
    for task, queue in taking.items():
        if task.cancelled():
            continue
        if (error := task.exception()) is not None:
            errors.append(error)
            continue
        room = count - len(found)
        queue._open.claims.taker.give_back(task.result()[room:])
        found.extend((queue, taken) for taken in task.result()[:room])
    if errors and not found:
        raise errors[0]
    return found


def _give_back(taken: Iterable[_Taken[T]]) -> None:
    parts: dict[ReliableQueue[T], list[Taken[Claim]]] = {}
    for queue, each in taken:
        parts.setdefault(queue, []).append(each)
    for queue, some in parts.items():
        queue._open.claims.taker.give_back(some)


def _give_back_late(queue: ReliableQueue[T], task: asyncio.Future[Sequence[Taken[Claim]]]) -> None:
    """Give back the messages that came for a caller who has gone."""
    if not task.cancelled() and task.exception() is None:
        queue._open.claims.taker.give_back(task.result())


async def _of_each(
    queues: Iterable[ReliableQueue[T]], of: Callable[[ReliableQueue[T]], Awaitable[R]]
) -> list[R]:
    """Call ``of`` for every queue concurrently, and return the results.

    Waits for all calls, then raises the first error.
    """
    outcomes = await asyncio.gather(*(of(queue) for queue in queues), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _of_all(errors: Sequence[BaseException], stored: Sequence[str], count: int) -> BaseException:
    """Combine the errors of several partitions: return the one that leaves most open, with all ids
    certain to be stored.
    """
    safe = [
        *stored,
        *(
            name
            for error in errors
            if not isinstance(error, NotDurable)
            for name in getattr(error, "stored", ())
        ),
    ]
    unsafe = [name for error in errors if isinstance(error, NotDurable) for name in error.stored]
    unknown = next((error for error in errors if isinstance(error, OutcomeUnknown)), None)
    other = next(
        (
            error
            for error in errors
            if not isinstance(error, NotDurable | DuplicateMessage | QueueFull)
        ),
        None,
    )
    if unknown is not None or (other is not None and (safe or unsafe)):
        reason = unknown or other
        known = (*safe, *unsafe)
        return OutcomeUnknown(
            f"{len(known)} of {count} messages are stored, and the others may be: {reason}", known
        )
    if other is not None:
        return other
    for kind in (DuplicateMessage, QueueFull):
        refused = [name for error in errors if isinstance(error, kind) for name in error.ids]
        if refused:
            return kind(tuple(refused), (*safe, *unsafe))
    return NotDurable(str(errors[0]), tuple(unsafe))
