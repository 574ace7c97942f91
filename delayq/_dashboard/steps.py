"""Acts on many messages in batches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

R = TypeVar("R")
T = TypeVar("T")

AT_A_TIME = 25
"""The most messages in a call."""
# The most calls at once.
_AT_ONCE = 20


async def in_steps(items: Sequence[T], act: Callable[[T], Awaitable[R]]) -> list[R]:
    """Act on all items, one batch at a time."""
    results: list[R] = []
    for at in range(0, len(items), _AT_ONCE):
        some = [act(item) for item in items[at : at + _AT_ONCE]]
        # Wait for all calls, so that none continues behind the page.
        outcomes = await asyncio.gather(*some, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
    return results
