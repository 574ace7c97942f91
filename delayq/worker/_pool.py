"""Runs the tasks of a worker: those that handle messages, and one for each feed, which claims them.
:class:`SlotPlan` decides which message is handled when.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from delayq._engine import prefetch
from delayq._logging import log
from delayq._redis.retry import retry_delay
from delayq.errors import Closed, ConfigurationError, ServerError, ServerRefused
from delayq.worker._slots import SlotPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
    from contextvars import Context

    from delayq.worker._handling import Claimed
    from delayq.worker._slots import Feed

_log = logging.getLogger("delayq")

# In a burst, how long a claim waits for messages that a limit keeps back, in seconds.
_LIMITED_CLAIM_WAIT = 1.0
# Number of times in a row that the server must refuse a claim to end a burst.
_REFUSED_FOR_GOOD = 5
# How long a task handles messages without waiting before it lets others run, in seconds.
_YIELD_AFTER = 0.001
# How long a cancelled handler has to give its message back, in seconds.
_GIVE_BACK_WITHIN = 1.0
# In a burst, how often an empty feed asks again while others are at work, in seconds.
_EMPTY_FEED_INTERVAL = 0.05


@dataclass(slots=True)
class _ClaimState:
    """The state of the claims of one feed.

    Attributes:
        timeout: Ends the claim that is under way; None if there is none.
        error: The error for which a claim is repeated; None if the last one succeeded.
        is_limited: In a burst: whether a limit keeps back messages that are due, as far as is
            known.
        empty_at: In a burst: the number of handlers that had ended when the queue was last found
            empty; None if it was not.
    """

    timeout: asyncio.Timeout | None = None
    error: Exception | None = None
    is_limited: bool = False
    empty_at: int | None = None


class Pool:
    """The tasks that claim and handle messages."""

    def __init__(
        self,
        feeds: Sequence[Feed],
        slots: int,
        *,
        burst: bool,
        stop: Callable[[BaseException | None], None],
    ) -> None:
        """Args:
        feeds: The feeds from which messages come.
        slots: Number of handlers that run at a time.
        burst: Whether to stop when nothing is due.
        stop: Called when there is nothing more to do, with the reason if that is an error.
        """
        self._plan = SlotPlan(feeds, slots)
        self._burst = burst
        self._stop = stop
        self._claim_states = {feed: _ClaimState() for feed in self._plan.feeds}
        # Check the pace of feeds whose messages wait.
        self._pace_checks: dict[Feed, asyncio.TimerHandle] = {}
        # Feeds that wait for room to claim more.
        self._waiting_for_room: dict[Feed, asyncio.Future[None]] = {}
        # The tasks that handle messages, and the futures on which idle ones wait.
        self._handler_tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        # Whether a task was woken or created that has not run yet.
        self._is_waking = False
        self._feeders: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._loop = asyncio.get_running_loop()
        for feed in self._plan.feeds:
            feed.threads.on_change = partial(self._update_capacity, feed)
            self._update_capacity(feed)

    def free(self, feed: Feed) -> int:
        """Return how many more messages of a feed may be begun now."""
        return self._plan.free(feed)

    @property
    def is_claiming(self) -> bool:
        """Whether messages are claimed, once :meth:`start` was called. Other threads may read
        this.
        """
        return not self._is_closing

    @property
    def ended(self) -> list[str]:
        """The queues whose messages are no longer claimed, although the pool is not closed. Other
        threads may read this.
        """
        if self._is_closing:
            return []
        return [
            feed.port.name
            for feed, feeder in zip(self._plan.feeds, [*self._feeders], strict=False)
            if feeder.done()
        ]

    @property
    def failing(self) -> tuple[str, Exception] | None:
        """A queue whose messages cannot be claimed now, and the error; None if there is none. Other
        threads may read this.
        """
        for feed in self._plan.feeds:
            queue = feed.port.queue
            # While a claim waits for messages, the queue's own calls tell whether all goes well.
            is_waiting = queue.dispatcher.has_callers
            own_error = None if is_waiting else self._claim_states[feed].error
            if error := queue.claim_error or own_error:
                return feed.port.name, error
        return None

    def positions(self) -> dict[tuple[str, int], object]:
        """Return a value for each claim loop that waits for nothing but a call of its own. A loop
        hangs if its value does not change.

        Each key is the queue, and the number of the partition, or -1 for the loop of the feed.
        """
        positions: dict[tuple[str, int], object] = {}
        for feed in self._plan.feeds:
            queue = feed.port.queue
            is_waiting = feed in self._waiting_for_room or queue.dispatcher.has_callers
            # A burst pauses between claims.
            if not (is_waiting or self._burst):
                # Each failed claim has an error of its own.
                positions[queue.name, -1] = feed.begin_count, self._claim_states[feed].error
            for partition in queue.partitions:
                if (position := partition.claims.position) is not None:
                    positions[queue.name, partition.index] = position
        return positions

    @property
    def running(self) -> int:
        """Number of handlers that are running."""
        return self._plan.running

    def start(self) -> None:
        """Start claiming messages."""
        for feed in self._plan.feeds:
            feeder = self._loop.create_task(self._feed(feed), name=f"delayq feed {feed.port.name}")
            feeder.add_done_callback(self._stop_on_error)
            self._feeders.append(feeder)

    async def close(self) -> None:
        """Stop claiming, and give back the messages claimed ahead. Running handlers continue."""
        self._is_closing = True
        for feeder in self._feeders:
            feeder.cancel()
        if self._feeders:
            await asyncio.wait(self._feeders)
            self._feeders.clear()
        for pace_check in self._pace_checks.values():
            pace_check.cancel()
        self._pace_checks.clear()
        for feed in self._plan.feeds:
            self._give_back(feed, self._plan.take_all(feed))
            if feed.batches is not None:
                feed.batches.hurry()
        for idle in self._idle:
            if not idle.done():
                idle.set_result(None)

    async def drain(self, timeout: float, urgent: asyncio.Event) -> None:
        """Wait until no handler is running and everything is acknowledged, for at most ``timeout``
        seconds, or until ``urgent`` is set.
        """
        waits = {asyncio.ensure_future(self._drained()), asyncio.ensure_future(urgent.wait())}
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def end(self) -> None:
        """Cancel the handlers that are still running, and bring everything back to the server.

        Takes a few seconds at most.
        """
        await self.close()
        for is_repeated in (False, True):
            for task in self._handler_tasks:
                # One that is cancelled already, as asyncio.run() cancels all tasks, is handing its
                # message back. Only a server that does not answer may keep it from that.
                if is_repeated or not task.cancelling():
                    task.cancel()
            if self._handler_tasks:
                await asyncio.wait(self._handler_tasks, timeout=_GIVE_BACK_WITHIN)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_WITHIN):
                await self._flush()
        if self._handler_tasks:
            _log.error(
                "%d handlers did not end after they were cancelled, and are abandoned",
                len(self._handler_tasks),
            )
        quiet = (feed.port.quiet(_GIVE_BACK_WITHIN / 2) for feed in self._plan.feeds)
        await asyncio.gather(*quiet)

    async def _drained(self) -> None:
        while self._handler_tasks:
            await asyncio.wait(self._handler_tasks)
        await self._flush()

    async def _flush(self) -> None:
        await asyncio.gather(*(feed.port.flush() for feed in self._plan.feeds))

    # Claiming

    async def _feed(self, feed: Feed) -> None:
        """Claim messages of a feed until the pool closes, also after errors."""
        failures = 0
        while not self._is_closing:
            try:
                await self._refill(feed, await self._wait_for_room(feed))
            except (Closed, ConfigurationError) as error:
                self._stop(error)
                return
            except Exception as error:  # noqa: BLE001 - other queues must not suffer, whatever fails
                failures += 1
                self._claim_states[feed].error = error
                is_refused = isinstance(error, ServerRefused) and failures >= _REFUSED_FOR_GOOD
                if self._burst and is_refused:
                    self._stop(error)
                    return
                if failures == 1:
                    traced = None if isinstance(error, ServerError) else error
                    text = "claiming messages failed: %s"
                    log(logging.ERROR, feed.port.name, text, error, error=traced)
                self._plan.unreserve(feed)
                self._wake_task()
                await asyncio.sleep(retry_delay(failures))
            else:
                failures = 0
                self._claim_states[feed].error = None

    async def _wait_for_room(self, feed: Feed) -> int:
        """Wait until a feed should claim more messages, and return how many."""
        while (room := self._plan.room(feed, refill=True)) <= 0:
            has_room = self._waiting_for_room[feed] = self._loop.create_future()
            try:
                # A burst does not wait for threads that hang.
                async with asyncio.timeout(_EMPTY_FEED_INTERVAL if self._burst else None):
                    await has_room
            except TimeoutError:
                self._stop_if_done()
            finally:
                del self._waiting_for_room[feed]
        return room

    async def _refill(self, feed: Feed, room: int) -> None:
        """Claim up to ``room`` messages of a feed."""
        plan, state, batches = self._plan, self._claim_states[feed], feed.batches
        is_reserved = feed in plan.reserved
        end_count = plan.end_count
        wait: float | None = 0.0 if is_reserved or self._burst else None
        if state.is_limited:
            # Messages are due, and come when a limit lets them.
            wait = _LIMITED_CLAIM_WAIT
        if not plan.free(feed):
            # The claim is for later: it must not take what other workers could begin now.
            self._watch(feed)
        requested = min(room, feed.port.most_at_once)
        claimed = await self._claim(feed, requested, wait)
        if is_reserved and not claimed:
            # The feed has had its chance. Otherwise the slot is kept until the feed takes it.
            plan.unreserve(feed)
        excess = plan.add(feed, claimed)
        if batches is not None:
            batches.expect(claim for _, claim in claimed[: len(claimed) - len(excess)])
        if excess:
            feed.port.give_back(excess)
        # This concerns other feeds too: the slot that was reserved for this one may be free. A
        # claim that follows at once leaves before handlers begin, because those that never wait
        # would hold it up: so the server works at the same time.
        is_followed = len(claimed) >= requested and plan.room(feed, refill=True) > 0
        self._wake_task_after(prefetch.ITERATIONS_TO_SEND if is_followed else 0)
        if feed.buffer:
            self._watch(feed)
        if self._burst:
            # After a claim that waits, the server is asked.
            state.is_limited = not (claimed or wait) and await feed.port.is_limited()
            if not state.is_limited and not claimed:
                state.empty_at = None if wait else end_count
                self._stop_if_done()
                await asyncio.sleep(_EMPTY_FEED_INTERVAL if self._is_at_work else 0)

    async def _claim(self, feed: Feed, count: int, wait: float | None) -> Sequence[Claimed]:
        """Claim up to ``count`` messages, until :meth:`_end_claim`."""
        state = self._claim_states[feed]
        state.timeout = timeout = asyncio.timeout(None)
        try:
            async with timeout:
                return await feed.port.claim(count, wait)
        except TimeoutError:
            if not timeout.expired():
                raise
            return ()
        finally:
            state.timeout = None

    def _end_claim(self, feed: Feed) -> None:
        """End a claim for which there is no room any more."""
        timeout = self._claim_states[feed].timeout
        if timeout is not None and self._plan.room(feed) <= 0:
            self._claim_states[feed].timeout = None
            timeout.reschedule(self._loop.time())

    def _watch(self, feed: Feed) -> None:
        """Check the pace of a feed after a moment."""
        if feed not in self._pace_checks:
            self._pace_checks[feed] = self._loop.call_later(
                prefetch.WITHIN, self._check_pace, feed, feed.begin_count
            )

    def _check_pace(self, feed: Feed, begin_count: int) -> None:
        """Give back messages of a feed that wait for handlers that take long.

        ``begin_count`` is the number of its messages that had begun a moment ago.
        """
        del self._pace_checks[feed]
        plan = self._plan
        if feed.begin_count == begin_count and (feed.buffer or not plan.free(feed)):
            self._give_back(feed, plan.take_all(feed))
            plan.park(feed)
            self._end_claim(feed)
        elif excess := plan.take_excess(feed, feed.begin_count - begin_count):
            self._give_back(feed, excess)
        if feed.buffer or (self._claim_states[feed].timeout is not None and not plan.free(feed)):
            self._watch(feed)

    def _give_back(self, feed: Feed, claimed: Sequence[Claimed]) -> None:
        if not claimed:
            return
        if feed.batches is not None:
            feed.batches.expect_no_more(claim for _, claim in claimed)
        feed.port.give_back(claimed)

    def _refill_if_room(self, feeds: Iterable[Feed]) -> None:
        """Let those of these feeds claim that wait for room, and have it."""
        for feed in feeds:
            has_room = self._waiting_for_room.get(feed)
            if has_room and not has_room.done() and self._plan.room(feed, refill=True) > 0:
                has_room.set_result(None)

    def _stop_if_done(self) -> None:
        if self._burst and not self._is_at_work and all(map(self._is_empty, self._plan.feeds)):
            self._stop(None)

    @property
    def _is_at_work(self) -> bool:
        """Whether a handler is running, or a message or an acknowledgement is on its way."""
        plan = self._plan
        return plan.running > 0 or any(feed.buffer or feed.port.unanswered for feed in plan.feeds)

    def _is_empty(self, feed: Feed) -> bool:
        """Return whether a queue was found empty after the last handler had ended, in a burst."""
        return self._claim_states[feed].empty_at == self._plan.end_count or not feed.capacity

    # Handling

    def _update_capacity(self, feed: Feed) -> None:
        """Adjust the feed after threads began to hang or have returned, or batches changed."""
        hanging = feed.threads.hanging
        if feed.batches is None:
            capacity = max(0, feed.concurrency - hanging)
        else:
            capacity = min(feed.concurrency, feed.batches.capacity_beside(hanging))
        self._plan.set_capacity(feed, capacity)
        self._end_claim(feed)
        self._refill_if_room((feed,))
        self._wake_task()

    def _wake_task(self) -> None:
        """Have one more task handle messages, if there are any to begin.

        A task wakes the next one as soon as its own message has to wait, so quick work needs few of
        them.
        """
        if not self._plan.turns or self._is_closing or self._is_waking:
            return
        while self._idle:
            idle = self._idle.pop()
            if not idle.done():
                idle.set_result(None)
                self._is_waking = True
                return
        if len(self._handler_tasks) < self._plan.max_running:
            self._is_waking = True
            task = self._loop.create_task(self._handle_messages(), name="delayq handlers")
            self._handler_tasks.add(task)
            task.add_done_callback(self._on_handler_task_end)

    def _wake_task_after(self, iterations: int) -> None:
        """Do as :meth:`_wake_task`, so many iterations of the event loop later."""
        if iterations:
            self._loop.call_soon(self._wake_task_after, iterations - 1)
        else:
            self._wake_task()

    def _on_handler_task_end(self, task: asyncio.Task[None]) -> None:
        self._handler_tasks.discard(task)
        self._is_waking = False
        self._stop_on_error(task)
        self._wake_task()

    def _stop_on_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    async def _handle_messages(self) -> None:
        """Handle one message after another, of whichever feed has the next turn."""
        plan, now, waiting_for_room = self._plan, self._loop.time, self._waiting_for_room
        self._is_waking = False
        started = now()
        yields_at = started + _YIELD_AFTER
        while not self._is_closing:
            if (turn := plan.begin()) is None:
                await self._wait_for_work()
                started = now()
                yields_at = started + _YIELD_AFTER
                continue
            feed, claimed = turn
            if waiting_for_room:
                self._refill_if_room((feed,))
            wrap, ahead, handle = feed.port.wrap, feed.port.ahead, feed.handle
            next_claimed: Claimed | None = claimed
            while next_claimed is not None:
                goes_on = False
                try:
                    remainder = run_to_first_wait(handle(wrap(next_claimed[1], ahead)))
                    if remainder is not None:
                        # Others handle messages while this one waits.
                        self._wake_task()
                        await remainder
                        yields_at = now() + _YIELD_AFTER
                    goes_on = not self._is_closing
                finally:
                    # The next message begins as this one ends.
                    ended_at = now()
                    duration, started = ended_at - started, ended_at
                    if duration > prefetch.WITHIN:
                        # It may have blocked the event loop, which has things to do.
                        yields_at = ended_at
                    goes_on = goes_on and ended_at < yields_at
                    next_claimed = plan.end(feed, duration, goes_on=goes_on)
                    if waiting_for_room:
                        # The feeds that have a slot reserved come first.
                        self._refill_if_room((*plan.reserved, *waiting_for_room))
            if started >= yields_at:
                await asyncio.sleep(0)
                started = now()
                yields_at = started + _YIELD_AFTER

    async def _wait_for_work(self) -> None:
        idle = self._loop.create_future()
        self._idle.append(idle)
        try:
            await idle
        finally:
            if idle.done():
                self._is_waking = False


def run_to_first_wait(coroutine: Coroutine[Any, Any, None]) -> Remainder | None:
    """Run a coroutine up to its first wait, and return its remainder; None if it has ended.

    It runs in a copy of the current context, so that variables it sets do not outlive it. One task
    handles many messages, and a variable that one of them has set (a request id for the log, a
    span) must not be visible to the next. A task for each message would cost more than everything
    else in the worker.
    """
    context = copy_context()
    try:
        pending = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return Remainder(coroutine, context, pending)


class Remainder:
    """Awaits the remainder of a coroutine in its own context."""

    __slots__ = ("_context", "_coroutine", "_pending")

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], context: Context, pending: Any
    ) -> None:
        self._coroutine = coroutine
        self._context = context
        self._pending = pending

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, run, pending = self._coroutine, self._context.run, self._pending
        try:
            while True:
                try:
                    answer = yield pending
                except BaseException as error:  # noqa: BLE001 - any error belongs to the coroutine
                    pending = run(coroutine.throw, error)
                else:
                    pending = run(coroutine.send, answer)
        except StopIteration:
            return
        finally:
            coroutine.close()
