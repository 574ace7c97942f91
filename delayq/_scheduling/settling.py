"""What the holder of a claim can do with it: acknowledge, try again later, bury, hold on to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from delayq._redis.group_commit import GroupCommit
from delayq._redis.reliable_scripts import ACK, BURY, EXTEND, NACK, RELEASE
from delayq.errors import LeaseLost, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._redis.keys import ReliableKeys
    from delayq._redis.scripts import Script
    from delayq._scheduling.claims import Claim, Policy
    from delayq._scheduling.services import Services

_AT_A_TIME = 200
# See leases.py: so much of a lease must be left for us to know that a repeated call found nothing because it had been
# carried out, seconds.
_SURELY = 1.0
LOST = "the lease has ended: another worker may have the message"

Part = str | bytes | int


class Settling:
    """The claims of one queue that are settled here. Concurrent callers share calls."""

    def __init__(self, keys: ReliableKeys, policy: Policy, services: Services) -> None:
        self._keys = keys
        self._policy = policy
        self._server = services.server
        self._clock = services.clock
        self._acks: GroupCommit[Claim, bool | OutcomeUnknown] = GroupCommit(
            self._commit_acks, services.background, max_items=_AT_A_TIME, max_bytes=_AT_A_TIME
        )

    async def ack(self, claim: Claim) -> None:
        """The message is handled.

        Raises:
            LeaseLost: The lease had ended, and somebody else may have the message. Nothing was changed.
            OutcomeUnknown: It may have been carried out.
        """
        # A caller who is cancelled now has handled the message all the same.
        _demand(await asyncio.shield(self._acks.submit(claim, 1)))

    async def nack(self, claim: Claim, delay_us: int, error: str) -> None:
        """The message is due again after a delay. Raises as :meth:`ack`."""
        keys = (*self._keys.messages, self._keys.wake)
        _demand(*await self._settle(NACK, keys, (), [claim], (delay_us, error)))

    async def bury(self, claim: Claim, why: str) -> None:
        """The message becomes a dead letter. ``why`` is JSON on one line. Raises as :meth:`ack`."""
        keys = (*self._keys.messages, self._keys.dead, self._keys.dead_messages)
        _demand(*await self._settle(BURY, keys, (), [claim], (why,)))

    async def release(self, claim: Claim) -> None:
        """The message is as it was before it was claimed. Raises as :meth:`ack`."""
        keys = (*self._keys.messages, self._keys.wake)
        _demand(*await self._settle(RELEASE, keys, (), [claim], ()))

    async def extend(self, claims: Sequence[Claim], lease_us: int) -> list[bool]:
        """Let leases end so much from now, and say which of them are still ours.

        Raises:
            ServerError: Nobody knows: likely nothing was changed.
        """
        held: list[bool] = []
        for at in range(0, len(claims), _AT_A_TIME):
            some = claims[at : at + _AT_A_TIME]
            names = [part for claim in some for part in claim.name]
            now, *ours = await self._server.run(EXTEND, self._keys.messages, (lease_us, *names))
            self._clock.observe(now)
            for claim, mine in zip(some, ours, strict=True):
                if mine:
                    claim.ends_us = now + lease_us
                held.append(bool(mine))
        return held

    async def aclose(self, grace: float) -> None:
        """Take nothing more. What is on its way has ``grace`` seconds."""
        await self._acks.aclose(grace)

    async def _commit_acks(self, claims: Sequence[Claim]) -> list[bool | OutcomeUnknown]:
        keys = (*self._keys.messages, self._keys.done)
        return await self._settle(ACK, keys, (self._policy.remember_us,), claims, ())

    async def _settle(
        self, script: Script, keys: Sequence[str], head: tuple[Part, ...], claims: Sequence[Claim], tail: tuple[Part, ...]
    ) -> list[bool | OutcomeUnknown]:
        args = [*head, *(part for claim in claims for part in (*claim.name, *tail))]
        try:
            return [bool(done) for done in await self._server.run(script, keys, args)]
        except OutcomeUnknown as lost:
            try:
                again = await self._server.run(script, keys, args)
            except ServerError:
                # Whatever became of the second try, the first one may have been carried out.
                raise lost from lost.__cause__
            return [
                bool(done) or self._clock.seconds_until(claim.ends_us) > _SURELY or lost
                for done, claim in zip(again, claims, strict=True)
            ]


def _demand(done: bool | OutcomeUnknown) -> None:
    if isinstance(done, OutcomeUnknown):
        raise done
    if not done:
        raise LeaseLost(LOST)
