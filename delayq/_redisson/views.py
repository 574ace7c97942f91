"""The messages of a delayed queue: those that are not due yet, and those that are due and not
taken.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic

from delayq._checks import check_count
from delayq._durations import Duration, datetime_at, microseconds
from delayq._generics import T
from delayq._redisson.records import payload_of
from delayq._redisson.store import BATCH
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from datetime import datetime

    from delayq._redisson.keys import DelayedKeys
    from delayq._redisson.records import PendingRecord
    from delayq._redisson.store import DelayedStore
    from delayq._redisson.take_calls import TakeCall, TakeCalls
    from delayq.codecs import Codec

_READY_PAGE = 1000


class Pending(Generic[T]):
    """The messages that are not due yet.

    Two values are equal if the codec encodes them to the same bytes, as in Redisson. Methods that
    search or read everything do so in pages of at most 1,000 messages, or some 256 KiB, so that
    they hold up neither the server nor the network; they see every message that is pending
    throughout the call. Records that cannot be read are skipped; they go to quarantine when they
    come due. Every method may raise the errors of :class:`~delayq.errors.ServerError`; methods that
    decode, :class:`~delayq.errors.DecodeError`; methods that encode, the errors of
    :meth:`DelayedQueue.offer`.

    Without an ordered list, the sorted set of due times is read instead: then the first message,
    for a poll or peek, is the one that is due first, and the last is the one that is due last.
    """

    def __init__(
        self,
        store: DelayedStore,
        take_calls: TakeCalls,
        codec: Codec[T],
        encode: Callable[[T], bytes],
        keys_of: Callable[[str], DelayedKeys],
    ) -> None:
        self._store = store
        self._take_calls = take_calls
        self._codec = codec
        self._encode = encode
        self._keys_of = keys_of

    async def size(self) -> int:
        """Return the number of pending messages."""
        return await self._store.count_pending()

    async def peek(self) -> T | None:
        """Return the message offered first, due or not, without removing it, or None."""
        place = 0
        while (record := await self._store.record_at(place)) is not None:
            if (payload := payload_of(record)) is not None:
                return self._codec.decode(payload)
            place += 1
        return None

    async def poll(self) -> T | None:
        """Remove and return the message offered first, or None. Raises as :meth:`poll_many`."""
        values = await self.poll_many(1)
        return values[0] if values else None

    async def poll_many(self, n: int) -> list[T]:
        """Remove and return up to ``n`` messages, due or not, in offer order.

        A message that cannot be read goes to quarantine, is logged, and the next one takes its
        place. A call that fails or is cancelled takes nothing: the messages it had taken go back to
        where they were, with their due times.

        Raises:
            BadInput: ``n`` is not a valid number of messages.
            OutcomeUnknown, ServerUnavailable: The server did not answer. Nothing is lost.
        """
        if n is None:
            raise BadInput("n must be an int of at least 0, not None")
        check_count(n, "n")
        values: list[T] = []
        unreadable: list[tuple[bytes, Exception]] = []
        calls: list[TakeCall] = []
        started = asyncio.get_running_loop().time()
        try:
            while len(values) < n:
                call, removed, payloads = await self._take_calls.poll_pending(
                    min(BATCH, n - len(values))
                )
                calls.append(call)
                if not removed:
                    break
                for payload in payloads:
                    try:
                        values.append(self._codec.decode(payload))
                    except Exception as error:  # noqa: BLE001 - a codec of the user's may raise anything
                        unreadable.append((payload, error))
        except BaseException:
            self._take_calls.lose(calls)
            raise
        await self._take_calls.confirm_all(calls, started)
        # Only now: a call that fails gives the unreadable ones back with the rest.
        for payload, reason in unreadable:
            self._take_calls.set_aside(payload)
            self._take_calls.report(reason)
        return values

    async def read_all(self) -> list[T]:
        """Return every pending message, in offer order, without removing any."""
        records: dict[bytes, None] = {}
        async for page in self._store.pages():
            records |= dict.fromkeys(page)
        payloads = map(payload_of, self._store.offer_order(records))
        return [self._codec.decode(payload) for payload in payloads if payload is not None]

    async def entries(self) -> list[tuple[T, datetime]]:
        """Return every pending message with its due time (UTC), in due order; none is removed."""
        records: dict[bytes, PendingRecord] = {}
        async for page in self._store.scored_pages():
            records |= {item.record: item for item in page}
        due_order = sorted(records.values(), key=lambda item: (item.due_us, item.record))
        return [
            (self._codec.decode(payload), datetime_at(item.due_us))
            for item in due_order
            if (payload := item.payload) is not None
        ]

    async def contains(self, value: T) -> bool:
        """Return whether an equal message is pending."""
        return await self.contains_all([value])

    async def contains_all(self, values: Iterable[T]) -> bool:
        """Return whether an equal message is pending for each of ``values``, if there are any."""
        missing = {self._encode_to_find(value) for value in values}
        if missing:
            async for page in self._store.pages():
                missing.difference_update(map(payload_of, page))
                if not missing:
                    break
        return not missing

    async def remove(self, value: T) -> bool:
        """Remove the first equal message in offer order, and return whether there was one.

        This searches all pending messages, unlike :meth:`Receipt.cancel`.
        """
        payload_to_remove = self._encode_to_find(value)
        while records := await self._find(lambda payload: payload == payload_to_remove):
            for record in records:
                if await self._store.cancel([record], stale=True):
                    return True
            # All of them came due during the search. There may be others.
        return False

    async def remove_all(self, values: Iterable[T]) -> bool:
        """Remove every message that equals one of ``values``, and return whether there were any."""
        unwanted = {self._encode_to_find(value) for value in values}
        return bool(unwanted) and await self._remove_if(lambda payload: payload in unwanted)

    async def retain_all(self, values: Collection[T]) -> bool:
        """Remove every message that equals none of ``values``. Return whether there were any."""
        retained_payloads = {self._encode_to_find(value) for value in values}
        return await self._remove_if(lambda payload: payload not in retained_payloads)

    async def poll_last_and_offer_first_to(self, name: str) -> T | None:
        """Move the message that was offered last to the head of the ready list of queue ``name``,
        without further delay.

        Returns:
            The message, or None if there is none.

        Raises:
            BadName: As for :meth:`delayq.Client.delayed_queue`.
            OutcomeUnknown: It may have been moved.
        """
        destination = self._keys_of(name).ready
        while True:
            remaining, payload = await self._store.poll_last(destination)
            if payload is not None:
                return self._codec.decode(payload)
            if not remaining:
                return None

    async def clear(self) -> bool:
        """Drop every pending message, and return whether there were any. Ready messages stay."""
        return await self._store.purge("delayed") > 0

    async def expire(self, duration: Duration) -> bool:
        """Make all pending messages disappear after ``duration``. Return whether there were any."""
        return await self._store.expire(microseconds(duration, "duration"))

    def _encode_to_find(self, value: T) -> bytes:
        """Encode a value to look for its bytes. Raises as :meth:`DelayedQueue.offer`."""
        if hasattr(self._codec, "fingerprint"):
            raise BadInput(
                f"pending finds a value by its bytes, and {type(self._codec).__name__} writes"
                " others each time: keep the receipts of offer(), which cancel and reschedule"
            )
        return self._encode(value)

    async def _find(self, condition: Callable[[bytes | None], bool]) -> list[bytes]:
        """Return the records whose payloads satisfy the condition, in offer order."""
        records: dict[bytes, None] = {}
        async for page in self._store.pages():
            records |= dict.fromkeys(record for record in page if condition(payload_of(record)))
        return self._store.offer_order(records)

    async def _remove_if(self, unwanted: Callable[[bytes | None], bool]) -> bool:
        # Find first, remove afterwards: removing while reading would shift the pages.
        records = await self._find(unwanted)
        removed = 0
        for at in range(0, len(records), BATCH):
            removed += await self._store.cancel(records[at : at + BATCH], stale=True)
        return removed > 0


class Ready(Generic[T]):
    """The list of messages that are due.

    Every method may raise the errors of :class:`~delayq.errors.ServerError`.
    """

    def __init__(self, store: DelayedStore, codec: Codec[T]) -> None:
        self._store = store
        self._codec = codec

    async def size(self) -> int:
        """Return the number of ready messages."""
        return await self._store.count_ready()

    async def leased(self) -> int:
        """Return how many messages are leased by :meth:`DelayedQueue.deliveries`, besides these."""
        return await self._store.count_leased()

    async def read_all(self) -> list[T]:
        """Return every ready message, beginning with the next one to be taken; none is removed.

        The list is read in pages of 1,000, so that the server is not held up: while consumers take
        messages, the result of a longer list may have gaps.

        Raises:
            DecodeError: The codec cannot decode one of them.
        """
        values: list[T] = []
        while True:
            page = await self._store.ready_page(len(values), _READY_PAGE)
            values += map(self._codec.decode, page)
            if len(page) < _READY_PAGE:
                return values

    async def clear(self) -> bool:
        """Drop every ready message, and return whether there were any. Pending messages stay."""
        return await self._store.purge("ready") > 0
