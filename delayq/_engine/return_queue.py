"""Returns items to their server that no caller took: in order, and until it has them."""

from __future__ import annotations

import asyncio
from logging import ERROR, WARNING
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delayq._logging import log
from delayq._redis.retry import retry_delay
from delayq._redis.return_calls import send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.caller_queue import Numbered
    from delayq._engine.context import EngineContext
    from delayq._redis.return_calls import ReturnCall, ShutdownCalls

Item = TypeVar("Item")

# Maximum number of items, and of bytes, that one call returns: it blocks the whole server.
_CHUNK = 100
_CHUNK_BYTES = 256 * 1024
# Maximum number of calls sent at a time, one behind the other.
_CALLS_AT_ONCE = 16


class _Chunk(NamedTuple, Generic[Item]):
    """Items that one call returns."""

    call: ReturnCall
    items: list[Numbered[Item]]

    def __repr__(self) -> str:
        return f"<_Chunk of {len(self.items)} items>"


class ReturnQueue(Generic[Item]):
    """The items of one source that are on their way back to their server.

    Attributes:
        unsent: The items that are not in a call yet.
    """

    def __init__(
        self,
        name: str,
        services: EngineContext,
        *,
        return_call: Callable[[Sequence[Item]], ReturnCall],
        size: Callable[[Item], int],
        on_returned: Callable[[Sequence[Item]], object],
        hand_out: Callable[[list[Numbered[Item]]], list[Numbered[Item]]],
    ) -> None:
        """Args:
        name: The source's name, for the log.
        return_call: Builds the call that returns items, in this order, ahead of what is there.
        size: Returns how many bytes an item takes in that call.
        on_returned: Called once with items that went back.
        hand_out: Hands items to callers that have come meanwhile, and returns the others.
        """
        self.unsent: list[Numbered[Item]] = []
        self._name = name
        self._services = services
        self._return_call = return_call
        self._size = size
        self._on_returned = on_returned
        self._hand_out = hand_out
        # The calls that are in flight or will be repeated, in the order in which they are sent.
        self._chunks: list[_Chunk[Item]] = []
        self._task: asyncio.Task[Any] | None = None
        # While a claim is in progress, whose items belong behind those that go back.
        self._is_suspended = False
        self._resumed: asyncio.Future[None] | None = None
        # Set when the queue is closed.
        self._shutdown_calls: ShutdownCalls | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way back."""
        return not (self.unsent or self._chunks)

    def suspend(self) -> None:
        """Send no call until :meth:`resume`."""
        self._is_suspended = True

    def resume(self) -> None:
        """Let calls be sent again."""
        self._is_suspended = False
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def withdraw(self) -> list[Numbered[Item]]:
        """Remove and return the items that are not in a call yet."""
        items, self.unsent = self.unsent, []
        return items

    def add(self, items: list[Numbered[Item]]) -> None:
        """Return items, besides those that are on their way already."""
        self.unsent += items
        if not self.unsent:
            return
        if self._shutdown_calls is not None:
            self._send_at_shutdown(self._shutdown_calls, [])
        elif self._task is None:
            self._task = self._services.background.spawn(self._run(), "give back")

    async def drain(self, timeout: float) -> None:
        """Wait until everything is on the server, for at most ``timeout`` seconds."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout)

    def close(self, shutdown_calls: ShutdownCalls, items: list[Numbered[Item]]) -> None:
        """Write the calls that return these items, and all others."""
        self._shutdown_calls = shutdown_calls
        self.unsent += items
        if self._task is not None:
            self._task.cancel()
        # Calls that were sent before come first, and are repeated unchanged.
        self._send_at_shutdown(shutdown_calls, self._chunks)

    async def aclose(self, grace: float) -> None:
        """Wait until everything is back, for at most ``grace`` seconds."""
        assert self._shutdown_calls is not None, "closed before"
        try:
            await self._shutdown_calls.drain(grace)
        finally:
            self._report_remaining()

    def _send_at_shutdown(
        self, shutdown_calls: ShutdownCalls, earlier_chunks: list[_Chunk[Item]]
    ) -> None:
        new_chunks = self._pack()
        chunks = [*earlier_chunks, *new_chunks]
        self._chunks += new_chunks
        for chunk in chunks:
            self._on_returned([item for _, item in chunk.items])
        shutdown_calls.send(self._name, [chunk.call for chunk in chunks])

    def _report_remaining(self) -> None:
        """Log how many messages are not known to be back."""
        for unsure, words in (
            (False, "could not be given back"),
            (True, "may not have been given back"),
        ):
            chunks = [
                chunk
                for chunk in self._chunks
                if not chunk.call.is_done and chunk.call.is_unsure is unsure
            ]
            if chunks:
                count = sum(len(chunk.items) for chunk in chunks)
                reason = chunks[0].call.outcome or "the server did not answer in time"
                log(ERROR, self._name, f"%d messages were taken and {words}: %s", count, reason)

    def _pack(self) -> list[_Chunk[Item]]:
        """Pack the items that are not in a call yet into calls, beginning with the last ones."""
        items = sorted(self.withdraw())
        chunks = []
        while items:
            start, size = len(items), 0
            while start and len(items) - start < _CHUNK:
                size += self._size(items[start - 1][1])
                if size > _CHUNK_BYTES and start < len(items):
                    break
                start -= 1
            call = self._return_call([item for _, item in items[start:]])
            chunks.append(_Chunk(call, items[start:]))
            del items[start:]
        return chunks

    async def _run(self) -> None:
        failures = 0
        try:
            while self.unsent or self._chunks:
                if self._is_suspended:
                    # The items of the claim belong behind these, so these have to go back first.
                    if self._resumed is None:
                        self._resumed = asyncio.get_running_loop().create_future()
                    await asyncio.wait({self._resumed})
                self._chunks += self._pack()
                if not (chunks := self._chunks[:_CALLS_AT_ONCE]):
                    # The items have been handed out in the meantime.
                    continue
                await send(self._services.server, [chunk.call for chunk in chunks])
                if not (failed := self._record_outcomes(chunks)):
                    failures = 0
                    continue
                failures += 1
                if failures == 1:
                    count, error = sum(len(chunk.items) for chunk in failed), failed[0].call.outcome
                    log(WARNING, self._name, "giving %d messages back: %s", count, error)
                not_handed_out = self._hand_out(sorted(self.withdraw()))
                self.unsent += not_handed_out
                await asyncio.sleep(retry_delay(failures))
        finally:
            self._task = None

    def _record_outcomes(self, chunks: list[_Chunk[Item]]) -> list[_Chunk[Item]]:
        """Record the outcome of the first chunks, and return those that are not back yet."""
        failed = []
        for chunk in chunks:
            if chunk.call.is_done:
                self._on_returned([item for _, item in chunk.items])
            else:
                failed.append(chunk)
        # Calls that may have been carried out are repeated unchanged.
        self._chunks[: len(chunks)] = [chunk for chunk in failed if chunk.call.is_unsure]
        self.unsent += [
            item for chunk in failed if not chunk.call.is_unsure for item in chunk.items
        ]
        return failed
