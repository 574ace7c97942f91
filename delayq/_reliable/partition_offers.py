"""The calls that store the messages offered to one partition."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from delayq._engine.batcher import Batcher
from delayq._engine.durability import DurableBatchers
from delayq._engine.wakeup import warn_of_refusal
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.scripts import Request
from delayq._reliable.bodies import PlainMessage
from delayq._reliable.offer import STORED, OfferOutcome
from delayq._reliable.scripts import OFFER, OFFER_NEW
from delayq._reliable.settings_cache import MOST_TRIES
from delayq.errors import ConfigurationError, ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from delayq._engine.context import Counters, EngineContext
    from delayq._engine.durability import Results
    from delayq._redis.client import RedisClient
    from delayq._redis.pipeline import WaitingServer
    from delayq._reliable.bodies import NewMessage
    from delayq._reliable.settings_cache import SettingsCache
    from delayq._reliable.store import ReliableStore
    from delayq.errors import OutcomeUnknown

# Maximum number of messages, and of bytes, that share one script call: a script blocks the whole
# server while it runs.
_MESSAGES_PER_CALL = 200
_BYTES_PER_CALL = 256 * 1024
# A reply of offer_new.lua, and behind the outcomes of offer.lua: the messages are stored, but the
# user may not announce them.
_UNANNOUNCED = -3


def chunks(items: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide items into those of one call each, in their order. ``sizes`` are in bytes."""
    start = size = 0
    for position, item_size in enumerate(sizes):
        size += item_size
        if position > start and (size > _BYTES_PER_CALL or position - start == _MESSAGES_PER_CALL):
            yield items[start:position]
            start, size = position, item_size
    if items:
        yield items[start:]


# To look one up in the class takes five times as long.
_REPLACED = OfferOutcome.REPLACED
_OUTCOMES: Mapping[int, OfferOutcome] = {outcome.value: outcome for outcome in OfferOutcome}


class PartitionOffers:
    """Stores the messages offered to one partition, batching those of concurrent callers.

    Attributes:
        batchers: A batcher for each durability. Each message is as large as its content.
        batcher: The one that stores messages without further durability.
        call_keys: The keys of the calls that were made: each keeps a reply on the server.
    """

    def __init__(
        self,
        index: int,
        store: ReliableStore,
        settings: SettingsCache,
        counters: Counters,
        services: EngineContext,
        *,
        wake: Callable[[], object],
        report_soon: Callable[[], object],
    ) -> None:
        """Args:
        index: The number of the partition.
        store: Its data on the server.
        settings: The settings of the queue.
        counters: Counts the messages that are stored.
        services: The client's services.
        wake: Makes this client look for due messages.
        report_soon: Called after messages were stored, to report the count of them.
        """
        self._index = index
        self._store = store
        self._settings = settings
        self._counters = counters
        self._background = services.background
        self._wake = wake
        self._report_soon = report_soon
        self.call_keys: list[str] = []
        self._warned_of_refusal = False
        # A try of these calls that we gave up may still arrive. The kept reply keeps it from
        # storing, and expires by itself.
        self._uncertain_calls: set[str] = set()
        self.batchers: DurableBatchers[NewMessage, OfferOutcome] = DurableBatchers(
            self._store.client, self._store.keys.wake, self._new_batcher
        )
        self.batcher: Batcher[NewMessage, OfferOutcome] = self.batchers.plain

    def recall(self) -> None:
        """Fail what was not sent yet with :class:`SettingsChanged`: it may belong elsewhere now."""
        for batcher in self.batchers.all:
            batcher.recall(SettingsChanged("the number of partitions has changed"))

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        await self.batchers.aclose(grace)
        if finished_calls := [call for call in self.call_keys if call not in self._uncertain_calls]:
            with suppress(ServerError, TimeoutError):
                async with asyncio.timeout(grace / 2):
                    await self._store.forget_calls(finished_calls)

    def _new_batcher(
        self, server: RedisClient | WaitingServer, reading: Callable[[Results], Results]
    ) -> Batcher[NewMessage, Any]:
        # Identifies this client's calls: the server keeps the reply to the last one of each slot,
        # in case that reply is lost.
        session = secrets.token_hex(6)
        calls = [self._store.keys.call(f"{session}-{slot}") for slot in (0, 1)]
        last_number = 0

        def next_request(messages: Sequence[NewMessage], slot: int) -> Request:
            nonlocal last_number
            if not last_number:
                self.call_keys += calls
            last_number += 1
            return self.request(calls[slot], last_number, messages)

        return Batcher(
            server,
            self._background,
            request=next_request,
            repeat=partial(self._repeat, server),
            results=reading(self.outcomes),
            max_items=_MESSAGES_PER_CALL,
            max_size=_BYTES_PER_CALL,
            expires=True,
        )

    def outcomes(self, messages: Sequence[NewMessage], reply: Any) -> Sequence[OfferOutcome]:
        """Return the outcomes of messages from the reply to their call, and count them."""
        count = len(messages)
        if isinstance(reply, int):
            is_announced = reply != _UNANNOUNCED
            outcomes = [_OUTCOMES[reply if is_announced else STORED]] * count
        else:
            is_announced = len(reply) == count
            outcomes = [*map(_OUTCOMES.__getitem__, reply[:count])]
        if not is_announced:
            # At least this client looks.
            self._wake()
            if not self._warned_of_refusal:
                self._warned_of_refusal = True
                warn_of_refusal(self._store.keys.name)
        self._counters.offered += outcomes.count(STORED) + outcomes.count(_REPLACED)
        self._report_soon()
        return outcomes

    def request(self, call: str, number: int, messages: Sequence[NewMessage]) -> Request:
        """Build the call that stores messages.

        If the queue has another number of partitions by now, or a size limit, the call fails with
        :class:`SettingsChanged`.

        Args:
            call: The key, the last one of the request, that keeps the reply so that the call can be
                repeated.
            number: Tells the call from the earlier ones with that key.
            messages: The messages.
        """
        settings = self._settings.stored
        arguments: Iterable[str | bytes | int]
        if settings.max_size or not {PlainMessage}.issuperset(map(type, messages)):
            script = OFFER
            arguments = chain.from_iterable(message.arguments for message in messages)
        else:
            # Of a plain message, the fields are the arguments.
            script, arguments = OFFER_NEW, chain.from_iterable(cast("Any", messages))
        keys = (*self._store.keys.of_script(script), call)
        return Request(script, keys, [number, settings.partitions, *arguments])

    async def _repeat(
        self,
        server: RedisClient | WaitingServer,
        request: Request,
        messages: Sequence[NewMessage],
        lost_reply: OutcomeUnknown | None,
    ) -> Any:
        number = cast("int", request.args[0])
        call, errors = request.keys[-1], self._store.client.errors
        if lost_reply is not None:
            self._uncertain_calls.add(call)
            if (
                request.deadline is not None
                and asyncio.get_running_loop().time() >= request.deadline
            ):
                raise lost_reply
        try:
            # The call keeps its number, so anything already carried out is not carried out again.
            for _ in range(MOST_TRIES):
                if self._settings.stored.partitions != request.args[1]:
                    # The messages belong elsewhere now: unless they are stored already, this is
                    # refused.
                    break
                try:
                    repetition = self.request(call, number, messages)
                    return await server.run(*repetition._replace(deadline=request.deadline))
                except SettingsChanged:
                    await self._settings.after_refusal(self._index)
            return await server.run(*request)
        except (ServerUnavailable, ServerRefused, ConfigurationError) as error:
            # Whatever happened to this try, an earlier one may have been carried out.
            raise lost_reply or error from error.__cause__
        finally:
            if self._store.client.errors != errors:
                # The error may have been this call's.
                self._uncertain_calls.add(call)
