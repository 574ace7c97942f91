"""Group commit: calls made while one is in flight share the next one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delayq._redis import client as patience
from delayq._redis.connection import own_copy
from delayq.errors import Closed, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from delayq._background import Background
    from delayq._redis.client import RedisClient
    from delayq._redis.connection import Connection
    from delayq._redis.durability import WaitingServer
    from delayq._redis.scripts import Request

_log = logging.getLogger("delayq")

Item = TypeVar("Item")
Result = TypeVar("Result")

# The maximum number of commits in flight, and the number of items that the second one needs.
_LANES = 2
_ENOUGH = 50
# Items submitted further apart than this, in seconds, do not share a commit if it has to leave within some time.
_SPAN = 0.5
# If more bytes than this are waiting, new items are held up.
_MOST_WAITING = 16 * 1024 * 1024


class _Commit(Generic[Item, Result]):
    """Items that leave together: being collected, in flight, or being retried."""

    __slots__ = ("follows", "futures", "items", "lane", "request", "since", "size", "task")
    request: Request

    def __init__(self, since: float) -> None:
        # When its first item was submitted.
        self.since = since
        # Whether it continues a commit that is waiting or in flight, and must not overtake it.
        self.follows = False
        self.items: list[Item] = []
        self.futures: list[asyncio.Future[Result] | None] = []
        self.size = 0
        self.lane = 0
        self.task: asyncio.Task[Any] | None = None


class Batcher(Generic[Item, Result]):
    """Collects items of concurrent callers and commits them together.

    A lone caller never waits for others: the first item leaves before :meth:`submit` returns. Items that arrive while a commit
    is in flight wait for its answer, or leave in a second commit behind it if there are enough of them, so that the server need
    not wait for us. Both commits use one connection and are therefore carried out in order, unless the server is not ready for
    the first one and is for the second. For that reason, items passed to :meth:`submit_many` never leave side by side.

    If a caller is cancelled before its item has left, the item is withdrawn, unless items are ``final``. If it is cancelled
    later, the item is committed and the answer dropped. If items expire, each one that has not left within a few seconds fails.
    Its time counts from its submission, and starts again with every sign that the server carries out earlier items.

    As long as all goes well there is no task: the answer itself sends the next batch. If a call fails, a task retries it.
    """

    def __init__(
        self,
        server: RedisClient | WaitingServer,
        background: Background,
        *,
        request: Callable[[Sequence[Item], int], Request],
        repeat: Callable[[Request, Sequence[Item], OutcomeUnknown | None], Awaitable[Any]],
        results: Callable[[Sequence[Item], Any], Sequence[Result]],
        max_items: int,
        max_bytes: int,
        final: bool = False,
        expires: bool = False,
        unattended: Callable[[Item, Result | BaseException], object] = lambda _item, _outcome: None,
    ) -> None:
        """Args:
        server: Runs the calls.
        background: Owns the tasks that retry.
        request: Returns the call for a batch and the lane that it takes, 0 or 1. A lane has one call in flight at a time.
        repeat: Makes a call that could not be sent at once or that failed. Its error argument is set if the call may have been
            carried out, and None if it was not. Returns the answer.
        results: Returns one result per item, in order, from an answer.
        max_items: The maximum number of items per commit: one script blocks the whole server while it runs.
        max_bytes: The maximum size of a commit that has more than one item, bytes.
        final: Whether an item is committed even if its caller is cancelled.
        expires: Whether an item fails if it could not be sent for as long as a call is retried.
        unattended: Called with the outcome of an item that no caller waits for.
        """
        # Kept, because on Python 3.11 each lookup asks the system for the process's id.
        self._loop = asyncio.get_running_loop()
        self._new_future: Callable[[], asyncio.Future[Result]] = partial(asyncio.Future, loop=self._loop)
        self._server = server
        self._background = background
        self._request = request
        self._repeat = repeat
        self._results = results
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._final = final
        self._expires = expires
        self._unattended = unattended
        self._went_well_at = float("-inf")
        self._failed_with: Exception | None = None
        self._expiring: asyncio.Handle | None = None
        # The commits that wait. The last one accepts more items.
        self._waiting: deque[_Commit[Item, Result]] = deque()
        self._waiting_bytes = 0
        self._held_up: deque[asyncio.Future[None]] = deque()
        # In the order in which they left.
        self._calls: list[_Commit[Item, Result]] = []
        self._wire: Connection | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._closed = False
        # How many items were accepted, and how many of them are done; and the callers that wait until a number of items is done.
        self._accepted = 0
        self._done = 0
        self._flushing: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._leaves_soon = False

    @property
    def unanswered(self) -> int:
        """The number of items that wait or are in flight."""
        return self._accepted - self._done

    async def flush(self) -> None:
        """Wait until all items submitted so far have their answers, or have failed."""
        if self.unanswered and not self._closed:
            done = self._loop.create_future()
            self._flushing.append((self._accepted, done))
            await done

    @property
    def is_full(self) -> bool:
        """Whether so much is waiting that more would cost memory and gain nothing. See :meth:`room`."""
        return self._waiting_bytes > _MOST_WAITING

    async def room(self) -> float:
        """Wait for capacity. Call this before building an item; :meth:`submit` itself accepts items regardless.

        Returns:
            The time from which the item that is built now counts. Pass it to :meth:`submit`.

        Raises:
            ServerUnavailable: None of the waiting items could be sent.
        """
        since = self._loop.time()
        while self.is_full and not self._closed:
            turn = self._loop.create_future()
            self._held_up.append(turn)
            try:
                async with asyncio.timeout_at(self._expires_at(since)):
                    await turn
            except TimeoutError:
                # Unless something was carried out in the meantime.
                if self._expires_at(since) <= self._loop.time():
                    self._let_in()
                    raise self._unsent() from None
            except asyncio.CancelledError:
                self._let_in()
                raise
        if self._held_up:
            self._let_in()
        return since

    def submit(self, item: Item, size: int, since: float | None = None) -> asyncio.Future[Result]:
        """Add ``item`` of ``size`` bytes to the next commit. Await or cancel the returned future.

        ``since`` is the result of :meth:`room`, if it was called.
        """
        future = self._new_future()
        collected = self._add(item, size, future, since)
        if not (calls := self._calls) or (collected >= _ENOUGH and len(calls) < _LANES):
            self._leave()
        return future

    def submit_unattended(self, item: Item, size: int) -> None:
        """Submit an item as :meth:`submit` does, for a caller that does not wait: ``unattended`` is called with its outcome.

        The item leaves with all others that are submitted in this iteration of the event loop.
        """
        if self._add(item, size, None) >= self._max_items // 2:
            self._leave()
        elif not self._leaves_soon:
            self._leaves_soon = True
            self._loop.call_soon(self._leave)

    def submit_many(self, items: Iterable[tuple[Item, int]]) -> list[asyncio.Future[Result]]:
        """Submit each item as :meth:`submit` does, in as few commits as they need, one after the other."""
        futures = []
        first: _Commit[Item, Result] | None = None
        for item, size in items:
            futures.append(future := self._new_future())
            self._add(item, size, future)
            first = first or self._waiting[-1]
            if self._waiting[-1] is not first:
                self._waiting[-1].follows = True
        self._leave()
        return futures

    async def aclose(self, grace: float) -> None:
        """Accept no more items, give those that wait ``grace`` seconds, then fail them as unsent or unknown."""
        self._closed = True
        self._leave()
        if self._calls:
            self._emptied = self._loop.create_future()
            await asyncio.wait({self._emptied}, timeout=grace)
        calls, self._calls = self._calls, []
        for call in calls:
            if call.task is not None:
                call.task.cancel()
        unsent, self._waiting = self._waiting, deque()
        self._waiting_bytes = 0
        if self._expiring is not None:
            self._expiring.cancel()
        while self._held_up:
            self._let_in()
        for call in calls:
            self._fail(call, OutcomeUnknown("the queue closed before the answer came"))
        for waiting in unsent:
            self._fail(waiting, Closed("the queue closed before the message was sent"))

    def _add(self, item: Item, size: int, future: asyncio.Future[Result] | None, since: float | None = None) -> int:
        """Add an item to those that wait. Returns how many are in its commit."""
        if self._closed:
            raise Closed("the queue is closed")
        waiting = self._waiting
        if since is None:
            since = self._loop.time()
        elif self._expiring is not None:
            # It may be the first one to expire.
            self._expiring.cancel()
            self._expiring = self._loop.call_soon(self._expire)
        if (
            not waiting
            or len((last := waiting[-1]).items) >= self._max_items
            or last.size + size > self._max_bytes
            or (self._expires and abs(since - last.since) > _SPAN)
        ):
            waiting.append(last := _Commit(since))
        last.items.append(item)
        last.futures.append(future)
        last.size += size
        self._waiting_bytes += size
        self._accepted += 1
        return len(last.items)

    def _leave(self) -> None:
        """Send the commits that may leave now."""
        self._leaves_soon = False
        calls, waiting = self._calls, self._waiting
        while waiting:
            if calls and (
                len(calls) >= _LANES
                or calls[0].task is not None
                or waiting[0].follows
                or (len(waiting) == 1 and len(waiting[0].items) < _ENOUGH)
            ):
                if self._expires and self._expiring is None:
                    self._expiring = self._loop.call_later(patience.RETRY_FOR, self._expire)
                return
            call = waiting.popleft()
            self._waiting_bytes -= call.size
            if not self._is_wanted(call):
                continue
            call.lane = 1 - calls[0].lane if calls else 0
            beside = self._wire if calls else None
            try:
                script, keys, args, _ = call.request = self._request(call.items, call.lane)
                calls.append(call)
                self._wire = self._server.run_soon(script, keys, args, partial(self._told, call), beside)
            except Exception as error:  # noqa: BLE001 - it concerns these items, not the current caller
                self._ended(call)
                self._fail(call, error)
                continue
            if self._wire is None:
                self._start_repeating(call, None)
        if self._held_up and not self.is_full:
            self._let_in()
        if not calls and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _is_wanted(self, call: _Commit[Item, Result]) -> bool:
        """Drop items that were cancelled or have waited too long. Returns whether any are left to send."""
        if not self._final:
            self._drop_cancelled(call)
        if call.items and self._expires and self._expires_at(call.since) <= self._loop.time():
            self._fail(call, self._unsent())
        return bool(call.items)

    def _drop_cancelled(self, call: _Commit[Item, Result]) -> None:
        gone = [place for place, future in enumerate(call.futures) if future is not None and future.cancelled()]
        for place in reversed(gone):
            del call.items[place], call.futures[place]
        self._count(len(gone))

    def _expires_at(self, since: float) -> float:
        """Return when an item submitted at ``since`` fails, unless the server shows by then that it carries out others."""
        if not self._expires:
            return float("inf")
        shown = self._went_well_at
        if self._wire is not None and self._calls and self._calls[0].task is None:
            # A large call takes its time.
            shown = max(shown, self._wire.moved_at)
        return max(since, shown) + patience.RETRY_FOR

    def _expire(self) -> None:
        """Fail the items that have waited too long. None of them was sent."""
        self._expiring = None
        now = self._loop.time()
        for waiting in [each for each in self._waiting if self._expires_at(each.since) <= now]:
            self._waiting.remove(waiting)
            self._waiting_bytes -= waiting.size
            self._fail(waiting, self._unsent())
        if self._waiting:
            wait = min(self._expires_at(each.since) for each in self._waiting) - now
            self._expiring = self._loop.call_later(max(wait, 0.01), self._expire)
        if self._held_up and not self.is_full:
            self._let_in()

    def _unsent(self) -> ServerUnavailable:
        error = ServerUnavailable(
            f"nothing could be sent for {patience.RETRY_FOR:g} s: {self._failed_with or 'the server does not answer'}"
        )
        error.__cause__ = self._failed_with
        return error

    def _told(self, call: _Commit[Item, Result], answer: Any) -> None:
        if call not in self._calls:
            return  # given up meanwhile
        if isinstance(answer, ServerRefused):
            # It would refuse again. If it has carried out a part of the call, a repetition would find that part done.
            self._ended(call)
            self._fail(call, answer)
            self._leave()
        elif isinstance(answer, Exception):
            self._failed_with = answer
            self._start_repeating(call, answer if isinstance(answer, OutcomeUnknown) else None)
        else:
            self._arrived(call, answer)

    def _start_repeating(self, call: _Commit[Item, Result], lost: OutcomeUnknown | None) -> None:
        # If neither was carried out, as when the server did not know the script, one could overtake the other when retried alone.
        first = [each.task for each in self._calls if each is not call and each.task is not None] if lost is None else []
        if self._expires:
            call.request = call.request._replace(until=self._expires_at(call.since))
        call.task = self._background.spawn(self._run(call, lost, first), "group commit")

    async def _run(self, call: _Commit[Item, Result], lost: OutcomeUnknown | None, first: Sequence[asyncio.Task[Any]]) -> None:
        try:
            if first:
                await asyncio.wait(first)
            answer = await self._repeat(call.request, call.items, lost)
        except asyncio.CancelledError:
            # The client is closing, and the waiting callers would otherwise never be told.
            self._ended(call)
            self._fail(call, OutcomeUnknown("the queue closed before the answer came"))
            raise
        except Exception as error:  # noqa: BLE001 - it reaches every caller it concerns
            self._failed_with = error
            self._ended(call)
            self._fail(call, error)
            self._leave()
        else:
            self._arrived(call, answer)

    def _arrived(self, call: _Commit[Item, Result], answer: Any) -> None:
        self._went_well_at, self._failed_with = self._loop.time(), None
        self._ended(call)
        # Keep the server busy first.
        self._leave()
        try:
            results = self._results(call.items, answer)
            if len(results) != len(call.items):
                raise RuntimeError(f"got {len(results)} results for {len(call.items)} items")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the same
            self._fail(call, error)
            return
        # Taken out of the call, from which closing may have removed them already.
        items, futures, call.items, call.futures = call.items, call.futures, [], []
        for item, future, result in zip(items, futures, results, strict=True):
            if future is None:
                self._tell_unattended(item, result)
            elif not future.done():
                future.set_result(result)
        self._count(len(items))

    def _fail(self, call: _Commit[Item, Result], error: Exception) -> None:
        items, futures, call.items, call.futures = call.items, call.futures, [], []
        for item, future in zip(items, futures, strict=True):
            self._settle(item, future, error)
        self._count(len(items))

    def _settle(self, item: Item, future: asyncio.Future[Result] | None, error: Exception) -> None:
        if future is None:
            self._tell_unattended(item, error)
        elif not future.done():
            future.set_exception(own_copy(error))

    def _tell_unattended(self, item: Item, outcome: Result | BaseException) -> None:
        try:
            self._unattended(item, outcome)
        except Exception:  # noqa: BLE001 - it would keep others from being told
            _log.exception("reporting the outcome of an item failed")

    def _count(self, done: int) -> None:
        self._done += done
        while self._flushing and self._flushing[0][0] <= self._done:
            flushed = self._flushing.popleft()[1]
            if not flushed.done():
                flushed.set_result(None)

    def _ended(self, call: _Commit[Item, Result]) -> None:
        if call in self._calls:
            self._calls.remove(call)

    def _let_in(self) -> None:
        while self._held_up:
            turn = self._held_up.popleft()
            if not turn.done():
                turn.set_result(None)
                return
