"""Slots that acknowledgements of this client have freed, and of which no other client was told."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from delayq.errors import DelayqError

if TYPE_CHECKING:
    from delayq._background import Background
    from delayq._reliable.store import ReliableStore

# When no caller wants messages, the next one usually comes within this time, in seconds: mostly it
# has just been handed some.
_CALLERS_WITHIN = 0.002


class FreedSlots:
    """Remembers whether other clients have to be told of messages that may run.

    Attributes:
        count: How often an acknowledgement has let messages run.
    """

    def __init__(self, store: ReliableStore, background: Background) -> None:
        self.count: int = 0
        self._store = store
        self._background = background
        # How many of these times a claim has found all messages, or the others were told.
        self._settled = 0
        self._is_telling = False

    def claimed(self, count: int) -> None:
        """Note that a claim, which began when ``count`` was this, has left nothing that is due."""
        self._settled = max(self._settled, count)

    async def tell(self) -> None:
        """Tell the other clients of messages that may run and were not claimed here, if any."""
        count = self.count
        if count > self._settled:
            # A hint: the others look now and then.
            with suppress(DelayqError):
                await self._store.announce()
                self._settled = max(self._settled, count)

    def tell_soon(self) -> None:
        """Tell the other clients unless a caller comes soon who wants the messages."""
        if self.count > self._settled and not self._is_telling:
            self._is_telling = True
            self._background.spawn(self._tell_later(), f"tell {self._store.keys.name}")

    async def _tell_later(self) -> None:
        try:
            await asyncio.sleep(_CALLERS_WITHIN)
            await self.tell()
        finally:
            self._is_telling = False
