"""Wait for events instead of durations."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


async def until(condition: Callable[[], Any], within: float = 20.0) -> None:
    """Wait until ``condition``, plain or async, is true. Fail after ``within`` seconds, far more than it should take."""
    async with asyncio.timeout(within) as limit:
        while True:
            result = condition()
            if await result if inspect.isawaitable(result) else result:
                return
            if limit.expired():
                # The condition has swallowed the cancellation, which may come just as a call of its own ends.
                raise TimeoutError
            await asyncio.sleep(0.005)
