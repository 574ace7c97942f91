"""Messages delivered under a lease: none is lost when its handler dies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

import anyio

from delayq._durations import Duration, datetime_at, microseconds
from delayq._engine.leases import (
    LEASE_ENDED,
    MAX_LEASES,
    Acknowledger,
    await_ack,
    check_outcome,
    fresh_until,
    settle_quietly,
)
from delayq._generics import T
from delayq._redisson.store import BATCH
from delayq.errors import Closed, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from types import TracebackType
    from typing import Self

    from delayq._engine.context import Counters, EngineContext
    from delayq._engine.lease_keeper import LeaseKeeper
    from delayq._engine.prefetch import Ahead
    from delayq._redis.scripts import Request
    from delayq._redisson.store import DelayedStore, Transferred

# The ends of the tokens of one call's leases, as transfer.lua makes them.
_TOKEN_SUFFIXES = tuple(f":{number:03}" for number in range(1, BATCH + 1))


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


class LeaseAcknowledger(Acknowledger[Lease]):
    """Ends and extends the leases of one queue's messages."""

    def __init__(
        self,
        store: DelayedStore,
        services: EngineContext,
        on_due: Callable[[int], None],
        counters: Counters,
    ) -> None:
        """Call ``on_due`` with the due time of each message offered again, in microseconds."""
        super().__init__(store.keys.name, services, counters)
        self._store = store
        self._on_due = on_due

    async def nack(self, lease: Lease, delay_us: int) -> None:
        """Offer the message again, due after ``delay_us`` microseconds. Raises as
        :meth:`Delivery.nack`.
        """
        due_us = await self._store.nack(lease.token, delay_us)
        if due_us is None:
            raise LeaseLost(LEASE_ENDED)
        self._counters.retried += 1
        self._on_due(due_us)

    async def extend(self, leases: Sequence[Lease], lease_us: int) -> list[bool]:
        """Extend leases to end ``lease_us`` microseconds from now. Return which are still ours."""
        are_ours: list[bool] = []
        for at in range(0, len(leases), MAX_LEASES):
            page = leases[at : at + MAX_LEASES]
            ends_us, page_outcomes = await self._store.extend(
                [lease.token for lease in page], lease_us
            )
            for lease, is_ours in zip(page, page_outcomes, strict=True):
                if is_ours:
                    lease.ends_us = ends_us
                    lease.fresh_until = fresh_until(self._clock, ends_us, lease_us)
            are_ours += page_outcomes
        return are_ours

    def create(self, call: str, reply: Transferred, lease_us: int) -> list[Lease]:
        """Create the leases of one call's payloads, with the tokens that ``transfer.lua`` makes."""
        ends_us = reply.lease_ends_us(lease_us)
        fresh = fresh_until(self._clock, ends_us, lease_us)
        return [
            Lease(call + suffix, payload, ends_us, fresh)
            for suffix, payload in zip(_TOKEN_SUFFIXES, reply.payloads, strict=False)
        ]

    async def release(self, lease: Lease) -> None:
        """Give an untouched message back to the head of the ready list."""
        await self._store.send(self._store.release_request([lease.token]))

    def _ack_request(self, leases: Sequence[Lease], slot: int) -> Request:
        del slot
        return self._store.ack_request([lease.token for lease in leases])


class Delivery(Generic[T]):
    """A message of :meth:`DelayedQueue.deliveries`, and the lease under which you hold it.

    Until the lease ends, no other consumer gets the message. Then it goes back to the head of the
    ready list, for Python and Java alike. Use it as a context manager: it renews its lease while
    the block runs, then calls :meth:`ack` if the block ends normally and :meth:`nack` if it raises;
    if the block is cancelled, the message goes back at once. Errors that the block raises
    propagate, and an error in giving the message back is then only logged. If the loop has more
    messages at hand, or is fetching the next batch, the ack does not wait for its reply: if the
    lease was lost, that is logged.

    Attributes:
        value: The message's value.
    """

    __slots__ = ("_acknowledger", "_ahead", "_keeper", "_lease", "_retry_us", "_settled", "value")

    def __init__(
        self,
        value: T,
        lease: Lease,
        acknowledger: LeaseAcknowledger,
        keeper: LeaseKeeper[Lease],
        retry_us: int,
        ahead: Ahead | None = None,
    ) -> None:
        """Args:
        value: The message's value.
        lease: Its lease.
        acknowledger: Ends the lease.
        keeper: Renews the lease.
        retry_us: The default delay of :meth:`nack`, in microseconds.
        ahead: The messages that its consumer has fetched and will handle next.
        """
        self.value: T = value
        self._lease = lease
        self._acknowledger = acknowledger
        self._keeper = keeper
        self._retry_us = retry_us
        self._settled = False
        self._ahead = ahead

    @property
    def lease_ends_at(self) -> datetime:
        """The time the lease ends, by the server's clock (UTC)."""
        return datetime_at(self._lease.ends_us)

    async def ack(self) -> None:
        """Acknowledge the message: it is removed for good. Concurrent calls share a round trip.

        Raises:
            LeaseLost: The lease had ended. Another consumer may have the message. Nothing changed.
            OutcomeUnknown: The reply was lost. Unless it was carried out, the message comes again.
            ServerUnavailable, ServerRefused: The call was not carried out: the message is
                redelivered when the lease ends.
            Closed: The queue or client is closed; the message is redelivered, too.
        """
        check_outcome(await self._acknowledger.ack(self._lease))
        self._done()

    async def nack(self, delay: Duration | None = None) -> None:
        """Offer the message again, like any other, for Python and Java alike.

        Args:
            delay: Seconds or a timedelta until it is due. By default, ``retry_delay``.

        Raises:
            BadDelay: As for :meth:`DelayedQueue.offer`. Otherwise as :meth:`ack`.
        """
        await self._acknowledger.nack(
            self._lease, self._retry_us if delay is None else microseconds(delay)
        )
        self._done()

    async def extend(self, duration: Duration) -> None:
        """Make the lease end ``duration`` (seconds, timedelta) from now. Raises as :meth:`nack`."""
        lease_us = microseconds(duration, "lease")
        (is_ours,) = await self._acknowledger.extend([self._lease], lease_us)
        if not is_ours:
            raise LeaseLost(LEASE_ENDED)
        self._keeper.extended(self._lease, lease_us)

    async def __aenter__(self) -> Self:
        if self._keeper.closed:
            raise Closed("the queue is closed: the message is redelivered when its lease ends")
        if not self._settled:
            # If the lease is lost all the same, the ack or nack reports it.
            self._keeper.hold(self._lease, _ignore)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keeper.let_go(self._lease)
        if self._settled:
            return
        ahead = self._ahead
        if (
            error is None
            and ahead is not None
            and (ahead or ahead.is_fetching)
            and self._acknowledger.ack_and_forget(self._lease, ahead.max_unanswered)
        ):
            self._settled = True
            return
        if error is None:
            # Shielded: a handled message is acknowledged even if its handler is cancelled now.
            with anyio.CancelScope(shield=True):
                await await_ack(ahead, self.ack())
        else:
            acknowledger = self._acknowledger
            call = (
                self.nack() if isinstance(error, Exception) else acknowledger.release(self._lease)
            )
            await settle_quietly(call, acknowledger.name)

    def _done(self) -> None:
        self._settled = True
        self._keeper.let_go(self._lease)

    def __repr__(self) -> str:
        return f"<Delivery, leased until {self.lease_ends_at.isoformat()}>"


def _ignore() -> None:
    """Do nothing about a lost lease."""
