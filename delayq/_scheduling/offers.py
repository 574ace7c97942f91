"""Stores the messages of one queue, those of concurrent callers together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._redis.group_commit import GroupCommit, Request
from delayq._redis.records import pack
from delayq._redis.scripts import OFFER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from delayq._redis.keys import DelayedKeys
    from delayq._scheduling.services import Services
    from delayq.errors import OutcomeUnknown

# What shares one script: a script blocks the whole server while it runs.
MESSAGES_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024

Offer = tuple[int, bytes]
"""Delay in microseconds, and payload."""
Stored = tuple[bytes, int]
"""The record, as it stands on the server, and its due time in ms."""


class Offers:
    """The way in of one queue."""

    def __init__(self, keys: DelayedKeys, services: Services, announced: Callable[[int], None], *, listed: bool) -> None:
        """Args:
        announced: Called with the earliest due time of what was stored, ms.
        listed: Whether the ordered list is kept.
        """
        self._keys = keys
        self._listed = int(listed)
        self._server = services.server
        self._announced = announced
        self._commits: GroupCommit[Offer, Stored] = GroupCommit(
            services.server,
            services.background,
            request=self._request,
            repeat=self._repeat,
            results=self._results,
            max_items=MESSAGES_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
        )

    def submit(self, delay_us: int, payload: bytes) -> asyncio.Future[Stored]:
        """Store a message with the next call. Await or cancel what this returns."""
        return self._commits.submit((delay_us, payload), len(payload))

    def submit_many(self, offers: Iterable[Offer]) -> list[asyncio.Future[Stored]]:
        """As :meth:`submit` for each, in as few calls as they need."""
        return self._commits.submit_many((offer, len(offer[1])) for offer in offers)

    async def aclose(self, grace: float) -> None:
        """Take nothing more. What is on its way has ``grace`` seconds."""
        await self._commits.aclose(grace)

    def _request(self, offers: Sequence[Offer]) -> Request:
        keys = self._keys
        args: list[bytes | int] = [self._listed]
        for offer in offers:
            args += offer
        return Request(OFFER, (keys.timeout, keys.ordered, keys.channel), args)

    async def _repeat(self, request: Request, _offers: Sequence[Offer], lost: OutcomeUnknown | None) -> Any:
        if lost is not None:
            # Nobody can tell whether it was carried out, so a repetition might store everything twice.
            raise lost
        return await self._server.run(*request)

    def _results(self, offers: Sequence[Offer], answer: list[Any]) -> list[Stored]:
        length_bytes, *stored = answer
        ids, dues = stored[::2], stored[1::2]
        # Our own subscription will hear of it too, unless it is interrupted just now.
        self._announced(min(dues))
        return [
            (pack(record_id, payload, length_bytes), due) for record_id, due, (_, payload) in zip(ids, dues, offers, strict=True)
        ]
