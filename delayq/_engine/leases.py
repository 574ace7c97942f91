"""Leases of messages in queues of both kinds: the calls that end them, and the block around a
message.
"""

from __future__ import annotations

import asyncio
from logging import WARNING
from typing import TYPE_CHECKING, Generic

import anyio

from delayq._engine.batcher import Batcher
from delayq._engine.lease_keeper import L
from delayq._logging import log
from delayq._redis.client import RETRY_FOR
from delayq._redis.retry import retry_delay
from delayq.errors import LeaseLost, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._engine.context import Counters, EngineContext
    from delayq._engine.prefetch import Ahead
    from delayq._engine.server_clock import ServerClock
    from delayq._redis.scripts import Request

# Most leases that one call ends or extends.
MAX_LEASES = 200
# If this much of a lease remains, in seconds, a repeated call misses it only because the first try
# was carried out.
_MARGIN = 1.0
HANDLED_TWICE = "the lease of %s was lost, so the message may be handled again"
LEASE_ENDED = "the lease has ended: another worker may have the message"


class Acknowledger(Generic[L]):
    """Ends the leases of the messages in one queue or partition. Concurrent acknowledgements share
    calls.

    Attributes:
        name: The queue's name.
        ack_and_forget: Acknowledges a message without waiting, as :meth:`Batcher.fire_and_forget`,
            and logs a failure.
    """

    def __init__(
        self,
        name: str,
        services: EngineContext,
        counters: Counters,
        *,
        uncancellable: bool = False,
    ) -> None:
        """Args:
        name: The queue's name.
        services: The services the queue is built from.
        counters: Counts what succeeds.
        uncancellable: Whether a message is acknowledged even if its caller is cancelled before the
            call is sent.
        """
        self.name: str = name
        self._server = services.server
        self._clock = services.clock
        self._counters = counters
        self._acks: Batcher[L, bool | OutcomeUnknown] = Batcher(
            services.server,
            services.background,
            request=self._ack_request,
            repeat=self._run,
            results=self._count_acked,
            max_items=MAX_LEASES,
            max_size=MAX_LEASES,
            uncancellable=uncancellable,
            on_outcome=self._on_outcome,
        )
        self.ack_and_forget: Callable[[L, int], bool] = self._acks.fire_and_forget

    @property
    def in_flight(self) -> int:
        """Number of acknowledgements in flight."""
        return self._acks.unanswered

    async def flush(self) -> None:
        """Wait for the replies to all acknowledgements sent before now."""
        await self._acks.flush()

    def ack(self, lease: L, size: int = 1) -> Future[bool | OutcomeUnknown]:
        """Acknowledge a message. The future has the outcome, for :func:`check_outcome`.

        ``size`` is the number of places that it takes in a call. Raises :class:`Closed` at once.
        """
        return self._acks.submit(lease, size)

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        await self._acks.aclose(grace)

    def _ack_request(self, leases: Sequence[L], slot: int) -> Request:
        """Return the call that acknowledges these messages."""
        raise NotImplementedError

    def _count_acked(
        self, _leases: Sequence[L], reply: Sequence[int | OutcomeUnknown]
    ) -> list[bool | OutcomeUnknown]:
        """Count the acknowledgements that succeeded, and return each lease's outcome."""
        if reply.count(1) == len(reply):
            self._counters.acked += len(reply)
            return [True] * len(reply)
        outcomes = [done if isinstance(done, OutcomeUnknown) else bool(done) for done in reply]
        self._counters.acked += outcomes.count(True)
        return outcomes

    def _on_outcome(
        self,
        _lease: L,
        outcome: bool | OutcomeUnknown | BaseException,
        message_id: str | None = None,
    ) -> None:
        """Log the outcome of an acknowledgement that no caller waits for, unless it succeeded."""
        if outcome is True:
            return
        name = "a message" if message_id is None else f"message {message_id!r}"
        if outcome is False:
            log(WARNING, self.name, HANDLED_TWICE, name, message=message_id)
        else:
            text = "%s was handled, but may be redelivered: %s"
            log(WARNING, self.name, text, name, outcome, message=message_id)

    async def _run(
        self, request: Request, leases: Sequence[L], lost_reply: OutcomeUnknown | None = None
    ) -> list[bool | OutcomeUnknown]:
        """Make a call that ends leases, until it is answered or the last lease has ended.

        A call whose reply was lost, as it was already if ``lost_reply`` is set, is repeated. A call
        that could not be sent is repeated, too: a message that was handled is not handled again
        because its server was away, or refused connections, for a part of its lease.

        Returns:
            For each lease, whether it was ours, or the error if the outcome is unknown.
        """
        ends_us = [lease.ends_us for lease in leases]
        deadline, failures = self._clock.local() + _retry_time(self._clock, ends_us), 0
        while True:
            try:
                reply = await self._server.run(*request._replace(deadline=deadline))
                break
            except OutcomeUnknown as error:
                lost_reply, failures = error, failures + 1
                if self._clock.local() >= deadline:
                    raise
            except ServerError:
                if lost_reply is None:
                    raise
                # Whatever has become of the later tries, an earlier one may have been carried out.
                raise lost_reply from lost_reply.__cause__
            await asyncio.sleep(retry_delay(failures, longest=0.5))
        if lost_reply is None:
            return [bool(done) for done in reply]
        # A lease that is gone but cannot have ended was ended by the first try.
        return [
            bool(done) or self._clock.seconds_until(end_us) > _MARGIN or lost_reply
            for done, end_us in zip(reply, ends_us, strict=True)
        ]


def check_outcome(outcome: bool | OutcomeUnknown) -> None:
    """Raise the error that the outcome of a call for one lease means, unless it succeeded."""
    if isinstance(outcome, OutcomeUnknown):
        raise outcome
    if not outcome:
        raise LeaseLost(LEASE_ENDED)


def fresh_until(clock: ServerClock, ends_us: int, lease_us: int) -> float:
    """Return the local time, in seconds, until which at least half of a lease that ends at
    ``ends_us`` is left.
    """
    return clock.local() + clock.seconds_until(ends_us) - lease_us / 2_000_000


def _retry_time(clock: ServerClock, ends_us: Sequence[int]) -> float:
    """Return for how many seconds a call that ends leases is repeated."""
    return max(RETRY_FOR, *map(clock.seconds_until, ends_us))


# The end of an ``async with`` block around a message


async def await_ack(ahead: Ahead | None, ack: Awaitable[None]) -> None:
    """Await an acknowledgement, and add the time it takes to ``ahead.ack_time``."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    if ahead is not None:
        ahead.awaits_ack = True
    try:
        await ack
    finally:
        if ahead is not None:
            ahead.ack_time += loop.time() - started
            ahead.awaits_ack = False


async def settle_quietly(call: Awaitable[object], queue: str, message: str | None = None) -> None:
    """Await the call that acknowledges, retries or releases a message whose block raises an error,
    which matters more than an error of the call: that is logged. Cancellation still propagates.

    The log shows the queue's name, and the message's id if it has one.
    """
    name = "a message" if message is None else f"message {message!r}"
    try:
        # Shielded: a handler that is cancelled still gives its message back.
        with anyio.CancelScope(shield=True):
            await call
    except Exception as error:  # noqa: BLE001 - the block has an error of its own
        unsure = isinstance(error, OutcomeUnknown)
        log(
            WARNING,
            queue,
            "%s failed and %s given back: %s: %s. %s is redelivered when its lease ends",
            name,
            "may not have been" if unsure else "could not be",
            type(error).__name__,
            error,
            "If it was not, it" if unsure else "It",
            message=message,
        )
