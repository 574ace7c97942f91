"""Batches: messages that belong together, and what follows when all of them have ended."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from delayq._background import gather_all
from delayq._checks import describe_value
from delayq._durations import Duration, datetime_at, seconds
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.retry import retry_delay
from delayq._reliable.bodies import with_batch
from delayq._reliable.dead_letters import half_way
from delayq._reliable.ids import follower_id, home_of, new_ids_in
from delayq._reliable.offer import Offer
from delayq._reliable.offer_encoder import with_headers
from delayq._reliable.settings_cache import MOST_TRIES
from delayq.codecs.json import result_codec
from delayq.codecs.protocol import decode
from delayq.errors import (
    BadInput,
    BatchTimeout,
    DelayqError,
    DuplicateMessage,
    NoBatch,
    NotDurable,
    OutcomeUnknown,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        MutableSequence,
        Sequence,
    )
    from datetime import datetime

    from delayq._redis.durability import Durability
    from delayq._reliable.batch_store import BatchCounts
    from delayq._reliable.bodies import NewMessage, OptionsMessage
    from delayq._reliable.offer_encoder import OfferEncoder
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.outcomes import Record
    from delayq._reliable.partition import Partition
    from delayq._reliable.sending import Sender
    from delayq._reliable.store import ReliableStore
    from delayq.codecs import Codec

R = TypeVar("R")

MAX_MEMBERS = 100_000
"""The largest number of messages in a batch."""
# How many messages join a batch in one call, and leave it.
_IDS_PER_CALL = 1_000
# How many such calls are under way at once.
_CALLS_AT_ONCE = 8


@dataclass(frozen=True)
class BatchStatus:
    """How far the messages of a batch are.

    Attributes:
        id: The batch's id.
        total: The number of its messages.
        waiting: The number of those that no worker has, due or not.
        running: The number of those that workers have.
        handled: The number of those that were acknowledged.
        dead: The number of those that are dead letters. One that is redriven waits again.
        cancelled: The number of those that were cancelled, purged or dropped, or have expired.
        was_offered_whole: Whether all of its messages were stored. If the process that offered them
            has died half way, this stays false, and the batch never finishes.
        created_at: When the batch was created, by the server's clock (UTC).
        finished_at: When the last of its messages ended; None while some have not.
    """

    id: str
    total: int
    waiting: int
    running: int
    handled: int
    dead: int
    cancelled: int
    was_offered_whole: bool
    created_at: datetime
    finished_at: datetime | None

    @property
    def is_finished(self) -> bool:
        """Whether all of its messages have ended, one way or another."""
        return self.was_offered_whole and not self.waiting and not self.running

    @classmethod
    def of(cls, batch: str, counts: BatchCounts) -> BatchStatus:
        """Return what the server has counted."""
        return cls(
            batch,
            total=counts.open + counts.handled + counts.dead + counts.cancelled,
            waiting=counts.open - counts.running,
            running=counts.running,
            handled=counts.handled,
            dead=counts.dead,
            cancelled=counts.cancelled,
            was_offered_whole=counts.total is not None,
            created_at=datetime_at(counts.created_us),
            finished_at=datetime_at(counts.ended_us) if counts.ended_us else None,
        )


class Batch:
    """A batch of messages: see :meth:`ReliableQueue.offer_batch`.

    Attributes:
        id: The batch's id, by which :meth:`ReliableQueue.batch` finds it in any process.
    """

    def __init__(self, batch: str, queue: OpenReliableQueue, codec: Codec[Any]) -> None:
        """Args:
        batch: The batch's id.
        queue: The queue that has its messages.
        codec: Encodes the values of the queue.
        """
        self.id: str = batch
        self._queue = queue
        self._codec = codec

    async def status(self) -> BatchStatus:
        """Return how far its messages are.

        Costs the server next to nothing, unless many of them run. Messages that have expired end,
        even if no worker listens to the queue.

        Raises:
            NoBatch: There is none of this id, or it is remembered no longer.
        """
        queue = self._queue
        queue.check_open()
        await queue.flush()
        counts = await self._counts()
        if counts is not None and counts.some_expired:
            # A user that may only look sees messages that are about to end. If the reply is lost,
            # the next status tells.
            with suppress(ServerRefused, OutcomeUnknown):
                await self._cancel("expired")
            counts = await self._counts()
        if counts is None:
            raise NoBatch(self.id)
        return BatchStatus.of(self.id, counts)

    async def wait(self, timeout: Duration | None = None) -> BatchStatus:
        """Wait until all of its messages have ended, and return how.

        Args:
            timeout: How long to wait, seconds or a timedelta; None to wait as long as it takes, 0
                to look once.

        Raises:
            BatchTimeout: Some have not ended within ``timeout``.
            NoBatch: As for :meth:`status`.
            Closed: The queue or client is closed, or is closed while the call waits.
        """
        queue = self._queue
        timeout_s = None if timeout is None else seconds(timeout, "timeout")
        if timeout_s == 0:
            if (status := await self.status()).is_finished:
                return status
            raise BatchTimeout(self.id, 0.0)
        queue.check_open()
        for partition in queue.partitions:
            partition.listen()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._wait()
        except TimeoutError as error:
            raise BatchTimeout(self.id, timeout_s or 0.0) from error.__cause__

    async def _wait(self) -> BatchStatus:
        queue, failures = self._queue, 0
        with queue.notifications.subscribed(self.id) as notified:
            while True:
                notified.clear()
                pause: float | None = None
                try:
                    status = await self.status()
                    failures = 0
                except (ServerUnavailable, OutcomeUnknown):
                    failures += 1
                    pause = retry_delay(failures, longest=queue.services.retry_most)
                else:
                    if status.is_finished:
                        return status
                await queue.notifications.pause(notified, pause)

    async def cancel(self, *, running: bool = False) -> int:
        """Cancel the messages that have not ended.

        Args:
            running: Also those that workers have, as :meth:`ReliableQueue.cancel` does.

        Returns:
            How many were cancelled. The others have ended meanwhile, or a worker has them.

        Raises:
            NoBatch: As for :meth:`status`.
            OutcomeUnknown: Some were cancelled, or may have been. Calling it again is safe.
        """
        queue = self._queue
        queue.check_open()
        await queue.flush()
        return await self._cancel("all" if running else "waiting")

    async def _cancel(self, scope: Literal["expired", "waiting", "all"]) -> int:
        """End messages that have expired, cancel others, and return how many were cancelled."""
        cancelled, after = 0, b""
        try:
            while True:
                call = partial(_cancel_page, batch=self.id, scope=scope, after=after)
                if (reply := await self._ask(call)) is None:
                    raise NoBatch(self.id)
                cancelled, after = cancelled + reply[0], reply[1]
                if not after:
                    return cancelled
        except ServerError as error:
            raise half_way(error, cancelled) from error.__cause__

    async def results(self) -> dict[str, Any]:
        """Return the results of the messages that were handled, by their ids.

        Each is what :meth:`ReliableQueue.result` returns. Works if the queue has ``keep`` set;
        messages whose records are kept no longer are left out.

        Raises:
            NoBatch: As for :meth:`status`.
            DecodeError: The codec cannot decode a result.
        """
        await self.status()
        codec, name, after = result_codec(self._codec), self._queue.name, b""
        results: dict[str, Any] = {}
        while members := await self._ask(partial(_handled_page, batch=self.id, after=after)):
            records = dict(members)
            records |= await self._records_elsewhere(
                [id for id, record in members if record is None]  # noqa: A001
            )
            for id, record in records.items():  # noqa: A001
                if record is not None and record.is_done:
                    text, payload = id.decode(errors="replace"), record.payload
                    results[text] = None if payload is None else decode(codec, payload, name, text)
            after = members[-1][0]
        return results

    async def _records_elsewhere(self, ids: Sequence[bytes]) -> dict[bytes, Record | None]:
        """Return the records of messages that do not lie with the batch: when a queue is moved to
        another number of partitions, records go where the ids of their messages belong.
        """
        queue = self._queue
        parts: dict[Partition, list[bytes]] = {}
        for id in ids:  # noqa: A001
            if (partition := queue.partition_of(id)) is not queue.home_of(self.id):
                parts.setdefault(partition, []).append(id)
        records: dict[bytes, Record | None] = {}
        for partition, part in parts.items():
            replies = await queue.settings.repeat(partial(partition.store.records, part))
            records.update(zip(part, replies, strict=True))
        return records

    async def _counts(self) -> BatchCounts | None:
        return await self._ask(partial(_counts_of, batch=self.id))

    async def _ask(self, call: Callable[[ReliableStore], Awaitable[R]]) -> R | None:
        """Make a call for the partition in which the batch lies."""
        queue = self._queue
        queue.check_open()
        return await queue.search(
            lambda: [queue.home_of(self.id)], lambda partition: call(partition.store)
        )

    def __repr__(self) -> str:
        return f"<Batch {self.id!r} of queue {self._queue.name!r}>"


class BatchOffers:
    """Offers batches through one queue handle."""

    def __init__(
        self, queue: OpenReliableQueue, sender: Sender, encoder: OfferEncoder[Any]
    ) -> None:
        self._queue = queue
        self._sender = sender
        self._encoder = encoder

    def encode(
        self,
        offers: Sequence[Offer[Any]],
        then: Offer[Any] | None,
        on_failure: Offer[Any] | None,
        headers: Mapping[str, str] | None = None,
    ) -> EncodedBatch:
        """Check and encode a batch, whose messages, and what follows, get these headers unless they
        have headers of the same names.

        Raises:
            BadInput: The batch is not valid.
            BadDelay, EncodeError, PayloadTooLarge: As for :meth:`ReliableQueue.offer`.
        """
        if len(offers) > MAX_MEMBERS:
            raise BadInput(f"a batch has at most {MAX_MEMBERS} messages, not {len(offers)}")
        members = []
        for offer in offers:
            if not isinstance(offer, Offer):
                raise BadInput(
                    f"offer_batch takes delayq.Offer objects, not {describe_value(offer)}: pass"
                    " Offer(value, ...)"
                )
            if offer.on_duplicate == "replace":
                raise BadInput(
                    'a message of a batch cannot have on_duplicate="replace": cancel the other'
                    " message first"
                )
            members.append(self._with_headers(offer, headers))
        encoded = EncodedBatch(
            members,
            self._successor("then", then, headers),
            self._successor("on_failure", on_failure, headers),
        )
        messages = (*members, encoded.then, encoded.on_failure)
        names = [message.id for message in messages if message and message.id]
        if len(set(names)) < len(names):
            raise BadInput("two messages of the batch, or that follow from it, have the same id")
        return encoded

    def _successor(
        self, argument: str, offer: Offer[Any] | None, headers: Mapping[str, str] | None
    ) -> OptionsMessage | None:
        if offer is None:
            return None
        if not isinstance(offer, Offer):
            raise BadInput(f"{argument} must be a delayq.Offer, not {describe_value(offer)}")
        if offer.unique_for is not None or offer.on_duplicate == "replace":
            raise BadInput(
                f"{argument} is stored once in any case: leave unique_for out, and"
                ' on_duplicate="replace"'
            )
        return self._with_headers(offer, headers)

    def _with_headers(self, offer: Offer[Any], headers: Mapping[str, str] | None) -> OptionsMessage:
        if headers:
            (offer,) = with_headers([offer], headers)
        return self._encoder.with_options(offer)

    async def send(self, encoded: EncodedBatch, durability: str | None) -> tuple[str, list[str]]:
        """Store a batch, and return its id and those of its messages.

        The batch comes first, then the messages, and at last the note that it is whole: so a
        message that ends early counts, and one that is never stored holds the batch up.

        Raises as :meth:`ReliableQueue.offer_batch`.
        """
        await self._sender.settings_for_offers(durability)
        level = self._sender.level_for(durability)
        if level is not None:
            await self._queue.partitions[0].store.check_durability(level)
        store, batch, members = await self._begin(encoded)
        try:
            await self._complete(store, batch, members, durability)
        except DelayqError as error:
            error.batch_id = batch
            raise
        return batch, [member.id for member in members]

    async def _complete(
        self,
        store: ReliableStore,
        batch: str,
        members: MutableSequence[NewMessage],
        durability: str | None,
    ) -> None:
        """Let the other messages of a batch join, store them, and note that it is whole."""
        count, at_once = self._queue.settings.stored.partitions, asyncio.Semaphore(_CALLS_AT_ONCE)

        async def join(ids: Sequence[str]) -> None:
            async with at_once:
                await store.join_batch(count, batch, ids)

        try:
            # The first page has joined.
            await gather_all(map(join, _pages(members)[1:]))
        except SettingsChanged as error:
            raise ServerUnavailable(
                f"batch {batch!r} was not offered whole, and never finishes: {error}"
            ) from error
        ignored, not_durable = await self._sender.send_members(members, durability)
        # The batch, too, is to be as safe as its messages. It was written before them, and the note
        # that it is whole comes last.
        level, reason = self._sender.level_for(durability), ""
        for at in range(0, max(1, len(ignored)), _IDS_PER_CALL):
            seal = partial(
                self._seal,
                batch,
                ignored[at : at + _IDS_PER_CALL],
                level,
                is_last=at + _IDS_PER_CALL >= len(ignored),
            )
            is_sealed, reason = await self._queue.settings.repeat(seal)
            if not is_sealed:
                # A server that has failed over may have lost it.
                raise NoBatch(batch)
        if not_durable is not None:
            raise not_durable
        if reason:
            ignored_ids = set(ignored)
            ids = tuple(member.id for member in members if member.id not in ignored_ids)
            raise NotDurable(f"the batch {batch!r} is stored, but {reason}", ids)

    async def _seal(
        self, batch: str, ids: Sequence[str], level: Durability | None, *, is_last: bool
    ) -> tuple[bool, str]:
        """Seal a batch where it lies by now: the queue may have been moved to other partitions."""
        return await self._queue.home_of(batch).store.seal_batch(
            batch, ids, is_last=is_last, durability=level if is_last else None
        )

    async def _begin(self, encoded: EncodedBatch) -> tuple[ReliableStore, str, list[NewMessage]]:
        """Create a batch in a partition where all of its messages can lie, and let the first of
        them join it.

        Returns:
            The data of the partition, the batch's id, and its messages.
        """
        queue, settings = self._queue, self._queue.settings
        for _ in range(MOST_TRIES):
            count = settings.stored.partitions
            index = self._partition_for(encoded, count)
            batch = _new_batch_id(index, count)
            members = encoded.members_of(batch, index, count)
            store = queue.opened_partitions[index].store
            followers = encoded.successors_of(batch, index, count)
            try:
                taken_ids = await store.join_batch(count, batch, _pages(members)[0], *followers)
            except SettingsChanged:
                # Its messages may belong elsewhere now.
                await settings.after_refusal(index)
            except DelayqError as error:
                error.batch_id = batch
                raise
            else:
                if taken_ids:
                    raise DuplicateMessage(tuple(taken_ids), ())
                return store, batch, members
        raise ServerUnavailable(
            f"nothing was stored: the settings of queue {queue.name!r} keep changing"
        )

    def _partition_for(self, encoded: EncodedBatch, partitions: int) -> int:
        """Return a partition in which all messages of a batch can lie."""
        homes = {home_of(name, partitions) for name in encoded.all_names}
        if len(homes) > 1:
            raise BadInput(
                f"the messages of a batch and what follows must lie in one partition, and queue"
                f" {self._queue.name!r} has {partitions}: give all of them the same group, or leave"
                " group and id out"
            )
        return homes.pop() if homes else self._queue.rotation.next()[0]


@dataclass(frozen=True)
class EncodedBatch:
    """A batch that was checked and encoded, without its id.

    Attributes:
        members: Its messages.
        then: The message that follows when all were handled.
        on_failure: The message that follows when the first one is lost to the batch.
    """

    members: Sequence[OptionsMessage]
    then: OptionsMessage | None
    on_failure: OptionsMessage | None

    @property
    def all_names(self) -> Iterable[str]:
        """The names whose partition its messages lie in."""
        for member in self.members:
            yield from member.all_names
        for successor in (self.then, self.on_failure):
            if successor is not None:
                yield from successor.all_names

    def members_of(self, batch: str, partition: int, partitions: int) -> list[NewMessage]:
        """Return the messages with their ids, as members of the batch."""
        ids = new_ids_in(partition, partitions)
        return [
            member._replace(
                id=member.id or next(ids),
                content=with_batch(member.content, batch),
                # If another message has the id, this one has not joined the batch.
                id_generated=False,
                # One with neither lies with its batch.
                group=member.group or member.id or batch,
                follower_names=(),
            )
            for member in self.members
        ]

    def successors_of(
        self, batch: str, partition: int, partitions: int
    ) -> list[OptionsMessage | None]:
        """Return what follows, with ids that are derived from that of the batch."""
        return [
            successor
            and successor._replace(
                id=successor.id or follower_id(batch.encode(), number, partition, partitions),
                content=with_batch(successor.content, batch),
            )
            for number, successor in enumerate((self.then, self.on_failure))
        ]


def _pages(members: Sequence[NewMessage]) -> list[list[str]]:
    """Return the ids of messages in pages, each for one call that lets them join; at least one."""
    starts = range(0, max(1, len(members)), _IDS_PER_CALL)
    return [[member.id for member in members[at : at + _IDS_PER_CALL]] for at in starts]


def _new_batch_id(partition: int, partitions: int) -> str:
    """Return the id of a batch that lies in this partition: digits, so that a body can name it
    among its limits, which sort by the time.
    """
    while True:
        batch = f"{time.time_ns() // 1_000_000}{secrets.randbelow(10**9):09}"
        if home_of(batch, partitions) == partition:
            return batch


async def _counts_of(store: ReliableStore, *, batch: str) -> BatchCounts | None:
    return await store.batch_counts(batch)


async def _cancel_page(
    store: ReliableStore,
    *,
    batch: str,
    scope: Literal["expired", "waiting", "all"],
    after: bytes,
) -> tuple[int, bytes] | None:
    return await store.cancel_members(batch, scope, after)


async def _handled_page(
    store: ReliableStore, *, batch: str, after: bytes
) -> list[tuple[bytes, Record | None]]:
    return await store.handled_members(batch, after)
