"""Operations on the leases of a delayed queue: acknowledge, offer again, extend, give back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delayq._engine.batcher import Batcher
from delayq._engine.leases import LOST, fresh_until, heed, settle, settled
from delayq._redisson.store import BATCH
from delayq.errors import LeaseLost, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import Counters, EngineContext
    from delayq._redisson.store import DelayedStore, Transferred

_ACKS_AT_A_TIME = 200
# The ends of the tokens of one call's leases, as transfer.lua makes them.
_PLACES = tuple(f":{place:03}" for place in range(1, BATCH + 1))


@dataclass(slots=True, eq=False)
class Lease:
    """A payload that is leased to this client until a moment of the server's clock.

    Attributes:
        token: Identifies the lease on the server.
        ends_us: When the lease ends, in microseconds.
        fresh_until: Local time until which at least half of the lease is left, in seconds.
    """

    token: str
    payload: bytes = field(repr=False)
    ends_us: int
    fresh_until: float


class Leases:
    """The leases of one queue. Acknowledgements from concurrent callers share a call."""

    def __init__(
        self,
        store: DelayedStore,
        services: EngineContext,
        on_due: Callable[[int], None],
        counts: Counters,
    ) -> None:
        """Call ``on_due`` with the due time of each message offered again, in microseconds."""
        self.name: str = store.keys.name
        self._store = store
        self._clock = services.clock
        self._on_due = on_due
        self._counts = counts
        self._acks: Batcher[Lease, bool | OutcomeUnknown] = Batcher(
            services.server,
            services.background,
            request=lambda leases, _: store.ack_request([lease.token for lease in leases]),
            repeat=lambda request, leases, lost: settle(
                services.server, services.clock, request, [lease.ends_us for lease in leases], lost
            ),
            results=lambda _, answer: settled(answer, counts),
            max_items=_ACKS_AT_A_TIME,
            max_bytes=_ACKS_AT_A_TIME,
            on_outcome=lambda _, outcome: heed(store.keys.name, None, outcome),
        )
        # Acknowledges a message without waiting, as Batcher.fire_and_forget(), and logs failures.
        self.ack_and_forget: Callable[[Lease, int], bool] = self._acks.fire_and_forget

    async def ack(self, lease: Lease) -> None:
        """Acknowledge the message. Raises as :meth:`Delivery.ack`."""
        done = await self._acks.submit(lease, 1)
        if isinstance(done, OutcomeUnknown):
            raise done
        if not done:
            raise LeaseLost(LOST)

    async def nack(self, lease: Lease, delay_us: int) -> None:
        """Offer the message again, due after ``delay_us`` microseconds. Raises as :meth:`ack`."""
        due_us = await self._store.nack(lease.token, delay_us)
        if due_us is None:
            raise LeaseLost(LOST)
        self._counts.retried += 1
        self._on_due(due_us)

    async def extend(self, leases: Sequence[Lease], lease_us: int) -> list[bool]:
        """Extend leases to end ``lease_us`` microseconds from now. Return which are still ours."""
        ours_so_far: list[bool] = []
        for at in range(0, len(leases), _ACKS_AT_A_TIME):
            page = leases[at : at + _ACKS_AT_A_TIME]
            ends_us, ours = await self._store.extend([lease.token for lease in page], lease_us)
            for lease, mine in zip(page, ours, strict=True):
                if mine:
                    lease.ends_us = ends_us
                    lease.fresh_until = fresh_until(self._clock, ends_us, lease_us)
            ours_so_far += ours
        return ours_so_far

    def create(self, call: str, reply: Transferred, lease_us: int) -> list[Lease]:
        """Create the leases of one call's payloads, with the tokens that ``transfer.lua`` makes."""
        ends_us = reply.lease_ends_us(lease_us)
        fresh = fresh_until(self._clock, ends_us, lease_us)
        return [
            Lease(call + place, payload, ends_us, fresh)
            for place, payload in zip(_PLACES, reply.payloads, strict=False)
        ]

    async def release(self, lease: Lease) -> None:
        """Give an untouched message back to the head of the ready list."""
        await self._store.send(self._store.release_request([lease.token]))

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        await self._acks.aclose(grace)
