"""Stores the messages of one queue, batching those of concurrent callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._engine.batcher import Batcher
from delayq._engine.durability import DurableBatchers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._delayed.store import DelayedStore, Offer, Stored
    from delayq._engine.context import EngineContext
    from delayq._engine.counters import Counters
    from delayq._engine.durability import Results, Unconfirmed
    from delayq._redis.client import RedisClient
    from delayq._redis.durability import Durability, WaitingServer
    from delayq._redis.scripts import Request
    from delayq.errors import OutcomeUnknown

# Most messages, and bytes, in one script call, which blocks the whole server while it runs.
MESSAGES_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024


class DelayedOffers:
    """Stores the messages offered to one queue.

    Attributes:
        commits: Stores messages in batches. Its items are offers, as large as their payloads.
    """

    def __init__(
        self,
        store: DelayedStore,
        services: EngineContext,
        on_due: Callable[[int], None],
        counts: Counters,
    ) -> None:
        """Call ``on_due`` with the earliest due time of stored messages, in microseconds."""
        self._store = store
        self._on_due = on_due
        self._counts = counts
        self._background = services.background
        self._promised: DurableBatchers[Offer, Stored] = DurableBatchers(
            services.server, store.keys.timeout, self._new_commits
        )
        self.commits: Batcher[Offer, Stored] = self._promised.plain

    async def under(self, promise: Durability) -> Batcher[Offer, Stored | Unconfirmed[Stored]]:
        """Return the batcher for a promise, as :meth:`DurableBatchers.under` does."""
        return await self._promised.under(promise)

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        await self._promised.aclose(grace)

    def _new_commits(
        self, server: RedisClient | WaitingServer, reading: Callable[[Results], Results]
    ) -> Batcher[Offer, Any]:
        async def repeat(
            request: Request, _offers: Sequence[Offer], lost: OutcomeUnknown | None
        ) -> Any:
            if lost is not None:
                # If the first try was carried out, a repetition stores everything twice.
                raise lost
            return await server.run(*request)

        return Batcher(
            server,
            self._background,
            request=lambda offers, _: self._store.offer_request(offers),
            repeat=repeat,
            results=reading(self._results),
            max_items=MESSAGES_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
            expires=True,
        )

    def _results(self, _offers: Sequence[Offer], reply: list[Any]) -> list[Stored]:
        first_us, stored = self._store.parse_offered(reply)
        self._counts.offered += len(stored)
        # Our own subscription reports this as well, unless it is interrupted at the moment.
        self._on_due(first_us)
        return stored
