"""Leaves an ``async with`` block around a message."""

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
    """What a loop has at hand, and how long it waited for acknowledgements meanwhile: that is no part of handling.

    Attributes:
        waited: Seconds.
    """

    waited: float = 0.0


async def paced(ahead: object, settling: Awaitable[None]) -> None:
    """Settle a message, and note how long that took with what its loop has at hand."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        await settling
    finally:
        if isinstance(ahead, Paced):
            ahead.waited += loop.time() - started


async def settle_quietly(settling: Awaitable[object], queue: str, message: str | None = None) -> None:
    """Settle a message while its block's own error is on its way out, so that this error goes on unchanged.

    Errors of settling are logged: a message that was not settled comes again when its lease ends. Cancellation is not held back.

    Args:
        settling: The call that settles the message.
        queue: The queue's name, for the log.
        message: The message's id, if it has one.
    """
    name = "a message" if message is None else f"message {message!r}"
    try:
        # Shielded: a handler that is cancelled still hands its message back.
        with anyio.CancelScope(shield=True):
            await settling
    except Exception as error:  # noqa: BLE001 - whatever it is, the block's own error says more
        unsure = isinstance(error, OutcomeUnknown)
        _log.warning(
            "queue %r: %s failed, and %s given back: %s: %s. %s comes again when its lease ends",
            queue,
            name,
            "may not have been" if unsure else "could not be",
            type(error).__name__,
            error,
            "If it was not, it" if unsure else "It",
            extra=about(queue, message),
        )
