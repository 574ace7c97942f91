"""Stores the messages of one queue, those of concurrent callers together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._redis.group_commit import GroupCommit
from delayq._redis.records import pack
from delayq._redis.scripts import OFFER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from delayq._redis.keys import DelayedKeys
    from delayq._scheduling.services import Services

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
            self._commit, services.background, max_items=MESSAGES_AT_A_TIME, max_bytes=_BYTES_AT_A_TIME
        )

    def submit(self, delay_us: int, payload: bytes) -> asyncio.Future[Stored]:
        """Store a message with the next call. Await or cancel what this returns."""
        return self._commits.submit((delay_us, payload), len(payload))

    async def aclose(self, grace: float) -> None:
        """Take nothing more. What is on its way has ``grace`` seconds."""
        await self._commits.aclose(grace)

    async def _commit(self, offers: Sequence[Offer]) -> list[Stored]:
        keys = self._keys
        args = [self._listed, *(part for offer in offers for part in offer)]
        length_bytes, *stored = await self._server.run(OFFER, (keys.timeout, keys.ordered, keys.channel), args)
        ids, dues = stored[::2], stored[1::2]
        # Our own subscription will hear of it too, unless it is interrupted just now.
        self._announced(min(dues))
        return [
            (pack(record_id, payload, length_bytes), due) for record_id, due, (_, payload) in zip(ids, dues, offers, strict=True)
        ]
