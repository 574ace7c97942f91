"""A reliable queue that is open on this client, shared by all handles of its name."""

from __future__ import annotations

import asyncio
import heapq
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from delayq._engine.dispatcher import Dispatcher
from delayq._reliable.ids import PartitionRotation, home_of, partition_of
from delayq._reliable.notifications import MessageNotifications
from delayq._reliable.partition import Partition
from delayq._reliable.probes import Probes
from delayq._reliable.reports import Reports
from delayq._reliable.settings import DEFAULTS
from delayq._reliable.settings_cache import SettingsCache
from delayq._reliable.store import ReliableStore
from delayq.errors import Closed, DelayqError
from delayq.stats import QueueDepth, QueueStats

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Collection,
        Iterator,
        Sequence,
    )

    from delayq._engine.context import EngineContext
    from delayq._engine.scheduler import Scheduler
    from delayq._redis.return_calls import ShutdownCalls
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings import HandleSettings, StoredSettings
    from delayq.codecs import Codec

_log = logging.getLogger("delayq")

R = TypeVar("R")


@dataclass(slots=True)
class HandleDefaults:
    """The settings and the codec of handles that are given none.

    Attributes:
        settings: The settings that handles on this client were given, each by the first that has
            it.
        codec: The first codec that a handle on this client was given.
    """

    settings: HandleSettings
    codec: Codec[Any] | None = None

    def complete(
        self, own_settings: HandleSettings, codec: Codec[Any] | None
    ) -> tuple[HandleSettings, Codec[Any] | None]:
        """Return the settings and the codec of a handle. It inherits those that it was not given
        from earlier handles on this client, and later ones inherit its own.
        """
        settings = own_settings.inherit(self.settings).inherit(DEFAULTS)
        self.settings = self.settings.inherit(own_settings)
        self.codec = self.codec or codec
        return settings, codec or self.codec


class OpenReliableQueue:
    """An open reliable queue, in one or more partitions.

    Attributes:
        partitions: The partitions, in order. The first one has the queue's own keys.
        opened_partitions: All partitions that this client has opened: these, and behind them any
            that the queue had before its number of partitions was reduced, while it was empty.
        dispatcher: The callers that wait for messages, whichever partition they come from.
        rotation: Chooses the partitions of messages whose ids are generated.
        settings: The queue's settings on the server, as far as this client knows them.
        defaults: The settings and the codec of handles that are given none.
        closing: A future that is done from the moment when the queue is closed.
        notifications: Notifications about single messages.
        reports: The reports of this client about its work.
    """

    kind: Literal["reliable"] = "reliable"

    def __init__(
        self,
        name: str,
        keys_of: Callable[[int], ReliableKeys],
        own_settings: HandleSettings,
        scheduler: Scheduler,
        services: EngineContext,
    ) -> None:
        self._open_partition: Callable[[int], Partition] = lambda index: scheduler.open(
            keys_of(index).wake, lambda services: Partition(self, index, keys_of(index), services)
        )
        first = keys_of(0)
        store = ReliableStore(services.server, first)
        self.defaults: HandleDefaults = HandleDefaults(own_settings)
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.settings: SettingsCache = SettingsCache(
            name,
            lambda index: ReliableStore(services.server, keys_of(index)) if index else store,
            services.background,
            self._on_settings_changed,
        )
        self.dispatcher: Dispatcher[Claim] = Dispatcher(
            services,
            on_join=self._on_caller_joined,
            source_of=lambda claim: claim.partition,
            policy_of=lambda claim: claim.policy,
        )
        self.notifications: MessageNotifications = MessageNotifications(services, self.closing)
        self.reports: Reports = Reports(
            store, services, self.settings, stats=self.stats, oldest=self._oldest
        )
        self._probes = Probes(name, scheduler, services, self.dispatcher, self.settings)
        self.opened_partitions: list[Partition] = [Partition(self, 0, first, services)]
        self.partitions: list[Partition] = self.opened_partitions[:]
        # Those whose last calls have ended.
        self._ended_partitions: set[int] = set()
        self.rotation: PartitionRotation = PartitionRotation(self.is_unreachable)

    @classmethod
    def open(
        cls,
        name: str,
        keys_of: Callable[[int], ReliableKeys],
        own_settings: HandleSettings,
        scheduler: Scheduler,
    ) -> OpenReliableQueue:
        """Open a queue, unless it is open already, and return it."""
        first = scheduler.open(
            keys_of(0).wake,
            lambda services: cls(
                name, keys_of, own_settings, scheduler, services
            ).opened_partitions[0],
        )
        assert isinstance(first.queue, cls)
        return first.queue

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.opened_partitions[0].keys.name

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self.closing.done()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The client's event loop."""
        return self.closing.get_loop()

    @property
    def services(self) -> EngineContext:
        """The services the queue is built from."""
        return self.dispatcher.services

    def check_open(self) -> None:
        """Raise :class:`~delayq.Closed` if the queue was closed."""
        if self.closing.done():
            raise Closed("the queue is closed")

    # Where messages lie

    def partition_of(self, id: str | bytes) -> Partition:  # noqa: A002
        """Return the partition of a message, unless it has a group and an id of the caller's
        own.
        """
        partitions = self.partitions
        return partitions[partition_of(id, len(partitions)) if len(partitions) > 1 else 0]

    def home_of(self, name: str) -> Partition:
        """Return the partition in which a schedule lies, or all messages of a group."""
        return self.partitions[home_of(name, len(self.partitions))]

    def candidates(self, id: str) -> list[Partition]:  # noqa: A002
        """Return the partitions in which a message may lie, that of its id first.

        A generated id tells the partition, but an id of the caller's own may look like one, and
        belong to a message that lies with its group.
        """
        first = self.partition_of(id)
        return [first, *(partition for partition in self.partitions if partition is not first)]

    async def search(
        self,
        candidates: Callable[[], Sequence[Partition]],
        read: Callable[[Partition], Awaitable[R]],
    ) -> R | None:
        """Ask the partitions in which something may lie, one after the other.

        Returns the first result that is not false; None if there is none.
        """
        while True:
            count = self.settings.stored.partitions
            for partition in candidates():
                if result := await self.settings.repeat(partial(read, partition)):
                    return result
            if not await self.has_other_partitions(count):
                return None

    async def has_other_partitions(self, count: int) -> bool:
        """Return whether the queue has got another number of partitions than ``count``: a client
        that was not notified may have asked the wrong ones.
        """
        stored = await self.settings.read()
        stored.check_at_rest(self.name)
        return stored.partitions != count

    async def for_each_partition(self, call: Callable[[Partition], Awaitable[R]]) -> Sequence[R]:
        """Make a call for every partition concurrently, and return the results.

        Repeats the calls as :meth:`with_all_partitions` does. Waits for all, then raises the first
        error.
        """

        async def call_each(partitions: Sequence[Partition]) -> Sequence[R]:
            outcomes = await asyncio.gather(*map(call, partitions), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            return outcomes  # type: ignore[return-value]  # none is an error

        return await self.with_all_partitions(call_each)

    async def with_all_partitions(self, call: Callable[[Sequence[Partition]], Awaitable[R]]) -> R:
        """Make a call for all partitions together, and return its result.

        If the queue has got other partitions meanwhile, repeat it for all of them, so that none is
        missed.
        """
        while True:
            count = self.settings.stored.partitions
            result = await self.settings.repeat(lambda: call(self.partitions))
            # The calls were made, whatever becomes of this one.
            with suppress(DelayqError):
                await self.settings.read()
            self.settings.stored.check_at_rest(self.name)
            if self.settings.stored.partitions == count:
                return result

    def are_unreachable(self, failed: Collection[int]) -> bool:
        """Return whether no partition for new messages is available, as far as we know.

        Of ``failed`` partitions, it is known that they are not.
        """
        if failed and not self.services.nodes.spread:
            # All are on one server.
            return True
        return all(
            index in failed or self.is_unreachable(index)
            for index in range(self.rotation.partitions)
        )

    def is_unreachable(self, index: int) -> bool:
        """Return whether the server of a partition is not available, as far as we know."""
        keys = self.opened_partitions[index].keys
        return self.services.nodes.failed_lately(keys.wake)

    # Taking

    def _on_caller_joined(self, nowait: bool) -> None:
        """Look for messages for a caller that has joined."""
        partitions = self.partitions
        for partition in partitions:
            if not partition.is_listening:
                partition.listen()
        if len(partitions) == 1:
            wakeups = partitions[0].claims.wakeups
            if nowait:
                wakeups.wake()
            else:
                wakeups.on_caller_joined()
            return
        unknown = [
            partition
            for index in self.dispatcher.caller_queue.unprobed_sources()
            if not (partition := self.opened_partitions[index]).wakeups.plan.is_up_to_date
        ]
        if not nowait:
            for partition in partitions:
                partition.wakeups.listen()
        if unknown:
            self.probe(unknown)
        self.dispatcher.request_claims()

    def expect_messages_everywhere(self) -> None:
        """Have the next caller ask every partition, whatever is known of it."""
        for partition in self.partitions:
            self.dispatcher.caller_queue.assume_items(partition.claims.source)

    def probe(self, partitions: Sequence[Partition]) -> None:
        """Find out which of several partitions have something due."""
        self._probes.request(partitions)

    async def flush(self) -> None:
        """Wait for the replies to all acknowledgements sent before now."""
        for partition in self.partitions:
            if partition.acks_in_flight:
                await partition.acknowledger.flush()

    async def quiet(self, within: float) -> None:
        """Wait until no claim is in flight and everything given back has arrived, for at most
        ``within`` seconds each.
        """
        await asyncio.gather(*(partition.claims.quiet(within) for partition in self.partitions))

    @property
    def acks_in_flight(self) -> int:
        """Number of acknowledgements in flight."""
        return sum(partition.acks_in_flight for partition in self.partitions)

    # The partitions

    def _on_settings_changed(self, stored: StoredSettings) -> None:
        if self.closed:
            # It opens no more partitions.
            return
        if stored.partitions != len(self.partitions):
            opened = self.opened_partitions
            for partition in opened:
                partition.offers.recall()
            opened += map(self._open_partition, range(len(opened), stored.partitions))
            self.partitions = opened[: stored.partitions]
        self.rotation.start_over(stored.partitions, is_limited="limit" in stored.fields)
        self.on_limits_changed(self.partitions)

    def on_limits_changed(self, partitions: Sequence[Partition]) -> None:
        """Look for messages in these partitions again, because limits may let more run."""
        for partition in partitions:
            partition.wakeups.plan.invalidate()
        if self.dispatcher.caller_queue.wants_items:
            self._on_caller_joined(nowait=False)

    async def depth(self) -> QueueDepth:
        """Return the number of messages in each state."""
        await self.settings.learn({})
        return QueueDepth.total(
            await asyncio.gather(*(partition.store.depth() for partition in self.partitions))
        )

    async def due_counts(self, edges: Sequence[int]) -> list[int]:
        """Return how many messages come due between each of some moments and the next, and after
        the last one, in microseconds.
        """
        counts = (partition.store.due_counts(edges) for partition in self.partitions)
        return [sum(parts) for parts in zip(*await asyncio.gather(*counts), strict=True)]

    @contextmanager
    def served(self, slots: int, free: Callable[[], int]) -> Iterator[None]:
        """Count, while the block runs, that a worker handles up to ``slots`` messages at a time.

        Args:
            slots: The slots of the worker.
            free: Returns how many of them are free.
        """
        first = self.partitions[0]
        first.listen()
        first.counters.slots += slots
        first.counters.free_slots.append(free)
        try:
            yield
        finally:
            first.counters.slots -= slots
            first.counters.free_slots.remove(free)
            self.reports.report(at_once=True)

    def stats(self) -> QueueStats:
        """Return what this client has done with the queue."""
        return QueueStats.total([partition.stats() for partition in self.partitions])

    @property
    def claim_error(self) -> DelayqError | None:
        """The error for which messages of a partition cannot be claimed now; None if all goes well,
        as far as we know. Other threads may read this.
        """
        errors = (partition.claims.last_error for partition in self.partitions)
        return next(filter(None, errors), None)

    def _oldest(self, limit: int) -> list[Claim]:
        """Return up to ``limit`` of the messages that are being handled, those begun first."""
        claims = (claim for partition in self.partitions for claim in partition.oldest(limit))
        return heapq.nsmallest(limit, claims, key=lambda claim: claim.begun_at)

    def close(self, last: ShutdownCalls) -> None:
        """Start nothing new, and end every waiting call, when the first partition is closed."""
        if not self.closed:
            self.closing.set_result(None)
            self.reports.close()
            for partition in self.opened_partitions:
                partition.claims.close()
            self.dispatcher.close(last)

    async def on_partition_closed(self, index: int, deadline: float) -> None:
        """Report what remains, once the last calls of all partitions have ended."""
        self._ended_partitions.add(index)
        if len(self._ended_partitions) >= len(self.partitions):
            await self.reports.aclose(deadline)
