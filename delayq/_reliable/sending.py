"""Sends messages to the partitions in which they belong, and acts on the outcome of each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._engine import durability as durabilities
from delayq._engine.durability import Unconfirmed
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.retry import retry_delay
from delayq._reliable.ids import new_id, new_id_in
from delayq._reliable.offer import ENDS_EARLY_TEXT, STORED, OfferOutcome
from delayq._reliable.settings_cache import MOST_TRIES, nothing_sent_yet
from delayq.errors import (
    BadDelay,
    BadInput,
    DelayqError,
    DuplicateMessage,
    NotDurable,
    OutcomeUnknown,
    QueueFull,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Awaitable, Collection, Iterable, MutableSequence, Sequence

    from delayq._engine.batcher import Batcher
    from delayq._redis.durability import Durability
    from delayq._reliable.bodies import NewMessage
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.partition import Partition
    from delayq._reliable.partition_offers import PartitionOffers
    from delayq._reliable.settings import StoredSettings
    from delayq._reliable.settings_cache import Declaration

    # The outcome of each message is an OfferOutcome, possibly inside Unconfirmed.
    OfferBatcher = Batcher[NewMessage, Any]

_REPLACED, _IGNORED = OfferOutcome.REPLACED, OfferOutcome.IGNORED
_DUPLICATE, _FULL = OfferOutcome.DUPLICATE, OfferOutcome.FULL
_SUCCESSES = (STORED, _REPLACED, _IGNORED)


class Sender:
    """Sends the messages that are offered through one queue handle.

    A message whose id is generated gets its partition, and an id that lies there, when it is sent.
    The message is submitted in the same step of the event loop, and its outcome is
    :class:`SettingsChanged` if the queue has another number of partitions by the time when it would
    be stored. So no message is ever stored where others would not look for it.

    Attributes:
        durability: How safe messages must be, unless an offer says otherwise.
    """

    def __init__(
        self,
        queue: OpenReliableQueue,
        declaration: Declaration,
        durability: Durability | None,
        *,
        waits_for_room: bool,
    ) -> None:
        """Args:
        queue: The queue.
        declaration: Made before anything is sent.
        durability: How safe messages must be, unless an offer says otherwise.
        waits_for_room: Whether offers wait if the queue is full.
        """
        self._queue = queue
        self._declaration = declaration
        self.durability: Durability | None = durability
        self._waits_for_room = waits_for_room
        self._settings = queue.settings
        # The settings under which messages with a generated id are submitted at once. Set by the
        # first `send`, which has declared the queue.
        self._immediate_settings: StoredSettings | None = None
        self._first_batcher = queue.opened_partitions[0].offers.batcher

    def submit_now(
        self, message: NewMessage, durability: str | None
    ) -> tuple[NewMessage, Future[Any]] | None:
        """Submit one message, if nothing has to be awaited before. Otherwise, as for the first
        message of a handle, return None: call :meth:`send`.

        Args:
            message: The message.
            durability: Overrides the handle's own setting.

        Returns:
            The message with its id, and the future of its outcome, for :meth:`finish`.
        """
        settings = self._immediate_settings
        if (
            settings is None
            or self._settings.stored is not settings
            or not message.id_generated
            or durability is not None
        ):
            return None
        if settings.has_one_partition:
            message_id, batcher = new_id(), self._first_batcher
        elif message.group is None and not message.follower_names:
            partition, message_id = self._queue.rotation.next()
            batcher = self._queue.opened_partitions[partition].offers.batcher
        else:
            return None
        message = message.with_id(message_id)
        outcome = batcher.submit_now(message, len(message.content))
        return None if outcome is None else (message, outcome)

    async def send(self, message: NewMessage, durability: str | None) -> str:
        """Store one message, and return its id. Raises as :meth:`delayq.ReliableQueue.offer`.

        The arguments are those of :meth:`submit_now`.
        """
        settings = await self.settings_for_offers(durability)
        if not settings.max_size and self.durability is None:
            self._immediate_settings = settings
        partition, message = self._place(message)
        batcher = await self._batcher_for(partition.offers, durability)
        since = await batcher.wait_for_capacity() if batcher.is_full else None
        # An acknowledgement in flight may free the id, or make room.
        if not message.id_generated or self._settings.stored.max_size:
            await self._queue.flush()
        if self._settings.stored.partitions != settings.partitions:
            return (await self._send_all([message], durability))[0].id
        outcome: Any
        try:
            outcome = await batcher.submit(message, len(message.content), since)
        except DelayqError as error:
            outcome = error
        return await self.finish(message, durability, outcome)

    async def finish(self, message: NewMessage, durability: str | None, outcome: Any) -> str:
        """Return the id of a message if this is the outcome of storing it, or send it again.

        Raises as :meth:`send`. The other arguments are those of :meth:`submit_now`.
        """
        if outcome in _SUCCESSES:
            return message.id
        if isinstance(outcome, DelayqError) and not (
            isinstance(outcome, SettingsChanged)
            # Partitions on other servers may be available.
            or (message.id_generated and isinstance(outcome, ServerUnavailable))
        ):
            _raise_for((message.id,), (outcome,), self._queue.name)
        # Rare enough to be handled like a batch of one.
        (message,) = await self._send_all([message], durability, [outcome])
        return message.id

    async def send_many(
        self, messages: MutableSequence[NewMessage], durability: str | None
    ) -> list[str]:
        """Store messages, and return their ids. Raises as :meth:`delayq.ReliableQueue.offer_many`.

        Args:
            messages: The messages.
            durability: Overrides the handle's own setting.
        """
        settings = await self.settings_for_offers(durability)
        # As in `send`.
        if settings.max_size or not all(message.id_generated for message in messages):
            await self._queue.flush()
        outcomes: list[Any] | None = None
        if settings.has_one_partition:
            batcher = await self._batcher_for(self._queue.partitions[0].offers, durability)
            if self._settings.stored.has_one_partition:
                messages = [
                    message if message.id else message.with_id(new_id()) for message in messages
                ]
                outcomes = await batcher.submit_many(
                    messages, [len(message.content) for message in messages]
                )
        if outcomes is None or outcomes.count(STORED) < len(outcomes):
            await self._send_all(messages, durability, outcomes)
        return [message.id for message in messages]

    async def send_members(
        self, messages: MutableSequence[NewMessage], durability: str | None
    ) -> tuple[list[str], NotDurable | None]:
        """Store messages that have ids, as :meth:`send_many` does.

        Returns:
            The ids of those that are not stored, because there are messages of these ids already,
            which are to stay; and the error if all are stored, but not as safely as requested.
        """
        # As in `send`.
        await self._queue.flush()
        outcomes: list[Any] = [None] * len(messages)
        not_durable: NotDurable | None = None
        await self._send_some(messages, range(len(messages)), durability, outcomes)
        try:
            await self._send_all(messages, durability, outcomes)
        except NotDurable as error:
            not_durable = error
        ignored = [
            message.id
            for message, outcome in zip(messages, outcomes, strict=True)
            if outcome is _IGNORED
        ]
        return ignored, not_durable

    def level_for(self, durability: str | None) -> Durability | None:
        """Return how safe a message must be that is offered with this durability of its own, if it
        has one.
        """
        return self.durability if durability is None else durabilities.parse(durability)

    async def settings_for_offers(self, durability: str | None) -> StoredSettings:
        """Return the settings of the queue, which are known and declared before anything is sent.

        Checks the durability first.
        """
        if durability is not None:
            durabilities.parse(durability)
        if not self._declaration.is_made or not self._settings.stored.has_partition_count:
            await self._declaration.make(set_partition_count=True)
        return self._settings.stored

    async def _send_all(
        self,
        messages: MutableSequence[NewMessage],
        durability: str | None,
        outcomes: list[Any] | None = None,
    ) -> MutableSequence[NewMessage]:
        """Send messages until all are stored, or one cannot be.

        Args:
            messages: The messages. Those whose generated id cannot be used get another one.
            durability: Overrides the handle's own setting.
            outcomes: The outcome of each message, if they were sent before.
        """
        positions: Sequence[int] = range(len(messages))
        if outcomes is None:
            outcomes = [None] * len(messages)
            await self._send_some(messages, positions, durability, outcomes)
            if outcomes.count(STORED) == len(outcomes):
                return messages
        failed: set[int] = set()
        unconfirmed: dict[int, str] = {}
        tries = refusals = 0
        while positions:
            _note_unconfirmed(outcomes, positions, unconfirmed)
            refusals += any(isinstance(outcome, SettingsChanged) for outcome in outcomes)
            if refusals > MOST_TRIES:
                _give_up(outcomes)
            positions = self._positions_to_repeat(messages, outcomes, failed)
            if not positions and self._waits_for_room and _FULL in outcomes:
                tries += 1
                await asyncio.sleep(retry_delay(tries, longest=1.0))
                positions = [at for at, outcome in enumerate(outcomes) if outcome == _FULL]
            if positions:
                await self._send_some(messages, positions, durability, outcomes, failed)
        _raise_for([message.id for message in messages], outcomes, self._queue.name)
        if unconfirmed:
            ids = tuple(messages[at].id for at in unconfirmed)
            raise NotDurable(
                f"{len(ids)} messages are stored, but {next(iter(unconfirmed.values()))}", ids
            )
        return messages

    def _positions_to_repeat(
        self,
        messages: MutableSequence[NewMessage],
        outcomes: Sequence[Any],
        failed: set[int],
    ) -> list[int]:
        """Return the positions of the messages to send again at once.

        Takes generated ids away that cannot be used, and adds to ``failed`` the partitions whose
        server was not available.
        """
        positions: list[int] = []
        unavailable: list[int] = []
        for at, outcome in enumerate(outcomes):
            message = messages[at]
            if outcome in _SUCCESSES:
                continue
            if isinstance(outcome, SettingsChanged):
                # It belongs elsewhere now.
                positions.append(at)
            elif outcome == _DUPLICATE and message.id_generated:
                # Another process has generated the same id.
                messages[at] = message.with_id("")
                positions.append(at)
            elif isinstance(outcome, ServerUnavailable):
                partition, _ = self._place(message)
                failed.add(partition.index)
                if message.id_generated and message.group is None and not message.follower_names:
                    unavailable.append(at)
        if unavailable and not self._queue.are_unreachable(failed):
            # They are not stored there. Other partitions are on other servers.
            for at in unavailable:
                messages[at] = messages[at].with_id("")
            positions += unavailable
        return positions

    async def _send_some(
        self,
        messages: MutableSequence[NewMessage],
        positions: Sequence[int],
        durability: str | None,
        outcomes: MutableSequence[Any],
        failed: Collection[int] = (),
    ) -> None:
        """Send the messages at these positions, and set the outcome of each.

        Of ``failed`` partitions, it is known that they are not available.
        """
        while True:
            count = self._settings.stored.partitions
            parts = self._place_all(messages, positions, failed)
            batchers = [
                await self._batcher_or_error(partition.offers, durability) for partition in parts
            ]
            if self._settings.stored.partitions == count:
                break
        submitted: list[list[int]] = []
        futures: list[Awaitable[list[Any]]] = []
        for part, batcher in zip(parts.values(), batchers, strict=True):
            try:
                if isinstance(batcher, DelayqError):
                    raise batcher
                batch = [messages[at] for at in part]
                sizes = [len(message.content) for message in batch]
                futures.append(batcher.submit_many(batch, sizes))
                submitted.append(part)
            except DelayqError as error:
                for at in part:
                    outcomes[at] = error
        for part, results in zip(submitted, await asyncio.gather(*futures), strict=True):
            for at, outcome in zip(part, results, strict=True):
                outcomes[at] = outcome

    def _place_all(
        self,
        messages: MutableSequence[NewMessage],
        positions: Sequence[int],
        failed: Collection[int],
    ) -> dict[Partition, list[int]]:
        """Give the messages at these positions ids, and return the positions by partition."""
        parts: dict[Partition, list[int]] = {}
        for at in positions:
            partition, messages[at] = self._place(messages[at], failed)
            parts.setdefault(partition, []).append(at)
        return parts

    def _place(
        self, message: NewMessage, failed: Collection[int] = ()
    ) -> tuple[Partition, NewMessage]:
        """Return the partition for a message, and the message with an id.

        One of a group lies with the others of its group; if its id is generated, it gets one that
        tells the partition.
        """
        queue = self._queue
        named = message.group is not None or message.follower_names
        if named and not self._settings.stored.has_one_partition:
            home = self._home_of(message)
            if message.id_generated and (not message.id or queue.partition_of(message.id) != home):
                name = new_id_in(home.index, self._settings.stored.partitions)
                message = message.with_id(name)
            return home, message
        if message.id:
            return queue.partition_of(message.id), message
        partition, name = queue.rotation.next(failed)
        return queue.opened_partitions[partition], message.with_id(name)

    def _home_of(self, message: NewMessage) -> Partition:
        """Return the partition that a message's group, or else its own id, and its followers need.

        Raises BadInput if they need different ones.
        """
        queue = self._queue
        homes = {queue.home_of(name) for name in message.follower_names}
        if message.group is not None:
            homes.add(queue.home_of(message.group))
        elif not message.id_generated:
            homes.add(queue.partition_of(message.id))
        if len(homes) > 1:
            raise BadInput(
                "a message and those that follow from it must lie in one partition: give all of"
                " them the same group, or leave group and id out"
            )
        return homes.pop()

    async def _batcher_for(self, offers: PartitionOffers, durability: str | None) -> OfferBatcher:
        level = self.level_for(durability)
        if level is None:
            return offers.batcher
        with nothing_sent_yet():
            return await offers.batchers.batcher_for(level)

    async def _batcher_or_error(
        self, offers: PartitionOffers, durability: str | None
    ) -> OfferBatcher | DelayqError:
        try:
            return await self._batcher_for(offers, durability)
        except DelayqError as error:
            return error


def _give_up(outcomes: MutableSequence[Any]) -> None:
    """Let messages fail that were refused again and again."""
    for at, outcome in enumerate(outcomes):
        if isinstance(outcome, SettingsChanged):
            outcomes[at] = ServerRefused(f"it is not stored: {outcome} again and again")


def _note_unconfirmed(
    outcomes: MutableSequence[Any], positions: Iterable[int], unconfirmed: dict[int, str]
) -> None:
    """Replace unconfirmed outcomes by plain ones, and collect the reasons by position."""
    for at in positions:
        unconfirmed.pop(at, None)
        if isinstance(outcome := outcomes[at], Unconfirmed):
            outcomes[at], unconfirmed[at] = outcome


def _raise_for(ids: Sequence[str], outcomes: Sequence[int | BaseException], queue: str) -> None:
    """Raise the error for messages of a queue that are not stored; return if all of them are."""
    # Each id once: a list may contain the same id twice.
    stored = tuple(
        dict.fromkeys(
            name for name, outcome in zip(ids, outcomes, strict=True) if outcome in _SUCCESSES
        )
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if OfferOutcome.ENDS_EARLY in outcomes:
        errors.append(BadDelay(ENDS_EARLY_TEXT))
    if errors:
        unknown = next((error for error in errors if isinstance(error, OutcomeUnknown)), None)
        if stored or unknown:
            error = unknown or errors[0]
            raise OutcomeUnknown(
                f"{len(stored)} of {len(ids)} messages are stored, and the others may be: {error}",
                stored,
            ) from error
        raise errors[0]
    refused = dict.fromkeys(
        name for name, outcome in zip(ids, outcomes, strict=True) if outcome in (_DUPLICATE, _FULL)
    )
    if refused:
        if _DUPLICATE in outcomes:
            raise DuplicateMessage(tuple(refused), stored)
        raise QueueFull(tuple(refused), stored, queue)
