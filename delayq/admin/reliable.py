"""A reliable queue from outside: its messages, dead letters, schedules, workers and settings."""

from __future__ import annotations

import heapq
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, TypeVar

from delayq._background import gather_all
from delayq._durations import datetime_at
from delayq._reliable.batches import BatchStatus
from delayq._reliable.dead_letters import half_way
from delayq._reliable.groups import Groups
from delayq._reliable.ids import checked_id, home_of, partition_of
from delayq._reliable.keys import ReliableKeys, check_partitions
from delayq._reliable.listing import live_page
from delayq._reliable.mover import Mover
from delayq._reliable.schedules import to_schedule
from delayq._reliable.settings import Difference
from delayq._reliable.settings_cache import SettingsCache
from delayq._reliable.store import ReliableStore
from delayq._reliable.timing import UnreadableSchedule, parse_schedule
from delayq.admin.search import SearchPages
from delayq.errors import ServerError, ServerRefused
from delayq.stats import COUNTED_STATES, QueueDepth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime
    from typing import Self

    from delayq._engine.session import Session
    from delayq._reliable.letter_store import StoredLetter
    from delayq._reliable.mover import Repartition
    from delayq._reliable.replies import LiveState, StoredMessage
    from delayq._reliable.report_format import Unit
    from delayq._reliable.schedules import Schedule
    from delayq._reliable.settings import QueueSettings, SettingTexts, StoredSettings
    from delayq.client import Client
    from delayq.stats import Activity, WorkerInfo

M = TypeVar("M")
R = TypeVar("R")

_SHOWN_RUNS = 5


@dataclass(frozen=True)
class ListedSchedule:
    """A schedule, and when its messages are due.

    Attributes:
        name: Its name.
        schedule: The schedule; None if it cannot be read.
        runs: When the next five occurrences are due, as far as they are known (UTC).
    """

    name: str
    schedule: Schedule | None
    runs: tuple[datetime, ...] = ()


class ReliableInspector:
    """Reads and changes a reliable queue without opening it.

    It listens to nothing and moves no messages. Every method may raise the errors of
    :class:`~delayq.errors.ServerError`.

    Attributes:
        name: The queue's name.
        stores: The data of its partitions, as far as they are known.
    """

    kind: Literal["reliable"] = "reliable"

    def __init__(
        self,
        session: Session,
        name: str,
        partitions: int = 1,
        *,
        name_mapper: Callable[[str], str] | None = None,
    ) -> None:
        """Args:
        session: The session of an open client.
        name: The queue's name: on the server, unless there is a name mapper.
        partitions: The number of partitions that are known.
        name_mapper: As for :func:`delayq.connect`.
        """
        self._session = session
        self._name_mapper = name_mapper
        self.name: str = name
        self.stores: Sequence[ReliableStore] = [self.store(n) for n in range(partitions)]

    @classmethod
    def of(cls, client: Client, name: str) -> Self:
        """Inspect the queue that a client knows by this name."""
        client.session.check_loop()
        return cls(client.session, name, name_mapper=client.name_mapper)

    # Partitions

    def store(self, partition: int) -> ReliableStore:
        """Return the data of the partition with that number."""
        keys = ReliableKeys.of(self.name, self._name_mapper, partition)
        return ReliableStore(self._session.server, keys)

    async def all_stores(self, *, at_rest: bool = False) -> Sequence[ReliableStore]:
        """Return the data of all partitions, as the settings number them.

        A user that may not read the settings gets those that are known.

        Args:
            at_rest: Refuse a queue that is being moved to another number of partitions.

        Raises:
            ServerUnavailable: The queue is being moved, and must be ``at_rest``.
        """
        if (stored := await self._visible_settings()) is not None:
            if at_rest:
                stored.check_at_rest(self.name)
            self.stores = [self.store(number) for number in range(stored.partitions)]
        return self.stores

    async def now(self) -> datetime:
        """Return the server's time (UTC)."""
        return datetime_at(await self._session.server.time_us())

    async def call_each(self, call: Callable[[ReliableStore], Awaitable[R]]) -> list[R]:
        """Make a call to every known partition at once."""
        return await gather_all([call(store) for store in self.stores])

    async def repartition(
        self, partitions: int, *, progress: Callable[[Repartition], None] = lambda _: None
    ) -> Repartition:
        """Move the queue to another number of partitions, or continue an interrupted move.

        Due times, order, ids, groups and their limits, schedules, dead letters, remembered ids and
        results are kept. The queue is paused meanwhile, and offers fail after some seconds without
        having stored anything. While workers still have messages, cancelling or an error ends the
        move, and nothing has changed; if that is not possible, the error says how to go on. So does
        a call with the number of partitions that the queue has. Later, another call has to continue
        the move.

        Args:
            partitions: The new number of partitions.
            progress: Called with each step.

        Raises:
            BadInput: The number of partitions is invalid.
            ConfigurationError: The queue is being moved to another number of partitions, its limit
                is smaller than the number, or another release has written it.
            ServerUnavailable: Another process changes the number of partitions, or has taken the
                move over.
        """
        check_partitions(partitions)
        return await Mover(self.name, self.store, partitions, progress).run()

    # Figures

    async def depth(self) -> QueueDepth:
        """Return the number of messages in each state, in the partitions that are known."""
        return QueueDepth.total(await self.call_each(ReliableStore.depth))

    async def stats(self) -> QueueDepth:
        """Return the figures of :meth:`delayq.ReliableQueue.stats`."""
        await self.all_stores(at_rest=True)
        return await self.depth()

    async def activity(self, unit: Unit, span: int) -> list[Activity]:
        """Return what happened in the last ``span`` minutes or hours."""
        return await self.stores[0].activity(unit, span)

    async def batches(self, limit: int) -> list[BatchStatus]:
        """Return up to ``limit`` batches, newest first."""
        stores = await self.all_stores(at_rest=True)
        located_batches = [
            (batch, store) for store in stores for batch in await store.newest_batches(limit)
        ]
        newest = heapq.nlargest(limit, located_batches, key=itemgetter(0))
        counts = await gather_all([store.batch_counts(batch) for batch, store in newest])
        return [
            BatchStatus.of(batch, of_batch)
            for (batch, _), of_batch in zip(newest, counts, strict=True)
            if of_batch is not None
        ]

    async def workers(self) -> list[WorkerInfo]:
        """Return the clients that work on the queue, by host and process.

        A client reports with every re-check if what it handles has changed, otherwise with every
        fourth one. Its entry goes when it closes the queue or stops its worker, and if it dies,
        twelve re-checks after its last report: one minute by default.
        """
        workers = await self.stores[0].workers()
        return sorted(workers, key=lambda worker: (worker.host, worker.pid))

    async def exists(self) -> bool:
        """Return whether the queue was ever used: has had a message, or a setting.

        True if the user may not know.
        """
        first = self.stores[0]
        try:
            if "layout" in (await first.settings()).fields:
                return True
            # Its settings may have been evicted.
            depth = await first.depth()
        except ServerRefused:
            return True
        return any(getattr(depth, state) for state in COUNTED_STATES)

    # Messages

    async def get(self, id: str) -> StoredMessage | None:  # noqa: A002
        """Return a live message with its checkpoint; None if there is none with that id.

        Raises:
            BadInput: ``id`` is not a valid id.
        """
        checked = checked_id(id)
        stores = [*await self.all_stores(at_rest=True)]
        # Most messages lie in the partition of their id, but those of a group lie with their group.
        stores.insert(0, stores.pop(partition_of(checked, len(stores))))
        for store in stores:
            if (message := await store.get_with_checkpoint(checked)) is not None:
                return message
        return None

    async def live_messages(self, state: LiveState, offset: int, limit: int) -> list[StoredMessage]:
        """Return messages in one state, as :meth:`delayq.ReliableQueue.list` does."""
        stores = await self.all_stores(at_rest=True)
        return [message for _, message in (await live_page(stores, state, offset, limit)).messages]

    async def message_pages(
        self, state: LiveState, convert: Callable[[int, StoredMessage], M]
    ) -> list[SearchPages[M]]:
        """Return the messages in one state, to be searched: one partition after the other.

        ``convert`` gets the number of the partition and what it has stored.
        """
        return await self._pages(
            lambda store: store.length(state),
            lambda store, offset, limit: store.page(state, offset, limit),
            convert,
        )

    async def letter_pages(
        self, convert: Callable[[int, StoredLetter], M], *, newest_first: bool = False
    ) -> list[SearchPages[M]]:
        """Return the dead letters, as :meth:`message_pages` returns messages."""
        read = ReliableStore.newest_dead if newest_first else ReliableStore.dead_page
        return await self._pages(ReliableStore.count_dead, read, convert)

    async def _pages(
        self,
        count: Callable[[ReliableStore], Awaitable[int]],
        read: Callable[[ReliableStore, int, int], Awaitable[Sequence[R | None]]],
        convert: Callable[[int, R], M],
    ) -> list[SearchPages[M]]:
        async def pages(number: int, store: ReliableStore) -> SearchPages[M]:
            async def page(offset: int, limit: int) -> list[M | None]:
                return [
                    None if item is None else convert(number, item)
                    for item in await read(store, offset, limit)
                ]

            return SearchPages(await count(store), page)

        return await gather_all([pages(*partition) for partition in enumerate(self.stores)])

    async def trim_letters(self) -> None:
        """Drop the dead letters that the settings no longer keep, unless the user may not."""
        settings = await self._visible_settings()
        if settings is not None and settings.drops_letters:
            with suppress(ServerRefused):
                await self.call_each(ReliableStore.trim_dead)

    async def purge(self, state: str) -> int:
        """Drop the messages in one state, or in all, step by step.

        Raises:
            OutcomeUnknown: Some were dropped, or may have been. With any other error, none was.
        """
        dropped = 0
        try:
            for store in await self.all_stores():
                async for of_page in store.purge_all(state):
                    dropped += of_page
        except ServerError as error:
            raise half_way(error, dropped) from error.__cause__
        return dropped

    async def remove(self) -> int:
        """Remove every key of a queue that is no longer used, and return how many there were.

        Use it only if no other client uses the name: calls made meanwhile may bring keys back.
        """
        return sum(
            [await store.remove() for store in reversed(await self.all_stores(at_rest=True))]
        )

    # Pauses and groups

    async def pause(self) -> None:
        """Stop all claims."""
        await self._change_each(ReliableStore.pause)

    async def resume(self) -> None:
        """End a pause."""
        await self._change_each(ReliableStore.resume)

    async def _change_each(self, change: Callable[[ReliableStore], Awaitable[object]]) -> None:
        # A queue without a number of partitions gets one, so that no later partition is missed.
        await self._settings_cache().learn({}, set_partition_count=True)
        await self.all_stores()
        await self.call_each(change)

    @property
    def groups(self) -> Groups:
        """The groups of the queue's messages."""
        return Groups(self._store_of_group, self._set_group, self.all_stores)

    async def _store_of_group(self, group: str) -> ReliableStore:
        stores = await self.all_stores()
        return stores[home_of(group, len(stores))]

    async def _set_group(self, group: str, change: str, limit: str) -> bool:
        """Change a group where it lies."""
        return await self._settings_cache().write(
            partial(home_of, group),
            lambda number, count: self.store(number).set_group(count, group, change, limit),
        )

    # Schedules

    async def schedules(self) -> list[ListedSchedule]:
        """Return all schedules, by name."""
        schedules: list[ListedSchedule] = []
        for store in await self.all_stores():
            entries, shift_us = await store.schedules()
            schedules += [_parse_schedule(name, entry, shift_us) for name, entry in entries.items()]
        return sorted(schedules, key=lambda listed: listed.name)

    async def run_schedule_now(self, name: str) -> tuple[ReliableStore, str] | None:
        """Make the next occurrence of a schedule due now. The one after it keeps its time.

        Returns:
            The partition of the occurrence, and its id; None if there is no such schedule, or none
            of its occurrences waits.
        """
        for store in await self.all_stores():
            entry = await store.schedule_entry(name)
            if entry is None:
                continue
            try:
                facts, _ = parse_schedule(entry)
            except UnreadableSchedule:
                continue
            occurrence = f"{name}@{facts['next']}"
            if (await store.reschedule([occurrence], 0))[0]:
                return store, occurrence
        return None

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule as :meth:`delayq.ReliableQueue.unschedule` does."""
        return any([await store.unschedule(name) for store in await self.all_stores()])

    async def pause_schedule(self, name: str) -> bool:
        """Pause a schedule as :meth:`delayq.ReliableQueue.pause_schedule` does."""
        return any([await store.pause_schedule(name) for store in await self.all_stores()])

    async def resume_schedule(self, name: str) -> bool:
        """Resume a schedule as :meth:`delayq.ReliableQueue.resume_schedule` does."""
        return any([await store.resume_schedule(name) for store in await self.all_stores()])

    # Settings

    async def settings(self) -> QueueSettings:
        """Return the settings."""
        return (await self.stores[0].settings()).public()

    async def visible_settings(self) -> QueueSettings | None:
        """Return the settings; None if the user may not read them."""
        stored = await self._visible_settings()
        return None if stored is None else stored.public()

    async def _visible_settings(self) -> StoredSettings | None:
        with suppress(ServerRefused):
            return await self.stores[0].settings()
        return None

    async def configure(self, changes: SettingTexts) -> None:
        """Change settings. Raises as :meth:`delayq.ReliableQueue.configure`."""
        await self._settings_cache().configure(changes)

    async def differences(self) -> list[tuple[Difference, list[WorkerInfo]]]:
        """Return the settings of which processes declare another value than the server has, each
        with these processes.
        """
        stored = await self.stores[0].settings()
        declarers: dict[Difference, list[WorkerInfo]] = {}
        for worker in await self.stores[0].workers():
            for difference in stored.differences(worker.declared):
                declarers.setdefault(difference, []).append(worker)
        return [*declarers.items()]

    async def undeclared(self, declared: SettingTexts) -> list[Difference]:
        """Return those of the declared settings that the server does not have: its value is empty
        if it has none.
        """
        stored = await self.stores[0].settings()
        stored.check_layout(self.name)
        absent = stored.missing(declared)
        return [
            *(Difference(setting, "", text) for setting, text in absent.items()),
            *stored.differences(declared),
        ]

    def _settings_cache(self) -> SettingsCache:
        return SettingsCache(self.name, self.store, self._session.background, lambda _: None)


def _parse_schedule(raw: bytes, entry: bytes, shift_us: int) -> ListedSchedule:
    name = raw.decode(errors="replace")
    try:
        schedule = to_schedule(name, entry, shift_us)
        facts, timing = parse_schedule(entry)
    except UnreadableSchedule:
        return ListedSchedule(name, None)
    if facts["paused"] or not facts["next"]:
        return ListedSchedule(name, schedule)
    first_us = int(facts["next"])
    if timing.every_us:
        runs_us = [first_us + count * timing.every_us for count in range(_SHOWN_RUNS)]
    else:
        upcoming = facts["upcoming"] if isinstance(facts["upcoming"], list) else []
        runs_us = [first_us, *map(int, upcoming[: _SHOWN_RUNS - 1])]
    return ListedSchedule(name, schedule, tuple(datetime_at(run - shift_us) for run in runs_us))
