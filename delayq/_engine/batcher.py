"""Group commit: calls made while one is in flight share the next one."""

from __future__ import annotations

import asyncio
import logging
import math
from asyncio import Future
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from delayq._engine.batch_plan import MAX_WAITING_SIZE, BatchPlan
from delayq._redis.connection import own_copy
from delayq._redis.error_reader import RepeatNow
from delayq.errors import Closed, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
    from contextvars import Context

    from delayq._background import Background
    from delayq._engine.batch_plan import CallBatch
    from delayq._redis.client import RedisClient
    from delayq._redis.connection import Connection
    from delayq._redis.pipeline import WaitingServer
    from delayq._redis.scripts import Request

    # Each item's waiter is its caller's future, or None if no caller waits. Items that were
    # submitted together have the same one.
    Waiter = Future[Any] | None
    AnyBatch = CallBatch[Any, Waiter]
    # The context and the callback to call when a future is done, and that future.
    _Wakeup = tuple[Context, Callable[[Future[Any]], object], Future[Any]]

_log = logging.getLogger("delayq")

# When this many items for which no caller waits have come together, they leave at once.
_UNATTENDED = 100

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Calls(Generic[Item, Result]):
    """How batches become calls, and replies become results. See :class:`Batcher`."""

    request: Callable[[Sequence[Item], int], Request]
    repeat: Callable[[Request, Sequence[Item], OutcomeUnknown | None], Awaitable[Any]]
    results: Callable[[Sequence[Item], Any], Sequence[Result]]
    on_outcome: Callable[[Item, Result | BaseException], object]


class _GroupFuture(Future[list[Any]]):
    """The future of items that were submitted together: their outcomes, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        # By batch, in order; empty until they are known.
        self._outcomes: dict[AnyBatch, Sequence[Any]] = {}
        self._missing = 0

    def expect(self, batches: Sequence[AnyBatch]) -> None:
        """Be done when the outcomes of all these batches are known."""
        self._outcomes = dict.fromkeys(batches, ())
        self._missing = len(batches)
        self._finish()

    def note(self, batch: AnyBatch, outcomes: Sequence[Any]) -> None:
        """Note the outcomes of the items in one batch."""
        self._outcomes[batch] = outcomes
        self._missing -= 1
        self._finish()

    def _finish(self) -> None:
        if not self._missing and not self.done():
            self.set_result([*chain.from_iterable(self._outcomes.values())])


class Batcher(Generic[Item, Result]):
    """Collects items of concurrent callers and commits them together, as a :class:`BatchPlan`
    decides.

    A lone caller never waits for others: the first item leaves before :meth:`submit` returns. If a
    caller is cancelled before its item has left, the item is withdrawn, unless items are
    ``uncancellable``; if it is cancelled later, the item is committed all the same. The reply
    itself sends the next batch; only a call that fails has a task, which retries it.
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
        max_size: int,
        uncancellable: bool = False,
        expires: bool = False,
        on_outcome: Callable[[Item, Result | BaseException], object] = lambda _item, _outcome: None,
    ) -> None:
        """Args:
        server: Runs the calls.
        background: Owns the tasks that retry.
        request: Returns the call for a batch and its slot, which has one call in flight at a time.
        repeat: Makes a call that could not be sent at once or that failed, and returns the reply.
            Its error argument is set if the call may have been carried out.
        results: Returns one result per item, in order, from a reply.
        max_items: The maximum number of items per batch: a script blocks the whole server.
        max_size: The maximum size of a batch that has more than one item.
        uncancellable: Whether an item is committed even if its caller is cancelled.
        expires: Whether an item fails that could not be sent for as long as a call is retried.
        on_outcome: Called with each item of :meth:`fire_and_forget` whose result is not True, and
            with its result or error.
        """
        # Kept, because on Python 3.11 each lookup asks the system for the process's id.
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._background = background
        self._calls = _Calls(request, repeat, results, on_outcome)
        self._uncancellable = uncancellable
        self._plan: BatchPlan[Item, Waiter] = BatchPlan(
            max_items=max_items,
            max_size=max_size,
            expires_after=server.waits_for if expires else math.inf,
        )
        self._connection: Connection | None = None
        self._failed_with: Exception | None = None
        self._repeating: dict[AnyBatch, asyncio.Task[Any]] = {}
        self._expiry: asyncio.Handle | None = None
        self._waiting_for_capacity: deque[Future[None]] = deque()
        # Items that no caller waits for, until the end of this iteration of the event loop.
        self._unattended: list[Item] = []

    @property
    def unanswered(self) -> int:
        """The number of items that wait or are in flight."""
        return self._plan.unanswered + len(self._unattended)

    @property
    def is_full(self) -> bool:
        """Whether so much is waiting that more would cost memory and gain nothing."""
        return self._plan.waiting_size > MAX_WAITING_SIZE

    async def flush(self) -> None:
        """Wait until all items submitted so far have their results, or have failed."""
        if self._unattended:
            self._send_ready()
        if self._plan.unanswered and not self._plan.closed:
            await self._flushed()

    async def wait_for_capacity(self) -> float:
        """Wait for capacity, before you build an item. Return the time to pass to :meth:`submit`.

        Raises:
            ServerUnavailable: None of the waiting items could be sent.
        """
        submitted_at = self._loop.time()
        while self.is_full and not self._plan.closed:
            turn = self._loop.create_future()
            self._waiting_for_capacity.append(turn)
            try:
                async with asyncio.timeout_at(
                    self._plan.expires_at(submitted_at, self._moved_at())
                ):
                    await turn
            except TimeoutError:
                # Unless something was carried out in the meantime.
                if self._plan.expires_at(submitted_at, self._moved_at()) <= self._loop.time():
                    self._admit_next()
                    raise self._unsent() from None
            except asyncio.CancelledError:
                self._admit_next()
                raise
        if self._waiting_for_capacity:
            self._admit_next()
        return submitted_at

    def submit(self, item: Item, size: int, submitted_at: float | None = None) -> Future[Result]:
        """Add ``item`` of a size to the next batch. Await or cancel the returned future."""
        if self._unattended:
            self._add_unattended()
        future: Future[Result] = Future(loop=self._loop)
        if submitted_at is None:
            submitted_at = self._loop.time()
        elif self._expiry is not None:
            # It may be the first one to expire.
            self._expiry.cancel()
            self._expiry = self._loop.call_soon(self._expire)
        if self._plan.add(item, size, future, submitted_at):
            self._send_ready()
        return future

    def submit_now(self, item: Item, size: int) -> Future[Result] | None:
        """Submit an item as :meth:`submit` does; return None if it has to wait for capacity."""
        plan, loop = self._plan, self._loop
        if plan.waiting_size > MAX_WAITING_SIZE:
            return None
        if self._unattended:
            self._add_unattended()
        future: Future[Result] = Future(loop=loop)
        if plan.add(item, size, future, loop.time()):
            self._send_ready()
        return future

    def fire_and_forget(self, item: Item, max_unanswered: int) -> bool:
        """Submit an item of size 1 for a caller that does not wait, together with all others that
        are submitted in this iteration of the event loop.

        Returns:
            Whether it was submitted: not if ``max_unanswered`` items are unanswered already.
        """
        unattended, plan = self._unattended, self._plan
        if plan.unanswered + len(unattended) >= max_unanswered:
            return False
        if plan.closed:
            raise Closed("the queue is closed")
        unattended.append(item)
        if len(unattended) == 1:
            self._loop.call_soon(self._send_ready)
        elif len(unattended) >= _UNATTENDED:
            self._send_ready()
        return True

    def submit_many(
        self, items: Sequence[Item], sizes: Sequence[int]
    ) -> Future[list[Result | Exception]]:
        """Submit items, with their sizes, in as few batches as they need, one after the
        other.

        The future's result has the outcome of each item. Cancelling it withdraws those that have
        not left.
        """
        group = _GroupFuture(self._loop)
        group.expect(self._plan.add_many(items, sizes, group, self._loop.time()))
        self._send_ready()
        return group

    def recall(self, error: Exception) -> None:
        """Fail all items that have not left."""
        for batch in self._plan.recall():
            self._fail(batch, error)
        while self._waiting_for_capacity and not self.is_full:
            self._admit_next()

    async def aclose(self, grace: float) -> None:
        """Accept no more items, and fail those that are not done within ``grace`` seconds."""
        self._send_ready()
        self._plan.closed = True
        if self._plan.unanswered:
            await asyncio.wait({self._flushed()}, timeout=grace)
        for task in self._repeating.values():
            task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        in_flight, unsent = self._plan.abandon()
        while self._waiting_for_capacity:
            self._admit_next()
        for batch in in_flight:
            self._fail(batch, OutcomeUnknown("the queue closed before the reply came"))
        for batch in unsent:
            self._fail(batch, Closed("the queue closed before the message was sent"))

    def _flushed(self) -> Future[None]:
        """Return a future that is done when all items submitted so far are."""
        done = self._loop.create_future()
        self._plan.flush(done)
        return done

    def _add_unattended(self) -> None:
        """Put items that no caller waits for into batches, so that later ones cannot overtake."""
        unattended, self._unattended = self._unattended, []
        self._plan.add_small(unattended, [None] * len(unattended), self._loop.time())

    def _send_ready(self) -> None:
        """Send the batches that may leave now."""
        plan = self._plan
        if self._unattended:
            self._add_unattended()
        while (
            plan.waiting and (batch := plan.leave(self._loop.time(), self._moved_at())) is not None
        ):
            if batch.slot is None:
                self._fail(batch, self._unsent())
            else:
                self._send(batch, batch.slot, self._connection if len(plan.in_flight) > 1 else None)
        if plan.waiting:
            if self._expiry is None and plan.expires_after < math.inf:
                self._expiry = self._loop.call_later(plan.expires_after, self._expire)
        elif self._waiting_for_capacity and not self.is_full:
            self._admit_next()

    def _send(self, batch: AnyBatch, slot: int, beside: Connection | None) -> None:
        # Items are hardly ever cancelled, so this check is a quick one.
        if not self._uncancellable and any(map(Future.cancelled, filter(None, batch.waiters))):
            self._withdraw_cancelled(batch)
            if not batch.items:
                self._plan.end(batch)
                return
        try:
            script, keys, args, _ = request = self._calls.request(batch.items, slot)
            on_reply = partial(self._on_reply, batch, request)
            self._connection = self._server.send_now(script, keys, args, on_reply, beside)
        except Exception as error:  # noqa: BLE001 - it concerns these items, not the current caller
            self._plan.end(batch)
            self._fail(batch, error)
            return
        if self._connection is None:
            self._repeat(batch, request, None)

    def _withdraw_cancelled(self, batch: AnyBatch) -> None:
        cancelled = [
            index
            for index, future in enumerate(batch.waiters)
            if future is not None and future.cancelled()
        ]
        self._resolve(self._plan.withdraw(batch, cancelled))

    def _moved_at(self) -> float:
        """Return when bytes last moved on the connection, in local seconds."""
        return -math.inf if self._connection is None else self._connection.pulse.moved_at

    def _expire(self) -> None:
        """Fail the items that have waited too long. None of them was sent."""
        self._expiry = None
        now, moved_at = self._loop.time(), self._moved_at()
        for batch in self._plan.expire(now, moved_at):
            self._fail(batch, self._unsent())
        if self._plan.waiting:
            wait = self._plan.next_expiry(moved_at) - now
            self._expiry = self._loop.call_later(max(wait, 0.01), self._expire)
        if self._waiting_for_capacity and not self.is_full:
            self._admit_next()

    def _unsent(self) -> ServerUnavailable:
        after, reason = self._plan.expires_after, self._failed_with or "the server does not answer"
        error = ServerUnavailable(f"nothing could be sent for {after:g} s: {reason}")
        error.__cause__ = self._failed_with
        return error

    def _on_reply(self, batch: AnyBatch, request: Request, reply: Any) -> None:
        if batch not in self._plan.in_flight:
            return  # given up meanwhile
        if isinstance(reply, ServerRefused):
            # A repetition would be refused too, or find its first part applied.
            self._plan.end(batch)
            self._fail(batch, reply)
            self._send_ready()
        elif isinstance(reply, Exception):
            if not isinstance(reply, RepeatNow):
                self._failed_with = reply
            self._repeat(batch, request, reply if isinstance(reply, OutcomeUnknown) else None)
        else:
            self._on_success(batch, reply)

    def _repeat(self, batch: AnyBatch, request: Request, unknown: OutcomeUnknown | None) -> None:
        after, give_up_at = self._plan.on_failure(
            batch, self._moved_at(), unknown=unknown is not None
        )
        earlier = [self._repeating[other_batch] for other_batch in after]
        if give_up_at < math.inf:
            # A call that was tried is repeated for less time than others wait to be sent.
            give_up_at -= self._server.waits_for - self._server.retry_for
            request = request._replace(deadline=give_up_at)
        self._repeating[batch] = self._background.spawn(
            self._run(batch, request, unknown, earlier), "group commit"
        )

    async def _run(
        self,
        batch: AnyBatch,
        request: Request,
        unknown: OutcomeUnknown | None,
        earlier: Sequence[asyncio.Task[Any]],
    ) -> None:
        try:
            if earlier:
                await asyncio.wait(earlier)
            reply = await self._calls.repeat(request, batch.items, unknown)
        except asyncio.CancelledError:
            # The client is closing, and the waiting callers would otherwise never be told.
            self._plan.end(batch)
            self._fail(batch, OutcomeUnknown("the queue closed before the reply came"))
            raise
        except Exception as error:  # noqa: BLE001 - it reaches every caller it concerns
            self._failed_with = error
            self._plan.end(batch)
            self._fail(batch, error)
            self._send_ready()
        else:
            self._on_success(batch, reply)
        finally:
            del self._repeating[batch]

    def _on_success(self, batch: AnyBatch, reply: Any) -> None:
        self._failed_with = None
        self._plan.on_success(batch, self._loop.time())
        # Send the next batch before handling this reply.
        self._send_ready()
        try:
            results = self._calls.results(batch.items, reply)
            if len(results) != len(batch.items):
                raise RuntimeError(f"got {len(results)} results for {len(batch.items)} items")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the same
            self._fail(batch, error)
            return
        items, futures, flushed = self._plan.resolve(batch)
        if batch.shared:
            results = _resolve_groups(batch, items, futures, results)
        wakes_several = len(futures) > 1
        waking: list[_Wakeup] = []
        for item, future, result in zip(items, futures, results, strict=True):
            if future is None:
                if result is not True:
                    self._report(item, result)
            elif not future.done():
                # Usually, one task waits for it. Resume all of them in one step of the event loop:
                # by itself, asyncio takes one for each, and that takes longer than the rest.
                if wakes_several and (callbacks := future._callbacks) and len(callbacks) == 1:  # noqa: SLF001 - it is in every implementation
                    callback, context = callbacks[0]
                    future.remove_done_callback(callback)
                    waking.append((context, callback, future))
                future.set_result(result)
        if waking:
            self._loop.call_soon(_wake, iter(waking))
        self._resolve(flushed)

    def _fail(self, batch: AnyBatch, error: Exception) -> None:
        items, futures, flushed = self._plan.resolve(batch)
        if batch.shared:
            _resolve_groups(batch, items, futures, [own_copy(error) for _ in items])
        for item, future in zip(items, futures, strict=True):
            if future is None:
                self._report(item, error)
            elif not future.done():
                future.set_exception(own_copy(error))
        self._resolve(flushed)

    def _report(self, item: Item, outcome: Result | BaseException) -> None:
        try:
            self._calls.on_outcome(item, outcome)
        except Exception:  # noqa: BLE001 - it would keep others from being reported
            _log.exception("reporting the outcome of an item failed")

    def _resolve(self, flushed: Iterable[Waiter]) -> None:
        for future in flushed:
            if future is not None and not future.done():
                future.set_result(None)

    def _admit_next(self) -> None:
        while self._waiting_for_capacity:
            turn = self._waiting_for_capacity.popleft()
            if not turn.done():
                turn.set_result(None)
                return


def _resolve_groups(
    batch: AnyBatch, items: list[Any], waiters: list[Waiter], outcomes: Sequence[Any]
) -> Sequence[Any]:
    """Give the waiters that several items share their outcomes. Remove these items with their
    waiters, and return the outcomes of the others.
    """
    remaining = [*outcomes]
    for waiter in batch.shared:
        # There are none left if they were withdrawn.
        if count := waiters.count(waiter):
            start = waiters.index(waiter)
            span = slice(start, start + count)
            cast("_GroupFuture", waiter).note(batch, remaining[span])
            del items[span], waiters[span], remaining[span]
    return remaining


def _wake(waking: Iterator[_Wakeup]) -> None:
    """Call the callbacks of futures that are done, as the event loop would."""
    for context, callback, future in waking:
        try:
            context.run(callback, future)
        except (SystemExit, KeyboardInterrupt):
            future.get_loop().call_soon(_wake, waking)
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio does
            future.get_loop().call_exception_handler(
                {"message": f"Exception in callback {callback!r}", "exception": error}
            )
