"""Handles notifications about individual messages: they were cancelled, have finished, or their
handlers report how far they are.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from delayq._redis.retry import retry_delay
from delayq.errors import Closed, OutcomeUnknown, ResultTimeout, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from delayq._engine.context import EngineContext
    from delayq._reliable.outcomes import Outcome

# How long the server remembers that a client waits, in seconds, unless it is told again. It is told
# at each re-check.
_REMEMBERED = 60.0
_RECHECKS = 3
# A read at the moment at which a message expires would come too early, in seconds.
_EXPIRY_MARGIN = 0.001
# How many cancelled leases are remembered.
_MAX_CANCELLED = 1000


class MessageNotifications:
    """Collects what this client is notified of about the messages of one queue, and waits for their
    ends.

    A client that waits for a message tells the server, which then notifies it of the message's end.
    The notification may be lost: all waits read again at each re-check of the queue, and whenever
    the client has subscribed anew.

    Attributes:
        cancelled: The last messages that were cancelled while clients had them: the id of each, and
            the token of its lease.
    """

    def __init__(self, services: EngineContext, closing: asyncio.Future[None]) -> None:
        """Waits end when ``closing`` is done."""
        self.cancelled: dict[tuple[bytes, bytes], None] = {}
        self._services = services
        self._closing = closing
        # By the id of the message for which each waits.
        self._waits: dict[bytes, set[asyncio.Event]] = {}

    @property
    def remembered_us(self) -> int:
        """For how long the server is to remember that a client waits, in microseconds."""
        return int(max(_REMEMBERED, _RECHECKS * self._services.resync_interval) * 1_000_000)

    def on_cancelled(self, lease: tuple[bytes, bytes]) -> None:
        """Remember that a message was cancelled, by its id and the token of its lease.

        This client may have claimed it ahead, and not begun with it.
        """
        self.cancelled[lease] = None
        if len(self.cancelled) > _MAX_CANCELLED:
            del self.cancelled[next(iter(self.cancelled))]

    def on_changed(self, id: bytes) -> None:  # noqa: A002
        """Wake the waits for a message, because it may have ended, or its handler has reported how
        far it is; all for an empty id.
        """
        if not id:
            self.wake_all()
        for event in self._waits.get(id, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake all waits, because a notification may have been lost."""
        for events in self._waits.values():
            for event in events:
                event.set()

    async def wait_for_outcome(
        self,
        id: str,  # noqa: A002
        timeout: float | None,
        read: Callable[[str, int], Awaitable[Outcome]],
    ) -> Outcome:
        """Wait until a message has ended, and return its outcome.

        Args:
            id: The message's id.
            timeout: How long to wait, in seconds; None for no limit.
            read: Reads the message's outcome so far, and lets the server remember for some
                microseconds that this client waits.

        Raises:
            ResultTimeout: It has not ended yet; or the server did not answer.
            ServerError: The server refuses the call.
            Closed: The queue was closed.
        """
        with self.subscribed(id) as event:
            try:
                async with asyncio.timeout(timeout):
                    return await self._wait(id, event, read)
            except TimeoutError as error:
                raise ResultTimeout(id, timeout or 0.0) from error.__cause__

    @contextmanager
    def subscribed(self, id: str) -> Iterator[asyncio.Event]:  # noqa: A002
        """Give the block an event that is set when a message or batch may have changed."""
        event, key = asyncio.Event(), id.encode()
        self._waits.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            self._waits[key].discard(event)
            if not self._waits[key]:
                del self._waits[key]

    async def pause(self, event: asyncio.Event, timeout: float | None) -> None:
        """Wait for an event for at most ``timeout`` seconds, or without limit if that is None.

        Raises:
            Closed: The queue was closed.
        """
        notified = asyncio.ensure_future(event.wait())
        futures: set[asyncio.Future[object]] = {notified, self._closing}  # type: ignore[arg-type]
        try:
            await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            notified.cancel()
        if self._closing.done():
            raise Closed("the queue is closed")

    async def _wait(
        self,
        id: str,  # noqa: A002
        event: asyncio.Event,
        read: Callable[[str, int], Awaitable[Outcome]],
    ) -> Outcome:
        services, failures = self._services, 0
        remember_us = self.remembered_us
        alive_us = 0
        while True:
            event.clear()
            try:
                outcome, failures = await read(id, remember_us), 0
            except (ServerUnavailable, OutcomeUnknown):
                failures += 1
                pause: float | None = retry_delay(failures, longest=services.retry_most)
            else:
                if not outcome.is_pending:
                    # If the message was alive later than that, it is the end of an earlier one.
                    is_older = outcome.moment_us < alive_us and not (
                        outcome.has_expired and outcome.death is not None
                    )
                    return outcome._replace(record=None, death=None) if is_older else outcome
                alive_us, pause = outcome.now_us, None
                if outcome.ends_us is not None:
                    # Nobody announces the end of a message that no worker takes.
                    pause = max(0, outcome.ends_us - alive_us) / 1_000_000 + _EXPIRY_MARGIN
            await self.pause(event, pause)
