"""Wait for events instead of durations."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    from delayq import DelayedQueue


_TRUE = object()


async def until(
    condition: Callable[[], Any], within: float = 20.0, *, equals: object = _TRUE
) -> None:
    """Wait until ``condition``, plain or async, is true, or returns what ``equals`` says."""
    async with asyncio.timeout(within) as limit:
        while True:
            result = condition()
            if inspect.isawaitable(result):
                result = await result
            if result if equals is _TRUE else result == equals:
                return
            if limit.expired():
                # The condition has swallowed the cancellation, which may come just as a call of its
                # own ends.
                raise TimeoutError
            await asyncio.sleep(0.005)


async def fetch_ahead(
    queue: DelayedQueue[int], at_least: int = 1
) -> tuple[AsyncIterator[int], list[int]]:
    """Consume until a loop has fetched ``at_least`` more. Return it and what it consumed."""
    values, consumed = aiter(queue), list[int]()
    while not any(len(reader.ahead) >= at_least for reader in queue._dispatcher._holders):
        consumed.append(await anext(values))
    return values, consumed


def be_impatient(patch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Give up calls after ``seconds``, also acknowledgements, for faults that last."""
    patch.setattr("delayq._redis.client.RETRY_FOR", seconds)
    patch.setattr("delayq._engine.leases._retry_time", lambda *_: seconds)
