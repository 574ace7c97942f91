"""Operations on a claim: acknowledge, try again later, bury, extend the lease."""

from __future__ import annotations

from collections import Counter
from logging import ERROR
from typing import TYPE_CHECKING

from delayq._engine.batcher import Batcher
from delayq._engine.leases import LOST, fresh_until, heed, settle, settled
from delayq._logging import log
from delayq._reliable.outcomes import attempt_of
from delayq.errors import Closed, LeaseLost, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence

    from delayq._engine.context import Counters, EngineContext
    from delayq._redis.scripts import Request
    from delayq._reliable.known_settings import KnownSettings
    from delayq._reliable.replies import Claim
    from delayq._reliable.store import ReliableStore


_AT_A_TIME = 200
RESULT_UNIT = 5_000
"""The bytes of results that take the place of a message in a call: so it has a megabyte at most."""


class Acknowledger:
    """Settles the claims of one queue. Concurrent callers share calls."""

    def __init__(
        self,
        store: ReliableStore,
        services: EngineContext,
        counters: Counters,
        settings: KnownSettings,
    ) -> None:
        self._store = store
        self._settings = settings
        self._counters = counters
        self._clock = services.clock
        self._suspects = services.suspects
        self._closed = False
        self._background = services.background
        # Cancelled messages whose handlers outlive their blocks, and those whose slots are to be
        # freed.
        self._outlived: Counter[Claim] = Counter()
        self._stopped: list[Claim] = []
        self._acks: Batcher[Claim, bool | OutcomeUnknown] = Batcher(
            services.server,
            services.background,
            request=self._acks_of,
            repeat=self._settle,
            results=lambda _, answer: settled(answer, counters),
            max_items=_AT_A_TIME,
            max_bytes=_AT_A_TIME,
            uncancellable=True,
            on_outcome=self._heed,
        )
        # Acknowledges a message without waiting, as Batcher.fire_and_forget(), and logs failures.
        self.ack_and_forget: Callable[[Claim, int], bool] = self._acks.fire_and_forget

    @property
    def in_flight(self) -> int:
        """Number of acknowledgements in flight."""
        return self._acks.unanswered

    async def flush(self) -> None:
        """Wait for the answers to all acknowledgements sent before now."""
        await self._acks.flush()

    def ack(self, claim: Claim) -> Future[bool | OutcomeUnknown]:
        """Acknowledge the message. The future has its outcome: see :func:`demand`.

        A caller that is cancelled has handled the message all the same, so the acknowledgement is
        carried out. Raises :class:`Closed` at once.
        """
        payload = getattr(claim, "result", b"")
        return self._acks.submit(claim, 1 + len(payload) // RESULT_UNIT)

    async def nack(self, claim: Claim, delay_us: int, error: str) -> None:
        """Make the message due again after ``delay_us`` microseconds.

        Raises:
            LeaseLost: The lease had ended, and another worker may have the message. Nothing was
                changed.
            OutcomeUnknown: The call may have been carried out.
        """
        attempt = self._attempt_of(claim, error)
        request = self._store.nack_request(claim, delay_us, error, attempt=attempt)
        await self._settle_one(request, claim)
        self._counters.retried += 1

    async def snooze(self, claim: Claim, delay_us: int) -> None:
        """Make the message due again after ``delay_us`` microseconds; the attempt does not count.

        Raises the same errors as :meth:`nack`.
        """
        await self._settle_one(self._store.nack_request(claim, delay_us, "", counts=False), claim)
        self._counters.released += 1

    async def bury(self, claim: Claim, why: str, error: str = "") -> None:
        """Make the message a dead letter.

        ``why`` is JSON on one line. Raises the same errors as :meth:`nack`.
        """
        request = self._store.bury_request(claim, why, self._attempt_of(claim, error))
        await self._settle_one(request, claim)
        self._counters.buried += 1

    async def release(self, claim: Claim, *, is_begun: bool = True) -> None:
        """Return the message to the state it was in before it was claimed; not ``is_begun``: no
        handler has begun it.

        Raises the same errors as :meth:`nack`.
        """
        await self._settle_one(self._store.release_request([claim], is_begun=is_begun), claim)
        self._counters.released += 1

    async def extend(self, claims: Sequence[Claim], lease_us: int) -> list[bool]:
        """Extend leases to end ``lease_us`` microseconds from now.

        Returns which of them are still ours.

        Raises:
            ServerError: The outcome is unknown; most likely nothing was changed.
            Closed: The queue is closed.
        """
        self._check_open()
        held: list[bool] = []
        for at in range(0, len(claims), _AT_A_TIME):
            some = claims[at : at + _AT_A_TIME]
            asked_at = self._clock.local()
            now_us, ours = await self._store.extend(some, lease_us)
            self._clock.observe(now_us, asked_at)
            for claim, mine in zip(some, ours, strict=True):
                if mine:
                    claim.ends_us = now_us + lease_us
                    own_us = lease_us if claim.policy is None else claim.policy.lease_us
                    claim.fresh_until = fresh_until(self._clock, claim.ends_us, own_us)
                else:
                    self._suspects.over(claim)
                held.append(mine)
        return held

    def outlives(self, claim: Claim) -> None:
        """Note that a handler, or a thread of it, runs on after the block of its message: until
        :meth:`ended`.
        """
        self._outlived[claim] += 1

    def ended(self, claim: Claim) -> None:
        """Note that a handler has ended that has outlived the block of its message."""
        self._outlived[claim] -= 1
        if not self._outlived[claim]:
            del self._outlived[claim]
            self.stopped(claim)

    def stopped(self, claim: Claim) -> None:
        """Free the slots of a message that was cancelled, if it has kept them and its handler has
        ended: soon, or at the end of its lease if the call fails.
        """
        if claim in self._outlived or claim in self._stopped or self._closed:
            return
        self._stopped.append(claim)
        if len(self._stopped) == 1:
            self._background.spawn(
                self._free_slots(), f"cancelled messages of {self._store.keys.name}"
            )

    async def _free_slots(self) -> None:
        while self._stopped:
            claims = self._stopped[:_AT_A_TIME]
            try:
                await self._store.free_slots(claims)
            except (ServerError, Closed):
                # They come back when their leases would have ended.
                pass
            except Exception as error:  # noqa: BLE001 - the next ones are freed all the same
                text = "the slots of %d cancelled messages are held until their leases end"
                log(ERROR, self._store.keys.name, text, len(claims), error=error)
            del self._stopped[: len(claims)]

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        self._closed = True
        await self._acks.aclose(grace)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the queue is closed: the message is redelivered when its lease ends")

    def _acks_of(self, claims: Sequence[Claim], _slot: int) -> Request:
        for claim in claims:
            self._suspects.over(claim)
        if self._settings.stored.keep_us:
            return self._store.finish_request(claims)
        return self._store.ack_request(claims)

    def _attempt_of(self, claim: Claim, error: str) -> bytes:
        """Return what to record about an attempt that has failed; nothing if it is not kept."""
        return attempt_of(claim, error) if self._settings.stored.keep_us else b""

    def _heed(self, claim: Claim, outcome: bool | OutcomeUnknown | BaseException) -> None:
        # It may have failed before it left.
        self._suspects.over(claim)
        if outcome is False:
            # It may have been cancelled just when its handler had ended.
            self.stopped(claim)
        heed(self._store.keys.name, claim.id, outcome)

    async def _settle_one(self, request: Request, claim: Claim) -> None:
        self._check_open()
        try:
            (done,) = await self._settle(request, [claim])
        finally:
            self._suspects.over(claim)
        demand(done)

    async def _settle(
        self, request: Request, claims: Sequence[Claim], lost: OutcomeUnknown | None = None
    ) -> list[bool | OutcomeUnknown]:
        return await settle(
            self._store.client, self._clock, request, [claim.ends_us for claim in claims], lost
        )


def demand(done: bool | OutcomeUnknown) -> None:
    """Raise the error that an outcome means, unless it is success."""
    if isinstance(done, OutcomeUnknown):
        raise done
    if not done:
        raise LeaseLost(LOST)
