"""Stores the messages of one reliable queue, those of concurrent callers together."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from delayq._redis.durability import Promise, WaitingServer, confirming
from delayq._redis.group_commit import GroupCommit, Request
from delayq._redis.reliable_scripts import OFFER
from delayq.errors import ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._redis.durability import Unconfirmed
    from delayq._redis.keys import ReliableKeys
    from delayq._redis.server import Server
    from delayq._scheduling.claims import Policy
    from delayq._scheduling.services import Services
    from delayq.errors import OutcomeUnknown

# What shares one script: a script blocks the whole server while it runs.
_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024


class NewMessage(NamedTuple):
    """A message to be stored: what ``offer.lua`` is told of it, in its order.

    Attributes:
        id: Its id.
        priority: 0 to 9.
        delay_us: How long until it is due, microseconds.
        ttl_us: How long it may live, microseconds; 0: without end.
        on_duplicate: What happens if its id is taken: ``raise``, ``ignore`` or ``replace``.
        content: Headers and payload, as :func:`delayq._redis.bodies.content` makes them.
    """

    id: str
    priority: int
    delay_us: int
    ttl_us: int
    on_duplicate: str
    content: bytes

    def __repr__(self) -> str:
        return f"<NewMessage {self.id!r}, {len(self.content)} bytes>"


class ReliableOffers:
    """The way in of one queue.

    Attributes:
        commits: What stores messages without more of a promise: each is as large as its content; the result is what
            ``offer.lua`` says of it.
    """

    def __init__(self, keys: ReliableKeys, policy: Policy, services: Services) -> None:
        self._keys = keys
        self._policy = policy
        self._services = services
        self._used: list[str] = []
        self._promised: dict[Promise, GroupCommit[NewMessage, int | Unconfirmed[int]]] = {}
        self.commits: GroupCommit[NewMessage, int] = self._new_commits(None)

    async def under(self, promise: Promise) -> GroupCommit[NewMessage, int | Unconfirmed[int]]:
        """What stores messages under a promise.

        Raises:
            ServerError: The server cannot be asked, or can keep no such promise.
        """
        if promise not in self._promised:
            await WaitingServer(self._services.server, promise).demand(self._keys.wake)
            self._promised.setdefault(promise, self._new_commits(promise))
        return self._promised[promise]

    async def aclose(self, grace: float) -> None:
        """Take nothing more. What is on its way has ``grace`` seconds."""
        promised = (commits.aclose(grace) for commits in self._promised.values())
        await asyncio.gather(self.commits.aclose(grace), *promised)
        if self._used:
            with suppress(ServerError, TimeoutError):
                async with asyncio.timeout(grace / 2):
                    await self._services.server.command("UNLINK", *self._used)

    def _new_commits(self, promise: Promise | None) -> GroupCommit[NewMessage, Any]:
        server = self._services.server if promise is None else WaitingServer(self._services.server, promise)
        # Names this client's calls: the server keeps the reply of the last one, for the case that it was lost.
        session = secrets.token_hex(6)
        call_keys = [self._keys.call(f"{session}-{lane}") for lane in (0, 1)]
        number = 0

        def request(messages: Sequence[NewMessage], lane: int) -> Request:
            nonlocal number
            if not number:
                self._used += call_keys
            number += 1
            keys, parts = self._keys, cast("Iterable[str | bytes | int]", chain.from_iterable(messages))
            args = [number, self._policy.max_size, *parts]
            return Request(OFFER, (*keys.messages, keys.wake, keys.done, call_keys[lane]), args)

        def results(_messages: Sequence[NewMessage], answer: Any) -> Sequence[int]:
            outcomes: list[int] = answer
            return outcomes

        return GroupCommit(
            server,
            self._services.background,
            request=request,
            repeat=partial(self._repeat, server),
            results=results if promise is None else confirming(promise, results),
            max_items=_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
        )

    async def _repeat(
        self,
        server: Server | WaitingServer,
        request: Request,
        _messages: Sequence[NewMessage],
        lost: OutcomeUnknown | None,
    ) -> Any:
        try:
            # Under its number: what was carried out is not carried out again.
            return await server.run(*request)
        except ServerUnavailable as error:
            raise lost or error from error.__cause__
