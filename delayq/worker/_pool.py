"""Decides which message is handled when: the hands of a worker, and the messages that each listener
has claimed for them.

A *lane* is a listener at work: its queue, the messages it has claimed ahead, and the number of its
handlers that are running. A fixed number of *hands* take from the lanes in turn, so a flood in one
lane holds up another by one message at most. Each lane claims as many messages as there are free
hands, plus as many as will be begun within a moment: none where handling takes long, a few hundred
where it is quick. If there are several lanes, each holds one more message, so that its turn finds
one.

A lane may turn out to hold too many messages, because hands that were free are taken by other
lanes, or because a handler hangs. Messages that arrive when no hand will be free soon go back to
the server at once, and so do those that have waited a second while nothing moved. No attempt is
counted. A lane that gave messages back has the next free hand, or it might never get one: while it
asks the server for them again, the hand is kept free for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from delayq._logging import about
from delayq._redis.retry import retry_delay
from delayq.errors import Closed, ConfigurationError, ServerError
from delayq.worker import _pace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq.worker._handling import Handling
    from delayq.worker._source import Claimed, Source

_log = logging.getLogger("delayq")

# Messages claimed ahead go back if none was begun for this long, in seconds.
_PATIENCE = 1.0
# Number of messages after which a hand that never had to wait lets others work.
_IN_A_ROW = 25
# How long a cancelled handler has to hand its message back before it is cancelled again, in
# seconds.
_HAND_BACK_WITHIN = 1.0
# In a burst, how often an empty lane looks again while others are at work, in seconds.
_LOOK_AGAIN = 0.05


class Lane:
    """A listener at work."""

    def __init__(self, source: Source, handling: Handling, concurrency: int) -> None:
        self.source: Source = source
        self.handling: Handling = handling
        self.concurrency: int = concurrency
        # How many of its handlers may run: all except those whose place is taken by a thread that
        # hangs.
        self.places: int = concurrency
        self.buffer: deque[Claimed] = deque()
        self.running: int = 0
        self.begun: int = 0
        # How long handling one message takes, in seconds; None if unknown.
        self.took: float | None = None
        # Whether messages claimed ahead went back, and no hand has been free since.
        self.stuck: bool = False
        self.queued: bool = False
        self.hungry: asyncio.Future[None] | None = None
        # Number of handlers that the pool had finished when the queue was last found empty, in a
        # burst.
        self.empty_at: int = -1


class Pool:
    """The hands, and the lanes from which they take.

    Attributes:
        running: Number of handlers that are running.
        finished: Number of handlers that have ended.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        hands: int,
        *,
        burst: bool,
        stop: Callable[[BaseException | None], None],
    ) -> None:
        """Args:
        lanes: The lanes from which messages come.
        hands: Number of handlers that run at a time.
        burst: Whether to stop when nothing is due.
        stop: Called when there is nothing more to do, with the reason if that is an error.
        """
        self._lanes = tuple(lanes)
        self._hands = hands
        self._burst = burst
        self._stop = stop
        self._ready: deque[Lane] = deque()
        # Lanes that gave messages back for want of a hand, in order; lanes that did so and have had
        # no hand since; and lanes whose feeders wait for room.
        self._owed: dict[Lane, None] = {}
        self._stuck: set[Lane] = set()
        self._hungry: dict[Lane, None] = {}
        self._idle: list[asyncio.Future[None]] = []
        # Whether a hand was called and has not come yet.
        self._called = False
        self._workers: set[asyncio.Task[None]] = set()
        self._feeders: list[asyncio.Task[None]] = []
        self._closing = False
        self._time = asyncio.get_running_loop().time
        self.running: int = 0
        self.finished: int = 0
        for lane in self._lanes:
            lane.handling.threads.changed = partial(self._threads_changed, lane)

    def start(self) -> None:
        """Start claiming messages."""
        for lane in self._lanes:
            feeder = asyncio.create_task(self._feed(lane), name=f"delayq feed {lane.source.name}")
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
        for lane in self._lanes:
            self._hand_back(lane)
        for idle in self._idle:
            _wake(idle)

    async def drain(self, within: float, hurry: asyncio.Event) -> None:
        """Wait until no handler is running, for at most ``within`` seconds, or until ``hurry`` is
        set.
        """
        until = self._time() + within
        hurried = asyncio.ensure_future(hurry.wait())
        try:
            while self._workers and not hurried.done() and (left := until - self._time()) > 0:
                await asyncio.wait(
                    {*self._workers, hurried}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
            flushed = asyncio.ensure_future(self._flush())
            await asyncio.wait(
                {flushed, hurried},
                timeout=max(0.0, until - self._time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            flushed.cancel()
        finally:
            hurried.cancel()

    async def end(self) -> None:
        """Cancel the handlers that are still running, and bring everything back to the server.

        Takes a few seconds at most.
        """
        await self.close()
        # A cancelled handler hands its message back, but a server that does not answer may keep it
        # from doing so.
        for _ in range(2):
            for worker in self._workers:
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
        await asyncio.gather(*(lane.source.quiet(_HAND_BACK_WITHIN / 2) for lane in self._lanes))

    async def _flush(self) -> None:
        await asyncio.gather(*(lane.source.flush() for lane in self._lanes))

    # Claiming

    def room(self, lane: Lane) -> int:
        """Return how many messages the lane may claim now."""
        free = min(lane.places - lane.running, self._hands - self.running)
        if lane not in self._owed:
            free = min(free, self._hands - self.running - len(self._owed))
        return max(0, free) + self._ahead(lane) - len(lane.buffer)

    def _ahead(self, lane: Lane) -> int:
        if lane.stuck or not lane.places:
            return 0
        least = 1 if len(self._lanes) > 1 and lane.running < lane.places else 0
        return max(least, _pace.ahead(min(lane.places, self._hands), lane.took))

    async def _feed(self, lane: Lane) -> None:
        failures = 0
        while not self._closing:
            try:
                await self._wait_for_room(lane)
                await self._fill(lane)
            except (Closed, ConfigurationError) as error:
                self._stop(error)
                return
            except ServerError as error:
                failures += 1
                if failures == 1:
                    _log.error(
                        "queue %r: claiming messages failed: %s",
                        lane.source.name,
                        error,
                        extra=about(lane.source.name),
                    )
                await self._pause(lane, failures)
            except Exception:  # noqa: BLE001 - other queues must not suffer, whatever fails
                failures += 1
                if failures == 1:
                    _log.exception(
                        "queue %r: claiming messages failed",
                        lane.source.name,
                        extra=about(lane.source.name),
                    )
                await self._pause(lane, failures)
            else:
                failures = 0

    async def _pause(self, lane: Lane, failures: int) -> None:
        self._owed.pop(lane, None)
        self._kick()
        await asyncio.sleep(retry_delay(failures))

    async def _fill(self, lane: Lane) -> None:
        owed = lane in self._owed
        finished, begun = self.finished, lane.begun
        # Messages that the lane holds in the meantime must not wait forever either.
        wait = 0.0 if owed or self._burst else (_PATIENCE if lane.buffer else None)
        taken = await lane.source.claim(min(self.room(lane), lane.source.most_at_once), wait)
        if wait and not taken and lane.begun == begun:
            self._give_up(lane)
        if owed and not taken:
            # The lane has had its chance. If messages came, the hand is kept until the lane takes
            # it.
            self._owed.pop(lane, None)
        room = max(0, self.room(lane))
        lane.buffer.extend(taken[:room])
        if len(taken) > room:
            lane.source.give_back(taken[room:])
        self._offer(lane)
        # This concerns other lanes too: the hand that was kept for this one may be free.
        self._kick()
        if self._burst and not taken:
            lane.empty_at = finished
            self._stop_if_done()
            await asyncio.sleep(_LOOK_AGAIN if self._at_work() else 0)

    async def _wait_for_room(self, lane: Lane) -> None:
        while self.room(lane) <= 0 or len(lane.buffer) > self._ahead(lane) // 2:
            lane.hungry = asyncio.get_running_loop().create_future()
            self._hungry[lane] = None
            begun = lane.begun
            # A burst does not wait for threads that hang.
            patience = (
                _LOOK_AGAIN
                if self._burst and not lane.places
                else _PATIENCE
                if lane.buffer
                else None
            )
            try:
                async with asyncio.timeout(patience):
                    await lane.hungry
            except TimeoutError:
                if lane.buffer and lane.begun == begun:
                    self._give_up(lane)
                if self._burst:
                    self._stop_if_done()
            finally:
                lane.hungry = None
                del self._hungry[lane]

    def _give_up(self, lane: Lane) -> None:
        self._hand_back(lane)
        lane.stuck = True
        self._stuck.add(lane)
        lane.took = None
        if len(self._lanes) > 1 and lane.running < lane.places:
            self._owed[lane] = None

    def _hand_back(self, lane: Lane) -> None:
        if lane.buffer:
            lane.source.give_back(list(lane.buffer))
            lane.buffer.clear()

    def _feed_if_hungry(self, lane: Lane) -> None:
        if (
            lane.hungry is not None
            and len(lane.buffer) <= self._ahead(lane) // 2
            and self.room(lane) > 0
        ):
            _wake(lane.hungry)

    # In a burst

    def _at_work(self) -> bool:
        return bool(
            self.running or any(lane.buffer or lane.source.unanswered for lane in self._lanes)
        )

    def _stop_if_done(self) -> None:
        # A handler that ended after a lane was found empty may have offered a message to it.
        if not self._at_work() and all(
            lane.empty_at == self.finished or not lane.places for lane in self._lanes
        ):
            self._stop(None)

    # Handling

    def _threads_changed(self, lane: Lane) -> None:
        """Adjust the lane after the number of its threads that hang has changed."""
        lane.places = max(0, lane.concurrency - lane.handling.threads.hanging)
        if not lane.places:
            # A hand for it would be kept in vain.
            self._owed.pop(lane, None)
        self._offer(lane)
        self._feed_if_hungry(lane)
        self._kick()

    def _offer(self, lane: Lane) -> None:
        """Put the lane in line for a hand, if it has something to do."""
        if not lane.queued and lane.buffer and lane.running < lane.places:
            lane.queued = True
            self._ready.append(lane)

    def _kick(self) -> None:
        """Put one more hand to work, if there is work.

        It calls the next one, so quick work needs few hands.
        """
        if not self._ready or self._closing or self._called:
            return
        while self._idle:
            if _wake(self._idle.pop()):
                self._called = True
                return
        if len(self._workers) < self._hands:
            self._called = True
            worker = asyncio.create_task(self._work(), name="delayq worker")
            self._workers.add(worker)
            worker.add_done_callback(self._gone)

    def _gone(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._called = False
        self._stop_on_error(worker)
        self._kick()

    def _stop_on_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    def _next(self) -> Lane | None:
        """Return the lane whose turn it is.

        The last free hands are reserved for lanes that are owed one.
        """
        free = self._hands - self.running
        for _ in range(len(self._ready)):
            lane = self._ready.popleft()
            if not lane.buffer or lane.running >= lane.places:
                lane.queued = False
            elif lane in self._owed or free > len(self._owed):
                lane.queued = False
                return lane
            else:
                self._ready.append(lane)
        return None

    async def _work(self) -> None:
        in_a_row = 0
        self._called = False
        while not self._closing:
            lane = self._next()
            if lane is None:
                await self._rest()
                in_a_row = 0
                continue
            claimed = lane.buffer.popleft()
            lane.running += 1
            lane.begun += 1
            self.running += 1
            if self._owed:
                self._owed.pop(lane, None)
            # In turn: the lane is behind the others now.
            self._offer(lane)
            if self._ready and not self._called:
                self._kick()
            if lane.hungry is not None:
                self._feed_if_hungry(lane)
            started = self._time()
            try:
                await lane.handling.handle(lane.source.message(claimed))
            finally:
                self._ended(lane, self._time() - started)
            in_a_row += 1
            if in_a_row == _IN_A_ROW:
                in_a_row = 0
                await asyncio.sleep(0)

    async def _rest(self) -> None:
        idle = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        try:
            await idle
        finally:
            if idle.done():
                self._called = False

    def _ended(self, lane: Lane, took: float) -> None:
        lane.running -= 1
        self.running -= 1
        self.finished += 1
        lane.took = _pace.mean(lane.took, took)
        self._offer(lane)
        if self._stuck:
            for other in self._stuck:
                other.stuck = False
            self._stuck.clear()
        if self._hungry:
            # The hand is free for any lane. Lanes that were promised it come first.
            for other in (*self._owed, *self._hungry):
                self._feed_if_hungry(other)


def _wake(sleeper: asyncio.Future[None]) -> bool:
    if sleeper.done():
        return False
    sleeper.set_result(None)
    return True
