"""A delayed queue as the dashboard shows it: rows of messages, each with the place to find it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from delayq._dashboard.health import count_in, edges
from delayq._dashboard.rows import Listing, Place, Row, of_record
from delayq._dashboard.steps import in_steps
from delayq._dashboard.undo import PerhapsUndone
from delayq._redisson.records import due_us_of_stored, id_of_stored, score_of
from delayq.admin.delayed import DelayedInspector
from delayq.admin.search import SearchPages
from delayq.errors import OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._redisson.records import Offer, PendingRecord


class DelayedSource(DelayedInspector):
    """A delayed queue, in Redisson's format."""

    states = ("delayed", "ready", "leased", "unreadable")
    partitions = 1

    def may_hold(self, place: Place) -> bool:
        """Return whether a message of this queue can have that place."""
        return bool(place.due)

    async def settings(self) -> None:
        """Return None: a delayed queue has no settings on the server."""

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages come due by each of :func:`edges`, and how many later."""
        return await self.store.due_counts(edges(now))

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

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        record = None if dead else await self._record_at(place)
        return None if record is None else of_record(record)

    async def look_at(self, places: Sequence[Place]) -> list[Row]:
        """Return those of some messages that are there."""
        records = await in_steps(places, self._record_at)
        return [of_record(record) for record in records if record is not None]

    async def cancel(self, places: Sequence[Place], *, running: bool = False) -> list[bool]:
        """Remove pending messages, and return which were there."""
        if running:
            # A worker's payloads have left the queue.
            return [False] * len(places)

        async def remove(record: PendingRecord | None) -> bool:
            return record is not None and await self.store.cancel([record.record]) > 0

        # Find all of them first: a change would mislead a search among those due at the same time.
        return await in_steps(await in_steps(places, self._record_at), remove)

    async def reschedule(self, places: Sequence[Place], delay_us: int) -> list[Place | None]:
        """Give messages another delay. Return their new places; None for those that are gone."""
        return await self.reschedule_each([(place, delay_us) for place in places])

    async def reschedule_each(self, moves: Sequence[tuple[Place, int]]) -> list[Place | None]:
        """Give each message a delay of its own, as :meth:`reschedule` does."""

        async def move(record_and_delay: tuple[PendingRecord | None, int]) -> Place | None:
            record, delay_us = record_and_delay
            if record is None:
                return None
            due_us = await self.store.reschedule(record.record, delay_us)
            return None if due_us is None else Place(record.start, 0, score_of(due_us))

        records = await in_steps([place for place, _ in moves], self._record_at)
        delays = [delay_us for _, delay_us in moves]
        return await in_steps([*zip(records, delays, strict=True)], move)

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer up to 25 messages again, with new ids, and return how many are there.

        Those that are still there are left as they are.

        Raises:
            PerhapsUndone: They may have been offered. To repeat the call would offer them twice.
        """
        live = await self.look_at([row.place for row in rows if row.place])
        live_places = {row.place for row in live}
        absent = [row for row in rows if row.place not in live_places]
        if absent:
            try:
                await self.offer([(row.delay_us(now), row.payload or b"") for row in absent])
            except OutcomeUnknown as error:
                raise PerhapsUndone(
                    f"{len(absent)} messages may be back, so check the list. Another try brings"
                    f" back only the others. {error}"
                ) from error
        return len(rows)

    async def offer(self, offers: Sequence[Offer]) -> list[Place]:
        """Store messages, and return their places."""
        reply = await self.store.send(self.store.offer_request(offers))
        _, receipts = self.store.parse_offered(offers, reply)
        # A record begins with the length of its id.
        return [
            Place(b"\x08" + id_of_stored(receipt), 0, score_of(due_us_of_stored(receipt)))
            for receipt in receipts
        ]

    async def _record_at(self, place: Place) -> PendingRecord | None:
        return await self.store.find_at(place.due, place.id)
