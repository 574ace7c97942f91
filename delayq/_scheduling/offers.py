"""Stores the messages of one queue, those of concurrent callers together."""

from __future__ import annotations

import asyncio
from itertools import chain
from itertools import repeat as again
from typing import TYPE_CHECKING, Any, cast

from delayq._redis.durability import Promise, WaitingServer, confirming
from delayq._redis.group_commit import GroupCommit, Request
from delayq._redis.scripts import OFFER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from delayq._redis.durability import Unconfirmed
    from delayq._redis.keys import DelayedKeys
    from delayq._scheduling.services import Services
    from delayq.errors import OutcomeUnknown

# What shares one script: a script blocks the whole server while it runs.
MESSAGES_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024

Offer = tuple[int, bytes]
"""Delay in microseconds, and payload."""
Stored = tuple[bytes, int, int]
"""The id, the due time in ms, and how many bytes a length has on that server."""


class Offers:
    """The way in of one queue.

    Attributes:
        commits: What stores messages: its items are offers, each as large as its payload.
    """

    def __init__(self, keys: DelayedKeys, services: Services, announced: Callable[[int], None], *, listed: bool) -> None:
        """Args:
        announced: Called with the earliest due time of what was stored, ms.
        listed: Whether the ordered list is kept.
        """
        self._keys = keys
        self._listed = int(listed)
        self._server = services.server
        self._announced = announced
        self._background = services.background
        self._promised: dict[Promise, GroupCommit[Offer, Stored | Unconfirmed[Stored]]] = {}
        self.commits: GroupCommit[Offer, Stored] = self._new_commits(None)

    async def under(self, promise: Promise) -> GroupCommit[Offer, Stored | Unconfirmed[Stored]]:
        """What stores messages under a promise.

        Raises:
            ServerError: The server cannot be asked, or can keep no such promise.
        """
        if promise not in self._promised:
            await WaitingServer(self._server, promise).demand(self._keys.timeout)
            self._promised.setdefault(promise, self._new_commits(promise))
        return self._promised[promise]

    async def aclose(self, grace: float) -> None:
        """Take nothing more. What is on its way has ``grace`` seconds."""
        promised = (commits.aclose(grace) for commits in self._promised.values())
        await asyncio.gather(self.commits.aclose(grace), *promised)

    def _new_commits(self, promise: Promise | None) -> GroupCommit[Offer, Any]:
        server = self._server if promise is None else WaitingServer(self._server, promise)

        async def repeat(request: Request, _offers: Sequence[Offer], lost: OutcomeUnknown | None) -> Any:
            if lost is not None:
                # Nobody can tell whether it was carried out, so a repetition might store everything twice.
                raise lost
            return await server.run(*request)

        return GroupCommit(
            server,
            self._background,
            request=self._request,
            repeat=repeat,
            results=self._results if promise is None else confirming(promise, self._results),
            max_items=MESSAGES_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
        )

    def _request(self, offers: Sequence[Offer], _lane: int) -> Request:
        keys = self._keys
        parts = cast("Iterable[bytes | int]", chain.from_iterable(offers))
        return Request(OFFER, (keys.timeout, keys.ordered, keys.channel), [self._listed, *parts])

    def _results(self, offers: Sequence[Offer], answer: list[Any]) -> list[Stored]:
        ids, dues = answer[1::2], answer[2::2]
        # Our own subscription will hear of it too, unless it is interrupted just now.
        self._announced(min(dues))
        return list(zip(ids, dues, again(answer[0], len(offers)), strict=True))
