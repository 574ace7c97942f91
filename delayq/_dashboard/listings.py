"""Lists and finds the messages of queues: rows, each with a reference to its message."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from delayq._background import gather_all, gather_mixed
from delayq._dashboard.health import count_in, edges
from delayq._dashboard.rows import (
    Listing,
    MessageRef,
    Row,
    of_letter,
    of_message,
    of_record,
    of_record_kept,
)
from delayq._durations import datetime_at, microseconds
from delayq._reliable.dead_letters import read_dead_letter
from delayq._reliable.listing import Merged, letters_page, live_page
from delayq._reliable.outcomes import history_of
from delayq._reliable.replies import LIVE_STATES, MessageTimes
from delayq.admin import retries
from delayq.admin.delayed import DelayedInspector
from delayq.admin.letters import LetterFacts
from delayq.admin.reliable import ReliableInspector
from delayq.admin.retries import FailedReader
from delayq.admin.search import SearchPages
from delayq.codecs import BytesCodec
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._redisson.records import PendingRecord
    from delayq._reliable.letter_store import StoredLetter
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.replies import LiveState, StoredMessage
    from delayq._reliable.store import ReliableStore
    from delayq.admin.retries import ReadPosition

AT_A_TIME = 10
"""The most messages in a call, and in a step of an action."""
# The ids of records are short, so a command may return more of them.
_RECORDS = 1000
# How many messages of a partition a page looks at, with those that have expired.
_FARTHEST = 20_000


class DelayedListings(DelayedInspector):
    """The messages of a delayed queue, in Redisson's format."""

    states = (*LIVE_STATES, "unreadable")
    partitions = 1

    def may_hold(self, ref: MessageRef) -> bool:
        """Return whether the queue can hold that message."""
        return bool(ref.due)

    async def settings(self) -> None:
        """Return None: a delayed queue has no settings on the server."""

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages come due by each of :func:`edges`, and how many later."""
        return await self.due_counts(edges(now))

    async def due_counts(self, edges: Sequence[int]) -> list[int]:
        return await self.store.due_counts(edges)

    async def page(self, state: str, offset: int, limit: int) -> Listing:
        return Listing(await self._rows(state, offset, limit))

    async def _rows(self, state: str, offset: int, limit: int) -> list[Row]:
        if state == "delayed":
            return [of_record(record) for record in await self.store.pending_page(offset, limit)]
        if state == "leased":
            leased = await self.store.leased_page(offset, limit)
            return [Row(None, state, payload, lease_us=ends_us) for payload, ends_us in leased]
        read = self.store.ready_page if state == "ready" else self.store.quarantined_page
        return [Row(None, state, payload) for payload in await read(offset, limit)]

    async def search_pages(self, states: Sequence[str]) -> list[SearchPages[Row]]:
        """Return the messages in these states, to be searched."""
        depth = await self.depth()
        return [
            SearchPages(count_in(depth, state), partial(self._rows, state))
            for state in states
            if state in self.states
        ]

    async def find(self, ref: MessageRef, *, dead: bool) -> Row | None:
        record = None if dead else await self._record_at(ref)
        return None if record is None else of_record(record)

    async def find_live(self, refs: Sequence[MessageRef]) -> list[Row]:
        """Return those of some messages that are there."""
        records = await gather_all(map(self._record_at, refs))
        return [of_record(record) for record in records if record is not None]

    async def _record_at(self, ref: MessageRef) -> PendingRecord | None:
        return await self.store.find_at(ref.due, ref.id)


class ReliableListings(ReliableInspector):
    """The messages of a reliable queue, in all its partitions."""

    states = LIVE_STATES

    @property
    def partitions(self) -> int:
        return len(self.stores)

    def may_hold(self, ref: MessageRef) -> bool:
        return ref.partition < len(self.stores)

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages come due by each of :func:`edges`, and how many later."""
        return await self.due_counts(edges(now))

    async def due_counts(self, edges: Sequence[int]) -> list[int]:
        parts = await self.call_each(lambda store: store.due_counts(edges))
        return [sum(counts) for counts in zip(*parts, strict=True)]

    # Lists

    async def page(self, state: str, offset: int, limit: int) -> Listing:
        """Return a page of the messages in one state, or of the dead letters, newest first.

        The offset counts live messages: see :mod:`delayq._reliable.listing`.
        """
        if state == "dead":
            letters = await letters_page(self.stores, offset, limit, newest_first=True)
            return Listing([_letter_row(*letter) for letter in letters])
        if state == "handled":
            return await self._handled_page(offset, limit)
        # One more, to know whether there are more.
        live = await live_page(self.stores, state, offset, limit + 1, farthest=_FARTHEST)
        rows = [_message_row(*message) for message in live.messages]
        has_more = len(rows) > limit
        is_cut = live.is_cut and not has_more
        return Listing(rows[:limit], has_more, _FARTHEST if is_cut else None)

    async def _handled_page(self, offset: int, limit: int) -> Listing:
        """Return messages that were handled, those that ended last first: ``limit`` or some more,
        or those that are found among the next messages with a record, which the offset counts.
        """
        # The first messages may be in any of several partitions.
        first = offset if len(self.stores) == 1 else 0
        step = max(limit, _RECORDS // len(self.stores))
        merged = Merged(
            [_record_reader(store, first, step) for store in self.stores],
            lambda change: (-change[1],),
        )
        await merged.skip(offset - first)
        oldest_us = await self._oldest_kept_us()
        rows: list[Row] = []
        end, is_full = offset, False
        while (changes := await merged.take(limit)) and changes[0][1][1] > oldest_us:
            is_full = len(rows) >= limit or end - offset >= _RECORDS
            if is_full:
                break
            by_partition: dict[int, list[tuple[bytes, int]]] = {}
            for number, change in changes:
                by_partition.setdefault(number, []).append(change)
            parts = await gather_all(
                [
                    _recorded_rows(self.stores[number], number, part, oldest_us)
                    for number, part in by_partition.items()
                ]
            )
            rows += [row for part in parts for row in part if row is not None]
            end += len(changes)
        rows.sort(key=lambda row: row.finished_us or 0, reverse=True)
        return Listing(rows, next_offset=end if is_full else None)

    async def search_pages(self, states: Sequence[str]) -> list[SearchPages[Row]]:
        """Return the messages in these states, to be searched: one partition after the other."""
        pages = await gather_all(
            [
                self.letter_pages(_letter_row)
                if state == "dead"
                else self._record_pages()
                if state == "handled"
                else self.message_pages(cast("LiveState", state), _message_row)
                for state in states
                if state in (*self.states, "dead", "handled")
            ]
        )
        return [partition for partitions in pages for partition in partitions]

    async def _record_pages(self) -> list[SearchPages[Row]]:
        oldest_us = await self._oldest_kept_us()

        async def pages(number: int, store: ReliableStore) -> SearchPages[Row]:
            async def page(offset: int, limit: int) -> list[Row | None]:
                changes = await store.recorded(offset, limit)
                return await _recorded_rows(store, number, changes, oldest_us)

            return SearchPages(await store.count_recorded(), page)

        return await gather_all([pages(*partition) for partition in enumerate(self.stores)])

    async def keeps_records(self) -> bool:
        """Return whether the queue keeps records of messages, as far as the user may know."""
        return await self._oldest_kept_us() > 0

    async def _oldest_kept_us(self) -> int:
        """Return before when a record is too old, in microseconds; 0 if none is kept."""
        settings = await self.visible_settings()
        if settings is None or not settings.keep:
            return 0
        return await self._session.server.time_us() - microseconds(settings.keep)

    async def count_failed(self) -> int:
        """Count the live messages of which an attempt has failed."""
        return await retries.count(self.stores)

    async def failed_page(
        self, position: ReadPosition, matches: Callable[[str], bool], limit: int, deadline: float
    ) -> tuple[list[Row], ReadPosition | None]:
        """Return failed messages with a matching line of their errors, without their payloads,
        those that are due first at the top, and where to go on; None at the end.

        These are ``limit`` or some more, or those that are found before ``deadline``, a moment of
        the monotonic clock.
        """
        reader = FailedReader(self.stores, position)
        rows: list[Row] = []
        while reader.position is not None:
            messages = await reader.step()
            refs = [
                MessageRef(message.id, message.partition)
                for message in messages
                if matches(message.error)
            ]
            for store, batch in self._by_partition(refs):
                stored = await store.get_many([ref.id for ref in batch], payloads=False)
                rows += [
                    of_message(ref, message)
                    for ref, message in zip(batch, stored, strict=True)
                    if message is not None
                ]
            if len(rows) >= limit or time.monotonic() >= deadline:
                break
        return sorted(rows, key=lambda row: row.moment_us or 0), reader.position

    async def failed_refs(
        self, matches: Callable[[str], bool], limit: int, deadline: float, *, only_delayed: bool
    ) -> tuple[list[MessageRef], bool]:
        """Return references to up to ``limit`` failed messages with a matching line of their
        errors, or to those that are found before ``deadline``, a moment of the monotonic clock; and
        whether these are all. If ``only_delayed``, leave out those that are due or leased.
        """
        reader = FailedReader(self.stores)
        refs: dict[MessageRef, None] = {}
        while reader.position is not None and len(refs) < limit:
            matching = [
                MessageRef(message.id, message.partition)
                for message in await reader.step()
                if matches(message.error)
            ]
            refs |= dict.fromkeys(await self._delayed(matching) if only_delayed else matching)
            if time.monotonic() >= deadline:
                break
        return [*refs][:limit], reader.position is None and len(refs) <= limit

    async def _delayed(self, refs: Sequence[MessageRef]) -> list[MessageRef]:
        """Return those of some messages that wait and are not due."""
        delayed: list[MessageRef] = []
        for store, batch in self._by_partition(refs):
            messages = await store.get_many([ref.id for ref in batch], payloads=False)
            delayed += [
                ref
                for ref, message in zip(batch, messages, strict=True)
                if message is not None and message.state == "delayed"
            ]
        return delayed

    async def letters(self) -> list[SearchPages[tuple[Row, LetterFacts]]]:
        """Return the dead letters, to be searched: one partition after the other, and the newest
        ones of each first.
        """

        def read(number: int, stored: StoredLetter) -> tuple[Row, LetterFacts]:
            return _letter_row(number, stored), LetterFacts.of(stored)

        return await self.letter_pages(read, newest_first=True)

    # Single messages

    async def find_by_id(self, id: str) -> list[Row]:  # noqa: A002
        """Return the live message, the oldest dead letter, and the record with this id."""

        async def rows_of(number: int, store: ReliableStore) -> list[Row]:
            message = await store.get(id)
            rows = [] if message is None else [_message_row(number, message)]
            letter = await store.dead_letter(id.encode())
            rows += [] if letter is None else [_letter_row(number, letter)]
            record = await self._find_record(MessageRef(id.encode(), number))
            return rows if record is None or record.state != "handled" else [*rows, record]

        parts = await gather_all([rows_of(*partition) for partition in enumerate(self.stores)])
        return [row for rows in parts for row in rows]

    async def find(self, ref: MessageRef, *, dead: bool) -> Row | None:
        if not self.may_hold(ref):
            return None
        store = self.stores[ref.partition]
        if dead:
            letter = await store.dead_letter(ref.id)
            return None if letter is None else of_letter(ref, letter)
        message = await store.get_with_checkpoint(ref.id)
        if message is None:
            return await self._find_ended(ref)
        return of_message(ref, message, await store.times(message))

    async def _find_ended(self, ref: MessageRef) -> Row | None:
        """Return the record of a message that has ended, or its dead letter."""
        row = await self._find_record(ref)
        letter = await self.find(ref, dead=True)
        return row if letter is None or (row and row.state == "handled") else letter

    async def _find_record(self, ref: MessageRef) -> Row | None:
        """Return the record of a message that has ended; None if there is none."""
        try:
            name = ref.id.decode()
        except UnicodeDecodeError:
            return None
        outcome, _ = await self.stores[ref.partition].outcome(name)
        if outcome.record is None or outcome.is_live:
            return None
        return of_record_kept(ref, outcome.record, outcome.record.moment_us)

    async def find_live(self, refs: Sequence[MessageRef]) -> list[Row]:
        """Return those of some messages that are alive."""
        rows: list[Row] = []
        for store, batch in self._by_partition(refs):
            ids = [ref.id for ref in batch]
            messages, expiries, windows = await gather_mixed(
                store.get_many(ids), store.expiries(ids), id_windows(store, ids)
            )
            for ref, message, expires_us, taken_until_us in zip(
                batch, messages, expiries, windows, strict=True
            ):
                if message is not None:
                    row = of_message(ref, message, MessageTimes(None, expires_us))
                    rows.append(replace(row, taken_until_us=taken_until_us))
        return rows

    async def history(self, row: Row) -> MessageHistory | None:
        """Return what is recorded of a message; None if there is nothing, or its id
        is not text.
        """
        assert row.ref is not None
        store, name = self.stores[row.ref.partition], row.ref.id
        if row.state == "dead" and (letter := await store.dead_letter(name)) is not None:
            id = read_dead_letter(letter, BytesCodec()).id  # noqa: A001
        else:
            id = name.decode(errors="replace")  # noqa: A001
        outcome, live = await store.outcome(id)
        history = history_of(id, outcome, None if row.state == "dead" else live, BytesCodec())
        # The record may be that of another message with the same id.
        is_its_own = (
            history is not None
            and history.offered_at is not None
            and (row.enqueued_us is None or history.offered_at == datetime_at(row.enqueued_us))
        )
        return history if is_its_own else None

    # Partitions

    def _by_partition(
        self, refs: Sequence[MessageRef], step: int = AT_A_TIME
    ) -> list[tuple[ReliableStore, list[MessageRef]]]:
        """Return references by partition, without repeats, and at most ``step`` at a time."""
        parts: dict[int, list[MessageRef]] = {}
        for ref in dict.fromkeys(refs):
            parts.setdefault(ref.partition, []).append(ref)
        return [
            (self.stores[number], part[at : at + step])
            for number, part in parts.items()
            for at in range(0, len(part), step)
        ]


def _record_reader(
    store: ReliableStore, at: int, step: int
) -> Callable[[], Awaitable[list[tuple[bytes, int]]]]:
    """Return a function that returns the next ``step`` messages with a record, those of the last
    changes first; none at the end.
    """

    async def read() -> list[tuple[bytes, int]]:
        nonlocal at
        changes = await store.recorded(at, step)
        at += len(changes)
        return changes

    return read


async def _recorded_rows(
    store: ReliableStore, number: int, changes: Sequence[tuple[bytes, int]], oldest_us: int
) -> list[Row | None]:
    """Return what is recorded of messages that were handled; None for all others, and for records
    that are too old.
    """
    records = await store.records([id for id, _ in changes]) if changes else []  # noqa: A001
    return [
        None
        if record is None or not record.is_done or us <= oldest_us
        else of_record_kept(MessageRef(id, number), record, us)
        for (id, us), record in zip(changes, records, strict=True)  # noqa: A001
    ]


def _message_row(number: int, message: StoredMessage) -> Row:
    return of_message(MessageRef(message.id, number), message)


def _letter_row(number: int, letter: StoredLetter) -> Row:
    return of_letter(MessageRef(letter.name, number), letter)


async def id_windows(store: ReliableStore, ids: Sequence[bytes]) -> list[int | None]:
    """Return until when each id counts as taken, in microseconds."""
    try:
        return await store.unique_until(ids)
    except ServerRefused:
        # Only a user that may restore messages needs to know, and may: a producer and admin.
        return [None] * len(ids)
