"""Stores the rows of outboxes in a queue: each once, whichever process repeats the call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._redis.error_reader import SettingsChanged
from delayq._redis.pipeline import WaitingServer
from delayq._reliable.ids import home_of, partition_of
from delayq._reliable.offer import OfferOutcome
from delayq._reliable.partition_offers import chunks
from delayq._reliable.scripts import OFFER
from delayq.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._redis.durability import Durability
    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.settings_cache import Declaration
    from delayq._reliable.store import ReliableStore

TOKEN_LENGTH = 12
"""The number of characters of a batch's token: the keys of its calls look like those of clients."""
# The last characters of these keys, of which each names one call of a batch to a partition: enough
# for the most bytes that a batch has.
_CALLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# The number of a call that stores rows of an outbox: see lua/reliable/include/call.lua.
_NUMBER = 0
# How long the server remembers a batch whose rows are deleted, milliseconds: a process that was
# stopped in between may still send it.
_REMEMBERED_MS = 600_000


class RelayPort:
    """The part of a queue that a relay uses.

    The server keeps the reply of each call under the token of its batch, until :meth:`forget`. So
    whoever sends the same messages under the same token again stores nothing, even if they have
    been handled in the meantime, and gets the first reply.
    """

    def __init__(
        self, queue: OpenReliableQueue, declaration: Declaration, durability: Durability | None
    ) -> None:
        """Args:
        queue: The queue.
        declaration: Made before anything is stored.
        durability: How safe messages must be before their rows may be deleted.
        """
        self._queue = queue
        self._declaration = declaration
        self._durability = durability
        # The calls of batches that are not forgotten yet, by token.
        self._calls: dict[str, list[tuple[ReliableStore, str]]] = {}

    async def partitions(self) -> int:
        """Return the number of partitions of the queue, which gets one if it has none.

        Raises:
            ServerError: The server did not answer, or refuses.
            ConfigurationError: Another release has written the settings.
        """
        settings = self._queue.settings
        if not self._declaration.is_made or not settings.stored.has_partition_count:
            await self._declaration.make(set_partition_count=True)
        return settings.stored.partitions

    async def store(
        self, token: str, partitions: int, messages: Sequence[OptionsMessage]
    ) -> list[OfferOutcome | ServerError | None]:
        """Store messages, in their order, and return the outcome of each.

        It is an error if it is not known whether the message is stored, or the server refuses its
        call; :class:`SettingsChanged` if it is not stored because the queue has another number of
        partitions; None if it was not sent, because an earlier one was not stored.

        Args:
            token: Names the messages: the same for the same messages in the same order.
            partitions: The number of partitions by which the messages are placed: the same for a
                repetition.
            messages: The messages, with ids.
        """
        outcomes: list[OfferOutcome | ServerError | None] = [None] * len(messages)
        calls = self._calls[token] = []
        parts: dict[int, list[int]] = {}
        for position, message in enumerate(messages):
            parts.setdefault(_partition(message, partitions), []).append(position)

        async def store_part(index: int, positions: Sequence[int]) -> None:
            sizes = [len(messages[position].content) for position in positions]
            for call, chunk in enumerate(chunks(positions, sizes)):
                store = self._queue.settings.store_of(index)
                key = store.keys.call(f"{token}-{_CALLS[call]}")
                calls.append((store, key))
                batch = [messages[position] for position in chunk]
                try:
                    results = await self._send(store, index, key, partitions, batch)
                except ServerError as error:
                    for position in chunk:
                        outcomes[position] = error
                    return
                for position, outcome in zip(chunk, results, strict=True):
                    outcomes[position] = outcome
                if OfferOutcome.FULL in results:
                    # The later ones must not come before these.
                    return

        await asyncio.gather(*(store_part(*part) for part in parts.items()))
        if any(isinstance(outcome, SettingsChanged) for outcome in outcomes):
            await self._queue.settings.read()
        return outcomes

    async def _send(
        self,
        store: ReliableStore,
        index: int,
        key: str,
        partitions: int,
        messages: Sequence[OptionsMessage],
    ) -> Sequence[OfferOutcome]:
        """Send one call, and return the outcomes. Raises ServerError."""
        keys = (*store.keys.of_script(OFFER), key)
        args: list[Any] = [_NUMBER, partitions]
        for message in messages:
            args += message.arguments
        if self._durability is None:
            reply = await store.client.run(OFFER, keys, args)
        else:
            server = WaitingServer(store.client, self._durability)
            reply, confirmation = await server.run(OFFER, keys, args)
            if reason := self._durability.failure(confirmation):
                raise ServerError(f"the messages are stored, but {reason}")
        if len(reply) < len(messages):
            # Somebody has deleted rows since the first try, which may have stored any of these.
            return [OfferOutcome.DUPLICATE] * len(messages)
        opened = self._queue.opened_partitions
        if index < len(opened):
            return opened[index].offers.outcomes(messages, reply)
        return [OfferOutcome(outcome) for outcome in reply[: len(messages)]]

    async def forget(self, token: str) -> None:
        """Let the server forget a batch soon, because its rows are deleted.

        Raises as :meth:`RedisClient.command`.
        """
        calls = self._calls.pop(token, [])
        await asyncio.gather(*(store.expire_call(key, _REMEMBERED_MS) for store, key in calls))


def _partition(message: OptionsMessage, partitions: int) -> int:
    """Return the partition of a message: that of its group, or of its id."""
    if partitions == 1:
        return 0
    if message.group is not None:
        return home_of(message.group, partitions)
    return partition_of(message.id, partitions)
