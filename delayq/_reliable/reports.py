"""Reports to the server what a client does with a queue, for the history of the queue, and that it
works there, for the list of workers.

Clients count what they do anyway. Every re-check sends what is new in one or two small calls, so a
message costs the server nothing, and a client that dies leaves out a few seconds.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from logging import WARNING
from typing import TYPE_CHECKING, Any

from delayq._logging import log
from delayq._redis.rights import is_refusal
from delayq._reliable.process_report import PROCESS
from delayq._reliable.report_format import (
    NO_COUNTS,
    REPORTS_MISSED,
    SHOWN_MESSAGES,
    Sampler,
    Work,
    counts_of,
    facts_of,
    packed,
)
from delayq.errors import OutcomeUnknown, ServerError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings_cache import SettingsCache
    from delayq._reliable.store import ReliableStore
    from delayq.stats import QueueStats

# Looks that follow a subscription come in between, and report nothing: the part of the interval
# between two re-checks that has to pass first.
_APART = 0.9
# A worker that has nothing new to report does so every fourth time, and counts as long as three of
# these reports are missing. In intervals between two re-checks.
_HEARTBEAT = 4
_COUNTS = _HEARTBEAT * REPORTS_MISSED
# How long nothing is reported after the server has refused it for want of a right, in seconds.
_REFUSED_FOR = 300.0


class Reports:
    """The reports of this client about its work on a queue.

    Attributes:
        lateness: Measures how long after they were due messages are handed out.
        handling: Measures how long handlers take.
        report_soon: Reports at the next re-check, even if the queue is not re-checked itself.
    """

    def __init__(
        self,
        store: ReliableStore,
        services: EngineContext,
        settings: SettingsCache,
        *,
        stats: Callable[[], QueueStats],
        oldest: Callable[[int], Sequence[Claim]],
    ) -> None:
        """Args:
        store: The data of the queue's first partition.
        services: The services the queue is built from.
        settings: The queue's settings.
        stats: Returns what this client has done with the queue.
        oldest: Returns up to some number of the messages it handles, those begun first.
        """
        self._counts = _Counts(store, stats)
        self.lateness: Sampler = self._counts.lateness
        self.handling: Sampler = self._counts.handling
        self.report_soon: Callable[[], object] = partial(services.at_recheck, self._report)
        self._services = services
        self._settings = settings
        self._oldest = oldest
        self._entry = _Entry(store, services, stats)
        self._sending: asyncio.Task[Any] | None = None
        # Until when nothing is reported: after each report; and after the server has refused one.
        self._not_before = self._refused_until = 0.0
        self._closed = False

    def _report(self) -> bool:
        """Report what is new. Return whether some may be left, because a report may fail."""
        self.report()
        return not self._closed and self._counts.are_new()

    def report(self, *, at_once: bool = False) -> None:
        """Report what is new. This is called with every re-check, and waits for nothing.

        ``at_once`` says that a worker has stopped: it does not wait for the next re-check.
        """
        now = asyncio.get_running_loop().time()
        if self._closed or now < self._refused_until or (now < self._not_before and not at_once):
            return
        if self._sending is not None and not self._sending.done():
            if at_once:
                self._sending.add_done_callback(lambda _: self.report(at_once=True))
            return
        work = self._work(self._counts.stats(), has_stopped=at_once)
        if self._counts.are_new() or self._entry.is_due(work):
            self._not_before = now + _APART * self._services.resync_interval
            self._sending = self._services.background.spawn(
                self._send(work), f"reports of {self._counts.store.keys.name}"
            )

    def close(self) -> None:
        """Start no more reports."""
        self._closed = True

    async def aclose(self, deadline: float) -> None:
        """Report what remains, until a time on the event loop's clock, after :meth:`close`."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                if self._sending is not None:
                    await asyncio.wait((self._sending,))
                if asyncio.get_running_loop().time() >= self._refused_until:
                    await self._send(None)

    def _work(self, stats: QueueStats, *, has_stopped: bool) -> Work | None:
        """Return the work of this client; None if it does none.

        Code that takes messages now and then works while it does, unless it has stopped.
        """
        takes = self._entry.takes(stats.delivered) and not has_stopped
        if not (stats.slots or stats.in_flight or takes or stats.waiting):
            return None
        differences = self._settings.differences()
        return Work(
            stats.slots,
            stats.in_flight,
            self._oldest(SHOWN_MESSAGES),
            {difference.name: difference.declared for difference in differences},
            PROCESS.slots,
            PROCESS.blocking,
        )

    async def _send(self, work: Work | None) -> None:
        """Report what is new, and that the client works, or that it does not work any more."""
        try:
            await asyncio.gather(self._counts.send(), self._entry.update(work))
        except ServerRefused as error:
            if not is_refusal(str(error)):
                # The server is full, say: the next report tries again.
                return
            has_warned = self._refused_until > 0
            pause = max(_REFUSED_FOR, self._services.resync_interval)
            self._refused_until = asyncio.get_running_loop().time() + pause
            if not has_warned:
                log(
                    WARNING,
                    self._counts.store.keys.name,
                    "the history of the queue and the list of its workers leave out what this"
                    " process does: %s",
                    error,
                )


class _Counts:
    """The counts of this client in the history.

    Attributes:
        store: The data of the queue's first partition.
        stats: Returns what this client has done with the queue.
        lateness: Measures how long after they were due messages are handed out.
        handling: Measures how long handlers take.
    """

    def __init__(self, store: ReliableStore, stats: Callable[[], QueueStats]) -> None:
        self.store: ReliableStore = store
        self.stats: Callable[[], QueueStats] = stats
        self.lateness: Sampler = Sampler()
        self.handling: Sampler = Sampler()
        self._counted: dict[str, int] = dict(NO_COUNTS)

    def are_new(self) -> bool:
        """Return whether some are to be sent."""
        return counts_of(self.stats()) != self._counted

    async def send(self) -> None:
        """Send what is new. Raises ServerRefused."""
        counts, before = counts_of(self.stats()), self._counted
        if counts == before:
            return
        late, handling = self.lateness.drain(), self.handling.drain()
        new = {name: count - before[name] for name, count in counts.items()}
        # Set first: if the reply is lost, these may have been counted, and must not be twice.
        self._counted = counts
        try:
            await self.store.tally(packed(new, late, handling))
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

    def __init__(
        self, store: ReliableStore, services: EngineContext, stats: Callable[[], QueueStats]
    ) -> None:
        self._store = store
        self._services = services
        self._stats = stats
        self._interval = services.resync_interval
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._name = secrets.token_hex(6)
        self._delivered = 0
        # The last report that has arrived, and when it was made; None if the server has none.
        self._reported: Work | None = None
        self._reported_at = 0.0
        self._may_be_listed = False

    def takes(self, delivered: int) -> bool:
        """Return whether messages were delivered since the last call of this."""
        before, self._delivered = self._delivered, delivered
        return delivered != before

    def is_due(self, work: Work | None) -> bool:
        """Return whether to report this now."""
        if work is None:
            return self._may_be_listed
        age = self._loop.time() - self._reported_at
        return work != self._reported or age > _APART * _HEARTBEAT * self._interval

    async def update(self, work: Work | None) -> None:
        """Bring the entry up to date. Raises ServerRefused."""
        if not self.is_due(work):
            return
        now, counts_us = self._loop.time(), 0
        facts = ""
        if work is not None:
            counts_us = max(1, int(_COUNTS * self._interval * 1_000_000))
            facts = facts_of(work, now, self._opened_at, counts_us, self._stats().free_slots)
        self._reported = None
        self._may_be_listed = True
        try:
            await self._services.coalescer.run(
                self._store.register_request(self._name, counts_us, facts)
            )
        except ServerRefused:
            raise
        except ServerError:
            # The next report tries again.
            return
        self._reported, self._reported_at = work, now
        self._may_be_listed = work is not None
