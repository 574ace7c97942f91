"""Tasks that a test starts, and ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, wait until they have ended, and raise what one of them failed with."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run work beside the block, and end it with the block."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        await end(*tasks)
