"""Tells the server what a client does with a queue, for the history of the queue.

Clients count what they do anyway. Every re-check sends what is new in one small call, so a message
costs the server nothing, and a client that dies leaves out a few seconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from logging import WARNING
from typing import TYPE_CHECKING, Any

from delayq._logging import log
from delayq._reliable.tallies import NOTHING, Sampler, counts_of, packed
from delayq.errors import OutcomeUnknown, ServerError, ServerRefused

if TYPE_CHECKING:
    from delayq._engine.context import EngineContext
    from delayq._reliable.open_queue import OpenReliableQueue

# Looks that follow a subscription come in between, and report nothing: the part of the interval
# between two re-checks that has to pass first.
_APART = 0.9
# How long nothing is reported after the server has refused it, in seconds.
_REFUSED_FOR = 300.0


class Reports:
    """The reports of this client about its work on a queue.

    Attributes:
        lateness: Measures how long after they were due messages are handed out.
        handling: Measures how long handlers take.
    """

    def __init__(self, queue: OpenReliableQueue, services: EngineContext) -> None:
        self.lateness: Sampler = Sampler()
        self.handling: Sampler = Sampler()
        self._queue = queue
        self._background = services.background
        self._reported: dict[str, int] = dict(NOTHING)
        self._sending: asyncio.Task[Any] | None = None
        self._interval = services.resync_interval
        self._not_before = 0.0
        self._is_refused = False

    def look(self) -> None:
        """Report what is new. This is called with every re-check, and waits for nothing."""
        now = self._queue.loop.time()
        if now < self._not_before or not self._has_news:
            return
        if self._sending is None or self._sending.done():
            self._not_before = now + _APART * self._interval
            self._sending = self._background.spawn(self._send(), f"reports of {self._queue.name}")

    async def aclose(self, until: float) -> None:
        """Report the rest, until a time on the event loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                if self._sending is not None:
                    await asyncio.wait((self._sending,))
                if self._has_news and not self._is_refused:
                    await self._send()

    @property
    def _has_news(self) -> bool:
        return self._counts() != self._reported

    def _counts(self) -> dict[str, int]:
        return counts_of(self._queue.stats())

    async def _send(self) -> None:
        counts, before = self._counts(), self._reported
        late, handling = self.lateness.drain(), self.handling.drain()
        new = {name: count - before[name] for name, count in counts.items()}
        # Set first: if the reply is lost, these may have been counted, and must not be twice.
        self._reported = counts
        try:
            await self._queue.partitions[0].store.tally(packed(new, late, handling))
        except OutcomeUnknown:
            pass
        except ServerRefused as error:
            self._refused(error)
        except ServerError:
            # It was not carried out: the next report has all of it.
            self._reported = before
            self.lateness.put_back(late)
            self.handling.put_back(handling)

    def _refused(self, error: ServerRefused) -> None:
        self._not_before = self._queue.loop.time() + max(_REFUSED_FOR, self._interval)
        if not self._is_refused:
            self._is_refused = True
            log(
                WARNING,
                self._queue.name,
                "the history of the queue leaves out what this process does: %s",
                error,
            )
