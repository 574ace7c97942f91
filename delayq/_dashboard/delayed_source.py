"""Reads and changes a delayed queue without opening it, so that it takes no part in it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

from delayq._dashboard.depths import count_in, edges
from delayq._dashboard.rows import Listing, Place, Row, of_record
from delayq._dashboard.steps import in_steps
from delayq._dashboard.undo import PerhapsUndone
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import due_us_of_stored, id_of_stored, score_of
from delayq._redisson.store import DelayedStore
from delayq.admin.search import Shelf
from delayq.errors import OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._engine.session import Session
    from delayq._redisson.records import Offer, PendingRecord
    from delayq.admin.catalog import QueueKind
    from delayq.admin.inspect import PurgeState
    from delayq.stats import QueueDepth


class DelayedSource:
    """A delayed queue, in Redisson's format."""

    kind: QueueKind = "delayed"
    states = ("delayed", "ready", "leased", "unreadable")
    partitions = 1

    def __init__(self, session: Session, name: str) -> None:
        self._server = session.server
        self._store = DelayedStore(session.server, DelayedKeys.of(name))
        self.name: str = name

    def has(self, place: Place) -> bool:
        """Return whether a message of this queue can have that place."""
        return bool(place.due)

    async def depth(self) -> QueueDepth:
        depth, bad, now = await asyncio.gather(
            self._store.depth(),
            self._store.count_quarantined(),
            self._server.time_us(self._store.keys.timeout),
        )
        return depth.of_queue(now, bad)

    async def settings(self) -> None:
        """Return None: a delayed queue has no settings on the server."""

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages come due by each of :data:`HORIZONS`, and how many later."""
        return await self._store.due_counts(edges(now))

    async def page(self, state: str, offset: int, limit: int) -> Listing:
        return Listing(await self._rows(state, offset, limit))

    async def _rows(self, state: str, offset: int, limit: int) -> list[Row]:
        if state == "delayed":
            return [of_record(found) for found in await self._store.pending_page(offset, limit)]
        if state == "leased":
            leased = await self._store.leased_page(offset, limit)
            return [Row(None, state, payload, lease_us=ends_us) for payload, ends_us in leased]
        read = self._store.ready_page if state == "ready" else self._store.quarantined_page
        return [Row(None, state, payload) for payload in await read(offset, limit)]

    async def shelves(self, states: Sequence[str]) -> list[Shelf[Row]]:
        """Return the messages in these states, to be searched."""
        depth = await self.depth()
        return [
            Shelf(count_in(depth, state), partial(self._rows, state))
            for state in states
            if state in self.states
        ]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        found = None if dead else await self._store.find_at(place.due, place.id)
        return None if found is None else of_record(found)

    async def look_at(self, places: Sequence[Place]) -> list[Row]:
        """Return those of some messages that are there."""
        found = await in_steps(places, self._record_at)
        return [of_record(each) for each in found if each is not None]

    async def cancel(self, places: Sequence[Place], *, running: bool = False) -> list[bool]:
        """Remove pending messages, and return which were there."""
        if running:
            # A worker's payloads have left the queue.
            return [False] * len(places)

        async def remove(found: PendingRecord | None) -> bool:
            return found is not None and await self._store.cancel([found.record]) > 0

        # Find all of them first: a change would mislead a search among those due at the same time.
        return await in_steps(await in_steps(places, self._record_at), remove)

    async def reschedule(self, places: Sequence[Place], delay_us: int) -> list[Place | None]:
        """Give messages another delay. Return their new places; None for those that are gone."""
        return await self.reschedule_each([(place, delay_us) for place in places])

    async def reschedule_each(self, moves: Sequence[tuple[Place, int]]) -> list[Place | None]:
        """Give each message a delay of its own, as :meth:`reschedule` does."""

        async def move(one: tuple[PendingRecord | None, int]) -> Place | None:
            found, delay_us = one
            due_us = None if found is None else await self._store.reschedule(found.record, delay_us)
            if found is None or due_us is None:
                return None
            return Place(found.start, 0, score_of(due_us))

        found = await in_steps([place for place, _ in moves], self._record_at)
        delays = [delay_us for _, delay_us in moves]
        return await in_steps([*zip(found, delays, strict=True)], move)

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer up to 25 messages again, with new ids, and return how many are there.

        Those that are still there are left as they are.

        Raises:
            PerhapsUndone: They may have been offered. To repeat the call would offer them twice.
        """
        there = {row.place for row in await self.look_at([row.place for row in rows if row.place])}
        gone = [row for row in rows if row.place not in there]
        if gone:
            try:
                await self.offer([(row.delay_us(now), row.payload or b"") for row in gone])
            except OutcomeUnknown as error:
                raise PerhapsUndone(
                    f"{len(gone)} messages may be back, so check the list. Another try brings back"
                    f" only the others. {error}"
                ) from error
        return len(rows)

    async def offer(self, offers: Sequence[Offer]) -> list[Place]:
        """Store messages, and return their places."""
        reply = await self._store.send(self._store.offer_request(offers))
        _, stored = self._store.parse_offered(offers, reply)
        # A record begins with the length of its id.
        return [
            Place(b"\x08" + id_of_stored(each), 0, score_of(due_us_of_stored(each)))
            for each in stored
        ]

    async def purge(self, state: str) -> int:
        """Drop the messages in one state, or in all."""
        return await self._store.purge(cast("PurgeState", state))

    async def _record_at(self, place: Place) -> PendingRecord | None:
        return await self._store.find_at(place.due, place.id)
