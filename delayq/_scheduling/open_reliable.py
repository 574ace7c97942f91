"""A reliable queue that is open on this client, for every handle of its name."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, cast

from delayq._redis.group_commit import GroupCommit, Request
from delayq._redis.reliable_scripts import OFFER
from delayq._scheduling.claims import Claims
from delayq._scheduling.lease_keeper import LeaseKeeper
from delayq._scheduling.recurrence import Recurrence
from delayq._scheduling.settling import Settling
from delayq.errors import ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._redis.keys import ReliableKeys
    from delayq._scheduling.claims import Policy
    from delayq._scheduling.services import Services
    from delayq._scheduling.turns import Notice
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


class OpenReliableQueue:
    """Its way in, and its way out.

    Attributes:
        keys: Its keys.
        offers: Stores messages, each as large as its content; the result is what ``offer.lua`` says of it.
        policy: How this client treats it.
        claims: Claims what is due, and hands it out.
        settling: Settles what was handed out.
        keeper: Renews the leases of what is being handled.
        recurrence: Puts in place what recurs.
        loop: The client's event loop.
        closed: Whether it was closed.
    """

    def __init__(self, keys: ReliableKeys, policy: Policy, services: Services) -> None:
        self.keys: ReliableKeys = keys
        self.policy: Policy = policy
        self.claims: Claims = Claims(keys, policy, services)
        self.settling: Settling = Settling(keys, policy, services)
        self.keeper: LeaseKeeper = LeaseKeeper(keys.name, policy.lease_us, self.settling, services)
        self.recurrence: Recurrence = Recurrence(self, services)
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.closed: bool = False
        self._server = services.server
        self.offers: GroupCommit[NewMessage, int] = GroupCommit(
            services.server,
            services.background,
            request=self._request,
            repeat=self._repeat,
            results=lambda _, answer: answer,
            max_items=_AT_A_TIME,
            max_bytes=_BYTES_AT_A_TIME,
        )
        # Names this client's calls: the server keeps the reply of the last one, for the case that it was lost.
        session = secrets.token_hex(6)
        self._call_keys = [keys.call(f"{session}-{lane}") for lane in (0, 1)]
        self._number = 0

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def channels(self) -> tuple[str, ...]:
        return (self.keys.wake,)

    @property
    def kind(self) -> str:
        return "reliable"

    def resync_keys(self) -> tuple[str, ...]:
        if self.claims.taker.waiting:
            return self.keys.live
        # Nobody looks, so whoever comes next has to.
        self.claims.pushes.forget()
        return ()

    def resynced(self, due_us: int, ready: int) -> None:
        del ready
        self.claims.pushes.next_due(due_us)

    def heard(self, moment: int) -> None:
        self.claims.announced(moment)

    def noticed(self, notice: Notice) -> None:
        self.claims.noticed(notice)

    def push(self) -> None:
        self.claims.pushes.push()

    async def aclose(self, grace: float) -> None:
        self.keeper.close()
        self.recurrence.close()
        await asyncio.gather(self.offers.aclose(grace), self.settling.aclose(grace), self.claims.aclose(grace))
        if self._number:
            with suppress(ServerError, TimeoutError):
                async with asyncio.timeout(grace / 2):
                    await self._server.command("UNLINK", *self._call_keys)

    def _request(self, messages: Sequence[NewMessage], lane: int) -> Request:
        keys = self.keys
        self._number += 1
        args = [self._number, self.policy.max_size, *cast("Iterable[str | bytes | int]", chain.from_iterable(messages))]
        return Request(OFFER, (*keys.messages, keys.wake, keys.done, self._call_keys[lane]), args)

    async def _repeat(self, request: Request, _messages: Sequence[NewMessage], lost: OutcomeUnknown | None) -> list[int]:
        try:
            # Under its number: what was carried out is not carried out again.
            answer: list[int] = await self._server.run(*request)
        except ServerUnavailable as error:
            raise lost or error from error.__cause__
        return answer
