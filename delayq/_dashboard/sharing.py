"""Asks a question once for all viewers that want the answer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Cached(Generic[T]):
    """The latest answer to a question, shared by all callers that want it.

    Callers that ask while the question is in flight get the same answer, or the same error. A
    server that is slow, or unavailable, is therefore not asked by one caller after the other.

    Attributes:
        answered_at: When the question was answered, by the monotonic clock.
    """

    def __init__(self, ask: Callable[[], Coroutine[None, None, T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[T] | None = None
        self._answer: T | None = None
        self.answered_at = float("-inf")

    async def at_most(self, age: float) -> T:
        """Return the answer, or a new one if it is older than ``age`` seconds. Raises as asking."""
        if self._asking is None:
            if self._answer is not None and time.monotonic() < self.answered_at + age:
                return self._answer
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._answered)
        # A caller that goes away leaves the others their answer.
        return await asyncio.shield(self._asking)

    def forget(self) -> None:
        """Ask again at the next call."""
        self._answer = None

    def _answered(self, asking: asyncio.Task[T]) -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._answer, self.answered_at = asking.result(), time.monotonic()
