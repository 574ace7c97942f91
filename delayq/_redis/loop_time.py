"""Time limits that do not run out while the event loop is busy with other work."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# The number of parts in which a limit is counted. The loop runs at least this often before it ends.
_PARTS = 50


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than this, not counting delays of the loop.

    A limit for an answer says something about the server. If the loop itself is late, because a
    thousand clients are opened at once or the machine stands still, the answer may lie here unread,
    and each step of a greeting has to wait for its turn. So a delay counts as one part of the limit
    at most, however long it is.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def count(part: int) -> None:
        nonlocal timer
        if part < _PARTS:
            timer = loop.call_later(seconds / _PARTS, count, part + 1)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds / _PARTS, count, 1)
        try:
            yield
        finally:
            timer.cancel()
