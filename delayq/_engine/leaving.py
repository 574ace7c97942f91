"""Acknowledges or hands back a message at the end of its ``async with`` block."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import anyio

from delayq._logging import about
from delayq.errors import OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable

_log = logging.getLogger("delayq")


class Paced:
    """The messages that a loop has at hand, and how long it has waited for acknowledgements, which
    does not count as handling.

    Attributes:
        waited: Time spent waiting for acknowledgements, seconds.
    """

    waited: float = 0.0


async def paced(ahead: object, settling: Awaitable[None]) -> None:
    """Await the call that acknowledges or retries a message, and add the time it takes to
    ``ahead.waited``.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        await settling
    finally:
        if isinstance(ahead, Paced):
            ahead.waited += loop.time() - started


async def settle_quietly(
    settling: Awaitable[object], queue: str, message: str | None = None
) -> None:
    """Acknowledge or hand back a message while its block raises an error, and let that error
    propagate unchanged.

    Errors of the call itself are logged: a message that was not acknowledged or handed back is
    redelivered when its lease ends. Cancellation still propagates.

    Args:
        settling: The call that acknowledges, retries or releases the message.
        queue: The queue's name, for the log.
        message: The message's id, if it has one.
    """
    name = "a message" if message is None else f"message {message!r}"
    try:
        # Shielded: a handler that is cancelled still hands its message back.
        with anyio.CancelScope(shield=True):
            await settling
    except Exception as error:  # noqa: BLE001 - the block's own error matters more
        unsure = isinstance(error, OutcomeUnknown)
        _log.warning(
            "queue %r: %s failed and %s handed back: %s: %s. %s is redelivered when its lease ends",
            queue,
            name,
            "may not have been" if unsure else "could not be",
            type(error).__name__,
            error,
            "If it was not, it" if unsure else "It",
            extra=about(queue, message),
        )
