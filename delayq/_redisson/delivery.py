"""Messages delivered under a lease: none is lost when its handler dies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import anyio

from delayq._durations import Duration, microseconds, moment_us
from delayq._engine.leases import LOST, paced, settle_quietly
from delayq._generics import T
from delayq.errors import Closed, LeaseLost

if TYPE_CHECKING:
    from datetime import datetime
    from types import TracebackType
    from typing import Self

    from delayq._engine.lease_keeper import LeaseKeeper
    from delayq._engine.leases import Batch
    from delayq._redisson.leases import Lease, Leases


class Delivery(Generic[T]):
    """A message of :meth:`DelayedQueue.deliveries`, and the lease under which you hold it.

    Until the lease ends, no other consumer gets the message. Then it goes back to the head of the
    ready list, for Python and Java alike. Use it as a context manager: it renews its lease while
    the block runs, then calls :meth:`ack` if the block ends normally and :meth:`nack` if it raises;
    if the block is cancelled, the message goes back at once. Errors that the block raises
    propagate, and an error in handing the message back is then only logged. If the loop has more
    messages at hand, or is fetching the next batch, the ack does not wait for its reply: if the
    lease was lost, that is logged.

    Attributes:
        value: The message's value.
    """

    __slots__ = ("_ahead", "_keeper", "_lease", "_leases", "_retry_us", "_settled", "value")

    def __init__(
        self,
        value: T,
        lease: Lease,
        leases: Leases,
        keeper: LeaseKeeper[Lease],
        retry_us: int,
        ahead: Batch[Any] | None = None,
    ) -> None:
        """Take the wait after a block raised, microseconds, and the messages that come next."""
        self.value: T = value
        self._lease = lease
        self._leases = leases
        self._keeper = keeper
        self._retry_us = retry_us
        self._settled = False
        self._ahead = ahead

    @property
    def lease_ends_at(self) -> datetime:
        """The time the lease ends, by the server's clock (UTC)."""
        return moment_us(self._lease.ends_us)

    async def ack(self) -> None:
        """Acknowledge the message: it is removed for good. Concurrent calls share a round trip.

        Raises:
            LeaseLost: The lease had ended. Another consumer may have the message. Nothing changed.
            OutcomeUnknown: The reply was lost. Unless it was carried out, the message comes again.
            ServerUnavailable, ServerRefused: The call was not carried out: the message is
                redelivered when the lease ends.
            Closed: The queue or client is closed; the message is redelivered, too.
        """
        await self._leases.ack(self._lease)
        self._done()

    async def nack(self, delay: Duration | None = None) -> None:
        """Offer the message again, like any other, for Python and Java alike.

        Args:
            delay: Seconds or a timedelta until it is due. By default, ``retry_delay``.

        Raises:
            BadDelay: As for :meth:`DelayedQueue.offer`. Otherwise as :meth:`ack`.
        """
        await self._leases.nack(
            self._lease, self._retry_us if delay is None else microseconds(delay)
        )
        self._done()

    async def extend(self, duration: Duration) -> None:
        """Make the lease end ``duration`` (seconds, timedelta) from now. Raises as :meth:`nack`."""
        lease_us = microseconds(duration, "lease")
        (mine,) = await self._leases.extend([self._lease], lease_us)
        if not mine:
            raise LeaseLost(LOST)
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
            and (ahead or ahead.fetching)
            and self._leases.ack_and_forget(self._lease, ahead.most_unanswered)
        ):
            self._settled = True
            return
        if error is None:
            # Shielded: a handled message is acknowledged even if its handler is cancelled now.
            with anyio.CancelScope(shield=True):
                await paced(ahead, self.ack())
        else:
            back = (
                self.nack() if isinstance(error, Exception) else self._leases.release(self._lease)
            )
            await settle_quietly(back, self._leases.name)

    def _done(self) -> None:
        self._settled = True
        self._keeper.let_go(self._lease)

    def __repr__(self) -> str:
        return f"<Delivery, leased until {self.lease_ends_at.isoformat()}>"


def _ignore() -> None:
    """Do nothing about a lost lease."""
