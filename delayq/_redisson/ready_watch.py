"""Watches one ready list for payloads that other programs put there."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from delayq._logging import about
from delayq._redis.dedicated import DedicatedConnection, keep_linked

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._engine.context import EngineContext
    from delayq._redisson.store import DelayedStore
    from delayq._timer.wheel import Timeout

_log = logging.getLogger("delayq")

# How long a watch outlasts the last caller, in seconds: the next one often comes at once.
LINGER = 0.5
# An item in the list is reported within this time, in seconds, or the connection is dead.
_REPORTS_WITHIN = 0.5


class ReadyWatch:
    """Reports when a ready list has an item, without taking it.

    Java services push to the ready list without announcing it, so one call has to block on it. A
    blocking pop would lose the item when its link breaks. Moving the head of the list onto the head
    of the same list blocks as well and changes nothing.
    """

    def __init__(
        self, store: DelayedStore, services: EngineContext, on_item: Callable[[], None]
    ) -> None:
        """Call ``found`` when the list has an item; to learn of more, call :meth:`start` again."""
        self._store = store
        self._services = services
        self._on_item = on_item
        self._task: asyncio.Task[Any] | None = None
        self._missing = asyncio.Event()
        self._link: DedicatedConnection | None = None
        self._blocked = False
        # How many times the watch has reported an item.
        self._reports = 0
        # Until when the watch goes on although no caller waits; infinite while one does.
        self._ends_at = math.inf
        self._linger: Timeout | None = None

    @property
    def is_watching(self) -> bool:
        """Whether an item that is added to the list will be noticed, unlike one that was there."""
        return self._blocked

    def start(self) -> None:
        """Watch the list, because it is empty and a caller is waiting."""
        self._ends_at = math.inf
        self._missing.set()
        if self._task is None:
            self._task = self._services.background.spawn(
                self._run(), f"ready watch {self._store.keys.name}"
            )

    def overlooked(self) -> None:
        """Replace the connection unless it reports an item that the server says is in the list."""
        if not self._blocked:
            return
        link, reports = self._link, self._reports

        def check(_: Timeout) -> None:
            if link and self._blocked and (link, reports) == (self._link, self._reports):
                link.cut()

        self._services.timer.new_timeout(check, _REPORTS_WITHIN)

    def idle(self) -> None:
        """Stop in a while, because no caller is waiting any more."""
        if self._task is None or self._ends_at < math.inf:
            return
        self._ends_at = self._services.clock.local() + LINGER
        # It stays set when a caller comes: loops wait anew for each message.
        if self._linger is None:
            self._linger = self._services.timer.new_timeout(self._lingered, LINGER)

    def close(self) -> None:
        """Stop now. The list stays as it is."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _lingered(self, _: Timeout) -> None:
        self._linger = None
        remaining = self._ends_at - self._services.clock.local()
        if remaining <= 0:
            self.close()
        elif remaining < math.inf:
            self._linger = self._services.timer.new_timeout(self._lingered, remaining)

    async def _run(self) -> None:
        keys = self._store.keys

        def interrupted(error: Exception) -> None:
            text = "queue %r: watching the ready list failed: %s"
            _log.warning(text, keys.name, error, extra=about(keys.name))

        nodes, max_pause = self._services.nodes, self._services.retry_most
        await keep_linked(nodes, keys.ready, self._watch, interrupted, max_pause)

    async def _watch(self, link: DedicatedConnection) -> None:
        self._link = link
        while True:
            await self._missing.wait()
            await link.send(*self._store.wait_for_ready)
            self._blocked = True
            try:
                item = await link.read()
            finally:
                self._blocked = False
            self._reports += 1
            if item is not None:
                self._missing.clear()
                self._on_item()
