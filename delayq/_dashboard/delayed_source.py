"""Reads and changes a delayed queue without opening it, so that it takes no part in it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

from delayq._dashboard.depths import count_in, edges
from delayq._dashboard.rows import Place, Row, of_record
from delayq._dashboard.steps import AT_A_TIME, in_steps
from delayq._delayed.keys import DelayedKeys
from delayq._delayed.store import DelayedStore, due_us_of_stored, id_of_stored, score_of
from delayq.admin.search import Shelf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._delayed.store import PendingRecord
    from delayq._engine.session import Session
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

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
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
            Shelf(count_in(depth, state), partial(self.page, state))
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

        async def remove(place: Place) -> bool:
            found = await self._record_at(place)
            return found is not None and await self._store.cancel([found.record]) > 0

        return await in_steps(places, remove)

    async def reschedule(self, places: Sequence[Place], delay_us: int) -> list[Place | None]:
        """Give messages another delay. Return their new places; None for those that are gone."""
        return await self.reschedule_each([(place, delay_us) for place in places])

    async def reschedule_each(self, moves: Sequence[tuple[Place, int]]) -> list[Place | None]:
        """Give each message a delay of its own, as :meth:`reschedule` does."""

        async def move(one: tuple[Place, int]) -> Place | None:
            place, delay_us = one
            found = await self._record_at(place)
            due_us = None if found is None else await self._store.reschedule(found.record, delay_us)
            return None if due_us is None else Place(place.id, 0, score_of(due_us))

        return await in_steps(moves, move)

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer messages again, with new ids, and return how many."""
        for at in range(0, len(rows), AT_A_TIME):
            some = rows[at : at + AT_A_TIME]
            await self.offer([(row.delay_us(now), row.payload or b"") for row in some])
        return len(rows)

    async def offer(self, offers: Sequence[tuple[int, bytes]]) -> list[Place]:
        """Store messages, each with its delay in microseconds, and return their places."""
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
