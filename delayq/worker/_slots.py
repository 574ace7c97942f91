"""Decides which message is handled when: the slots of a worker, and the messages that each listener
has claimed for them. Pure: it only asks a feed's port whether others wait for slots of a limit.

A *feed* is a listener at work. A fixed number of *slots*, one for each handler that may run, take
from the feeds in turn, so a flood in one holds up another by one message at most. Each feed claims
as many messages as there are free slots, plus as many as will be begun within a moment. If there
are several feeds, each holds one more, so that its turn finds one. A feed whose messages are
handled in batches has slots of its own.

Messages that arrive when no slot will be free soon, because other feeds have taken them, go back to
the server, and so do those that have waited for a moment while none was begun, and those of which
too many wait for handlers that have become slower. No attempt is counted. A feed that gave all of
its messages back has the next free slot, or it might never get one: while it asks the server for
them again, the slot is reserved for it.

Messages that run under a limit on concurrency take up its slots while they wait here. So as long as
the limit keeps back messages that other clients would handle, none are claimed ahead.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from delayq._engine import prefetch
from delayq._engine.prefetch import begun_soon, moving_mean, to_keep

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from delayq._reliable.consumer import WorkerMessage, WorkerPort
    from delayq.worker._batches import BatchHandling
    from delayq.worker._handling import Claimed
    from delayq.worker._threads import Threads

# Maximum number of messages that a feed claims ahead of free slots.
_MAX_AHEAD = 200


class Feed:
    """A listener at work.

    Attributes:
        port: Claims its messages.
        handle: Handles a message.
        threads: Run its handlers, unless these are coroutine functions.
        concurrency: Maximum number of its handlers that run.
        batches: Gathers its messages into batches; None if each is handled by itself. Batches need
            no slots of the worker.
        capacity: Maximum number of its handlers that may run now: threads that hang take places.
        buffer: The messages that are claimed and not begun.
        running: Number of its handlers that are running.
        begin_count: Number of its messages that have begun.
        duration: The mean time that handling one message takes, in seconds; None if unknown.
        has_turn: Whether it is in line for a slot.
    """

    def __init__(
        self,
        port: WorkerPort,
        handle: Callable[[WorkerMessage[Any]], Coroutine[Any, Any, None]],
        threads: Threads,
        concurrency: int,
        batches: BatchHandling | None = None,
    ) -> None:
        self.port: WorkerPort = port
        self.handle: Callable[[WorkerMessage[Any]], Coroutine[Any, Any, None]] = handle
        self.threads: Threads = threads
        self.concurrency: int = concurrency
        self.batches: BatchHandling | None = batches
        self.capacity: int = concurrency
        self.buffer: deque[Claimed] = deque()
        self.running: int = 0
        self.begin_count: int = 0
        self.duration: float | None = None
        self.has_turn: bool = False


class SlotPlan:
    """Decides which feed gets the next free slot, and how many messages each feed claims.

    Attributes:
        feeds: The feeds.
        max_running: Maximum number of handlers that run.
        turns: The feeds that have something to do, in the order of their turns.
        reserved: The feeds for which a slot is reserved, in order.
        running: Number of handlers that are running.
        end_count: Number of handlers that have ended.
    """

    def __init__(self, feeds: Sequence[Feed], slots: int) -> None:
        self.feeds: tuple[Feed, ...] = tuple(feeds)
        self._slots = slots
        self.max_running: int = slots + sum(
            feed.concurrency for feed in feeds if feed.batches is not None
        )
        # Number of slots in use: batches need none.
        self._used_slots = 0
        self.turns: deque[Feed] = deque()
        self.reserved: dict[Feed, None] = {}
        # Feeds whose messages went back, and no slot has been free since.
        self._parked: set[Feed] = set()
        self.running: int = 0
        self.end_count: int = 0

    def free(self, feed: Feed) -> int:
        """Return how many more handlers of a feed may run now, as far as slots go."""
        free = feed.capacity - feed.running
        if feed.batches is None:
            free = min(free, self._slots - self._used_slots)
        return max(0, free)

    def room(self, feed: Feed, *, refill: bool = False) -> int:
        """Return how many messages a feed may claim now, or how many too many it has, negative.

        For a ``refill``, return 0 while it has enough, so that claims are few and large.
        """
        buffered = len(feed.buffer)
        if refill and buffered > _MAX_AHEAD // 2:
            return 0
        ahead = 0
        if (
            feed.capacity
            and feed not in self._parked
            and (feed.batches is None or feed.batches.gathers_ahead)
        ):
            ahead = 1 if len(self.feeds) > 1 and feed.running < feed.capacity else 0
            if feed.duration is not None and not feed.port.is_contested:
                handlers = self._max_handlers(feed)
                ahead = max(ahead, begun_soon(handlers, feed.duration, _MAX_AHEAD))
        if refill and buffered > ahead // 2:
            return 0
        free = feed.capacity - feed.running
        if feed.batches is None:
            unused = self._slots - self._used_slots
            if feed not in self.reserved:
                unused -= len(self.reserved)
            free = min(free, unused)
        return max(0, free) + ahead - buffered

    def _max_handlers(self, feed: Feed) -> int:
        return min(feed.capacity, self._slots) if feed.batches is None else feed.capacity

    def add(self, feed: Feed, claimed: Sequence[Claimed]) -> Sequence[Claimed]:
        """Add messages that a feed has claimed, and return those for which there is no room."""
        room = max(0, self.room(feed))
        feed.buffer.extend(claimed[:room])
        self._line_up(feed)
        return claimed[room:]

    def take_all(self, feed: Feed) -> list[Claimed]:
        """Remove and return the messages that a feed has claimed ahead."""
        claimed = list(feed.buffer)
        feed.buffer.clear()
        return claimed

    def take_excess(self, feed: Feed, begin_count: int) -> list[Claimed]:
        """Remove and return the last messages that a feed has claimed ahead, if it holds too many
        after ``begin_count`` of them have begun in the last moment.
        """
        excess = len(feed.buffer) - to_keep(len(feed.buffer), begin_count)
        if not excess:
            return []
        if begin_count:
            # Those that are running tell nothing before they end.
            duration = self._max_handlers(feed) * prefetch.WITHIN / begin_count
            feed.duration = max(feed.duration or 0.0, duration)
        return [feed.buffer.pop() for _ in range(excess)][::-1]

    def park(self, feed: Feed) -> None:
        """Have a feed whose messages have waited too long claim none ahead until a slot becomes
        free, and reserve that one for it.
        """
        self._parked.add(feed)
        feed.duration = None
        if len(self.feeds) > 1 and feed.running < feed.capacity and feed.batches is None:
            self.reserved[feed] = None

    def unreserve(self, feed: Feed) -> None:
        """Reserve no slot for a feed any more."""
        self.reserved.pop(feed, None)

    def set_capacity(self, feed: Feed, capacity: int) -> None:
        """Change how many of a feed's handlers may run."""
        feed.capacity = capacity
        if not capacity:
            # A slot would be reserved in vain.
            self.unreserve(feed)
        self._line_up(feed)

    def _line_up(self, feed: Feed) -> None:
        """Put a feed in line for a slot, if it has something to do."""
        if not feed.has_turn and feed.buffer and feed.running < feed.capacity:
            feed.has_turn = True
            self.turns.append(feed)

    def begin(self) -> tuple[Feed, Claimed] | None:
        """Begin the next message of the feed whose turn it is, and return both; None if there is
        none. :meth:`end` must follow.

        The last free slots are kept for feeds that have one reserved.
        """
        free = self._slots - self._used_slots
        for _ in range(len(self.turns)):
            feed = self.turns.popleft()
            if not feed.buffer or feed.running >= feed.capacity:
                feed.has_turn = False
            elif feed.batches is not None or feed in self.reserved or free > len(self.reserved):
                break
            else:
                self.turns.append(feed)
        else:
            return None
        claimed = feed.buffer.popleft()
        feed.running += 1
        feed.begin_count += 1
        self.running += 1
        if feed.batches is None:
            self._used_slots += 1
        self.reserved.pop(feed, None)
        # The feed is behind the others now.
        feed.has_turn = False
        self._line_up(feed)
        return feed, claimed

    def end(self, feed: Feed, duration: float, *, goes_on: bool = False) -> Claimed | None:
        """End a message that took ``duration`` seconds.

        If the task that has handled it ``goes_on``, its slot goes to the next message of the feed,
        unless another feed may have the next turn. That message is returned, and :meth:`end` must
        follow again. Otherwise the slot is free.
        """
        self.end_count += 1
        feed.duration = moving_mean(feed.duration, duration)
        if (
            goes_on
            and feed.buffer
            # Except for the feed itself, nothing is in line.
            and len(self.turns) <= feed.has_turn
            and feed.running <= feed.capacity
            and not self.reserved
            and not self._parked
        ):
            feed.begin_count += 1
            return feed.buffer.popleft()
        feed.running -= 1
        self.running -= 1
        if feed.batches is None:
            self._used_slots -= 1
        self._line_up(feed)
        self._parked.clear()
        return None
