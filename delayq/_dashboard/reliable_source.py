"""Reads and changes a reliable queue without opening it, so that it takes no part in it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from delayq._dashboard.depths import edges
from delayq._dashboard.rows import Listing, Place, Row, of_letter, of_message
from delayq._dashboard.steps import AT_A_TIME, in_steps
from delayq._durations import moment_us
from delayq._reliable.dead_letters import half_way, purge_letters, read_dead_letter, redrive_letters
from delayq._reliable.groups import Groups
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.known_settings import KnownSettings
from delayq._reliable.listing import letters_page, live_page
from delayq._reliable.offering import Offer
from delayq._reliable.outcomes import history_of
from delayq._reliable.placement import home_of
from delayq._reliable.queue import ReliableQueue
from delayq._reliable.replies import MessageTimes
from delayq._reliable.settings import Settings
from delayq._reliable.store import ReliableStore
from delayq.admin.inspect import differences
from delayq.admin.search import Shelf
from delayq.codecs import BytesCodec
from delayq.errors import DuplicateMessage, PayloadTooLarge, QueueFull, ServerError, ServerRefused
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._engine.session import Session
    from delayq._reliable.dead_letters import DeadLetter
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.settings import Declared, Difference, QueueSettings, StoredSettings
    from delayq._reliable.tallies import Unit
    from delayq.admin.catalog import QueueKind
    from delayq.stats import Activity, WorkerInfo

R = TypeVar("R")

# How many messages of a partition a page looks at, with those that have expired.
_FARTHEST = 20_000


class ReliableSource:
    """A reliable queue, with all its partitions."""

    kind: QueueKind = "reliable"
    states = ("delayed", "ready", "leased")

    def __init__(self, session: Session, name: str, partitions: int) -> None:
        self._session = session
        self.name: str = name
        self._parts = [self._partition(number) for number in range(partitions)]

    def _partition(self, number: int) -> ReliableStore:
        return ReliableStore(self._session.server, ReliableKeys.of(self.name, partition=number))

    @property
    def partitions(self) -> int:
        return len(self._parts)

    def has(self, place: Place) -> bool:
        return place.partition < len(self._parts)

    async def depth(self) -> QueueDepth:
        return QueueDepth.total(await self._each(lambda _, store: store.depth()))

    async def settings(self) -> QueueSettings:
        return (await self._parts[0].settings()).public()

    async def configure(self, changes: Declared) -> None:
        """Change settings. Raises as :meth:`delayq.ReliableQueue.configure`."""
        await self._known_settings().configure(changes)

    @property
    def groups(self) -> Groups:
        """The groups of the queue's messages."""
        return Groups(self._home_of_group, self._set_group, self.every_store)

    async def _home_of_group(self, group: str) -> ReliableStore:
        stored = await self._learn()
        return self._parts[home_of(group, stored.partitions)]

    async def _set_group(self, group: str, what: str, limit: str) -> bool:
        """Change a group where it lies."""
        return await self._known_settings().write(
            partial(home_of, group),
            lambda place, count: self._partition(place).set_group(count, group, what, limit),
        )

    def _known_settings(self) -> KnownSettings:
        return KnownSettings(self.name, self._partition, self._session.background, lambda _: None)

    async def activity(self, unit: Unit, span: int) -> list[Activity]:
        return await self._parts[0].activity(unit, span)

    async def differences(self) -> list[tuple[Difference, list[WorkerInfo]]]:
        """Return the settings of which processes declare another value than the server has."""
        return await differences(self._parts[0])

    async def workers(self) -> list[WorkerInfo]:
        return await self._parts[0].workers()

    async def histogram(self, now: int) -> list[int]:
        parts = await self._each(lambda _, store: store.due_counts(edges(now)))
        return [sum(bars) for bars in zip(*parts, strict=True)]

    async def page(self, state: str, offset: int, limit: int) -> Listing:
        """Return a page of the messages in one state, or of the dead letters.

        The offset counts live messages: see :mod:`delayq._reliable.listing`.
        """
        if state == "dead":
            letters = await letters_page(self._parts, offset, limit)
            return Listing([of_letter(Place(each.name, part), each) for part, each in letters])
        # One more, to know whether there are more.
        found = await live_page(self._parts, state, offset, limit + 1, farthest=_FARTHEST)
        rows = [of_message(Place(each.id, part), each) for part, each in found.messages]
        has_more = len(rows) > limit
        is_cut = found.is_cut and not has_more
        return Listing(rows[:limit], has_more, _FARTHEST if is_cut else None)

    async def shelves(self, states: Sequence[str]) -> list[Shelf[Row]]:
        """Return the messages in these states, to be searched: one partition after the other."""
        known = [state for state in states if state in (*self.states, "dead")]

        async def of(number: int, state: str) -> Shelf[Row]:
            store = self._parts[number]
            count = await (store.count_dead() if state == "dead" else store.length(state))
            return Shelf(count, partial(self._rows, number, state))

        parts = await self._each(lambda number, _: in_steps(known, partial(of, number)))
        return [shelf for shelves in zip(*parts, strict=True) for shelf in shelves]

    async def look_up(self, id: str) -> list[Row]:  # noqa: A002
        """Return the live message and the oldest dead letter with this id."""

        async def there(number: int, store: ReliableStore) -> list[Row]:
            found = await store.get(id)
            rows = [] if found is None else [of_message(Place(found.id, number), found)]
            letter = await store.dead_letter(id.encode())
            if letter is not None:
                rows.append(of_letter(Place(letter.name, number), letter))
            return rows

        return [row for rows in await self._each(there) for row in rows]

    async def _rows(self, number: int, state: str, offset: int, limit: int) -> list[Row | None]:
        """Return messages of one partition, with None in the place of each that has expired."""
        store = self._parts[number]
        if state == "dead":
            letters = await store.dead_page(offset, limit)
            return [of_letter(Place(letter.name, number), letter) for letter in letters]
        messages = await store.page(state, offset, limit)
        return [
            None if found is None else of_message(Place(found.id, number), found)
            for found in messages
        ]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        if not self.has(place):
            return None
        store = self._parts[place.partition]
        if dead:
            letter = await store.dead_letter(place.id)
            return None if letter is None else of_letter(place, letter)
        found = await store.get(place.id)
        return None if found is None else of_message(place, found, await store.times(found))

    async def look_at(self, places: Sequence[Place]) -> list[Row]:
        """Return those of some messages that are alive."""
        rows: list[Row] = []
        for number, some in self._by_partition(places):
            store, ids = self._parts[number], [place.id for place in some]
            found, ends, taken = await asyncio.gather(
                store.get_many(ids), store.expiries(ids), _taken_until(store, ids)
            )
            for place, message, expires_us, until in zip(some, found, ends, taken, strict=True):
                if message is not None:
                    row = of_message(place, message, MessageTimes(None, expires_us))
                    rows.append(replace(row, taken_until_us=until))
        return rows

    async def history(self, row: Row) -> MessageHistory | None:
        """Return what is recorded of a message; None if there is nothing, or its id
        is not text.
        """
        assert row.place is not None
        store, name = self._parts[row.place.partition], row.place.id
        if row.state == "dead" and (letter := await store.dead_letter(name)) is not None:
            message = read_dead_letter(letter, BytesCodec()).id
        else:
            message = name.decode(errors="replace")
        outcome, live = await store.outcome(message)
        found = history_of(message, outcome, None if row.state == "dead" else live, BytesCodec())
        # The record may be that of another message with the same id.
        is_its_own = (
            found is not None
            and found.offered_at is not None
            and (row.enqueued_us is None or found.offered_at == moment_us(row.enqueued_us))
        )
        return found if is_its_own else None

    async def cancel(self, places: Sequence[Place], *, running: bool = False) -> list[bool]:
        """Remove messages, also those that workers have if ``running``; return which were there."""
        done: dict[Place, bool] = {}
        for number, some in self._by_partition(places):
            ids = [place.id for place in some]
            removed = await self._parts[number].cancel(ids, leased=running)
            done |= zip(some, removed, strict=True)
        return [done[place] for place in places]

    async def reschedule(self, places: Sequence[Place], delay_us: int) -> list[Place | None]:
        """Give messages another delay. Return their places; None for those that are gone."""
        done: dict[Place, Place | None] = {}
        for number, some in self._by_partition(places):
            moved = await self._parts[number].reschedule([place.id for place in some], delay_us)
            done |= {
                place: place if is_there else None
                for place, is_there in zip(some, moved, strict=True)
            }
        return [done[place] for place in places]

    async def reschedule_each(self, moves: Sequence[tuple[Place, int]]) -> list[Place | None]:
        """Give each message a delay of its own, as :meth:`reschedule` does."""

        async def move(one: tuple[Place, int]) -> Place | None:
            place, delay_us = one
            (moved,) = await self._parts[place.partition].reschedule([place.id], delay_us)
            return place if moved else None

        return await in_steps(moves, move)

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer up to 25 messages again, with all their attempts, and return how many are there.

        Those that are still there are left as they are. A message stays away if its id is taken by
        now, the queue is full, or its payload is larger than offers on this client may be.
        """
        queue = self.open()

        async def refused(some: Sequence[Offer[bytes]]) -> int:
            try:
                await queue.offer_many(some)
            except (DuplicateMessage, QueueFull) as error:
                return len(error.ids)
            except PayloadTooLarge:
                return 1 if len(some) == 1 else sum([await refused([each]) for each in some])
            return 0

        places = [row.place for row in rows if row.place is not None]
        there = {row.place: row.payload for row in await self.look_at(places)}
        same = sum(row.place in there and there[row.place] == row.payload for row in rows)
        gone = [row for row in rows if row.place not in there]
        if not gone:
            return same
        taken: dict[Place, int | None] = {}
        for number, some in self._by_partition([row.place for row in gone if row.place]):
            ends = await _taken_until(self._parts[number], [place.id for place in some])
            taken |= zip(some, ends, strict=True)

        def offer(row: Row) -> Offer[bytes]:
            # If the id is taken because the message was offered with ``unique_for``, it is still
            # its own: "replace" offers in spite of that, and no other message lives. If another
            # one was handled meanwhile, it is taken until a later moment.
            until = row.taken_until_us
            is_own = until is not None and row.place is not None and taken[row.place] == until
            return replace(_offer(row, now), on_duplicate="replace" if is_own else "raise")

        return same + len(gone) - await refused([offer(row) for row in gone])

    async def purge(self, state: str) -> int:
        """Drop the messages in one state, or in all, step by step.

        Raises:
            OutcomeUnknown: Some were dropped, or may have been. With any other error, none was.
        """
        dropped = 0
        try:
            for store in await self.every_store():
                is_last = False
                while not is_last:
                    step, is_last = await store.purge(state)
                    dropped += step
        except ServerError as error:
            raise half_way(error, dropped) from error.__cause__
        return dropped

    def open(self) -> ReliableQueue[bytes]:
        """Open the queue, under its name on the server. It stays open as long as the client."""
        queue: ReliableQueue[bytes] = ReliableQueue(
            self.name,
            lambda number: ReliableKeys.of(self.name, partition=number),
            BytesCodec(),
            # A visitor does not wait for a slot.
            Settings(when_full="raise"),
            self._session,
        )
        # The application may have this client, and open the queue with a codec of its own.
        queue.keep_codec()
        return queue

    def _by_partition(self, places: Sequence[Place]) -> list[tuple[int, list[Place]]]:
        """Return places by partition, each once, in steps of the size that a script may have."""
        parts: dict[int, list[Place]] = {}
        for place in dict.fromkeys(places):
            parts.setdefault(place.partition, []).append(place)
        return [
            (number, some[at : at + AT_A_TIME])
            for number, some in parts.items()
            for at in range(0, len(some), AT_A_TIME)
        ]

    async def letters(self) -> list[Shelf[tuple[Row, DeadLetter[bytes]]]]:
        """Return the dead letters, to be searched: one partition after the other."""

        async def page(number: int, offset: int, limit: int) -> list[tuple[Row, DeadLetter[bytes]]]:
            stored = await self._parts[number].dead_page(offset, limit)
            return [
                (of_letter(Place(each.name, number), each), read_dead_letter(each, BytesCodec()))
                for each in stored
            ]

        counts = await self._each(lambda _, store: store.count_dead())
        return [Shelf(count, partial(page, number)) for number, count in enumerate(counts)]

    async def every_store(self) -> Sequence[ReliableStore]:
        """Return the data of all partitions, also of those that were not found yet."""
        await self._learn()
        return self._parts

    async def redrive(self, places: Sequence[Place]) -> int:
        """Redrive dead letters."""
        return sum([await redrive_letters(*letters) for letters in self._letters(places)])

    async def purge_dead(self, places: Sequence[Place]) -> int:
        """Drop dead letters."""
        return sum([await purge_letters(*letters) for letters in self._letters(places)])

    async def pause(self) -> None:
        """Stop all claims."""
        await self._everywhere(ReliableStore.pause)

    async def resume(self) -> None:
        """End a pause."""
        await self._everywhere(ReliableStore.resume)

    # Internals

    async def _learn(self) -> StoredSettings:
        """Find all partitions, and return the settings."""
        stored = await self._parts[0].settings()
        self._parts = [self._partition(number) for number in range(stored.partitions)]
        return stored

    async def _everywhere(self, act: Callable[[ReliableStore], Awaitable[object]]) -> None:
        """Act on every partition."""
        await self._known_settings().learn({}, stores=True)
        await self._learn()
        await self._each(lambda _, store: act(store))

    async def _each(self, of: Callable[[int, ReliableStore], Awaitable[R]]) -> list[R]:
        # Wait for all calls, so that none continues behind the page.
        outcomes = await asyncio.gather(
            *(of(*part) for part in enumerate(self._parts)), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def _letters(self, places: Sequence[Place]) -> list[tuple[ReliableStore, list[bytes]]]:
        chosen: dict[int, list[bytes]] = {}
        for place in places:
            # By name: ids of other programs may not be text, and letters may share an id.
            chosen.setdefault(place.partition, []).append(place.id)
        return [(self._parts[number], names) for number, names in chosen.items()]


async def _taken_until(store: ReliableStore, ids: Sequence[bytes]) -> list[int | None]:
    try:
        return await store.taken_until(ids)
    except ServerRefused:
        # Only a user that may restore messages needs to know, and may: a producer and admin.
        return [None] * len(ids)


def _offer(row: Row, now: int) -> Offer[bytes]:
    """Return the offer of a message as it was when it was read."""
    assert row.place is not None
    delay_us = row.delay_us(now)
    ttl_us = None if row.expires_us is None else max(row.expires_us - now, delay_us + 1)
    return Offer(
        row.payload or b"",
        delay=timedelta(microseconds=delay_us),
        id=row.place.id.decode(),
        headers=row.headers or None,
        priority=row.priority,
        ttl=None if ttl_us is None else timedelta(microseconds=ttl_us),
        max_attempts=row.max_attempts,
        timeout=None if row.timeout_us is None else timedelta(microseconds=row.timeout_us),
        group=row.group or None,
    )
