"""Acts on what a client hears of single messages: they were cancelled, or have finished."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from delayq._redis.retry import retry_delay
from delayq._reliable.outcomes import Outcome
from delayq.errors import OutcomeUnknown, ResultTimeout, ServerUnavailable

if TYPE_CHECKING:
    from delayq._reliable.open_queue import OpenReliableQueue

# How long the server remembers that a client waits, if it hears no more of it, in seconds. It hears
# of it at each re-check.
_REMEMBERED = 60.0
_RE_CHECKS = 3
# A look at the moment at which a message expires would come too early, in seconds.
_A_BIT = 0.001
# How many cancelled leases are remembered.
_MOST_CANCELLED = 1000


class MessageNotifications:
    """Collects what this client hears of the messages of one queue, and waits for their ends.

    A client that waits for a message tells the server, which then announces the message's end. The
    announcement may be lost: all waits look again at each re-check of the queue, and whenever the
    client has subscribed anew.

    Attributes:
        cancelled: The last messages that were cancelled while clients had them: the id of each, and
            the token of its lease.
    """

    def __init__(self, queue: OpenReliableQueue) -> None:
        self.cancelled: dict[tuple[bytes, bytes], None] = {}
        self._queue = queue
        # By the id of the message that each one waits for.
        self._waiting: dict[bytes, set[asyncio.Event]] = {}

    def on_cancelled(self, lease: tuple[bytes, bytes]) -> None:
        """Remember that a message was cancelled, by its id and the token of its lease.

        This client may have claimed it ahead, and not begun with it.
        """
        self.cancelled[lease] = None
        if len(self.cancelled) > _MOST_CANCELLED:
            del self.cancelled[next(iter(self.cancelled))]

    def on_finished(self, id: bytes) -> None:  # noqa: A002
        """Wake those that wait for a message, because it may have ended; all for an empty id."""
        if not id:
            self.look_again()
        for event in self._waiting.get(id, ()):
            event.set()

    def look_again(self) -> None:
        """Wake all, because an announcement may have been lost."""
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def outcome(self, id: str, timeout: float | None) -> Outcome:  # noqa: A002
        """Return the end of a message. Without records, the message may still be alive.

        Args:
            id: The message's id.
            timeout: How long to wait, in seconds; None for no limit, 0 to look once.

        Raises:
            ResultTimeout: It has not ended yet; or the server did not answer.
            ServerError: With a ``timeout`` of 0, or if the server refuses the call.
            Closed: The queue was closed.
        """
        if timeout == 0:
            if (found := await self._look(id, 0)).is_pending:
                raise ResultTimeout(id, 0.0)
            return found
        for partition in self._queue.partitions:
            partition.listen()
        event, key = asyncio.Event(), id.encode()
        self._waiting.setdefault(key, set()).add(event)
        try:
            async with asyncio.timeout(timeout):
                return await self._wait(id, event)
        except TimeoutError as error:
            raise ResultTimeout(id, timeout or 0.0) from error.__cause__
        finally:
            self._waiting[key].discard(event)
            if not self._waiting[key]:
                del self._waiting[key]

    async def _wait(self, id: str, event: asyncio.Event) -> Outcome:  # noqa: A002
        queue, tries = self._queue, 0
        for_us = int(max(_REMEMBERED, _RE_CHECKS * queue.services.resync_interval) * 1_000_000)
        alive_us = 0
        while True:
            event.clear()
            try:
                found, tries = await self._look(id, for_us), 0
            except (ServerUnavailable, OutcomeUnknown):
                tries += 1
                pause: float | None = retry_delay(tries, most=queue.services.retry_most)
            else:
                if not found.is_pending:
                    # The message was alive after the end that was found: that was another one's.
                    is_older = found.moment_us < alive_us and not (
                        found.has_expired and found.death is not None
                    )
                    return found._replace(record=None, death=None) if is_older else found
                alive_us, pause = found.now_us, None
                if found.ends_us is not None:
                    # Nobody announces the end of one that no worker takes.
                    pause = max(0, found.ends_us - alive_us) / 1_000_000 + _A_BIT
            woken = asyncio.ensure_future(event.wait())
            either: set[asyncio.Future[object]] = {woken, queue.closing}  # type: ignore[arg-type]
            try:
                await asyncio.wait(either, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
            queue.check_open()

    async def _look(self, id: str, for_us: int) -> Outcome:  # noqa: A002
        """Return the end of a message, or that it lives."""
        queue = self._queue
        while True:
            number, ends = queue.settings.stored.partitions, list[Outcome]()
            first, *others = queue.candidates(id)
            for partitions in ([first], others):
                for partition in partitions:
                    found = await queue.settings.repeat(
                        partial(partition.store.await_end, id, for_us)
                    )
                    if found.is_live:
                        return found
                    ends.append(found)
                newest = max(ends, key=lambda end: end.moment_us)
                if newest.moment_us:
                    return newest
            # A client that was not notified may have asked the wrong partitions.
            stored = await queue.settings.read()
            stored.check_at_rest(queue.name)
            if stored.partitions == number:
                return newest
