"""Sends messages to the partitions in which they belong, and acts on the outcome of each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._engine import durability as durabilities
from delayq._engine.durability import Unconfirmed
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.retry import retry_delay
from delayq._reliable.bodies import group_in
from delayq._reliable.known_settings import MOST_TRIES, before_a_call
from delayq._reliable.new_message import ENDS_EARLY, OptionsMessage, PlainMessage
from delayq.errors import (
    BadDelay,
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
    from collections.abc import Awaitable, Iterable, MutableSequence, Sequence

    from delayq._engine.batcher import Batcher
    from delayq._redis.durability import Durability
    from delayq._reliable.declaration import Declaration
    from delayq._reliable.new_message import NewMessage
    from delayq._reliable.offers import ReliableOffers
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.partition import Partition
    from delayq._reliable.settings import StoredSettings

    # The outcome of each message is a number from offer.lua, possibly inside Unconfirmed.
    Commits = Batcher[NewMessage, Any]

# The outcomes of offer.lua.
STORED, _REPLACED, _IGNORED, _DUPLICATE, _FULL, _ENDS_EARLY = 1, 2, 0, -1, -2, -5
_THERE = (STORED, _REPLACED, _IGNORED)


class Sender:
    """Sends the messages that are offered through one queue handle.

    A message is submitted in the same step of the event loop in which its partition is chosen, and
    comes back as :class:`SettingsChanged` if the queue has another number of partitions by the time
    when it would be stored. So no message is ever stored where others would not look for it.
    """

    def __init__(
        self,
        queue: OpenReliableQueue,
        declaration: Declaration,
        promise: Durability | None,
        *,
        waits: bool,
    ) -> None:
        """Args:
        queue: The queue.
        declaration: Made before anything is sent.
        promise: How safe messages must be, unless an offer says otherwise.
        waits: Whether offers wait for room if the queue is full.
        """
        self._queue = queue
        self._declaration = declaration
        self._promise = promise
        self._waits = waits
        # The settings under which messages with a generated id are submitted at once, if known.
        self._simple: StoredSettings | None = None
        self._ids = queue.ids

    def submit(
        self, message: NewMessage, made_up: bool, durability: str | None
    ) -> Future[Any] | None:
        """Submit one message, if nothing has to be awaited before; otherwise return None: call
        :meth:`send`.

        Args:
            message: The message.
            made_up: Whether its id is generated.
            durability: Overrides the handle's own setting.

        Returns:
            The future of its outcome, for :meth:`finish`.
        """
        simple = self._simple
        if (
            made_up
            and durability is None
            and self._queue.settings.stored is simple
            and simple is not None
            and (simple.is_whole or isinstance(message, PlainMessage))
        ):
            return self._ids.commits.submit_now(message, len(message.content))
        return None

    async def send(self, message: NewMessage, made_up: bool, durability: str | None) -> str:
        """Store one message, and return its id. Raises as :meth:`delayq.ReliableQueue.offer`.

        The arguments are those of :meth:`submit`.
        """
        _check(durability)
        queue, settings = self._queue, self._queue.settings
        if not self._declaration.is_made or not settings.stored.is_numbered:
            await self._declaration.make(stores=True)
        stored = settings.stored
        if not stored.max_size and self._promise is None:
            self._simple = stored
        partition, message = self._place(message, made_up)
        commits = await self._commits(partition.offers, durability)
        since = await commits.wait_for_capacity() if commits.is_full else None
        if not made_up or settings.stored.max_size:
            await queue.flush()
        if settings.stored.partitions != stored.partitions:
            return (await self._send_all([message], [made_up], durability))[0].id
        try:
            outcome = await commits.submit(message, len(message.content), since)
        except DelayqError as error:
            outcome = error
        return await self.finish(message, made_up, durability, outcome)

    async def finish(
        self, message: NewMessage, made_up: bool, durability: str | None, outcome: Any
    ) -> str:
        """Return the id of a message if this is the outcome of storing it, or send it again.

        Raises as :meth:`send`. The other arguments are those of :meth:`submit`.
        """
        if outcome in _THERE:
            return message.id
        if isinstance(outcome, DelayqError) and not (
            isinstance(outcome, SettingsChanged)
            # Partitions on other servers may be available.
            or (made_up and isinstance(outcome, ServerUnavailable))
        ):
            raise_for((message.id,), (outcome,), self._queue.name)
        # Rare enough to be handled like a batch of one.
        (message,) = await self._send_all([message], [made_up], durability, [outcome])
        return message.id

    async def send_many(
        self,
        messages: MutableSequence[NewMessage],
        made_up: Sequence[bool],
        durability: str | None,
    ) -> list[str]:
        """Store messages, and return their ids. Raises as :meth:`delayq.ReliableQueue.offer_many`.

        Args:
            messages: The messages.
            made_up: For each message, whether its id is generated.
            durability: Overrides the handle's own setting.
        """
        _check(durability)
        queue, settings = self._queue, self._queue.settings
        if not self._declaration.is_made or not settings.stored.is_numbered:
            await self._declaration.make(stores=True)
        if settings.stored.max_size or not all(made_up):
            await queue.flush()
        outcomes: list[Any] | None = None
        if settings.stored.is_whole:
            commits = await self._commits(queue.partitions[0].offers, durability)
            if settings.stored.is_whole:
                sizes = [len(message.content) for message in messages]
                outcomes = await commits.submit_many(messages, sizes)
        if outcomes is None or outcomes.count(STORED) < len(outcomes):
            messages = await self._send_all(messages, made_up, durability, outcomes)
        return [message.id for message in messages]

    async def _send_all(
        self,
        messages: MutableSequence[NewMessage],
        made_up: Sequence[bool],
        durability: str | None,
        outcomes: list[Any] | None = None,
    ) -> MutableSequence[NewMessage]:
        """Send messages until all are stored, or one cannot be.

        Args:
            messages: The messages. Those whose generated id cannot be used get another one.
            made_up: For each message, whether its id is generated.
            durability: Overrides the handle's own setting.
            outcomes: The outcome of each message, if they were sent before.
        """
        again: Sequence[int] = range(len(messages))
        if outcomes is None:
            outcomes = [None] * len(messages)
            await self._send_some(messages, made_up, again, durability, outcomes)
            if outcomes.count(STORED) == len(outcomes):
                return messages
        failed: set[Partition] = set()
        unconfirmed: dict[int, str] = {}
        tries = refusals = 0
        while again:
            _note_unconfirmed(outcomes, again, unconfirmed)
            refusals += any(isinstance(outcome, SettingsChanged) for outcome in outcomes)
            if refusals > MOST_TRIES:
                _give_up(outcomes)
            again = self._to_send_again(messages, made_up, outcomes, failed)
            if not again and self._waits and _FULL in outcomes:
                tries += 1
                await asyncio.sleep(retry_delay(tries, most=1.0))
                again = [place for place, outcome in enumerate(outcomes) if outcome == _FULL]
            if again:
                await self._send_some(messages, made_up, again, durability, outcomes)
        raise_for([message.id for message in messages], outcomes, self._queue.name)
        if unconfirmed:
            ids = tuple(messages[place].id for place in unconfirmed)
            raise NotDurable(
                f"{len(ids)} messages are stored, but {next(iter(unconfirmed.values()))}", ids
            )
        return messages

    def _to_send_again(
        self,
        messages: MutableSequence[NewMessage],
        made_up: Sequence[bool],
        outcomes: Sequence[Any],
        failed: set[Partition],
    ) -> list[int]:
        """Return the messages to send again at once, by their places in the list.

        Adds to ``failed`` the partitions whose server was not available.
        """
        queue = self._queue
        again: list[int] = []
        unavailable: list[int] = []
        for place, outcome in enumerate(outcomes):
            if outcome in _THERE:
                continue
            if isinstance(outcome, SettingsChanged):
                # It belongs elsewhere now.
                again.append(place)
            elif outcome == _DUPLICATE and made_up[place]:
                # Another process has generated the same id.
                messages[place] = messages[place]._replace(id=queue.new_id())
                again.append(place)
            elif isinstance(outcome, ServerUnavailable):
                partition, _ = self._place(messages[place], made_up[place])
                failed.add(partition)
                if _group_of(messages[place]) is None:
                    unavailable.append(place)
        for place in unavailable:
            if made_up[place] and not queue.are_unreachable(failed):
                # It is not stored there. Other partitions are on other servers.
                messages[place] = messages[place]._replace(id=queue.new_id(failed))
                again.append(place)
        return again

    async def _send_some(
        self,
        messages: MutableSequence[NewMessage],
        made_up: Sequence[bool],
        places: Sequence[int],
        durability: str | None,
        outcomes: MutableSequence[Any],
    ) -> None:
        """Send the messages at these places of the list, and set the outcome of each."""
        settings = self._queue.settings
        while True:
            number = settings.stored.partitions
            parts = self._parts(messages, made_up, places)
            batchers = [await self._commits_of(each, durability) for each in parts]
            if settings.stored.partitions == number:
                break
        sent: list[list[int]] = []
        futures: list[Awaitable[list[Any]]] = []
        for some, commits in zip(parts.values(), batchers, strict=True):
            there = [place for place, _ in some]
            try:
                if isinstance(commits, DelayqError):
                    raise commits
                some_messages = [message for _, message in some]
                sizes = [len(message.content) for message in some_messages]
                futures.append(commits.submit_many(some_messages, sizes))
                sent.append(there)
            except DelayqError as error:
                for place in there:
                    outcomes[place] = error
        for there, results in zip(sent, await asyncio.gather(*futures), strict=True):
            for place, outcome in zip(there, results, strict=True):
                outcomes[place] = outcome

    def _place(self, message: NewMessage, made_up: bool) -> tuple[Partition, NewMessage]:
        """Return the partition for a message, and the message.

        One of a group lies with the others of its group; if its id is generated, it gets one that
        tells the partition.
        """
        queue = self._queue
        group = None if queue.settings.stored.is_whole else _group_of(message)
        if group is None:
            return queue.partition_of(message.id), message
        partition = queue.home_of(group)
        if made_up and partition is not queue.partition_of(message.id):
            message = message._replace(id=queue.new_id_in(partition))
        return partition, message

    def _parts(
        self, messages: MutableSequence[NewMessage], made_up: Sequence[bool], places: Sequence[int]
    ) -> dict[Partition, list[tuple[int, NewMessage]]]:
        """Return the messages to send to each partition, with their places in the list."""
        parts: dict[Partition, list[tuple[int, NewMessage]]] = {}
        for place in places:
            partition, messages[place] = self._place(messages[place], made_up[place])
            parts.setdefault(partition, []).append((place, messages[place]))
        return parts

    async def _commits(self, offers: ReliableOffers, durability: str | None) -> Commits:
        promise = self._promise if durability is None else durabilities.parse(durability)
        if promise is None:
            return offers.commits
        with before_a_call():
            return await offers.under(promise)

    async def _commits_of(
        self, partition: Partition, durability: str | None
    ) -> Commits | DelayqError:
        try:
            return await self._commits(partition.offers, durability)
        except DelayqError as error:
            return error


def _check(durability: str | None) -> None:
    """Raise BadInput unless it is valid, before the settings of the queue are stored."""
    if durability is not None:
        durabilities.parse(durability)


def _group_of(message: NewMessage) -> str | None:
    return group_in(message.content) if isinstance(message, OptionsMessage) else None


def _give_up(outcomes: MutableSequence[Any]) -> None:
    """Let messages fail that were refused again and again."""
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, SettingsChanged):
            outcomes[place] = ServerRefused(f"it is not stored: {outcome} again and again")


def _note_unconfirmed(
    outcomes: MutableSequence[Any], places: Iterable[int], unconfirmed: dict[int, str]
) -> None:
    """Replace unconfirmed outcomes by plain ones, and collect the reasons by place."""
    for place in places:
        unconfirmed.pop(place, None)
        if isinstance(outcome := outcomes[place], Unconfirmed):
            outcomes[place], unconfirmed[place] = outcome


def raise_for(ids: Sequence[str], outcomes: Sequence[int | BaseException], queue: str) -> None:
    """Raise the error for messages of a queue that are not stored; return if all of them are."""
    # Each id once: a list may contain the same id twice.
    stored = tuple(
        dict.fromkeys(
            name for name, outcome in zip(ids, outcomes, strict=True) if outcome in _THERE
        )
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if _ENDS_EARLY in outcomes:
        errors.append(BadDelay(ENDS_EARLY))
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
