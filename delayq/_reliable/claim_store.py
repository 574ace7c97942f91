"""The calls about claimed messages: claims, and their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._redis.scripts import Request
from delayq._reliable.bodies import batch_in, pack
from delayq._reliable.outcomes import attempt_of, offered_of
from delayq._reliable.replies import ClaimReply, Extended
from delayq._reliable.scripts import (
    ACK,
    ACK_THEN,
    BURY,
    CLAIM,
    EXTEND,
    FINISH,
    FREE_SLOTS,
    NACK,
    PROGRESS,
    RELEASE,
    RELEASE_CALL,
    SAVE,
    Part,
    ScriptRunner,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._engine.suspects import ClaimTerms
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings import Policy


class ClaimStore(ScriptRunner):
    """Claims messages, and ends claims."""

    async def claim(
        self,
        call: str,
        number: int,
        max_count: int,
        policy: Policy,
        signature: str,
        *,
        terms: ClaimTerms,
        own_suspect: Claim | None,
    ) -> ClaimReply:
        """Claim due messages, without repeating the call.

        Args:
            call: The key of the client's claims, which tells :meth:`release_call` what the last one
                has handed out.
            number: Tells it from the earlier ones with this key.
            max_count: The largest number of messages.
            policy: The settings of those who want the messages.
            signature: Published with the notice to other clients; empty for no notice.
            terms: Tells whether it may bring a suspect, and whether that is alone here.
            own_suspect: The suspect of this queue that the client has at work, if any.

        Raises:
            SettingsChanged: The settings have the layout of another release.
        """
        reply = await self.client.run_once(
            CLAIM,
            (*self.keys.of_script(CLAIM), call),
            (
                number,
                max_count,
                policy.lease_us,
                policy.max_attempts,
                signature,
                int(terms.may_bring_suspect),
                int(terms.is_alone),
                "" if own_suspect is None else own_suspect.id,
                "" if own_suspect is None else own_suspect.token,
            ),
        )
        return ClaimReply._make(reply)

    async def release_call(self, call: str, number: int) -> None:
        """Give back every message that a claim has handed out, whose reply was lost.

        If the claim arrives later, it hands out nothing.
        """
        keys = (*self.keys.of_script(RELEASE_CALL), call)
        await self.client.run(RELEASE_CALL, keys, (number,))

    async def free_slots(self, claims: Sequence[Claim]) -> None:
        """Free the slots of cancelled messages whose handlers have ended."""
        await self.run(FREE_SLOTS, *(part for claim in claims for part in claim.lease_id))

    def ack_request(self, claims: Sequence[Claim]) -> Request:
        """Build the call that deletes handled messages.

        The reply has 1 for each, or 0 if the lease was not ours any more.
        """
        args = [_count_by_token(claims), *[claim.id for claim in claims]]
        return Request(ACK, self.keys.of_script(ACK), args)

    def finish_request(self, claims: Sequence[Claim]) -> Request:
        """Build the call that deletes handled messages, and keeps their results and attempts.

        The reply is as for :meth:`ack_request`.
        """
        args: list[Part] = [_count_by_token(claims)]
        for claim in claims:
            args += _end_of(claim)
        return Request(FINISH, self.keys.of_script(FINISH), args)

    def ack_then_request(self, claims: Sequence[Claim]) -> Request:
        """Build the call that deletes handled messages as :meth:`finish_request` does, and stores
        those that follow from them, or from their batches.

        The reply is as for :meth:`ack_request`.
        """
        args: list[Part] = [_count_by_token(claims)]
        for claim in claims:
            followers = pack(getattr(claim, "followers", ()))
            args += (*_end_of(claim), followers, batch_in(claim.body) or "")
        return Request(ACK_THEN, self.keys.of_script(ACK_THEN), args)

    def nack_request(
        self, claim: Claim, delay_us: int, error: str, *, counts: bool = True, attempt: bytes = b""
    ) -> Request:
        """Build the call that makes a message due again after ``delay_us``.

        ``counts`` tells whether the attempt counts, and ``attempt`` is what to record about it, if
        anything. The reply is as for :meth:`ack_request`.
        """
        args = (*claim.lease_id, delay_us, int(counts), error, offered_of(claim.body), attempt)
        return Request(NACK, self.keys.of_script(NACK), args)

    def bury_request(self, claim: Claim, death: str, attempt: bytes = b"") -> Request:
        """Build the call that makes a message a dead letter; ``death`` is JSON.

        ``attempt`` and the reply are as for :meth:`nack_request`.
        """
        args = (*claim.lease_id, death, offered_of(claim.body), attempt)
        return Request(BURY, self.keys.of_script(BURY), args)

    def release_request(self, claims: Iterable[Claim], *, is_begun: bool) -> Request:
        """Build the call that gives messages back.

        Those that no handler has begun do not count as started. The reply is as for
        :meth:`ack_request`.
        """
        args: list[Part] = []
        for claim in claims:
            started_us = claim.start.at_us if claim.start else 0
            args += (*claim.lease_id, "" if is_begun else started_us)
        return Request(RELEASE, self.keys.of_script(RELEASE), args)

    async def extend(
        self, claims: Sequence[Claim], lease_us: int, *, alone: bool = True
    ) -> Extended:
        """Make leases end ``lease_us`` from now. If not ``alone``, messages that were alone in this
        client are not any more.
        """
        ids = (claim.id for claim in claims)
        reply = await self.run(EXTEND, lease_us, int(alone), _count_by_token(claims), *ids)
        now_us, *are_ours = reply
        return Extended(now_us, [bool(is_ours) for is_ours in are_ours])

    async def progress(self, claim: Claim, report: str) -> bool:
        """Store how far the handler of a message is, as JSON, and return whether the lease is still
        ours: otherwise nothing was changed.
        """
        return bool(await self.run(PROGRESS, claim.id, claim.token, report))

    async def save(self, claim: Claim, checkpoint: bytes) -> bool:
        """Store the checkpoint of a message, and return whether its lease is still ours: otherwise,
        nothing is stored. Of several, the one with the highest number stays.
        """
        return bool(await self.run(SAVE, claim.id, claim.token, checkpoint))


def _end_of(claim: Claim) -> tuple[Part, ...]:
    """Return the arguments of ``finish.lua`` for a message that has been handled."""
    payload = getattr(claim, "result", None)
    return (
        claim.id,
        offered_of(claim.body),
        # It was tried before, or redriven.
        int(claim.attempt > 1 or claim.known_due_us is not None),
        attempt_of(claim),
        b"" if payload is None else b"=" + payload,
    )


def _count_by_token(claims: Sequence[Claim]) -> bytes:
    """Return the tokens of claims, each with how many claims in a row have it."""
    runs, token, count = [], claims[0].token, 0
    for claim in claims:
        if claim.token != token:
            runs.append(b"%d:%b" % (count, token))
            token, count = claim.token, 0
        count += 1
    return b" ".join([*runs, b"%d:%b" % (count, token)])
