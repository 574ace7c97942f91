"""Stores the messages of one partition, batching those of concurrent callers."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from delayq._engine.batcher import Batcher
from delayq._engine.durability import DurableBatchers
from delayq._engine.wakeup import warn_of_refusal
from delayq._redis.error_reader import SettingsChanged
from delayq._reliable.known_settings import MOST_TRIES
from delayq.errors import ConfigurationError, ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import Counters, EngineContext
    from delayq._engine.durability import Results, Unconfirmed
    from delayq._redis.client import RedisClient
    from delayq._redis.durability import Durability, WaitingServer
    from delayq._redis.scripts import Request
    from delayq._reliable.known_settings import KnownSettings
    from delayq._reliable.new_message import NewMessage
    from delayq._reliable.store import ReliableStore
    from delayq.errors import OutcomeUnknown

# Maximum number of messages, and of bytes, that share one script call: a script blocks the whole
# server while it runs.
_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024


class ReliableOffers:
    """Stores the messages offered to one partition.

    Attributes:
        commits: The batcher that stores messages without a further promise. Each message is as
            large as its content; the result is the status that ``offer.lua`` returns for it.
    """

    def __init__(
        self,
        store: ReliableStore,
        index: int,
        services: EngineContext,
        settings: KnownSettings,
        counters: Counters,
        *,
        wake: Callable[[], object],
        report_soon: Callable[[], object],
    ) -> None:
        """Args:
        store: The partition's data on the server.
        index: The partition's number.
        services: The services the queue is built from.
        settings: The queue's settings.
        counters: Counts what is stored.
        wake: Lets this client look for messages.
        report_soon: Reports what was counted at the next re-check.
        """
        self._store = store
        self._index = index
        self._settings = settings
        self._counters = counters
        self._wake = wake
        self._report_soon = report_soon
        self._background = services.background
        self._used: list[str] = []
        self._warned_of_refusal = False
        # A try of these calls that we gave up may still arrive. Their records keep it from storing,
        # and expire by themselves.
        self._unsure: set[str] = set()
        self._promised: DurableBatchers[NewMessage, int] = DurableBatchers(
            self._store.client, self._store.keys.wake, self._new_commits
        )
        self.commits: Batcher[NewMessage, int] = self._promised.plain

    async def under(self, promise: Durability) -> Batcher[NewMessage, int | Unconfirmed[int]]:
        """Return the batcher for a promise, as :meth:`DurableBatchers.under` does."""
        return await self._promised.under(promise)

    def recall(self) -> None:
        """Fail what was not sent yet with :class:`SettingsChanged`: it may belong elsewhere now."""
        for commits in self._promised.all:
            commits.recall(SettingsChanged("the number of partitions has changed"))

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        await self._promised.aclose(grace)
        if done_with := [call for call in self._used if call not in self._unsure]:
            with suppress(ServerError, TimeoutError):
                async with asyncio.timeout(grace / 2):
                    await self._store.forget_calls(done_with)

    def _new_commits(
        self, server: RedisClient | WaitingServer, reading: Callable[[Results], Results]
    ) -> Batcher[NewMessage, Any]:
        # Identifies this client's calls: the server keeps the reply to the last one, in case that
        # reply is lost.
        session = secrets.token_hex(6)
        calls = [self._store.keys.call(f"{session}-{slot}") for slot in (0, 1)]
        number = 0

        def request(messages: Sequence[NewMessage], slot: int) -> Request:
            nonlocal number
            if not number:
                self._used += calls
            number += 1
            settings = self._settings.stored
            return self._store.offer_request(calls[slot], number, settings, messages)

        def results(messages: Sequence[NewMessage], answer: Any) -> Sequence[int]:
            offered = self._store.parse_offered(len(messages), answer)
            outcomes = offered.outcomes
            if not offered.announced:
                # At least this client looks.
                self._wake()
                if not self._warned_of_refusal:
                    self._warned_of_refusal = True
                    warn_of_refusal(self._store.keys.name)
            # Stored as a new message, or in place of an earlier one.
            self._counters.offered += outcomes.count(1) + outcomes.count(2)
            self._report_soon()
            return outcomes

        return Batcher(
            server,
            self._background,
            request=request,
            repeat=partial(self._repeat, server),
            results=reading(results),
            max_items=_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
            expires=True,
        )

    async def _repeat(
        self,
        server: RedisClient | WaitingServer,
        request: Request,
        messages: Sequence[NewMessage],
        lost: OutcomeUnknown | None,
    ) -> Any:
        number = cast("int", request.args[0])
        call, errors = request.keys[-1], self._store.client.errors
        if lost is not None:
            self._unsure.add(call)
            if request.until is not None and asyncio.get_running_loop().time() >= request.until:
                raise lost
        settings = self._settings
        try:
            # The call keeps its number, so anything already carried out is not carried out again.
            for _ in range(MOST_TRIES):
                known = settings.stored
                if known.partitions != request.args[1]:
                    # The messages belong elsewhere now: unless they are stored already, this is
                    # refused.
                    break
                try:
                    again = self._store.offer_request(call, number, known, messages)
                    return await server.run(*again._replace(until=request.until))
                except SettingsChanged:
                    await settings.after_refusal(self._index)
            return await server.run(*request)
        except (ServerUnavailable, ServerRefused, ConfigurationError) as error:
            # Whatever happened to this try, an earlier one may have been carried out.
            raise lost or error from error.__cause__
        finally:
            if self._store.client.errors != errors:
                # The error may have been this call's.
                self._unsure.add(call)
