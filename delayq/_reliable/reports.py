"""Tells the server what a client does with a queue, for the history of the queue, and that it works
there, for the list of workers.

Clients count what they do anyway. Every re-check sends what is new in one or two small calls, so a
message costs the server nothing, and a client that dies leaves out a few seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from contextlib import suppress
from logging import WARNING
from typing import TYPE_CHECKING, Any

from delayq._logging import log
from delayq._redis.rights import is_refusal
from delayq._reliable.tallies import NOTHING, Sampler, counts_of, packed
from delayq._reliable.workers import SHOWN, Work, facts_of
from delayq.errors import OutcomeUnknown, ServerError, ServerRefused

if TYPE_CHECKING:
    from delayq._engine.context import EngineContext
    from delayq._reliable.open_queue import OpenReliableQueue

# Probes that follow a subscription come in between, and report nothing: the part of the interval
# between two re-checks that has to pass first.
_APART = 0.9
# A worker that has nothing new to report does so every fourth time, and counts as long as three of
# these reports are missing. In intervals between two re-checks.
_HEARTBEAT, _COUNTS = 4, 12
# How long nothing is reported after the server has refused it for want of a right, in seconds.
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
        self._services = services
        self._counted: dict[str, int] = dict(NOTHING)
        self._entry = _Entry(queue, services.resync_interval)
        self._sending: asyncio.Task[Any] | None = None
        self._ended: set[int] = set()
        self._not_before = 0.0
        self._is_refused = self._has_warned = False

    def report_soon(self) -> None:
        """Report at the next re-check, even if the queue is not re-checked itself."""
        self._services.at_recheck(self._report)

    def _report(self) -> bool:
        """Report what is new. Return whether some may be left, because a report may fail."""
        self.look()
        return not self._queue.closed and self._counts() != self._counted

    def look(self, *, at_once: bool = False) -> None:
        """Report what is new. This is called with every re-check, and waits for nothing.

        ``at_once`` tells that a worker has stopped: it does not wait for the next re-check.
        """
        now = self._queue.loop.time()
        if self._queue.closed or (now < self._not_before and (self._is_refused or not at_once)):
            return
        if self._sending is not None and not self._sending.done():
            if at_once:
                self._sending.add_done_callback(lambda _: self.look(at_once=True))
            return
        work = self._entry.work(stopped=at_once)
        if self._counts() != self._counted or self._entry.is_due(work):
            self._not_before = now + _APART * self._services.resync_interval
            self._sending = self._services.background.spawn(
                self._send(work), f"reports of {self._queue.name}"
            )

    async def aclose(self, partition: int, until: float) -> None:
        """Report the rest, until a time on the event loop's clock, once this has been called for
        all partitions, each when its last call has ended.
        """
        self._ended.add(partition)
        if len(self._ended) < len(self._queue.partitions):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                if self._sending is not None:
                    await asyncio.wait((self._sending,))
                if not self._is_refused:
                    await self._send(None)

    async def _send(self, work: Work | None) -> None:
        """Report what is new, and that the client works, or that it does not work any more."""
        try:
            await asyncio.gather(self._count(), self._entry.update(work))
            self._is_refused = False
        except ServerRefused as error:
            if not is_refusal(str(error)):
                # The server is full, say: the next look tries again.
                return
            self._not_before = self._queue.loop.time() + max(
                _REFUSED_FOR, self._services.resync_interval
            )
            self._is_refused = True
            if not self._has_warned:
                self._has_warned = True
                log(
                    WARNING,
                    self._queue.name,
                    "the history of the queue and the list of its workers leave out what this"
                    " process does: %s",
                    error,
                )

    def _counts(self) -> dict[str, int]:
        return counts_of(self._queue.stats())

    async def _count(self) -> None:
        counts, before = self._counts(), self._counted
        if counts == before:
            return
        late, handling = self.lateness.drain(), self.handling.drain()
        new = {name: count - before[name] for name, count in counts.items()}
        # Set first: if the reply is lost, these may have been counted, and must not be twice.
        self._counted = counts
        try:
            await self._queue.partitions[0].store.tally(packed(new, late, handling))
        except OutcomeUnknown:
            pass
        except ServerError as error:
            # It was not carried out: the next report has all of it.
            self._counted = before
            self.lateness.put_back(late)
            self.handling.put_back(handling)
            if isinstance(error, ServerRefused):
                raise


class _Entry:
    """The entry of this client in the list of workers."""

    def __init__(self, queue: OpenReliableQueue, interval: float) -> None:
        self._queue = queue
        self._interval = interval
        self._opened_at = queue.loop.time()
        self._name = secrets.token_hex(6)
        self._delivered = 0
        # The last report that has arrived, and when it was made; None if the server has none.
        self._reported: Work | None = None
        self._reported_at = 0.0
        self._may_be_listed = False

    def work(self, *, stopped: bool) -> Work | None:
        """Return the work of this client; None if it does none.

        Code that takes messages now and then works while it does, unless it has ``stopped``.
        """
        queue, partitions = self._queue, self._queue.partitions
        delivered = sum(each.counters.delivered for each in partitions)
        takes = delivered != self._delivered and not stopped
        self._delivered = delivered
        slots = partitions[0].counters.slots
        running = sum(each.running for each in partitions)
        if not (slots or running or takes or queue.dispatcher.callers.are_waiting):
            return None
        oldest = (claim for each in partitions for claim in each.oldest(SHOWN))
        claims = heapq.nsmallest(SHOWN, oldest, key=lambda claim: claim.begun_at)
        differences = queue.settings.differences()
        return Work(slots, running, claims, {each.name: each.declared for each in differences})

    def is_due(self, work: Work | None) -> bool:
        """Return whether to report this now."""
        if work is None:
            return self._may_be_listed
        age = self._queue.loop.time() - self._reported_at
        return work != self._reported or age > _APART * _HEARTBEAT * self._interval

    async def update(self, work: Work | None) -> None:
        """Bring the entry up to date. Raises ServerRefused."""
        if not self.is_due(work):
            return
        now, counts_us = self._queue.loop.time(), 0
        facts = ""
        if work is not None:
            counts_us = max(1, int(_COUNTS * self._interval * 1_000_000))
            facts = facts_of(work, now, self._opened_at, counts_us)
        self._reported = None
        self._may_be_listed = True
        try:
            store = self._queue.partitions[0].store
            await self._queue.services.together.run(
                store.register_request(self._name, counts_us, facts)
            )
        except ServerRefused:
            raise
        except ServerError:
            # The next look tries again.
            return
        self._reported, self._reported_at = work, now
        self._may_be_listed = work is not None
