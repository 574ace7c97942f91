"""Runs the tasks of a worker: those that handle messages, and one for each feed, which claims them.
:class:`SlotPlan` decides which message is handled when.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from delayq._engine import prefetch
from delayq._logging import log
from delayq._redis.retry import retry_delay
from delayq.errors import Closed, ConfigurationError, ServerError, ServerRefused
from delayq.worker._contexts import run_to_first_wait
from delayq.worker._slots import SlotPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq.worker._handling import Claimed
    from delayq.worker._slots import Feed

_log = logging.getLogger("delayq")

# In a burst, how long a claim waits for messages that a limit holds back, in seconds.
_PATIENCE = 1.0
# Number of times in a row that the server must refuse a claim to end a burst.
_REFUSED_FOR_GOOD = 5
# Number of messages after which a task that never had to wait lets others work.
_IN_A_ROW = 25
# How long a cancelled handler has to hand its message back, in seconds.
_HAND_BACK_WITHIN = 1.0
# In a burst, how often an empty feed looks again while others are at work, in seconds.
_LOOK_AGAIN = 0.05


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
        # Ends the claims that are under way.
        self._claiming: dict[Feed, asyncio.Timeout] = {}
        # Looks at the pace of feeds whose messages wait.
        self._watches: dict[Feed, asyncio.TimerHandle] = {}
        # Feeds that wait for room to claim more.
        self._waiting_for_room: dict[Feed, asyncio.Future[None]] = {}
        # The tasks that handle messages, and the futures on which idle ones wait.
        self._workers: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        # Whether a worker was woken and has not run yet.
        self._waking = False
        self._feeders: list[asyncio.Task[None]] = []
        self._closing = False
        self._time = asyncio.get_running_loop().time
        for feed in self._plan.feeds:
            feed.handling.threads.changed = partial(self._places_changed, feed)
            self._places_changed(feed)

    def free(self, feed: Feed) -> int:
        """Return how many more messages of a feed may be begun now."""
        return self._plan.free(feed)

    @property
    def running(self) -> int:
        """Number of handlers that are running."""
        return self._plan.running

    def start(self) -> None:
        """Start claiming messages."""
        for feed in self._plan.feeds:
            feeder = asyncio.create_task(self._feed(feed), name=f"delayq feed {feed.port.name}")
            feeder.add_done_callback(self._stop_on_error)
            self._feeders.append(feeder)

    async def close(self) -> None:
        """Stop claiming, and give back the messages claimed ahead. Running handlers continue."""
        self._closing = True
        for feeder in self._feeders:
            feeder.cancel()
        if self._feeders:
            await asyncio.wait(self._feeders)
            self._feeders.clear()
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        for feed in self._plan.feeds:
            self._hand_back(feed)
            feed.handling.hurry()
        for idle in self._idle:
            _wake(idle)

    async def drain(self, within: float, hurry: asyncio.Event) -> None:
        """Wait until no handler is running and everything is acknowledged, for at most ``within``
        seconds, or until ``hurry`` is set.
        """
        waits = {asyncio.ensure_future(self._drained()), asyncio.ensure_future(hurry.wait())}
        try:
            await asyncio.wait(waits, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def end(self) -> None:
        """Cancel the handlers that are still running, and bring everything back to the server.

        Takes a few seconds at most.
        """
        await self.close()
        for again in (False, True):
            for worker in self._workers:
                # One that is cancelled already, as asyncio.run() cancels all tasks, is handing its
                # message back. Only a server that does not answer may keep it from that.
                if again or not worker.cancelling():
                    worker.cancel()
            if self._workers:
                await asyncio.wait(self._workers, timeout=_HAND_BACK_WITHIN)
        with suppress(TimeoutError):
            async with asyncio.timeout(_HAND_BACK_WITHIN):
                await self._flush()
        if self._workers:
            _log.error(
                "%d handlers did not end after they were cancelled, and are abandoned",
                len(self._workers),
            )
        quiet = (feed.port.quiet(_HAND_BACK_WITHIN / 2) for feed in self._plan.feeds)
        await asyncio.gather(*quiet)

    async def _drained(self) -> None:
        while self._workers:
            await asyncio.wait(self._workers)
        await self._flush()

    async def _flush(self) -> None:
        await asyncio.gather(*(feed.port.flush() for feed in self._plan.feeds))

    # Claiming

    async def _feed(self, feed: Feed) -> None:
        failures = 0
        while not self._closing:
            try:
                await self._wait_for_room(feed)
                await self._fill(feed)
            except (Closed, ConfigurationError) as error:
                self._stop(error)
                return
            except Exception as error:  # noqa: BLE001 - other queues must not suffer, whatever fails
                failures += 1
                is_refused = isinstance(error, ServerRefused) and failures >= _REFUSED_FOR_GOOD
                if self._burst and is_refused:
                    self._stop(error)
                    return
                if failures == 1:
                    name, cause = (
                        feed.port.name,
                        None if isinstance(error, ServerError) else error,
                    )
                    log(logging.ERROR, name, "claiming messages failed: %s", error, error=cause)
                self._plan.unreserve(feed)
                self._wake_one()
                await asyncio.sleep(retry_delay(failures))
            else:
                failures = 0

    async def _fill(self, feed: Feed) -> None:
        plan = self._plan
        reserved = feed in plan.reserved
        finished = plan.finished
        wait: float | None = 0.0 if reserved or self._burst else None
        if self._burst and feed.is_held:
            # Messages are due, and come when a limit lets them.
            wait = _PATIENCE
        if not plan.free(feed):
            # The claim is for later: it must not take what other workers could begin now.
            self._watch(feed)
        claimed = await self._claim(feed, wait)
        if reserved and not claimed:
            # The feed has had its chance. Otherwise the slot is kept until the feed takes it.
            plan.unreserve(feed)
        left = plan.add(feed, claimed)
        feed.handling.expect(claim for _, claim in claimed[: len(claimed) - len(left)])
        if left:
            feed.port.give_back(left)
        # This concerns other feeds too: the slot that was reserved for this one may be free.
        self._wake_one()
        if feed.buffer:
            self._watch(feed)
        if self._burst:
            # After a patient claim, the server is asked.
            feed.is_held = not (claimed or wait) and await feed.port.is_held()
        if self._burst and not claimed and not feed.is_held:
            feed.empty_at = -1 if wait else finished
            self._stop_if_done()
            await asyncio.sleep(_LOOK_AGAIN if plan.is_at_work else 0)

    async def _claim(self, feed: Feed, wait: float | None) -> Sequence[Claimed]:
        """Claim as many messages as there is room for, until :meth:`_end_claim`."""
        most = min(self._plan.room(feed), feed.port.most_at_once)
        limit = self._claiming[feed] = asyncio.timeout(None)
        try:
            async with limit:
                return await feed.port.claim(most, wait)
        except TimeoutError:
            if not limit.expired():
                raise
            return ()
        finally:
            self._claiming.pop(feed, None)

    def _end_claim(self, feed: Feed) -> None:
        """End a claim for which there is no room any more."""
        if feed in self._claiming and self._plan.room(feed) <= 0:
            self._claiming.pop(feed).reschedule(self._time())

    async def _wait_for_room(self, feed: Feed) -> None:
        while not self._plan.has_room(feed):
            room = self._waiting_for_room[feed] = asyncio.get_running_loop().create_future()
            try:
                # A burst does not wait for threads that hang.
                async with asyncio.timeout(_LOOK_AGAIN if self._burst else None):
                    await room
            except TimeoutError:
                self._stop_if_done()
            finally:
                del self._waiting_for_room[feed]

    def _watch(self, feed: Feed) -> None:
        """Look at the pace of a feed after a moment."""
        if feed not in self._watches:
            look = partial(self._look_at, feed, feed.begun)
            loop = asyncio.get_running_loop()
            self._watches[feed] = loop.call_later(prefetch.WITHIN, look)

    def _look_at(self, feed: Feed, begun: int) -> None:
        """Give back messages of a feed that wait for handlers that take long."""
        del self._watches[feed]
        plan = self._plan
        if feed.begun == begun and (feed.buffer or not plan.free(feed)):
            self._hand_back(feed)
            plan.park(feed)
            self._end_claim(feed)
        elif excess := plan.take_excess(feed, feed.begun - begun):
            self._give_back(feed, excess)
        if feed.buffer or (feed in self._claiming and not plan.free(feed)):
            self._watch(feed)

    def _hand_back(self, feed: Feed) -> None:
        if claimed := self._plan.take_back(feed):
            self._give_back(feed, claimed)

    def _give_back(self, feed: Feed, claimed: Sequence[Claimed]) -> None:
        feed.handling.expect_no_more(claim for _, claim in claimed)
        feed.port.give_back(claimed)

    def _feed_if_room(self, feed: Feed) -> None:
        room = self._waiting_for_room.get(feed)
        if room is not None and not room.done() and self._plan.has_room(feed):
            room.set_result(None)

    def _stop_if_done(self) -> None:
        if self._burst and self._plan.is_done:
            self._stop(None)

    # Handling

    def _places_changed(self, feed: Feed) -> None:
        """Adjust the feed after the number of messages that its handlers take has changed."""
        self._plan.set_places(feed, feed.handling.places_of(feed.concurrency))
        self._end_claim(feed)
        self._feed_if_room(feed)
        self._wake_one()

    def _wake_one(self) -> None:
        """Put one more worker to work, if there is work.

        A worker wakes the next one as soon as its own message has to wait, so quick work needs few
        of them.
        """
        if not self._plan.in_line or self._closing or self._waking:
            return
        while self._idle:
            if _wake(self._idle.pop()):
                self._waking = True
                return
        if len(self._workers) < self._plan.most:
            self._waking = True
            worker = asyncio.create_task(self._work(), name="delayq worker")
            self._workers.add(worker)
            worker.add_done_callback(self._gone)

    def _gone(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._waking = False
        self._stop_on_error(worker)
        self._wake_one()

    def _stop_on_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    async def _work(self) -> None:
        plan, now = self._plan, self._time
        in_a_row, started = 0, now()
        self._waking = False
        while not self._closing:
            feed = plan.next()
            if feed is None:
                await self._rest()
                in_a_row, started = 0, now()
                continue
            claimed: Claimed | None = plan.begin(feed)
            if feed in self._waiting_for_room:
                self._feed_if_room(feed)
            port, handle = feed.port, feed.handling.handle
            while claimed is not None:
                goes_on = False
                try:
                    message = port.wrap(claimed[1], port.ahead)
                    remainder = run_to_first_wait(handle(message))
                    if remainder is not None:
                        # Others handle messages while this one waits.
                        self._wake_one()
                        await remainder
                    in_a_row += 1
                    goes_on = in_a_row < _IN_A_ROW and not self._closing
                finally:
                    # The next message begins as this one ends.
                    started, before = now(), started
                    took = started - before
                    if took > prefetch.WITHIN:
                        # It may have blocked the event loop, which has things to do.
                        in_a_row, goes_on = _IN_A_ROW, False
                    claimed = plan.go_on(feed, took) if goes_on else None
                    if claimed is None:
                        plan.end(feed, took)
                    if self._waiting_for_room:
                        self._feed_waiting()
            if in_a_row >= _IN_A_ROW:
                await asyncio.sleep(0)
                in_a_row, started = 0, now()

    async def _rest(self) -> None:
        idle = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        try:
            await idle
        finally:
            if idle.done():
                self._waking = False

    def _feed_waiting(self) -> None:
        """Offer a slot that has become free to the feeds, beginning with those that have one
        reserved.
        """
        for feed in self._plan.reserved:
            self._feed_if_room(feed)
        for feed in self._waiting_for_room:
            self._feed_if_room(feed)


def _wake(sleeper: asyncio.Future[None]) -> bool:
    if sleeper.done():
        return False
    sleeper.set_result(None)
    return True
