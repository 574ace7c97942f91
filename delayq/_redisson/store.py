"""Typed calls of one delayed queue. Redisson's milliseconds become microseconds only here."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from delayq._engine.store import RECHECK, NextDue, RecheckReply, due_counts
from delayq._redis.client import Confirmation
from delayq._redis.scripts import Request, Script
from delayq._redisson.records import (
    UNIT_US,
    Offer,
    PendingRecord,
    Stored,
    any_id_of,
    due_us_of_stored,
    id_of,
    parse_score,
    score_of,
)
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from delayq._durations import DueTime
    from delayq._redis.client import RedisClient
    from delayq._redisson.keys import DelayedKeys

OFFER = Script("redisson/offer")
TRANSFER = Script("redisson/transfer")
SUMMON = Script("redisson/summon")
GIVE_BACK = Script("redisson/give_back")
SET_ASIDE = Script("redisson/set_aside")
CANCEL = Script("redisson/cancel")
RESCHEDULE = Script("redisson/reschedule")
PURGE = Script("redisson/purge")
POLL_PENDING = Script("redisson/poll_pending")
POLL_LAST = Script("redisson/poll_last")
EXPIRE = Script("redisson/expire")
ACK = Script("redisson/ack")
NACK = Script("redisson/nack")
EXTEND = Script("redisson/extend")
RELEASE = Script("redisson/release")
MIGRATE = Script("redisson/migrate")

BATCH = 100
"""The most messages that one call moves, takes or removes: a script blocks the whole server."""
_PAGE = 1000
_PAGE_BYTES = 256 * 1024
# The first page shows how long the records are.
_FIRST_PAGE = 50
# Pages overlap by this many records at most.
_OVERLAP = 100
_STEP_BACK = 200
# Most bytes that a call hands out after the first message, for slow networks.
_MOST_BYTES = 512 * 1024


Item = TypeVar("Item")


class LeasedPayload(NamedTuple):
    """A payload that a client holds, and the end of its lease in microseconds."""

    payload: bytes
    ends_us: int


class DelayedDepth(NamedTuple):
    """The number of messages in each state.

    Attributes:
        delayed: Records in the sorted set: not due yet, or not moved yet.
        ready: Payloads on the ready list.
        leased: Leases that clients hold.
        head_us: When the first pending message is due, in microseconds; None if there is none.
    """

    delayed: int
    ready: int
    leased: int
    head_us: int | None

    def overdue_us(self, now_us: float) -> float:
        """Return how long the first pending message has been due, microseconds; 0 if it is not."""
        return 0 if self.head_us is None else max(0, now_us - self.head_us)

    def of_queue(self, now_us: float, quarantined: int | None) -> QueueDepth:
        """Return the figures of the queue; ``quarantined`` is None if unknown."""
        age = self.overdue_us(now_us) / 1_000_000
        return QueueDepth(self.delayed, self.ready, self.leased, 0, age, quarantined=quarantined)


class Transferred(NamedTuple):
    """The reply of the transfer script.

    Attributes:
        now_us: The server's time, in microseconds.
        wait_us: The time until the next message is due or the next lease ends; 0: now, -1: never.
        due_count: The number of messages that were due.
        quarantined: How many of them cannot be read.
        returned: The number of messages whose lease had ended.
        ready_count: The number of payloads on the ready list.
        listeners: How many clients heard the notice; 0 without one, -1 if the user may not publish.
        payloads: The payloads call to the caller.
    """

    now_us: int
    wait_us: int
    due_count: int
    quarantined: int
    returned: int
    ready_count: int
    listeners: int
    payloads: list[bytes]

    @property
    def settled_us(self) -> int:
        """The start of this millisecond, before which nothing is due: it may still get messages."""
        return self.now_us - self.now_us % UNIT_US

    def lease_ends_us(self, lease_us: int) -> int:
        """Return the end of a lease that begins now, in microseconds; scripts round it up to ms."""
        return -(-(self.now_us + lease_us) // UNIT_US) * UNIT_US


class MigrationStep(NamedTuple):
    """The reply of the migration script. Each count has one number for each form of records.

    Attributes:
        length_bytes: The size of a length field on this server, in bytes.
        length: The length of the ordered list.
        reached: The index of the first entry examined.
        merged: The number of records that were there in both forms.
        listed: Counts of the entries of the ordered list.
        in_both: Counts of those that are in the sorted set too.
        alone: Counts of the records that were given.
    """

    length_bytes: int
    length: int
    reached: int
    merged: int
    listed: list[int]
    in_both: list[int]
    alone: list[int]


class DelayedStore:
    """Makes the calls for one queue, which may raise a :class:`~delayq.errors.ServerError`.

    Methods whose names end in ``_request`` build a call for another object to send or repeat.

    Attributes:
        keys: The queue's keys.
        listed: Whether the ordered list is maintained. If not, the sorted set is read in its place.
    """

    def __init__(self, client: RedisClient, keys: DelayedKeys, *, listed: bool = True) -> None:
        self._client = client
        self.keys: DelayedKeys = keys
        self.listed: bool = listed

    def path(self) -> object:
        """Return the value of :meth:`RedisClient.path`."""
        return self._client.path(self.keys.ready)

    async def send(self, request: Request) -> Any:
        """Make a call that was built here, and retry it where that is safe."""
        return await self._client.run(*request)

    async def _run(self, script: Script, *args: str | bytes | int) -> Any:
        return await self._client.run(script, self.keys.of_script(script), args)

    async def _count(self, *command: str) -> int:
        count: int = await self._client.command(*command)
        return count

    async def _list(self, key: str, offset: int, limit: int) -> list[bytes]:
        entries: list[bytes] = await self._client.command("LRANGE", key, offset, offset + limit - 1)
        return entries

    async def _scored(self, command: str, offset: int, limit: int) -> list[PendingRecord]:
        flat: list[bytes] = await self._client.command(
            command, self.keys.timeout, offset, offset + limit - 1, "WITHSCORES"
        )
        return [PendingRecord(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]

    # Offering

    def offer_request(self, offers: Iterable[Offer]) -> Request:
        """Build the call that stores messages."""
        parts = cast("Iterable[bytes | int]", chain.from_iterable(offers))
        return Request(OFFER, self.keys.of_script(OFFER), [int(self.listed), *parts])

    def parse_offered(
        self, offers: Sequence[Offer], reply: Sequence[Any]
    ) -> tuple[int, list[Stored]]:
        """Return the earliest due time, in microseconds, and each message as it was stored."""
        times = [due_time for due_time, _ in offers]
        stored = list(zip(repeat(reply), range(len(times)), times))
        candidates = times
        try:
            # Nearly all are delays, which can be compared as they are.
            if isinstance(soonest := min(cast("list[int]", times)), int):
                candidates = [soonest]
        except TypeError:
            # Some are moments.
            pass
        return min(due_us_of_stored((reply, 0, due_time)) for due_time in candidates), stored

    # Taking

    async def transfer(
        self,
        call: str,
        *,
        take: int,
        lease_us: int,
        lease_each: bool,
        signature: str,
        confirm: Callable[[], Confirmation | None],
    ) -> Transferred:
        """Move up to :data:`BATCH` due messages to the ready list, and take payloads from its head.

        Args:
            call: The name of the call.
            take: The maximum number of payloads to take.
            lease_us: How long they are leased, in microseconds.
            lease_each: Whether each payload has a lease of its own.
            signature: Published for the other clients; empty for no notice.
            confirm: Called if there are payloads. Returns the commands to send at once.
        """
        reply = await self._client.run_once(
            TRANSFER,
            self.keys.of_script(TRANSFER, fence=self.keys.fence(call)),
            (BATCH, take, _MOST_BYTES, lease_us, int(lease_each), call, signature),
            lambda reply: confirm() if reply[-1] else None,
        )
        return Transferred._make(reply)

    def confirmation(self, token: str, on_reply: Callable[[Any], object]) -> Confirmation:
        """Return the commands that end a lease; ``on_reply`` gets the last reply, or an error."""
        # In this order: a field without an entry in the sorted set would never be found.
        return Confirmation(
            (("HDEL", self.keys.leased, token), ("ZREM", self.keys.leases, token)), on_reply
        )

    async def poll_pending(
        self, call: str, token: str, limit: int, lease_us: int
    ) -> tuple[int, list[bytes]]:
        """Take pending messages under one lease. Return how many records left, and the payloads."""
        removed, payloads = await self._client.run_once(
            POLL_PENDING,
            self.keys.of_script(POLL_PENDING, fence=self.keys.fence(call)),
            (limit, _MOST_BYTES, int(self.listed), lease_us, token),
        )
        return removed, payloads

    def give_back_request(
        self, fence: str, fence_us: int, token: str, lease_count: int, payloads: Iterable[bytes]
    ) -> Request:
        """Build the call that puts a call's messages, then ``payloads``, back at the list's head.

        Args:
            fence: The key that makes a repetition harmless.
            fence_us: How long that key stays, in microseconds.
            token: The call whose leases end.
            lease_count: As in :class:`~delayq._redisson.take_calls.TakeCall`.
            payloads: Those that this client holds, in the order to take them in again.
        """
        keys = self.keys.of_script(GIVE_BACK, fence=fence)
        return Request(GIVE_BACK, keys, (fence_us // UNIT_US, token, lease_count, *payloads))

    def set_aside_request(self, fence: str, fence_us: int, token: str, payload: bytes) -> Request:
        """Build the call that quarantines a payload and ends the lease ``token``, if not empty."""
        keys = self.keys.of_script(SET_ASIDE, fence=fence)
        return Request(SET_ASIDE, keys, (fence_us // UNIT_US, token, payload))

    # Leases

    def ack_request(self, tokens: Sequence[str]) -> Request:
        """Build the call that deletes leased messages. It replies for each whether it was there."""
        return Request(ACK, self.keys.of_script(ACK), tokens)

    def release_request(self, tokens: Sequence[str]) -> Request:
        """Build the call that puts leased messages back at the head of the ready list, in order."""
        return Request(RELEASE, self.keys.of_script(RELEASE), tokens)

    async def ack(self, token: str) -> bool:
        """Delete leased messages. Returns whether they were there."""
        (was_there,) = await self._run(ACK, token)
        return bool(was_there)

    async def nack(self, token: str, delay_us: int) -> int | None:
        """Offer a leased message again. Return when it is due, microseconds; None if it is lost."""
        return _moment_or_none(await self._run(NACK, token, delay_us, int(self.listed)))

    async def extend(self, tokens: Iterable[str], lease_us: int) -> tuple[int, list[bool]]:
        """Make leases end ``lease_us`` from now. Return the end, microseconds, and which exist."""
        ends_ms, *exist = await self._run(EXTEND, lease_us, *tokens)
        return ends_ms * UNIT_US, [bool(exists) for exists in exist]

    # Looking

    async def depth(self) -> DelayedDepth:
        """Return the number of messages in each state."""
        delayed, ready, leased, head = await asyncio.gather(
            self.count_scored(), self.count_ready(), self.count_leased(), self.pending_page(0, 1)
        )
        return DelayedDepth(delayed, ready, leased, head[0].due_us if head else None)

    async def count_pending(self) -> int:
        """Return the number of pending messages, by the ordered list if there is one."""
        return await (
            self._count("LLEN", self.keys.ordered) if self.listed else self.count_scored()
        )

    async def count_scored(self) -> int:
        """Return the number of records in the sorted set."""
        return await self._count("ZCARD", self.keys.timeout)

    async def count_ready(self) -> int:
        """Return the number of payloads on the ready list."""
        return await self._count("LLEN", self.keys.ready)

    async def count_leased(self) -> int:
        """Return the number of leases that clients hold."""
        return await self._count("ZCARD", self.keys.leases)

    async def count_quarantined(self) -> int:
        """Return the number of records and payloads in quarantine."""
        return await self._count("LLEN", self.keys.quarantine)

    async def count_due(self, after_us: float | None, through_us: float | None) -> int:
        """Return how many are due after one moment and by another, microseconds; None: no limit."""
        low = "-inf" if after_us is None else f"({score_of(after_us)}"
        high = "+inf" if through_us is None else score_of(through_us)
        return await self._count("ZCOUNT", self.keys.timeout, low, high)

    async def due_counts(self, edges: Sequence[int]) -> list[int]:
        """Return how many come due between each of some moments, microseconds, and the next, and
        after the last one.
        """
        return await due_counts(self._client, [self.keys.timeout], map(score_of, edges))

    async def pending_page(self, offset: int, limit: int) -> list[PendingRecord]:
        """Return pending records in due order."""
        return await self._scored("ZRANGE", offset, limit)

    async def ready_page(self, offset: int, limit: int) -> list[bytes]:
        """Return payloads of the ready list, starting with the one that is taken next."""
        return await self._list(self.keys.ready, offset, limit)

    async def quarantined_page(self, offset: int, limit: int) -> list[bytes]:
        """Return records and payloads in quarantine, oldest first."""
        return await self._list(self.keys.quarantine, offset, limit)

    async def leased_page(self, offset: int, limit: int) -> list[LeasedPayload]:
        """Return what clients hold, by the end of the lease."""
        entries = await self._client.command(
            "ZRANGE", self.keys.leases, offset, offset + limit - 1, "WITHSCORES"
        )
        if not entries:
            return []
        payloads = await self._client.command("HMGET", self.keys.leased, *entries[::2])
        return [
            LeasedPayload(payload, parse_score(score))
            for payload, score in zip(payloads, entries[1::2], strict=True)
            if payload is not None  # acknowledged or retried meanwhile
        ]

    async def record_at(self, place: int) -> bytes | None:
        """Return the pending record at a place in offer order, from 0 on; None beyond the last."""
        if self.listed:
            record: bytes | None = await self._client.command("LINDEX", self.keys.ordered, place)
            return record
        head: list[bytes] = await self._client.command("ZRANGE", self.keys.timeout, place, place)
        return head[0] if head else None

    async def pages(self) -> AsyncIterator[list[bytes]]:
        """Yield the records that are pending throughout, in overlapping pages."""
        if not self.listed:
            async for scored in self.scored_pages():
                yield [record.record for record in scored]
            return

        async def read(start: int, count: int) -> list[bytes]:
            # Counted from the tail: due messages leave at the head, which moves no page.
            return (await self._list(self.keys.ordered, -(start + count), count))[::-1]

        async for page in _paged(read, lambda record: record):
            yield page

    async def scored_pages(self) -> AsyncIterator[list[PendingRecord]]:
        """Yield the records of :meth:`pages` with due times, beginning with the last one due."""
        # From the far end: due messages leave at the other one, which moves no page.
        read = partial(self._scored, "ZREVRANGE")
        async for page in _paged(read, lambda item: item.record):
            yield page

    def offer_order(self, records: Iterable[bytes]) -> list[bytes]:
        """Return records, given in the order of :meth:`pages`, in the order of their offers."""
        # Our ids sort by offer order. Java's are random, and come in any order.
        return list(records)[::-1] if self.listed else sorted(records, key=id_of)

    async def find(self, record_id: bytes) -> PendingRecord | None:
        """Return the pending record with an id, or None. Reads all: :meth:`find_at` is quick."""
        async for page in self.scored_pages():
            for record in page:
                if any_id_of(record.record) == record_id:
                    return record
        return None

    async def find_at(self, score: str, start: bytes) -> PendingRecord | None:
        """Return the pending record with a score and its first bytes, or None, in few look-ups."""
        low, high = 0, await self._count("ZCOUNT", self.keys.timeout, score, score)
        while low < high:
            middle = (low + high) // 2
            records = await self._client.command(
                "ZRANGE", self.keys.timeout, score, score, "BYSCORE", "LIMIT", middle, 1
            )
            if not records:
                return None
            start_there = records[0][: len(start)]
            if start_there == start:
                return PendingRecord(records[0], score.encode())
            low, high = (middle + 1, high) if start_there < start else (low, middle)
        return None

    # Changing

    async def cancel(self, records: Sequence[bytes], *, stale: bool = False) -> int:
        """Remove records, if ``stale`` also from the ordered list alone; return how many."""
        count: int = await self._run(CANCEL, int(stale), *records)
        return count

    async def reschedule(self, record: bytes, due_time: DueTime) -> int | None:
        """Make a message due then. Return its due time, microseconds, or None if it is gone."""
        return _moment_or_none(await self._run(RESCHEDULE, record, due_time))

    async def poll_last(self, destination: str) -> tuple[int, bytes | None]:
        """Move the message offered last to a list's head. Return how many left, and the payload."""
        keys = self.keys.of_script(POLL_LAST, destination=destination)
        removed, *payloads = await self._client.run(POLL_LAST, keys, (int(self.listed), BATCH))
        return removed, payloads[0] if payloads else None

    async def expire(self, ttl_us: int) -> bool:
        """Make all pending messages disappear after a while, and return whether there were any."""
        return bool(await self._run(EXPIRE, -(-ttl_us // UNIT_US)))

    async def purge(self, state: Literal["delayed", "ready", "all"]) -> int:
        """Drop the pending messages, the ready ones, or both, and return how many there were."""
        count: int = await self._run(PURGE, state)
        return count

    async def remove(self) -> int:
        """Delete all keys of the queue, and return how many there were."""
        keys = self.keys
        doomed = (keys.ready, keys.timeout, keys.ordered, keys.quarantine, keys.leases, keys.leased)
        return sum([await self._count("UNLINK", key) for key in doomed])

    # Migrating

    async def migrate_step(
        self, before: int, limit: int, records: Iterable[bytes], *, rewrite: bool
    ) -> MigrationStep:
        """Count, and ``rewrite``, records in old forms.

        Up to ``limit`` entries of the ordered list before an index are examined, and ``records``
        that are in the sorted set only.
        """
        width, length, reached, merged, *counts = await self._run(
            MIGRATE, int(rewrite), before, limit, *records
        )
        return MigrationStep(
            width, length, reached, merged, counts[0::3], counts[1::3], counts[2::3]
        )

    async def scan_pending(self, cursor: bytes, count: int) -> tuple[bytes, list[bytes]]:
        """Return the next cursor (``b"0"`` at both ends), and about ``count`` pending records."""
        cursor, page = await self._client.command(
            "ZSCAN", self.keys.timeout, cursor, "COUNT", count
        )
        return cursor, page[::2]

    # Waking

    @property
    def recheck_keys(self) -> tuple[str, ...]:
        """The keys that the re-check's script examines for a delayed queue."""
        keys = self.keys
        return keys.timeout, keys.leases, keys.ready, keys.turns, keys.summons

    async def recheck(self) -> NextDue:
        """Look at the queue as the re-check does. The end of a lease counts as a due message."""
        reply = await self._client.run(RECHECK, self.recheck_keys, ("delayed",))
        return RecheckReply.of(reply).queues[0]

    async def summon(self, share: int, at_hand: int) -> None:
        """Summon as many dormant clients as the ready payloads need beyond the number that is
        ``at_hand``, if each client takes ``share`` payloads.
        """
        await self._run(SUMMON, share, at_hand)

    @property
    def wait_for_ready(self) -> tuple[str | int, ...]:
        """The command that blocks until the ready list has an item, and changes nothing."""
        return "BLMOVE", self.keys.ready, self.keys.ready, "LEFT", "LEFT", 0


def _moment_or_none(due_ms: int) -> int | None:
    return None if due_ms < 0 else due_ms * UNIT_US


async def _paged(
    read: Callable[[int, int], Awaitable[list[Item]]], record_of: Callable[[Item], bytes]
) -> AsyncIterator[list[Item]]:
    """Read everything in pages with a limited number of records and of bytes.

    Each page begins with the last records of the one before. If none of them is there any more, it
    is read again from further back, so that no record that is there throughout is missed.
    """
    start, count, tail = 0, _FIRST_PAGE, frozenset[bytes]()
    while True:
        page = await read(start, count)
        records = [record_of(item) for item in page]
        if tail and tail.isdisjoint(records):
            start, tail = max(0, start - _STEP_BACK), frozenset()
            continue
        yield page
        if len(page) < count:
            return
        overlap = min(_OVERLAP, -(-count // 4))
        start, tail = start + count - overlap, frozenset(records[-overlap:])
        count = max(
            2,
            min(_PAGE + _OVERLAP, count * 4, count * _PAGE_BYTES // (sum(map(len, records)) or 1)),
        )
