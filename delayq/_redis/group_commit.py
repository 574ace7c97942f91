"""Group commit: calls made while one is on its way share the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delayq.errors import Closed, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._background import Background

Item = TypeVar("Item")
Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)


class GroupCommit(Generic[Item, Result]):
    """Collects items of concurrent callers and commits them together, one commit at a time.

    A lone caller waits for nobody: the first item leaves at once. A caller who is cancelled before its item left takes
    the item back; later, the item is committed and the answer dropped.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        background: Background,
        *,
        max_items: int,
        max_bytes: int,
    ) -> None:
        """Args:
        commit: Stores a batch and returns one result per item, in order.
        background: Owns the task that commits.
        max_items: Items per commit at most: one script blocks the whole server while it runs.
        max_bytes: Bytes per commit, where more than one item is in it.
        """
        self._commit = commit
        self._background = background
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[Item, int, asyncio.Future[Result]]] = deque()
        self._leaving: list[asyncio.Future[Result]] = []
        self._task: asyncio.Task[Any] | None = None
        self._closed = False

    def submit(self, item: Item, size: int) -> asyncio.Future[Result]:
        """Add ``item`` of ``size`` bytes to the next commit. Await or cancel what this returns."""
        if self._closed:
            raise Closed("the queue is closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, size, future))
        if self._task is None:
            self._task = self._background.spawn(self._run(), "group commit")
        return future

    async def aclose(self, grace: float) -> None:
        """Take nothing more, give what is waiting ``grace`` seconds, then fail it: unsent or unknown."""
        self._closed = True
        if (task := self._task) is not None:
            await asyncio.wait({task}, timeout=grace)
            task.cancel()
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(Closed("the queue closed before the message was sent"))
        self._waiting.clear()

    async def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._leaving = [future for _, future in batch]
                try:
                    results = await self._commit([item for item, _ in batch])
                except Exception as error:  # noqa: BLE001 - it reaches every caller it concerns
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(own_copy(error))
                else:
                    for (_, future), result in zip(batch, results, strict=True):
                        if not future.done():
                            future.set_result(result)
        finally:
            self._task = None
            for future in self._leaving:
                if not future.done():
                    future.set_exception(OutcomeUnknown("the queue closed before the answer came"))

    def _next_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        room = self._max_bytes
        while self._waiting and len(batch) < self._max_items:
            item, size, future = self._waiting[0]
            if future.cancelled():
                self._waiting.popleft()
                continue
            if batch and size > room:
                break
            self._waiting.popleft()
            room -= size
            batch.append((item, future))
        return batch


def own_copy(error: Error) -> Error:
    """An equal error for each caller: one object raised in many tasks would mix their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
