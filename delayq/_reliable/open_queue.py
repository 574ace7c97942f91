"""A reliable queue that is open on this client, shared by all handles of its name."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from delayq._engine.dispatcher import Dispatcher
from delayq._reliable.dead_letters import half_way
from delayq._reliable.id_source import IdSource
from delayq._reliable.ids import new_block, new_id
from delayq._reliable.known_settings import KnownSettings
from delayq._reliable.notifications import MessageNotifications
from delayq._reliable.partition import Partition
from delayq._reliable.placement import endings_in, home_of, partition_of
from delayq._reliable.probes import Probes
from delayq._reliable.recurrence import is_occurrence
from delayq._reliable.reports import Reports
from delayq._reliable.store import PAGE, ReliableStore
from delayq.errors import Closed, DelayqError, ServerError
from delayq.stats import QueueDepth, QueueStats

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Collection,
        Container,
        Iterable,
        Iterator,
        Sequence,
    )

    from delayq._engine.caller_queue import Numbered
    from delayq._engine.context import EngineContext
    from delayq._engine.scheduler import Scheduler
    from delayq._redis.hand_back import LastCalls
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings import Policy, Settings, StoredSettings
    from delayq.codecs import Codec

R = TypeVar("R")


class OpenReliableQueue:
    """An open reliable queue, in one or more partitions.

    Attributes:
        opened: The partitions, in order. Behind them may be some that the queue had before it was
            given fewer while nothing was in it.
        dispatcher: The callers that wait for messages, whichever partition they come from.
        ids: Generates the ids of new messages.
        settings: The queue's settings on the server, as far as this client knows them.
        given: The settings that handles on this client were given, each by the first that has it.
        codec: The first codec that a handle on this client was given.
        services: The services the queue is built from.
        closing: A future that is done from the moment when the queue is closed.
        news: Notifications about single messages.
        reports: The reports of this client about its work.
    """

    def __init__(
        self,
        name: str,
        keys_of: Callable[[int], ReliableKeys],
        given: Settings,
        scheduler: Scheduler,
        services: EngineContext,
    ) -> None:
        self._open_partition: Callable[[int], Partition] = lambda place: scheduler.open(
            keys_of(place).wake, lambda services: Partition(self, place, keys_of(place), services)
        )
        first = keys_of(0)
        self.services: EngineContext = services
        self.handle_settings: Settings = given
        self.codec: Codec[Any] | None = None
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.settings: KnownSettings = KnownSettings(
            name,
            lambda place: ReliableStore(services.server, keys_of(place) if place else first),
            services.background,
            self._settings_changed,
        )
        self.dispatcher: Dispatcher[Claim] = Dispatcher(
            services,
            on_join=self._ask,
            source_of=lambda claim: claim.partition,
            policy_of=lambda claim: claim.policy,
        )
        self.notifications: MessageNotifications = MessageNotifications(self)
        self.reports: Reports = Reports(self, services)
        self.opened_partitions: list[Partition] = [Partition(self, 0, first, services)]
        self.ids: IdSource = IdSource(self)
        self._looks = Probes(self, scheduler)

    @property
    def partitions(self) -> list[Partition]:
        """The partitions of the queue, in order. The first one has the queue's own keys."""
        return self.opened_partitions[: self.ids.partitions]

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.opened_partitions[0].name

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self.opened_partitions[0].closed

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The client's event loop."""
        return self.closing.get_loop()

    @property
    def kind(self) -> Literal["reliable"]:
        return "reliable"

    def check_open(self) -> None:
        """Raise :class:`~delayq.Closed` if the queue was closed."""
        if self.closed:
            raise Closed("the queue is closed")

    # Placement

    def partition_of(self, id: str) -> Partition:  # noqa: A002
        """Return the partition of a message, unless it has a group and an id of the caller's
        own.
        """
        number = self.ids.partitions
        return self.opened_partitions[partition_of(id, number) if number > 1 else 0]

    def home_of(self, name: str) -> Partition:
        """Return the partition in which a schedule lies, or all messages of a group."""
        return self.opened_partitions[home_of(name, self.ids.partitions)]

    def candidates(self, id: str) -> list[Partition]:  # noqa: A002
        """Return the partitions in which a message may lie, that of its id first.

        A generated id tells the partition, but an id of the caller's own may look like one, and
        belong to a message that lies with its group.
        """
        first = self.partition_of(id)
        return [first, *(partition for partition in self.partitions if partition is not first)]

    async def search(
        self, places: Callable[[], Sequence[Partition]], of: Callable[[Partition], Awaitable[R]]
    ) -> R | None:
        """Ask the partitions in which something may lie, one after the other.

        Returns the first answer that is not false; None if there is none.
        """
        while True:
            number = self.settings.stored.partitions
            for partition in places():
                if found := await self.settings.repeat(partial(of, partition)):
                    return found
            # A client that was not notified may have asked the wrong partitions.
            stored = await self.settings.read()
            stored.check_at_rest(self.name)
            if stored.partitions == number:
                return None

    async def change(
        self,
        ids: Sequence[str],
        of: Callable[[ReliableStore, Sequence[str]], Awaitable[list[bool]]],
    ) -> list[bool]:
        """Change messages wherever they lie, and return which of them ``of`` has changed.

        The partitions are asked as in :meth:`search`.

        Raises:
            OutcomeUnknown: Some were changed, or may have been. With any other error, none was.
        """
        changed: dict[str, bool] = dict.fromkeys(ids, False)
        try:
            while True:
                number = self.settings.stored.partitions
                places = [self.candidates(id) for id in changed]  # noqa: A001
                for partitions in zip_longest(*places):
                    parts: dict[Partition, list[str]] = {}
                    for id, partition in zip(changed, partitions, strict=True):  # noqa: A001
                        if partition is not None and not changed[id]:
                            parts.setdefault(partition, []).append(id)
                    for partition, some in parts.items():
                        for first in range(0, len(some), PAGE):
                            page = some[first : first + PAGE]
                            done = await self.settings.repeat(partial(of, partition.store, page))
                            changed.update(zip(page, done, strict=True))
                if all(changed.values()):
                    break
                # A client that was not notified may have asked the wrong partitions.
                stored = await self.settings.read()
                stored.check_at_rest(self.name)
                if stored.partitions == number:
                    break
        except ServerError as error:
            raise half_way(error, sum(changed.values())) from error.__cause__
        return [changed[id] for id in ids]  # noqa: A001

    async def for_each_partition(self, of: Callable[[Partition], Awaitable[R]]) -> Sequence[R]:
        """Call ``of`` for every partition concurrently, and return the results.

        Repeats the calls as :meth:`with_all_partitions` does. Waits for all, then raises the first
        error.
        """

        async def each(partitions: Sequence[Partition]) -> Sequence[R]:
            outcomes = await asyncio.gather(*map(of, partitions), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            return outcomes  # type: ignore[return-value]  # none is an error

        return await self.with_all_partitions(each)

    async def with_all_partitions(self, of: Callable[[Sequence[Partition]], Awaitable[R]]) -> R:
        """Call ``of`` for all partitions together, and return its result.

        If the queue has got other partitions meanwhile, call it for all of them again, so that none
        is missed.
        """
        while True:
            number = self.settings.stored.partitions
            result = await self.settings.repeat(lambda: of(self.partitions))
            # The calls were made, whatever becomes of this one.
            with suppress(DelayqError):
                await self.settings.read()
            self.settings.stored.check_at_rest(self.name)
            if self.settings.stored.partitions == number:
                return result

    def new_id_in(self, partition: Partition) -> str:
        """Generate an id for a message of a group, which lies in a certain partition."""
        number = self.settings.stored.partitions
        while True:
            beginning, _ = new_block()
            if endings := endings_in(beginning, partition.index, number):
                return beginning + endings[0]

    def new_id(self, failed: Container[Partition] = ()) -> str:
        """Generate an id whose partition is on a server that is available, as far as we know.

        Of ``failed`` partitions, it is known that they are not.
        """
        chosen = new_id()
        for _ in range(10 * len(self.partitions)):
            if not self.is_unreachable(self.partition_of(chosen), failed):
                break
            chosen = new_id()
        return chosen

    def are_unreachable(self, failed: Collection[Partition]) -> bool:
        """Return whether no partition for new messages is available, as far as we know."""
        if failed and not self.services.nodes.spread:
            # All are on one server.
            return True
        return all(self.is_unreachable(partition, failed) for partition in self.partitions)

    def is_unreachable(self, partition: Partition, failed: Container[Partition] = ()) -> bool:
        """Return whether the server of a partition is not available, as far as we know."""
        return partition in failed or self.services.nodes.failed_lately(partition.keys.wake)

    # Taking

    async def take(self, count: int, wait: float | None, policy: Policy) -> list[Numbered[Claim]]:
        """Take due messages, as :meth:`Dispatcher.take` does, and follow up those that recur."""
        until = None if wait is None else self.loop.time() + wait
        while True:
            left = None if until is None else max(0.0, until - self.loop.time()) if wait else 0.0
            taken = await self.dispatcher.take(count, left, policy)
            kept = await self.advance_schedules(taken)
            if kept or not taken:
                return kept

    async def advance_schedules(self, taken: list[Numbered[Claim]]) -> list[Numbered[Claim]]:
        """Put the next occurrences in place for messages that are about to be handed out.

        Returns the messages to hand out.
        """
        # A call for each would cost more than the look for an "@".
        for place in {
            claim.partition for _, claim in taken if b"@" in claim.id and is_occurrence(claim.id)
        }:
            taken = await self.opened_partitions[place].recurrence.begin(taken)
        return taken

    def _ask(self, insist: bool) -> None:
        """Look for messages for a caller that has joined."""
        for partition in self.partitions:
            partition.listen()
        if len(self.partitions) == 1:
            wakeups = self.partitions[0].wakeups
            if insist:
                wakeups.wake()
            else:
                wakeups.on_caller_joined()
            return
        unknown = [
            partition
            for number in self.dispatcher.callers.unprobed_sources()
            if not (partition := self.opened_partitions[number]).wakeups.plan.is_up_to_date
        ]
        if not insist:
            for each in self.partitions:
                each.wakeups.listen()
        if unknown:
            self.probe(unknown)
        self.dispatcher.request_claims()

    def expect_messages_everywhere(self) -> None:
        """Have the next caller ask every partition, whatever is known of it."""
        for partition in self.partitions:
            self.dispatcher.callers.assume_items(partition.claims.source)

    def probe(self, partitions: list[Partition]) -> None:
        """Find out which of several partitions have something due."""
        self._looks.request(partitions)

    async def flush(self) -> None:
        """Wait for the answers to all acknowledgements sent before now."""
        for partition in self.partitions:
            if partition.acks_in_flight:
                await partition.acknowledger.flush()

    async def quiet(self, within: float) -> None:
        """Wait until no claim is in flight and everything given back has arrived, for at most
        ``within`` seconds each.
        """
        await asyncio.gather(*(each.claims.quiet(within) for each in self.partitions))

    @property
    def acks_in_flight(self) -> int:
        """Number of acknowledgements in flight."""
        return sum(partition.acks_in_flight for partition in self.partitions)

    # The partitions

    def _settings_changed(self, stored: StoredSettings) -> None:
        if self.closed:
            # It opens no more partitions.
            return
        if stored.partitions != self.ids.partitions:
            for partition in self.opened_partitions:
                partition.offers.recall()
            for place in range(len(self.opened_partitions), stored.partitions):
                self.opened_partitions.append(self._open_partition(place))
            self.ids.settings_changed(stored.partitions)
        self.on_limits_changed(self.partitions)

    def on_limits_changed(self, partitions: Iterable[Partition]) -> None:
        """Look for messages in these partitions again, because limits may let more run."""
        for partition in partitions:
            partition.wakeups.plan.forget()
        if self.dispatcher.callers.capacity:
            self._ask(False)

    async def depth(self) -> QueueDepth:
        """Return the number of messages in each state."""
        await self.settings.learn({})
        return QueueDepth.total(
            await asyncio.gather(*(each.store.depth() for each in self.partitions))
        )

    @contextmanager
    def served(self, slots: int, free: Callable[[], int]) -> Iterator[None]:
        """Count, while the block runs, that a worker handles up to ``slots`` messages at a time.

        Args:
            slots: The slots of the worker.
            free: Returns how many of them are free.
        """
        self.partitions[0].listen()
        counters = self.partitions[0].counters
        counters.slots += slots
        counters.free_slots.append(free)
        try:
            yield
        finally:
            counters.slots -= slots
            counters.free_slots.remove(free)
            self.reports.look(at_once=True)

    def stats(self) -> QueueStats:
        """Return what this client has done with the queue."""
        return QueueStats.total([partition.stats() for partition in self.partitions])

    def close(self, last: LastCalls) -> None:
        """Start nothing new, and end every waiting call, when the first partition is closed."""
        if not self.closing.done():
            self.closing.set_result(None)
            for partition in self.opened_partitions:
                partition.claims.close()
            self.dispatcher.close(last)
