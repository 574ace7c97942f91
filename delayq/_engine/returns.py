"""Gives items back to their server that no caller took: in order, and until it has them."""

from __future__ import annotations

import asyncio
from logging import ERROR, WARNING
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delayq._logging import log
from delayq._redis.hand_back import send
from delayq._redis.retry import retry_delay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._engine.line import Taken
    from delayq._redis.hand_back import HandBack, LastCalls

Item = TypeVar("Item")

# Maximum number of items, and of bytes, that one call gives back: it blocks the whole server.
_CHUNK = 100
_CHUNK_BYTES = 256 * 1024
# Maximum number of give-back calls sent at a time, one behind the other.
_AT_ONCE = 16


class _Chunk(NamedTuple, Generic[Item]):
    """Items that go back in one call."""

    call: HandBack
    items: list[Taken[Item]]

    def __repr__(self) -> str:
        return f"<_Chunk of {len(self.items)} items>"


class Returns(Generic[Item]):
    """The items of one source that are on their way back to their server."""

    def __init__(
        self,
        name: str,
        services: EngineContext,
        *,
        hand_back: Callable[[Sequence[Item]], HandBack],
        size: Callable[[Item], int],
        given_back: Callable[[Sequence[Item]], object],
        hand_out: Callable[[list[Taken[Item]]], list[Taken[Item]]],
    ) -> None:
        """Args:
        name: The source's name, for the log.
        hand_back: Builds the call that returns items, in this order, ahead of what is there.
        size: Returns how many bytes an item takes in that call.
        given_back: Called once with items that went back.
        hand_out: Hands items to callers that have come meanwhile, and returns the rest.
        """
        self._name = name
        self._services = services
        self._hand_back = hand_back
        self._size = size
        self._given_back = given_back
        self._hand_out = hand_out
        # Items that are not in a call yet, and those in calls, in the order in which they go back.
        self._items: list[Taken[Item]] = []
        self._chunks: list[_Chunk[Item]] = []
        self._task: asyncio.Task[Any] | None = None
        # Set while items may be on their way here.
        self._attempt: asyncio.Future[None] | None = None
        # Set when the queue is closed.
        self._last: LastCalls | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way back."""
        return not (self._items or self._chunks)

    def attempt_begins(self) -> None:
        """Keep items from going back until the attempt is over."""
        if self._attempt is None:
            self._attempt = asyncio.get_running_loop().create_future()

    def attempt_is_over(self) -> None:
        """Let items go back."""
        if self._attempt is not None:
            self._attempt.set_result(None)
            self._attempt = None

    def withdraw(self) -> list[Taken[Item]]:
        """Remove and return the items that are not in a call yet."""
        items, self._items = self._items, []
        return items

    def put(self, items: list[Taken[Item]]) -> None:
        """Give items back, besides those that are on their way already."""
        self._items += items
        if not self._items:
            return
        if self._last is not None:
            self._send_last(self._last, [])
        elif self._task is None:
            self._task = self._services.background.spawn(self._run(), "give back")

    async def arrived(self, within: float) -> None:
        """Wait until everything is on the server, for at most ``within`` seconds."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within)

    def close(self, last: LastCalls, items: list[Taken[Item]]) -> None:
        """Write the calls that give back these items, and all others."""
        self._last = last
        self._items += items
        if self._task is not None:
            self._task.cancel()
        # Calls that were sent before come first, and are repeated unchanged.
        self._send_last(last, self._chunks)

    async def aclose(self, grace: float) -> None:
        """Wait until everything is back, for at most ``grace`` seconds."""
        assert self._last is not None, "closed before"
        try:
            await self._last.settle(grace)
        finally:
            self._report_what_is_left()

    def _send_last(self, last: LastCalls, before: list[_Chunk[Item]]) -> None:
        fresh = self._cut()
        sent = [*before, *fresh]
        self._chunks += fresh
        for chunk in sent:
            self._given_back([item for _, item in chunk.items])
        last.send(self._name, [chunk.call for chunk in sent])

    def _report_what_is_left(self) -> None:
        """Log how many messages are not known to be back."""
        for unsure, words in (
            (False, "could not be handed back"),
            (True, "may not have been handed back"),
        ):
            chunks = [
                chunk
                for chunk in self._chunks
                if not chunk.call.is_done and chunk.call.is_unsure is unsure
            ]
            if chunks:
                count = sum(len(chunk.items) for chunk in chunks)
                why = chunks[0].call.outcome or "the server did not answer in time"
                log(ERROR, self._name, f"%d messages were taken and {words}: %s", count, why)

    def _cut(self) -> list[_Chunk[Item]]:
        """Pack the items that go back into calls, beginning with the last ones."""
        items = sorted(self.withdraw())
        chunks = []
        while items:
            first, size = len(items), 0
            while first and len(items) - first < _CHUNK:
                size += self._size(items[first - 1][1])
                if size > _CHUNK_BYTES and first < len(items):
                    break
                first -= 1
            chunks.append(
                _Chunk(self._hand_back([item for _, item in items[first:]]), items[first:])
            )
            del items[first:]
        return chunks

    async def _run(self) -> None:
        failures = 0
        try:
            while self._items or self._chunks:
                if self._attempt is not None:
                    # The attempt's items belong behind these, so these have to go back first.
                    await asyncio.wait({self._attempt})
                self._chunks += self._cut()
                if not (chunks := self._chunks[:_AT_ONCE]):
                    # The items have been handed out in the meantime.
                    continue
                await send(self._services.server, [chunk.call for chunk in chunks])
                if not (left := self._after(chunks)):
                    failures = 0
                    continue
                failures += 1
                if failures == 1:
                    count, error = sum(len(chunk.items) for chunk in left), left[0].call.outcome
                    log(WARNING, self._name, "handing %d messages back: %s", count, error)
                left_over = self._hand_out(sorted(self.withdraw()))
                self._items += left_over
                await asyncio.sleep(retry_delay(failures))
        finally:
            self._task = None

    def _after(self, chunks: list[_Chunk[Item]]) -> list[_Chunk[Item]]:
        """Note the outcome of the first chunks, and return those that are not back yet."""
        left = []
        for chunk in chunks:
            if chunk.call.is_done:
                self._given_back([item for _, item in chunk.items])
            else:
                left.append(chunk)
        # Calls that may have been carried out are repeated unchanged.
        self._chunks[: len(chunks)] = [chunk for chunk in left if chunk.call.is_unsure]
        self._items += [item for chunk in left if not chunk.call.is_unsure for item in chunk.items]
        return left
