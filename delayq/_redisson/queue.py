"""The delayed queue in Redisson's layout: offers, receipts, and taking due messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import anyio

from delayq._checks import check_count, check_max_payload, describe_value
from delayq._durations import (
    Duration,
    datetime_at,
    estimated_delay,
    microseconds,
    seconds,
    when_due,
)
from delayq._engine import durability as durabilities
from delayq._engine import prefetch
from delayq._engine.durability import Unconfirmed
from delayq._engine.reader import Reader, ReturningIterator
from delayq._generics import T
from delayq._redisson.delivery import Delivery
from delayq._redisson.open_queue import OpenDelayedQueue
from delayq._redisson.records import due_us_of_stored, id_of_stored, pack
from delayq._redisson.views import Pending, Ready
from delayq.codecs.protocol import decode
from delayq.errors import (
    BadDelay,
    BadInput,
    BadName,
    Closed,
    ConfigurationError,
    DecodeError,
    EncodeError,
    NotDurable,
    OutcomeUnknown,
    PayloadTooLarge,
)
from delayq.instrumentation import OfferEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
    from datetime import datetime
    from typing import Self

    from delayq._engine.batcher import Batcher
    from delayq._engine.session import Session
    from delayq._redisson.delivery import Lease
    from delayq._redisson.keys import DelayedKeys
    from delayq._redisson.records import Offer, Stored
    from delayq.codecs import Codec


MAX_PAYLOAD = 512 * 1024
"""The default of ``max_payload``, bytes."""
# The most messages that one call returns.
_AT_A_TIME = 100


class Receipt(Generic[T]):
    """A receipt for a pending message, from :meth:`DelayedQueue.offer`, to cancel or reschedule it.

    Attributes:
        id: The message's id, 16 hexadecimal digits. Ids sort by offer order.
        due_at: When the message is due, by the server's clock (UTC), up to the year 9999.
    """

    __slots__ = ("_payload", "_queue", "_stored")

    def __init__(self, queue: DelayedQueue[T], payload: bytes, stored: Stored) -> None:
        self._queue = queue
        # With these, the complete record can be built, by which the server finds the message.
        self._payload = payload
        self._stored = stored

    @property
    def id(self) -> str:
        return id_of_stored(self._stored).hex()

    @property
    def due_at(self) -> datetime:
        return datetime_at(due_us_of_stored(self._stored))

    def through(self, queue: DelayedQueue[T]) -> Self:
        """Use this queue object from now on, and return the receipt."""
        self._queue = queue
        return self

    async def cancel(self) -> bool:
        """Remove the message from the queue.

        Returns:
            True if it was pending and will not be delivered; False if it is due or cancelled.

        Raises:
            OutcomeUnknown: It may have been cancelled. With any other error, it was not.
        """
        queue = self._queue.as_opened()
        return await queue.store.cancel([self._record()]) > 0

    async def reschedule(
        self, delay: Duration | None = None, *, at: datetime | None = None
    ) -> bool:
        """Make the message due ``delay`` from now, or at ``at``, instead of at its previous time.

        Args:
            delay: Seconds or a timedelta from now.
            at: A moment with a timezone.

        Returns:
            True if it was pending: :attr:`due_at` has changed. False if it is due or cancelled.

        Raises:
            BadDelay: As for :meth:`DelayedQueue.offer`.
            OutcomeUnknown: It may have been rescheduled. With any other error, it was not.
        """
        queue = self._queue.as_opened()
        if delay is None and at is None:
            raise BadDelay("pass delay or at")
        due_us = await queue.store.reschedule(self._record(), when_due(delay, at))
        if due_us is None:
            return False
        queue.on_due(due_us)
        # As if it had been offered then, without a delay.
        (length_bytes, _, first), position, _ = self._stored
        self._stored = (length_bytes, due_us, first), position, 0
        return True

    def _record(self) -> bytes:
        return pack(id_of_stored(self._stored), self._payload, self._stored[0][0])

    def __repr__(self) -> str:
        return f"<Receipt {self.id} of {self._queue.name!r}, due {self.due_at.isoformat()}>"


class DelayedQueue(Generic[T]):
    """A queue that delivers each message after its own delay, in Redisson's format.

    Create one with :meth:`delayq.Client.delayed_queue`. When a message comes due, it moves to the
    *ready* list, from which Python and Java consumers take it. Taking a message removes it from the
    server.

    Attributes:
        name: The queue's name. It is also the ready list's key, unless the client has a
            ``name_mapper``.
        ready: The messages that are due: :class:`~delayq._redisson.views.Ready`.
        pending: The messages that are not due yet: :class:`~delayq._redisson.views.Pending`.
    """

    def __init__(
        self,
        name: str,
        codec: Codec[T],
        max_payload: int,
        session: Session,
        *,
        listed: bool,
        durability: str,
        keys_of: Callable[[str], DelayedKeys],
    ) -> None:
        self._keys = keys_of(name)
        self._durability = durabilities.parse(durability)
        self._codec = codec
        check_max_payload(max_payload)
        self._max_payload = max_payload
        self.session: Session = session
        self._open = session.scheduler.open(
            self._keys.channel,
            lambda services: OpenDelayedQueue(self._keys, services, listed=listed),
        )
        if self._open.keys.ready != self._keys.ready:
            # "a" and "{a}": Redisson gives both the same keys, except for the ready list.
            raise BadName(
                f"{name!r} shares its keys with {self._open.keys.ready!r}, which is open on this"
                " client"
            )
        if self._open.store.listed != listed:
            raise ConfigurationError(
                f"queue {name!r} is open on this client with ordered_list={self._open.store.listed}"
            )
        self._dispatcher = self._open.transfer.dispatcher
        self.ready: Ready[T] = Ready(self._open.store, codec)
        self.pending: Pending[T] = Pending(
            self._open.store, self._open.transfer.take_calls, codec, self._encode, keys_of
        )

    @property
    def name(self) -> str:
        return self._keys.name

    # Offering

    async def offer(
        self,
        value: T,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
        durability: str | None = None,
    ) -> Receipt[T]:
        """Store a message that becomes due after a delay.

        Args:
            value: Any value that the codec can encode.
            delay: Seconds or a timedelta; without ``delay`` and ``at`` the message is due now.
            at: Instead of ``delay``, the moment when it is due, with a timezone, by the server's
                clock. A moment in the past means now.
            durability: How safe the message must be before this returns, overriding the queue's own
                setting. ``"memory"``: the server has it. ``"fsync"``: it is on the server's disk;
                needs Valkey, or Redis 7.2 or later, with ``appendonly yes``. ``"replicas:N"``: N
                replicas have it too.

        Returns:
            The receipt, with which you can cancel or reschedule the message while it is pending.

        Raises:
            BadDelay: The delay is negative, NaN, infinite, or past 2**53 ms; or ``at`` has no
                timezone. Nothing was written.
            EncodeError, PayloadTooLarge: Nothing was written.
            ServerUnavailable, ServerRefused: It is not stored. Offering it again is safe.
            OutcomeUnknown: It may be stored. Offering it again may store it twice.
            NotDurable: It is stored, but was not that safe within 2 s; ``stored`` has the receipt.
            Closed: The queue or client is closed. It is not stored.
        """
        self._check_open()
        queue = self._open
        if durability is None and self._durability is None and not queue.hooks.sending:
            payload = self._encode(value)
            due = microseconds(delay) if at is None and delay is not None else when_due(delay, at)
            item = due, payload
            # Awaited here, because each coroutine in between takes its time.
            if (stored := queue.offers.plain.submit_now(item, len(payload))) is not None:
                return Receipt(self, payload, await stored)
        return await self._offer(value, delay, at, durability)

    async def _offer(
        self, value: T, delay: Duration | None, at: datetime | None, durability: str | None
    ) -> Receipt[T]:
        """Offer as :meth:`offer`, for callers that have to wait or are observed."""
        if not (hooks := self._open.hooks).sending:
            return await self._offer_unobserved(value, delay, at, durability)
        sending = OfferEvent(self.name, "delayed", 1, batch=False, delay=estimated_delay(delay, at))
        with hooks.around_sending(sending):
            receipt = await self._offer_unobserved(value, delay, at, durability)
            sending.ids = (receipt.id,)
        return receipt

    async def _offer_unobserved(
        self, value: T, delay: Duration | None, at: datetime | None, durability: str | None
    ) -> Receipt[T]:
        batcher = await self._batcher_for(durability)
        waiting_since = await batcher.wait_for_capacity() if batcher.is_full else None
        payload = self._encode(value)
        stored = await batcher.submit((when_due(delay, at), payload), len(payload), waiting_since)
        if isinstance(stored, Unconfirmed):
            raise NotDurable(
                f"the message is stored, but {stored.reason}",
                (Receipt(self, payload, stored.result),),
            )
        return Receipt(self, payload, stored)

    async def offer_many(
        self, messages: Iterable[tuple[T, Duration]], *, durability: str | None = None
    ) -> list[Receipt[T]]:
        """Store many messages, each a pair of value and delay, in few round trips.

        All messages are checked before any is written, and stored in batches of 200 in turn.

        Args:
            messages: The pairs.
            durability: Overrides the queue's own setting, as in :meth:`offer`.

        Returns:
            One receipt per message, in order.

        Raises:
            OutcomeUnknown: Some may be stored: ``stored`` has the receipts of those that certainly
                are. Any error after the first batch was stored raises this. Otherwise as
                :meth:`offer`.
            NotDurable: All are stored; ``stored`` has receipts of those not that safe within 2 s.
        """
        self._check_open()
        pairs = _pairs(messages)
        try:
            items: list[Offer] = [
                (microseconds(delay), self._encode(value)) for value, delay in pairs
            ]
        except ValueError:
            # One has another length, unless the codec has raised this.
            _check_pairs(pairs)
            raise
        if not (hooks := self._open.hooks).sending:
            return await self._store(items, durability)
        sending = OfferEvent(self.name, "delayed", len(items), batch=True, delay=None)
        with hooks.around_sending(sending):
            receipts = await self._store(items, durability)
            sending.ids = [receipt.id for receipt in receipts]
        return receipts

    async def _store(self, items: Sequence[Offer], durability: str | None) -> list[Receipt[T]]:
        batcher = await self._batcher_for(durability)
        payloads = [payload for _, payload in items]
        results = await batcher.submit_many(items, [*map(len, payloads)])
        if {*map(type, results)} <= {tuple}:
            return [*map(partial(Receipt, self), payloads, results)]
        receipts: list[Receipt[T]] = []
        errors: list[BaseException] = []
        unsafe: list[Receipt[T]] = []
        reason = ""
        for payload, result in zip(payloads, results, strict=True):
            if isinstance(result, BaseException):
                errors.append(result)
                continue
            stored = result.result if isinstance(result, Unconfirmed) else result
            receipts.append(Receipt(self, payload, stored))
            if isinstance(result, Unconfirmed):
                reason = result.reason
                unsafe.append(receipts[-1])
        if unsafe and not errors:
            raise NotDurable(
                f"{len(unsafe)} of {len(items)} messages are stored, but {reason}", tuple(unsafe)
            )
        if not errors:
            return receipts
        error = next((error for error in errors if isinstance(error, OutcomeUnknown)), errors[0])
        if receipts or isinstance(error, OutcomeUnknown):
            raise OutcomeUnknown(
                f"{len(receipts)} of {len(items)} messages are stored, and the others may be:"
                f" {error}",
                tuple(receipts),
            ) from error
        raise errors[0]

    # Taking

    async def take(self) -> T:
        """Take the next due message, waiting until there is one.

        If the server is unavailable, the call waits for it. A cancelled call loses nothing: a
        message already taken for it goes to the next caller, or back to the head of the ready list.

        Raises:
            DecodeError: The codec failed. The bytes are in the error and in the quarantine list.
            ServerRefused: The server does not permit taking.
            Closed: The queue or client is closed, or is closed while the call waits.
        """
        self._check_open()
        items = await self._dispatcher.take(1, None)
        value = self._decode(items[0][1])
        self._open.counts.delivered += 1
        return value

    async def poll(self, timeout: Duration = 0.0) -> T | None:
        """Take the next due message, waiting up to ``timeout`` for one; return None if none came.

        Args:
            timeout: Seconds or a timedelta. 0 waits for the server's reply only.

        Raises:
            ServerUnavailable, OutcomeUnknown: Only with ``timeout=0``: the server did not answer. A
                longer poll waits for it as for messages. Otherwise as :meth:`take`.
        """
        self._check_open()
        items = await self._dispatcher.take(1, seconds(timeout, "timeout"))
        value = self._decode(items[0][1]) if items else None
        self._open.counts.delivered += len(items)
        return value

    async def drain(self, max_items: int | None = None) -> list[T]:
        """Take every message that is due now, up to ``max_items``, without waiting for more.

        The call ends even if producers are faster: messages that come due meanwhile may be left. A
        cancelled call puts back what it has taken. Raises as :meth:`poll` with ``timeout=0``, and
        BadInput if ``max_items`` is not a valid number of messages.
        """
        self._check_open()
        check_count(max_items, "max_items")
        values: list[T] = []
        # These messages go back if the block ends with an error or the queue closes.
        reader: Reader[bytes] = Reader()
        with reader.attached_to(self._dispatcher) as items:
            limit = max_items
            while limit is None or len(items) < limit:
                page = await self._dispatcher.take(
                    _AT_A_TIME if limit is None else min(_AT_A_TIME, limit - len(items)), 0
                )
                items.extend(page)
                if not page:
                    break
                if limit is None and len(items) >= _AT_A_TIME:
                    due = await self._open.count_due()
                    limit = len(items) + due
            for at, (_, payload) in enumerate(items):
                try:
                    values.append(self._decode(payload))
                except DecodeError:
                    del items[at]
                    raise
            items.clear()
        self._open.counts.delivered += len(values)
        return values

    def __aiter__(self) -> AsyncIterator[T]:
        """Take messages as they come due, until the queue or client closes.

        Some messages are fetched ahead: up to 100 where handling is quick, none where it takes
        long. Those that wait while you handle one for more than some 50 ms go back to the head of
        the ready list, but not while that blocks the event loop: if the process dies then, they are
        lost. The others go back when you leave the loop or the queue closes. A message that the
        codec cannot decode goes to the quarantine list, and is logged.
        """
        self._check_open()
        reader: Reader[bytes] = Reader()
        return ReturningIterator(self._values(reader), reader.abandon)

    async def _values(self, reader: Reader[bytes]) -> AsyncGenerator[T, None]:
        # Not the clock of the event loop: that one costs twice as much, for each message.
        now, within = time.monotonic, prefetch.WITHIN
        async with aclosing(reader.batches(self._dispatcher)) as batches:
            async for batch in batches:
                late = now() + within
                while batch:
                    moment = now()
                    if moment > late:
                        reader.return_if_late(moment - late)
                        late = moment + within
                        continue
                    late = moment + within
                    try:
                        value = self._decode(batch.popleft()[1])
                    except DecodeError as error:
                        self._open.transfer.take_calls.report(error)
                    else:
                        self._open.counts.delivered += 1
                        yield value

    def deliveries(
        self, lease: Duration = 30.0, *, retry_delay: Duration = 5.0
    ) -> AsyncIterator[Delivery[T]]:
        """Take messages as they come due, each under a lease: at-least-once delivery.

        A message stays on the server until :meth:`~delayq.Delivery.ack`. If its lease ends before
        that, because its consumer died or was too slow, it goes back to the head of the ready list,
        no later than the next re-check of any process that has the queue open. Java's producers and
        transfers do not notice; Java's consumers compete for ready messages, as ever.

        Some messages are fetched ahead, as with ``async for value in queue``, and their leases run
        from then on. Those that wait while you handle one for more than some 50 ms go back, and so
        do the others when you leave the loop. A message that the codec cannot decode goes to the
        quarantine list.

        Args:
            lease: How long you hold a message: seconds or a timedelta.
                :meth:`~delayq.Delivery.extend` prolongs it.
            retry_delay: How long a message waits after its block raised: seconds or a timedelta.

        Raises:
            BadDelay, BadInput: ``lease`` or ``retry_delay`` is not a duration, or ``lease`` is 0.
        """
        self._check_open()
        lease_us, retry_us = microseconds(lease, "lease"), microseconds(retry_delay, "retry_delay")
        if not lease_us:
            raise BadInput("lease must be more than 0")
        reader: Reader[Lease] = Reader()
        return ReturningIterator(self._deliveries(lease_us, retry_us, reader), reader.abandon)

    async def _deliveries(
        self, lease_us: int, retry_us: int, reader: Reader[Lease]
    ) -> AsyncGenerator[Delivery[T], None]:
        transfer = self._open.transfer
        leased = transfer.leased_callers(lease_us)
        keeper, acknowledger, counts, now, within = (
            leased.keeper,
            transfer.acknowledger,
            self._open.counts,
            asyncio.get_running_loop().time,
            prefetch.WITHIN,
        )
        async with aclosing(reader.batches(leased.dispatcher)) as batches:
            async for batch in batches:
                late = now() + within
                while batch:
                    moment = now()
                    if moment > late:
                        reader.return_if_late(moment - late)
                        late = moment + within
                        continue
                    late = moment + within
                    if moment > batch[0][1].fresh_until:
                        # Still in the batch: if we are cancelled now, it goes back.
                        lost_leases = await keeper.freshen([lease for _, lease in batch])
                        lost_ids = {id(lease) for lease in lost_leases}
                        for item in [item for item in batch if id(item[1]) in lost_ids]:
                            batch.remove(item)
                        late = now() + within
                        continue
                    lease = batch.popleft()[1]
                    try:
                        value = self._codec.decode(lease.payload)
                    except Exception as error:  # noqa: BLE001 - a codec of the user's may raise anything
                        transfer.take_calls.set_aside(lease.payload, lease)
                        transfer.take_calls.report(error)
                    else:
                        counts.delivered += 1
                        yield Delivery(value, lease, acknowledger, keeper, retry_us, batch)

    # Closing

    async def aclose(self) -> None:
        """Close the queue on this client, for every handle; its messages stay on the server.

        Waiting calls raise :class:`~delayq.errors.Closed`, loops over the queue simply end, and
        messages that were fetched but not handed to a consumer go back. Takes as long as
        :meth:`delayq.Client.aclose`. Closing twice does nothing.
        """
        with anyio.CancelScope(shield=True):
            await self.session.close_parts([self._open])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<DelayedQueue {self.name!r}>"

    # Internals

    async def _batcher_for(self, durability: str | None) -> Batcher[Offer, Any]:
        level = self._durability if durability is None else durabilities.parse(durability)
        offers = self._open.offers
        return offers.plain if level is None else await offers.batcher_for(level)

    async def key_sets(self) -> Sequence[DelayedKeys]:
        """Return the queue's keys, as a reliable queue returns those of its partitions."""
        return [self._keys]

    def as_opened(self) -> OpenDelayedQueue:
        """Check that the queue is open, and return it as this client has it."""
        self._check_open()
        return self._open

    def _check_open(self) -> None:
        self.session.check_loop()
        if self._open.closed:
            raise Closed("the queue is closed")

    def _encode(self, value: T) -> bytes:
        payload = self._codec.encode(value)
        if type(payload) is not bytes and not isinstance(payload, bytes):
            raise EncodeError(
                f"{type(self._codec).__name__}.encode returned {type(payload).__name__}, not bytes"
            )
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(len(payload), self._max_payload)
        return payload

    def _decode(self, payload: bytes) -> T:
        try:
            return decode(self._codec, payload, self.name)
        except DecodeError:
            self._open.transfer.take_calls.set_aside(payload)
            raise


def _pairs(messages: Iterable[tuple[T, Duration]]) -> Sequence[tuple[T, Duration]]:
    """Return the pairs of value and delay, whose lengths are not checked. Raises BadInput for
    anything else.
    """
    if not isinstance(messages, Iterable):
        raise BadInput(f"offer_many takes pairs of value and delay, not {describe_value(messages)}")
    pairs = [*messages]
    # All at once, because a check of each pair takes an eighth of the time of an offer.
    if [*map(type, pairs)].count(tuple) < len(pairs):
        _check_pairs(pairs)
    return pairs


def _check_pairs(pairs: Iterable[object]) -> None:
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadInput(
                "offer_many of a delayed queue takes pairs of value and delay, such as"
                f" (value, 30), not {type(pair).__name__}"
            ) from None
