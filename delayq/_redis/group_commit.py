"""Group commit: calls made while one is on its way share the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delayq.errors import Closed, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from delayq._background import Background
    from delayq._redis.scripts import Script
    from delayq._redis.server import Server

Item = TypeVar("Item")
Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)


class Request(NamedTuple):
    """A script's call."""

    script: Script
    keys: Sequence[str]
    args: Sequence[str | bytes | int]


class GroupCommit(Generic[Item, Result]):
    """Collects items of concurrent callers and commits them together, one commit at a time.

    A lone caller waits for nobody: the first item leaves before :meth:`submit` returns. A caller who is cancelled before
    its item left takes the item back, unless items are ``final``; later, the item is committed and the answer dropped.

    Where all goes well there is no task: the answer itself sends the next batch. What does not, a task repeats.
    """

    def __init__(
        self,
        server: Server,
        background: Background,
        *,
        request: Callable[[Sequence[Item]], Request],
        repeat: Callable[[Request, Sequence[Item], OutcomeUnknown | None], Awaitable[Any]],
        results: Callable[[Sequence[Item], Any], Sequence[Result]],
        max_items: int,
        max_bytes: int,
        final: bool = False,
    ) -> None:
        """Args:
        server: Runs the calls.
        background: Owns the tasks that repeat.
        request: The call for a batch.
        repeat: Makes a call that could not be sent at once, or that failed: with an error if it may have been carried out,
            otherwise it was not. Returns its answer.
        results: One result per item, in order, from an answer.
        max_items: Items per commit at most: one script blocks the whole server while it runs.
        max_bytes: Bytes per commit, where more than one item is in it.
        final: Whether an item is committed though its caller is cancelled.
        """
        self._server = server
        self._background = background
        self._request = request
        self._repeat = repeat
        self._results = results
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._final = final
        self._waiting: deque[tuple[Item, int, asyncio.Future[Result]]] = deque()
        # What is on its way, and by which call.
        self._sent: Request | None = None
        self._items: list[Item] = []
        self._futures: list[asyncio.Future[Result]] = []
        self._task: asyncio.Task[Any] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._closed = False

    def submit(self, item: Item, size: int) -> asyncio.Future[Result]:
        """Add ``item`` of ``size`` bytes to the next commit. Await or cancel what this returns."""
        if self._closed:
            raise Closed("the queue is closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, size, future))
        if not self._futures:
            self._leave()
        return future

    def submit_many(self, items: Iterable[tuple[Item, int]]) -> list[asyncio.Future[Result]]:
        """As :meth:`submit` for each, in as few commits as they need."""
        if self._closed:
            raise Closed("the queue is closed")
        new_future = asyncio.get_running_loop().create_future
        waiting = [(item, size, new_future()) for item, size in items]
        self._waiting += waiting
        if not self._futures:
            self._leave()
        return [future for _, _, future in waiting]

    async def aclose(self, grace: float) -> None:
        """Take nothing more, give what is waiting ``grace`` seconds, then fail it: unsent or unknown."""
        self._closed = True
        if self._futures:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=grace)
        if self._task is not None:
            self._task.cancel()
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(Closed("the queue closed before the message was sent"))
        self._waiting.clear()
        self._fail(OutcomeUnknown("the queue closed before the answer came"))

    def _leave(self) -> None:
        """Send the next batch, if there is one."""
        if self._take_batch():
            self._sent = self._request(self._items)
            if not self._server.run_soon(*self._sent, self._told):
                self._start_repeating(None)
            return
        self._sent = None
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _told(self, answer: Any) -> None:
        if not self._futures:
            return  # given up meanwhile
        if isinstance(answer, Exception):
            self._start_repeating(answer if isinstance(answer, OutcomeUnknown) else None)
        else:
            self._arrived(answer)

    def _start_repeating(self, lost: OutcomeUnknown | None) -> None:
        assert self._sent is not None
        self._task = self._background.spawn(self._run(self._sent, lost), "group commit")

    async def _run(self, request: Request, lost: OutcomeUnknown | None) -> None:
        try:
            answer = await self._repeat(request, self._items, lost)
        except asyncio.CancelledError:
            # The client closes, and nobody else would tell those who wait.
            self._fail(OutcomeUnknown("the queue closed before the answer came"))
            raise
        except Exception as error:  # noqa: BLE001 - it reaches every caller it concerns
            self._task = None
            self._fail(error)
            self._leave()
        else:
            self._task = None
            self._arrived(answer)

    def _arrived(self, answer: Any) -> None:
        try:
            results = self._results(self._items, answer)
        except Exception as error:  # noqa: BLE001 - the same
            self._fail(error)
        else:
            futures, self._futures = self._futures, []
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)
        self._leave()

    def _fail(self, error: Exception) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_exception(own_copy(error))

    def _take_batch(self) -> bool:
        items: list[Item] = []
        futures: list[asyncio.Future[Result]] = []
        waiting, room = self._waiting, self._max_bytes
        while waiting and len(items) < self._max_items:
            item, size, future = waiting[0]
            if not self._final and future.cancelled():
                waiting.popleft()
                continue
            if items and size > room:
                break
            waiting.popleft()
            room -= size
            items.append(item)
            futures.append(future)
        self._items, self._futures = items, futures
        return bool(items)


def own_copy(error: Error) -> Error:
    """An equal error for each caller: one object raised in many tasks would mix their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
