"""Calls that end or renew leases, and what their answers mean, for queues of both kinds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from delayq._logging import about
from delayq.errors import OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._engine.counters import Counters
    from delayq._engine.server_clock import ServerClock
    from delayq._redis.client import RedisClient
    from delayq._redis.scripts import Request

_log = logging.getLogger("delayq")

# Seconds of a lease that must be left for us to know that a repeated call found nothing because the
# first was carried out.
_SURELY = 1.0
LOST = "the lease has ended: another worker may have the message"
HANDLED_TWICE = "queue %r: the lease of %s was lost, so the message may be handled again"


def heed(queue: str, message: bytes | None, outcome: bool | OutcomeUnknown | BaseException) -> None:
    """Log the outcome of an acknowledgement that no caller waits for, unless it succeeded.

    ``message`` is the message's id, if it has one.
    """
    if outcome is True:
        return
    known = None if message is None else message.decode(errors="replace")
    name = "a message" if known is None else f"message {known!r}"
    if outcome is False:
        _log.warning(HANDLED_TWICE, queue, name, extra=about(queue, known))
    else:
        _log.warning(
            "queue %r: %s was handled, but may be redelivered: %s",
            queue,
            name,
            outcome,
            extra=about(queue, known),
        )


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
    """Make a call that settles leased messages, and repeat it once if its answer is lost.

    Args:
        server: Runs the call.
        clock: The server's clock.
        request: The call. Its answer says of each lease whether it was ours.
        ends_us: When each lease ends, in microseconds.
        lost: The error with which the answer was lost, if the call was made once already.

    Returns:
        For each lease, whether it was ours, or the error if the outcome is unknown.
    """
    if lost is None:
        try:
            return [bool(done) for done in await server.run(*request)]
        except OutcomeUnknown as error:
            lost = error
    try:
        again = await server.run(*request)
    except ServerError:
        # Whatever happened to the second try, the first one may have been carried out.
        raise lost from lost.__cause__
    # A lease that is gone but cannot have ended was settled by the first try.
    return [
        bool(done) or clock.seconds_until(ends) > _SURELY or lost
        for done, ends in zip(again, ends_us, strict=True)
    ]


def settled(
    answer: Sequence[int | OutcomeUnknown], counters: Counters
) -> list[bool | OutcomeUnknown]:
    """Count the successful acknowledgements in an answer of the server, or of :func:`settle`, and
    return each lease's outcome.
    """
    outcomes = [done if isinstance(done, OutcomeUnknown) else bool(done) for done in answer]
    counters.acked += outcomes.count(True)
    return outcomes
