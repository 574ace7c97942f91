"""Queues as the dashboard changes them: it cancels, moves, buries and restores messages."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from delayq._background import gather_all
from delayq._dashboard.listings import DelayedListings, ReliableListings, id_windows
from delayq._dashboard.rows import MessageRef, Row
from delayq._dashboard.undo import PerhapsUndone
from delayq._redisson.records import due_us_of_stored, id_of_stored, score_of
from delayq._reliable.dead_letters import purge_letters, redrive_letters
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.offer import Offer
from delayq._reliable.queue import ReliableQueue
from delayq._reliable.settings import HandleSettings
from delayq.codecs import BytesCodec
from delayq.errors import (
    DuplicateMessage,
    OutcomeUnknown,
    PayloadTooLarge,
    QueueFull,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._durations import DueTime
    from delayq._redisson.records import Offer as PendingOffer
    from delayq._redisson.records import PendingRecord
    from delayq._reliable.store import ReliableStore


class DelayedSource(DelayedListings):
    """A delayed queue, in Redisson's format."""

    async def cancel(self, refs: Sequence[MessageRef], *, running: bool = False) -> list[bool]:
        """Remove pending messages, and return which were there."""
        if running:
            # A worker's payloads have left the queue.
            return [False] * len(refs)

        async def remove(record: PendingRecord | None) -> bool:
            return record is not None and await self.store.cancel([record.record]) > 0

        # Find all of them first: a change would mislead a search among those due at the same time.
        return await gather_all(map(remove, await gather_all(map(self._record_at, refs))))

    async def reschedule(
        self, refs: Sequence[MessageRef], when: DueTime
    ) -> list[MessageRef | None]:
        """Give messages another due time. Return new references; None for those that are gone."""
        return await self.reschedule_each([(ref, when) for ref in refs])

    async def reschedule_each(
        self, moves: Sequence[tuple[MessageRef, DueTime]]
    ) -> list[MessageRef | None]:
        """Give each message a due time of its own, as :meth:`reschedule` does."""

        async def move(move: tuple[PendingRecord | None, DueTime]) -> MessageRef | None:
            record, when = move
            if record is None:
                return None
            due_us = await self.store.reschedule(record.record, when)
            return None if due_us is None else MessageRef(record.start, 0, score_of(due_us))

        records = await gather_all([self._record_at(ref) for ref, _ in moves])
        times = [when for _, when in moves]
        return await gather_all(map(move, zip(records, times, strict=True)))

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer a few messages again, with new ids, and return how many are there.

        Those that are still there are left as they are.

        Raises:
            PerhapsUndone: They may have been offered. To repeat the call would offer them twice.
        """
        live = await self.find_live([row.ref for row in rows if row.ref])
        live_refs = {row.ref for row in live}
        absent = [row for row in rows if row.ref not in live_refs]
        if absent:
            try:
                await self.offer([(row.delay_us(now), row.payload or b"") for row in absent])
            except OutcomeUnknown as error:
                raise PerhapsUndone(
                    f"{len(absent)} messages may be back, so check the list. Another try brings"
                    f" back only the others. {error}"
                ) from error
        return len(rows)

    async def offer(self, offers: Sequence[PendingOffer]) -> list[MessageRef]:
        """Store messages, and return references to them."""
        reply = await self.store.send(self.store.offer_request(offers))
        _, receipts = self.store.parse_offered(offers, reply)
        # A record begins with the length of its id.
        return [
            MessageRef(b"\x08" + id_of_stored(receipt), 0, score_of(due_us_of_stored(receipt)))
            for receipt in receipts
        ]


class ReliableSource(ReliableListings):
    """A reliable queue, with all its partitions."""

    async def cancel(self, refs: Sequence[MessageRef], *, running: bool = False) -> list[bool]:
        """Remove messages, also those that workers have if ``running``; return which were there."""
        removed: dict[MessageRef, bool] = {}
        for store, batch in self._by_partition(refs):
            replies = await store.cancel([ref.id for ref in batch], leased=running)
            removed |= zip(batch, replies, strict=True)
        return [removed[ref] for ref in refs]

    async def reschedule(
        self, refs: Sequence[MessageRef], when: DueTime
    ) -> list[MessageRef | None]:
        """Give messages another due time. Return their references; None for those that are gone."""
        was_there: dict[MessageRef, bool] = {}
        for store, batch in self._by_partition(refs):
            replies = await store.reschedule([ref.id for ref in batch], when)
            was_there |= zip(batch, replies, strict=True)
        return [ref if was_there[ref] else None for ref in refs]

    async def reschedule_each(
        self, moves: Sequence[tuple[MessageRef, DueTime]]
    ) -> list[MessageRef | None]:
        """Give each message a due time of its own, as :meth:`reschedule` does."""

        async def move(move: tuple[MessageRef, DueTime]) -> MessageRef | None:
            ref, when = move
            (was_there,) = await self.stores[ref.partition].reschedule([ref.id], when)
            return ref if was_there else None

        return await gather_all(map(move, moves))

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer a few messages again, with all their attempts, and return how many are there.

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

        refs = [row.ref for row in rows if row.ref is not None]
        live = {row.ref: row.payload for row in await self.find_live(refs)}
        unchanged = sum(row.ref in live and live[row.ref] == row.payload for row in rows)
        absent = [row for row in rows if row.ref not in live]
        if not absent:
            return unchanged
        windows: dict[MessageRef, int | None] = {}
        for store, batch in self._by_partition([row.ref for row in absent if row.ref]):
            ends = await id_windows(store, [ref.id for ref in batch])
            windows |= zip(batch, ends, strict=True)

        def offer_again(row: Row) -> Offer[bytes]:
            # If the id is taken because the message was offered with ``unique_for``, it is still
            # its own: "replace" offers in spite of that, and no other message lives. If another
            # one was handled meanwhile, it is taken until a later moment.
            is_own = (
                row.taken_until_us is not None
                and row.ref is not None
                and windows[row.ref] == row.taken_until_us
            )
            return replace(_offer(row, now), on_duplicate="replace" if is_own else "raise")

        refused = await count_refused([offer_again(row) for row in absent])
        return unchanged + len(absent) - refused

    async def bury(self, refs: Sequence[MessageRef], reason: str) -> list[MessageRef | None]:
        """Make messages that no worker has dead letters. Return references to these; None for
        messages that were not there.
        """
        letters: dict[MessageRef, MessageRef | None] = {}
        for store, batch in self._by_partition(refs):
            names = await store.bury_waiting([ref.id for ref in batch], reason)
            for ref, name in zip(batch, names, strict=True):
                letters[ref] = None if name is None else MessageRef(name, ref.partition)
        return [letters[ref] for ref in refs]

    async def redrive(self, refs: Sequence[MessageRef]) -> int:
        """Redrive dead letters."""
        return await self._change_letters(refs, redrive_letters)

    async def unbury(self, refs: Sequence[MessageRef]) -> int:
        """Redrive dead letters, and let the messages keep the due times that were still to come
        when they were buried.
        """
        return await self._change_letters(refs, partial(redrive_letters, keep_due=True))

    async def purge_dead(self, refs: Sequence[MessageRef]) -> int:
        """Drop dead letters."""
        return await self._change_letters(refs, purge_letters)

    def open(self) -> ReliableQueue[bytes]:
        """Open the queue, under its name on the server. It stays open as long as the client."""
        queue: ReliableQueue[bytes] = ReliableQueue(
            self.name,
            lambda number: ReliableKeys.of(self.name, partition=number),
            BytesCodec(),
            # A visitor does not wait for a slot.
            HandleSettings(when_full="raise"),
            self._session,
        )
        # The application may have this client, and open the queue with a codec of its own.
        queue.keep_codec()
        return queue

    async def _change_letters(
        self,
        refs: Sequence[MessageRef],
        change: Callable[[ReliableStore, Sequence[bytes]], Awaitable[int]],
    ) -> int:
        # By name: ids of other programs may not be text, and letters may share an id.
        return sum(
            [
                await change(store, [ref.id for ref in part])
                for store, part in self._by_partition(refs, len(refs))
            ]
        )


def _offer(row: Row, now: int) -> Offer[bytes]:
    """Return the offer of a message as it was when it was read."""
    assert row.ref is not None
    delay_us = row.delay_us(now)
    ttl_us = None if row.expires_us is None else max(row.expires_us - now, delay_us + 1)
    return Offer(
        row.payload or b"",
        delay=timedelta(microseconds=delay_us),
        id=row.ref.id.decode(),
        headers=row.headers or None,
        priority=row.priority,
        ttl=None if ttl_us is None else timedelta(microseconds=ttl_us),
        max_attempts=row.max_attempts,
        timeout=None if row.timeout_us is None else timedelta(microseconds=row.timeout_us),
        group=row.group or None,
    )


AnySource = DelayedSource | ReliableSource
