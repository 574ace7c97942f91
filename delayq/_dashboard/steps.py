"""Acts on many messages in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from delayq._background import gather_all

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
        # Waits for all calls, so that none continues behind the page.
        results += await gather_all(map(act, items[at : at + _AT_ONCE]))
    return results
