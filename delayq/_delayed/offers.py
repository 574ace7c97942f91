"""Stores the messages of one queue, batching those of concurrent callers."""

from __future__ import annotations

from itertools import chain
from itertools import repeat as again
from typing import TYPE_CHECKING, Any, cast

from delayq._delayed.scripts import OFFER
from delayq._engine.batcher import Batcher
from delayq._engine.durability import DurableBatchers
from delayq._redis.scripts import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from delayq._delayed.keys import DelayedKeys
    from delayq._engine.context import EngineContext
    from delayq._engine.counters import Counts
    from delayq._engine.durability import Durability, Results, Unconfirmed, WaitingServer
    from delayq._redis.client import RedisClient
    from delayq.errors import OutcomeUnknown

# Maximum number of messages, and of bytes, that share one script call: a script blocks the whole server while it runs.
MESSAGES_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024

Offer = tuple[int, bytes]
"""The delay in microseconds, and the payload."""
Stored = tuple[bytes, int, int]
"""The id, the due time in ms, and the size of a length field on that server, in bytes."""


class Offers:
    """Stores the messages offered to one queue.

    Attributes:
        commits: The group commit that stores messages. Its items are offers, each as large as its payload.
    """

    def __init__(
        self, keys: DelayedKeys, services: EngineContext, announced: Callable[[int], None], counts: Counts, *, listed: bool
    ) -> None:
        """Args:
        announced: Called with the earliest due time of the messages stored, in ms.
        listed: Whether the ordered list is maintained.
        """
        self._keys = keys
        self._listed = int(listed)
        self._announced = announced
        self._counts = counts
        self._background = services.background
        self._promised: DurableBatchers[Offer, Stored] = DurableBatchers(services.server, keys.timeout, self._new_commits)
        self.commits: Batcher[Offer, Stored] = self._promised.plain

    async def under(self, promise: Durability) -> Batcher[Offer, Stored | Unconfirmed[Stored]]:
        """Return the group commit for a promise, as :meth:`DurableBatchers.under` does."""
        return await self._promised.under(promise)

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        await self._promised.aclose(grace)

    def _new_commits(self, server: RedisClient | WaitingServer, reading: Callable[[Results], Results]) -> Batcher[Offer, Any]:
        async def repeat(request: Request, _offers: Sequence[Offer], lost: OutcomeUnknown | None) -> Any:
            if lost is not None:
                # The first try may have been carried out, so a repetition might store everything twice.
                raise lost
            return await server.run(*request)

        return Batcher(
            server,
            self._background,
            request=self._request,
            repeat=repeat,
            results=reading(self._results),
            max_items=MESSAGES_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
            expires=True,
        )

    def _request(self, offers: Sequence[Offer], _lane: int) -> Request:
        keys = self._keys
        parts = cast("Iterable[bytes | int]", chain.from_iterable(offers))
        return Request(OFFER, (keys.timeout, keys.ordered, keys.channel), [self._listed, *parts])

    def _results(self, offers: Sequence[Offer], answer: list[Any]) -> list[Stored]:
        ids, dues = answer[1::2], answer[2::2]
        self._counts.offered += len(ids)
        # Our own subscription reports this as well, unless it is interrupted at the moment.
        self._announced(min(dues))
        return list(zip(ids, dues, again(answer[0], len(offers)), strict=True))
