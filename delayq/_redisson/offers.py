"""Stores the messages of one queue, batching those of concurrent callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._engine.batcher import Batcher
from delayq._engine.durability import DurableBatchers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._engine.counters import Counters
    from delayq._engine.durability import Results
    from delayq._redis.client import RedisClient
    from delayq._redis.durability import WaitingServer
    from delayq._redis.scripts import Request
    from delayq._redisson.store import DelayedStore, Offer, Stored
    from delayq.errors import OutcomeUnknown

# Most messages, and bytes, in one script call, which blocks the whole server while it runs.
MESSAGES_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024


def delayed_offers(
    store: DelayedStore, services: EngineContext, on_due: Callable[[int], None], counts: Counters
) -> DurableBatchers[Offer, Stored]:
    """Return what stores the messages of one queue; an item is as large as its payload.

    ``on_due`` is called with the earliest due time of stored messages, in microseconds.
    """

    def results(offers: Sequence[Offer], reply: list[Any]) -> list[Stored]:
        first_us, stored = store.parse_offered(offers, reply)
        counts.offered += len(stored)
        # Our own subscription reports this as well, unless it is interrupted at the moment.
        on_due(first_us)
        return stored

    def new(
        server: RedisClient | WaitingServer, reading: Callable[[Results], Results]
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
            services.background,
            request=lambda offers, _: store.offer_request(offers),
            repeat=repeat,
            results=reading(results),
            max_items=MESSAGES_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
            expires=True,
        )

    return DurableBatchers(services.server, store.keys.timeout, new)
