"""A reliable queue as the dashboard shows it: rows of messages, each with the place to find it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from delayq._background import gather_all
from delayq._dashboard.health import edges
from delayq._dashboard.rows import Listing, Place, Row, of_letter, of_message
from delayq._dashboard.steps import AT_A_TIME, in_steps
from delayq._durations import moment_us
from delayq._reliable.dead_letters import purge_letters, read_dead_letter, redrive_letters
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.listing import letters_page, live_page
from delayq._reliable.offers import Offer
from delayq._reliable.outcomes import history_of
from delayq._reliable.queue import ReliableQueue
from delayq._reliable.replies import MessageTimes
from delayq._reliable.settings import Settings
from delayq.admin.reliable import ReliableInspector
from delayq.codecs import BytesCodec
from delayq.errors import DuplicateMessage, PayloadTooLarge, QueueFull, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._reliable.dead_letters import DeadLetter
    from delayq._reliable.letter_store import StoredLetter
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.replies import State, StoredMessage
    from delayq._reliable.store import ReliableStore
    from delayq.admin.search import SearchPages

# How many messages of a partition a page looks at, with those that have expired.
_FARTHEST = 20_000


class ReliableSource(ReliableInspector):
    """A reliable queue, with all its partitions."""

    states: tuple[State, ...] = ("delayed", "ready", "leased")

    @property
    def partitions(self) -> int:
        return len(self.stores)

    def may_hold(self, place: Place) -> bool:
        return place.partition < len(self.stores)

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages come due by each of :func:`edges`, and how many later."""
        parts = await self.call_each(lambda store: store.due_counts(edges(now)))
        return [sum(bars) for bars in zip(*parts, strict=True)]

    # Lists

    async def page(self, state: str, offset: int, limit: int) -> Listing:
        """Return a page of the messages in one state, or of the dead letters.

        The offset counts live messages: see :mod:`delayq._reliable.listing`.
        """
        if state == "dead":
            letters = await letters_page(self.stores, offset, limit)
            return Listing([_letter_row(*letter) for letter in letters])
        # One more, to know whether there are more.
        live = await live_page(self.stores, state, offset, limit + 1, farthest=_FARTHEST)
        rows = [_message_row(*message) for message in live.messages]
        has_more = len(rows) > limit
        is_cut = live.is_cut and not has_more
        return Listing(rows[:limit], has_more, _FARTHEST if is_cut else None)

    async def search_pages(self, states: Sequence[str]) -> list[SearchPages[Row]]:
        """Return the messages in these states, to be searched: one partition after the other."""
        pages = await gather_all(
            [
                self.letter_pages(_letter_row)
                if state == "dead"
                else self.message_pages(cast("State", state), _message_row)
                for state in states
                if state in (*self.states, "dead")
            ]
        )
        return [partition for partitions in pages for partition in partitions]

    async def letters(self) -> list[SearchPages[tuple[Row, DeadLetter[bytes]]]]:
        """Return the dead letters, to be searched: one partition after the other."""

        def read(number: int, stored: StoredLetter) -> tuple[Row, DeadLetter[bytes]]:
            return _letter_row(number, stored), read_dead_letter(stored, BytesCodec())

        return await self.letter_pages(read)

    # Single messages

    async def look_up(self, id: str) -> list[Row]:  # noqa: A002
        """Return the live message and the oldest dead letter with this id."""

        async def rows_of(number: int, store: ReliableStore) -> list[Row]:
            message = await store.get(id)
            rows = [] if message is None else [_message_row(number, message)]
            letter = await store.dead_letter(id.encode())
            return rows if letter is None else [*rows, _letter_row(number, letter)]

        parts = await gather_all([rows_of(*partition) for partition in enumerate(self.stores)])
        return [row for rows in parts for row in rows]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        if not self.may_hold(place):
            return None
        store = self.stores[place.partition]
        if dead:
            letter = await store.dead_letter(place.id)
            return None if letter is None else of_letter(place, letter)
        message = await store.get(place.id)
        return None if message is None else of_message(place, message, await store.times(message))

    async def look_at(self, places: Sequence[Place]) -> list[Row]:
        """Return those of some messages that are alive."""
        rows: list[Row] = []
        for store, batch in self._by_partition(places):
            ids = [place.id for place in batch]
            messages, expiries, windows = await asyncio.gather(
                store.get_many(ids), store.expiries(ids), _id_windows(store, ids)
            )
            for place, message, expires_us, taken_until_us in zip(
                batch, messages, expiries, windows, strict=True
            ):
                if message is not None:
                    row = of_message(place, message, MessageTimes(None, expires_us))
                    rows.append(replace(row, taken_until_us=taken_until_us))
        return rows

    async def history(self, row: Row) -> MessageHistory | None:
        """Return what is recorded of a message; None if there is nothing, or its id
        is not text.
        """
        assert row.place is not None
        store, name = self.stores[row.place.partition], row.place.id
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
            and (row.enqueued_us is None or history.offered_at == moment_us(row.enqueued_us))
        )
        return history if is_its_own else None

    # Changes

    async def cancel(self, places: Sequence[Place], *, running: bool = False) -> list[bool]:
        """Remove messages, also those that workers have if ``running``; return which were there."""
        removed: dict[Place, bool] = {}
        for store, batch in self._by_partition(places):
            replies = await store.cancel([place.id for place in batch], leased=running)
            removed |= zip(batch, replies, strict=True)
        return [removed[place] for place in places]

    async def reschedule(self, places: Sequence[Place], delay_us: int) -> list[Place | None]:
        """Give messages another delay. Return their places; None for those that are gone."""
        was_there: dict[Place, bool] = {}
        for store, batch in self._by_partition(places):
            replies = await store.reschedule([place.id for place in batch], delay_us)
            was_there |= zip(batch, replies, strict=True)
        return [place if was_there[place] else None for place in places]

    async def reschedule_each(self, moves: Sequence[tuple[Place, int]]) -> list[Place | None]:
        """Give each message a delay of its own, as :meth:`reschedule` does."""

        async def move(place_and_delay: tuple[Place, int]) -> Place | None:
            place, delay_us = place_and_delay
            (was_there,) = await self.stores[place.partition].reschedule([place.id], delay_us)
            return place if was_there else None

        return await in_steps(moves, move)

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer up to 25 messages again, with all their attempts, and return how many are there.

        Those that are still there are left as they are. A message stays away if its id is taken by
        now, the queue is full, or its payload is larger than offers on this client may be.
        """
        queue = self.open()

        async def count_refused(offers: Sequence[Offer[bytes]]) -> int:
            try:
                await queue.offer_many(offers)
            except (DuplicateMessage, QueueFull) as error:
                return len(error.ids)
            except PayloadTooLarge:
                if len(offers) == 1:
                    return 1
                return sum([await count_refused([offer]) for offer in offers])
            return 0

        places = [row.place for row in rows if row.place is not None]
        live = {row.place: row.payload for row in await self.look_at(places)}
        unchanged = sum(row.place in live and live[row.place] == row.payload for row in rows)
        absent = [row for row in rows if row.place not in live]
        if not absent:
            return unchanged
        windows: dict[Place, int | None] = {}
        for store, batch in self._by_partition([row.place for row in absent if row.place]):
            ends = await _id_windows(store, [place.id for place in batch])
            windows |= zip(batch, ends, strict=True)

        def offer_again(row: Row) -> Offer[bytes]:
            # If the id is taken because the message was offered with ``unique_for``, it is still
            # its own: "replace" offers in spite of that, and no other message lives. If another
            # one was handled meanwhile, it is taken until a later moment.
            is_own = (
                row.taken_until_us is not None
                and row.place is not None
                and windows[row.place] == row.taken_until_us
            )
            return replace(_offer(row, now), on_duplicate="replace" if is_own else "raise")

        refused = await count_refused([offer_again(row) for row in absent])
        return unchanged + len(absent) - refused

    async def redrive(self, places: Sequence[Place]) -> int:
        """Redrive dead letters."""
        return sum([await redrive_letters(*letters) for letters in self._letter_names(places)])

    async def purge_dead(self, places: Sequence[Place]) -> int:
        """Drop dead letters."""
        return sum([await purge_letters(*letters) for letters in self._letter_names(places)])

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

    # Partitions

    def _by_partition(self, places: Sequence[Place]) -> list[tuple[ReliableStore, list[Place]]]:
        """Return places by partition, each once, in steps of the size that a script may have."""
        parts: dict[int, list[Place]] = {}
        for place in dict.fromkeys(places):
            parts.setdefault(place.partition, []).append(place)
        return [
            (self.stores[number], part[at : at + AT_A_TIME])
            for number, part in parts.items()
            for at in range(0, len(part), AT_A_TIME)
        ]

    def _letter_names(self, places: Sequence[Place]) -> list[tuple[ReliableStore, list[bytes]]]:
        """Return the names of letters by partition: ids of other programs may not be text, and
        letters may share an id.
        """
        names: dict[int, list[bytes]] = {}
        for place in places:
            names.setdefault(place.partition, []).append(place.id)
        return [(self.stores[number], part) for number, part in names.items()]


def _message_row(number: int, message: StoredMessage) -> Row:
    return of_message(Place(message.id, number), message)


def _letter_row(number: int, letter: StoredLetter) -> Row:
    return of_letter(Place(letter.name, number), letter)


async def _id_windows(store: ReliableStore, ids: Sequence[bytes]) -> list[int | None]:
    """Return until when each id counts as taken, in microseconds."""
    try:
        return await store.unique_until(ids)
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
