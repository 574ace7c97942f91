"""Acknowledges or hands back a message at the end of its ``async with`` block."""

from __future__ import annotations

import asyncio
from logging import WARNING
from typing import TYPE_CHECKING

import anyio

from delayq._logging import log
from delayq.errors import OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable


class Paced:
    """The messages that a loop has at hand."""

    waited: float = 0.0
    """How long it has waited for acknowledgements, which does not count as handling, in seconds."""


async def paced(ahead: object, settling: Awaitable[None]) -> None:
    """Await the call that settles a message, and add the time it takes to ``ahead.waited``."""
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
