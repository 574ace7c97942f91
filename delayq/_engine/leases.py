"""Calls that end leases, and what their answers mean, for queues of both kinds."""

from __future__ import annotations

import asyncio
from collections import deque
from logging import WARNING
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from delayq._logging import log
from delayq._redis.client import RETRY_FOR
from delayq._redis.retry import retry_delay
from delayq.errors import OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from delayq._engine.context import Counters
    from delayq._engine.server_clock import ServerClock
    from delayq._redis.client import RedisClient
    from delayq._redis.scripts import Request

Item = TypeVar("Item")

# If this much of a lease is left, in seconds, a repeated call finds nothing only after a first one.
_SURELY = 1.0
HANDLED_TWICE = "the lease of %s was lost, so the message may be handled again"
LOST = "the lease has ended: another worker may have the message"


def heed(queue: str, message: bytes | None, outcome: bool | OutcomeUnknown | BaseException) -> None:
    """Log the outcome of an acknowledgement that no caller waits for, unless it succeeded."""
    if outcome is True:
        return
    known = None if message is None else message.decode(errors="replace")
    name = "a message" if known is None else f"message {known!r}"
    if outcome is False:
        log(WARNING, queue, HANDLED_TWICE, name, message=known)
    else:
        text = "%s was handled, but may be redelivered: %s"
        log(WARNING, queue, text, name, outcome, message=known)


def fresh_until(clock: ServerClock, ends_us: int, lease_us: int) -> float:
    """Return the local time, in seconds, until which at least half of a lease that ends at
    ``ends_us`` is left.
    """
    return clock.local() + clock.seconds_until(ends_us) - lease_us / 2_000_000


async def settle(
    server: RedisClient,
    clock: ServerClock,
    request: Request,
    ends_us: Sequence[int],
    lost: OutcomeUnknown | None,
) -> list[bool | OutcomeUnknown]:
    """Make a call that settles leased messages, until it is answered or the last lease has ended.

    A call whose answer was lost, as it was already if ``lost`` is set, is repeated. Whatever keeps
    a call from being sent, the next one may be: a message that was handled is not handled again
    because its server was away, or refused connections, for a part of its lease.

    Returns:
        For each lease, which ends at ``ends_us``, whether it was ours, or the error if the outcome
        is unknown.
    """
    until, failures = clock.local() + _patience(clock, ends_us), 0
    while True:
        try:
            answer = await server.run(*request._replace(deadline=until))
            break
        except OutcomeUnknown as error:
            lost, failures = error, failures + 1
            if clock.local() >= until:
                raise
        except ServerError:
            if lost is None:
                raise
            # Whatever has become of the later tries, an earlier one may have been carried out.
            raise lost from lost.__cause__
        await asyncio.sleep(retry_delay(failures, longest=0.5))
    if lost is None:
        return [bool(done) for done in answer]
    # A lease that is gone but cannot have ended was settled by the first try.
    return [
        bool(done) or clock.seconds_until(ends) > _SURELY or lost
        for done, ends in zip(answer, ends_us, strict=True)
    ]


def _patience(clock: ServerClock, ends_us: Sequence[int]) -> float:
    """Return for how many seconds a call that settles leases is made again."""
    return max(RETRY_FOR, *map(clock.seconds_until, ends_us))


def settled(
    answer: Sequence[int | OutcomeUnknown], counters: Counters
) -> list[bool | OutcomeUnknown]:
    """Count the acknowledgements that succeeded, and return each lease's outcome."""
    if answer.count(1) == len(answer):
        counters.acked += len(answer)
        return [True] * len(answer)
    outcomes = [done if isinstance(done, OutcomeUnknown) else bool(done) for done in answer]
    counters.acked += outcomes.count(True)
    return outcomes


# The end of an ``async with`` block around a message


class Batch(deque[Item]):
    """The messages that a loop has at hand. While there are some, or it fetches more, it need not
    wait for acknowledgements: it would wait for the server twice.
    """

    waited: float = 0.0
    """How long it has waited for acknowledgements, which does not count as handling, in seconds."""
    is_settling: bool = False
    """Whether it waits for an acknowledgement."""
    fetching: bool = False
    """Whether the next messages are being fetched."""
    most_unanswered: int = 400
    """With this many acknowledgements in flight, it waits for the next one all the same."""


async def paced(ahead: Batch[Any] | None, settling: Awaitable[None]) -> None:
    """Await the call that settles a message, and add the time it takes to ``ahead.waited``."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    if ahead is not None:
        ahead.is_settling = True
    try:
        await settling
    finally:
        if ahead is not None:
            ahead.waited += loop.time() - started
            ahead.is_settling = False


async def settle_quietly(
    settling: Awaitable[object], queue: str, message: str | None = None
) -> None:
    """Await the call that acknowledges, retries or releases a message whose block raises an error,
    which matters more than an error of the call: that is logged. Cancellation still propagates.

    The log shows the queue's name, and the message's id if it has one.
    """
    name = "a message" if message is None else f"message {message!r}"
    try:
        # Shielded: a handler that is cancelled still hands its message back.
        with anyio.CancelScope(shield=True):
            await settling
    except Exception as error:  # noqa: BLE001 - the block has an error of its own
        unsure = isinstance(error, OutcomeUnknown)
        log(
            WARNING,
            queue,
            "%s failed and %s handed back: %s: %s. %s is redelivered when its lease ends",
            name,
            "may not have been" if unsure else "could not be",
            type(error).__name__,
            error,
            "If it was not, it" if unsure else "It",
            message=message,
        )
