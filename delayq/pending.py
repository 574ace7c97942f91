"""The pending side of a delayed queue: what is not due yet. Names and results are Redisson's, its defects are not."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._durations import Duration, check_count, microseconds, moment
from delayq._logging import about
from delayq._redis.listing import DueOrder, OrderedList
from delayq._redis.records import payload_of
from delayq._redis.scripts import CANCEL, EXPIRE, POLL_LAST, PURGE
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from datetime import datetime

    from delayq._redis.keys import DelayedKeys
    from delayq._redis.listing import Listing
    from delayq._redis.server import Server
    from delayq._scheduling.transfer import HandOut, TransferTask
    from delayq.codecs import Codec

_log = logging.getLogger("delayq")

T = TypeVar("T")

_BATCH = 100


class Pending(Generic[T]):
    """The messages that are not due yet.

    Two values are equal when the codec encodes them to the same bytes, as in Redisson. What searches or reads everything
    does so in pages of at most 1,000 messages, or some 256 KiB, so that neither the server nor the network is held up; it sees
    every message that is pending all the while. Records that cannot be read are passed over; they go to quarantine when they come
    due. Every method may raise the errors of :class:`~delayq.errors.ServerError`; those that decode,
    :class:`~delayq.errors.DecodeError`; those that encode, what :meth:`DelayedQueue.offer` raises.

    Without an ordered list the sorted set of due times is read instead: then what a poll or peek calls first is what is due
    first, and last is what is due last.
    """

    def __init__(
        self,
        transfer: TransferTask,
        server: Server,
        codec: Codec[T],
        encode: Callable[[T], bytes],
        *,
        listed: bool,
        keys_of: Callable[[str], DelayedKeys],
    ) -> None:
        keys = transfer.keys
        self._keys = keys
        self._server = server
        self._transfer = transfer
        self._codec = codec
        self._encode = encode
        self._listed = int(listed)
        self._listing: Listing = OrderedList(keys, server) if listed else DueOrder(keys, server)
        self._keys_of = keys_of

    async def size(self) -> int:
        """How many messages are pending."""
        return await self._listing.size()

    async def peek(self) -> T | None:
        """Return the message that was offered first, whenever it is due; None if there is none. It stays.

        Records that cannot be read are passed over.
        """
        place = 0
        while (record := await self._listing.at(place)) is not None:
            if (payload := payload_of(record)) is not None:
                return self._codec.decode(payload)
            place += 1
        return None

    async def poll(self) -> T | None:
        """Take out the message that was offered first, due or not; None if there is none. Raises as :meth:`poll_many`."""
        values = await self.poll_many(1)
        return values[0] if values else None

    async def poll_many(self, n: int) -> list[T]:
        """Take out up to ``n`` messages, due or not, in offer order.

        What cannot be read goes to quarantine, with a line in the log, and the next message takes its place. A call that fails
        or is cancelled takes nothing: what it had taken goes back where it was, with its due time.

        Raises:
            BadInput: ``n`` is no number of messages.
            OutcomeUnknown, ServerUnavailable: The server did not answer. Nothing is lost.
        """
        if n is None:
            raise BadInput("n is an int of at least 0, not None")
        check_count(n, "n")
        values: list[T] = []
        unreadable: list[tuple[bytes, Exception]] = []
        taken: list[HandOut] = []
        started = asyncio.get_running_loop().time()
        try:
            while len(values) < n:
                handed, left, payloads = await self._transfer.poll_pending(min(_BATCH, n - len(values)), listed=self._listed)
                taken.append(handed)
                if not left:
                    break
                for payload in payloads:
                    try:
                        values.append(self._codec.decode(payload))
                    except Exception as error:  # noqa: BLE001 - a codec of the user's may raise anything
                        unreadable.append((payload, error))
        except BaseException:
            self._transfer.lose(taken)
            raise
        await self._transfer.confirm_all(taken, started)
        # Not before: a call that fails gives them back with the rest.
        for payload, reason in unreadable:
            self._transfer.set_aside(payload)
            _log.warning("queue %r: a message went to quarantine: %s", self._keys.name, reason, extra=about(self._keys.name))
        return values

    async def read_all(self) -> list[T]:
        """Every pending message, in offer order. They stay."""
        records: dict[bytes, None] = {}
        async for page in self._listing.pages():
            records |= dict.fromkeys(page)
        payloads = map(payload_of, self._listing.offer_order(records))
        return [self._codec.decode(payload) for payload in payloads if payload is not None]

    async def entries(self) -> list[tuple[T, datetime]]:
        """Every pending message with its due time (UTC), in due order. They stay."""
        scores: dict[bytes, float] = {}
        async for page in DueOrder(self._keys, self._server).scored_pages():
            scores |= page
        found = [(score, record, payload_of(record)) for record, score in scores.items()]
        due_order = sorted((score, record, payload) for score, record, payload in found if payload is not None)
        return [(self._codec.decode(payload), moment(_whole_ms(score))) for score, _, payload in due_order]

    async def contains(self, value: T) -> bool:
        """Whether an equal message is pending."""
        return await self.contains_all([value])

    async def contains_all(self, values: Iterable[T]) -> bool:
        """Whether for each of ``values`` an equal message is pending; True for none at all."""
        missing = {self._encode(value) for value in values}
        if missing:
            async for page in self._listing.pages():
                missing.difference_update(map(payload_of, page))
                if not missing:
                    break
        return not missing

    async def remove(self, value: T) -> bool:
        """Take out the first equal message in offer order, and say whether there was one.

        Searches everything that is pending. With the receipt, :meth:`Receipt.cancel` needs no search.
        """
        wanted = self._encode(value)
        while found := await self._find(lambda payload: payload == wanted):
            for record in found:
                if await self._cancel([record]):
                    return True
            # All of them came due while we searched. There may be others.
        return False

    async def remove_all(self, values: Iterable[T]) -> bool:
        """Take out every message that equals one of ``values``, and say whether there was any."""
        unwanted = {self._encode(value) for value in values}
        return bool(unwanted) and await self._remove_if(lambda payload: payload in unwanted)

    async def retain_all(self, values: Collection[T]) -> bool:
        """Take out every message that equals none of ``values``, and say whether there was any."""
        wanted = {self._encode(value) for value in values}
        return await self._remove_if(lambda payload: payload not in wanted)

    async def poll_last_and_offer_first_to(self, name: str) -> T | None:
        """Move the message that was offered last, undelayed, to the head of the ready list of queue ``name``.

        Returns:
            The message, or None if there is none.

        Raises:
            BadName: As for a queue's name.
            OutcomeUnknown: It may have been moved.
        """
        keys = (self._keys.timeout, self._keys.ordered, self._keys.quarantine, self._keys_of(name).ready)
        while True:
            left, *payloads = await self._server.run(POLL_LAST, keys, (self._listed, _BATCH))
            if payloads:
                return self._codec.decode(payloads[0])
            if not left:
                return None

    async def clear(self) -> bool:
        """Drop every pending message, and say whether there were any. What is ready stays."""
        return bool(await self._server.run(PURGE, (self._keys.timeout, self._keys.ordered, self._keys.ready), ("delayed",)))

    async def expire(self, duration: Duration) -> bool:
        """Let everything that is pending disappear ``duration`` from now, and say whether there was anything."""
        ttl_ms = -(-microseconds(duration, "duration") // 1000)
        return bool(await self._server.run(EXPIRE, (self._keys.timeout, self._keys.ordered), (ttl_ms,)))

    async def _find(self, condition: Callable[[bytes | None], bool]) -> list[bytes]:
        """The records whose payloads fulfil it, in offer order."""
        found: dict[bytes, None] = {}
        async for page in self._listing.pages():
            found |= dict.fromkeys(record for record in page if condition(payload_of(record)))
        return self._listing.offer_order(found)

    async def _remove_if(self, unwanted: Callable[[bytes | None], bool]) -> bool:
        # Found first, removed afterwards: removing while reading would move the pages.
        records = await self._find(unwanted)
        removed = 0
        for at in range(0, len(records), _BATCH):
            removed += await self._cancel(records[at : at + _BATCH])
        return removed > 0

    async def _cancel(self, records: list[bytes]) -> int:
        # A record that stands only in the list, as a crash of something else may have left it, goes as well.
        return int(await self._server.run(CANCEL, (self._keys.timeout, self._keys.ordered), (1, *records)))


def _whole_ms(score: float) -> int:
    return int(min(max(score, 0.0), 2.0**53))
