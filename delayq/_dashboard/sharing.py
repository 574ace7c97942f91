"""What many viewers want to know is asked once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Shared(Generic[T]):
    """The latest answer to a question, for all who want to know it.

    Who asks while the question is under way gets the same answer, or the same error: a server that is slow, or away, is not
    asked by one after the other.

    Attributes:
        answered_at: When it was answered, of the monotonic clock.
    """

    def __init__(self, ask: Callable[[], Coroutine[None, None, T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[T] | None = None
        self._answer: T | None = None
        self.answered_at = float("-inf")

    async def at_most(self, age: float) -> T:
        """The answer, unless it is older than ``age`` seconds: then a new one. Raises what asking raises."""
        if self._asking is None:
            if self._answer is not None and time.monotonic() < self.answered_at + age:
                return self._answer
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._answered)
        # Who goes away leaves the others their answer.
        return await asyncio.shield(self._asking)

    def _answered(self, asking: asyncio.Task[T]) -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._answer, self.answered_at = asking.result(), time.monotonic()
