"""Decides which message is handled when: the slots of a worker, and the messages that each listener
has claimed for them. Pure.

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
the limit holds messages back that other clients would handle, none are claimed ahead.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from delayq._engine import prefetch
from delayq._engine.prefetch import begun_soon, moving_mean, to_keep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._reliable.consumer import WorkerPort
    from delayq.worker._handling import Claimed, Handling
    from delayq.worker._tasks import TaskHandling

# Maximum number of messages that a feed claims ahead of free slots.
_MOST_AHEAD = 200


class Feed:
    """A listener at work.

    Attributes:
        port: Claims its messages.
        handling: Handles them.
        concurrency: Maximum number of its handlers that run.
        has_own_slots: Whether these need no slots of the worker.
        places: The same, without those whose place is taken by a thread that hangs.
        buffer: The messages that are claimed and not begun.
        running: Number of its handlers that are running.
        begun: Number of its messages that have been begun.
        took: How long handling one message takes, in seconds; None if unknown.
        in_line: Whether it is in line for a slot.
        is_held: Whether messages are due that a limit holds back, as far as it knows, in a burst.
        empty_at: Number of handlers that had ended when the queue was last found empty, in a burst.
    """

    def __init__(
        self,
        port: WorkerPort,
        handling: Handling | TaskHandling,
        concurrency: int,
        *,
        has_own_slots: bool = False,
    ) -> None:
        self.port: WorkerPort = port
        self.handling: Handling | TaskHandling = handling
        self.concurrency: int = concurrency
        self.has_own_slots: bool = has_own_slots
        self.places: int = concurrency
        self.buffer: deque[Claimed] = deque()
        self.running: int = 0
        self.begun: int = 0
        self.took: float | None = None
        self.in_line: bool = False
        self.is_held: bool = False
        self.empty_at: int = -1

    @property
    def is_full(self) -> bool:
        """Whether no more of its handlers may run."""
        return self.running >= self.places


class SlotPlan:
    """Decides which feed gets the next free slot, and how many messages each feed claims.

    Attributes:
        feeds: The feeds.
        most: Maximum number of handlers that run.
        in_line: The feeds that have something to do, in the order of their turns.
        reserved: The feeds for which a slot is reserved, in order.
        running: Number of handlers that are running.
        finished: Number of handlers that have ended.
    """

    def __init__(self, feeds: Sequence[Feed], slots: int) -> None:
        self.feeds: tuple[Feed, ...] = tuple(feeds)
        self._slots = slots
        self.most: int = slots + sum(feed.concurrency for feed in feeds if feed.has_own_slots)
        # The handlers that take up these slots.
        self._using_slots = 0
        self.in_line: deque[Feed] = deque()
        self.reserved: dict[Feed, None] = {}
        # Feeds whose messages went back, and no slot has been free since.
        self._parked: set[Feed] = set()
        self.running: int = 0
        self.finished: int = 0

    def free(self, feed: Feed) -> int:
        """Return how many more handlers of a feed may run now, as far as slots go."""
        free = feed.places - feed.running
        if not feed.has_own_slots:
            free = min(free, self._slots - self._using_slots)
        return max(0, free)

    def room(self, feed: Feed) -> int:
        """Return how many messages a feed may claim now, or how many too many it has, negative."""
        free = feed.places - feed.running
        if not feed.has_own_slots:
            unused = self._slots - self._using_slots
            if feed not in self.reserved:
                unused -= len(self.reserved)
            free = min(free, unused)
        return max(0, free) + self._ahead(feed) - len(feed.buffer)

    def has_room(self, feed: Feed) -> bool:
        """Return whether a feed should claim more messages now."""
        if len(feed.buffer) > _MOST_AHEAD // 2:
            return False
        return len(feed.buffer) <= self._ahead(feed) // 2 and self.room(feed) > 0

    def _ahead(self, feed: Feed) -> int:
        if feed in self._parked or not feed.places or feed.handling.keeps_none:
            return 0
        least = 1 if len(self.feeds) > 1 and not feed.is_full else 0
        if feed.took is None or feed.port.is_contested:
            return least
        return max(least, begun_soon(self._slots_of(feed), feed.took, _MOST_AHEAD))

    def _slots_of(self, feed: Feed) -> int:
        return feed.places if feed.has_own_slots else min(feed.places, self._slots)

    def add(self, feed: Feed, claimed: Sequence[Claimed]) -> Sequence[Claimed]:
        """Add messages that a feed has claimed, and return those for which there is no room."""
        room = max(0, self.room(feed))
        feed.buffer.extend(claimed[:room])
        self.line_up(feed)
        return claimed[room:]

    def take_back(self, feed: Feed) -> list[Claimed]:
        """Remove and return the messages that a feed has claimed ahead."""
        claimed = list(feed.buffer)
        feed.buffer.clear()
        return claimed

    def take_excess(self, feed: Feed, begun: int) -> list[Claimed]:
        """Remove and return the last messages that a feed has claimed ahead, if it holds too many
        after it has begun this number of them in the last moment.
        """
        excess = len(feed.buffer) - to_keep(len(feed.buffer), begun)
        if excess and begun:
            # Those that are running tell nothing before they end.
            feed.took = max(feed.took or 0.0, self._slots_of(feed) * prefetch.WITHIN / begun)
        return [feed.buffer.pop() for _ in range(excess)][::-1]

    def park(self, feed: Feed) -> None:
        """Have a feed whose messages have waited too long claim none ahead until a slot becomes
        free, and reserve that one for it.
        """
        self._parked.add(feed)
        feed.took = None
        if len(self.feeds) > 1 and not feed.is_full and not feed.has_own_slots:
            self.reserved[feed] = None

    def unreserve(self, feed: Feed) -> None:
        """Reserve no slot for a feed any more."""
        self.reserved.pop(feed, None)

    def set_places(self, feed: Feed, places: int) -> None:
        """Change how many of a feed's handlers may run."""
        feed.places = places
        if not places:
            # A slot would be reserved in vain.
            self.unreserve(feed)
        self.line_up(feed)

    def line_up(self, feed: Feed) -> None:
        """Put a feed in line for a slot, if it has something to do."""
        # As is_full, without a call: this runs for each message.
        if not feed.in_line and feed.buffer and feed.running < feed.places:
            feed.in_line = True
            self.in_line.append(feed)

    def next(self) -> Feed | None:
        """Remove and return the feed whose turn it is.

        The last free slots are kept for feeds that have one reserved.
        """
        free = self._slots - self._using_slots
        for _ in range(len(self.in_line)):
            feed = self.in_line.popleft()
            if not feed.buffer or feed.running >= feed.places:
                feed.in_line = False
            elif feed.has_own_slots or feed in self.reserved or free > len(self.reserved):
                feed.in_line = False
                return feed
            else:
                self.in_line.append(feed)
        return None

    def begin(self, feed: Feed) -> Claimed:
        """Begin the next message of a feed, and return it. :meth:`end` must follow."""
        claimed = feed.buffer.popleft()
        feed.running += 1
        feed.begun += 1
        self.running += 1
        if not feed.has_own_slots:
            self._using_slots += 1
        if self.reserved:
            self.unreserve(feed)
        # In turn: the feed is behind the others now.
        self.line_up(feed)
        return claimed

    def end(self, feed: Feed, took: float) -> None:
        """Free the slot of a message that took ``took`` seconds."""
        feed.running -= 1
        self.running -= 1
        if not feed.has_own_slots:
            self._using_slots -= 1
        self.finished += 1
        feed.took = moving_mean(feed.took, took)
        if not feed.in_line:
            self.line_up(feed)
        if self._parked:
            self._parked.clear()

    def go_on(self, feed: Feed, took: float) -> Claimed | None:
        """Give the slot of a message that took ``took`` seconds to the next message of its feed,
        and return that. :meth:`end` must follow.

        Changes nothing and returns None if another feed may have the next turn, or if there is no
        message.
        """
        if (
            # Except for itself, nothing is in line.
            len(self.in_line) > feed.in_line
            or not feed.buffer
            or feed.running > feed.places
            or self.reserved
            or self._parked
        ):
            return None
        feed.begun += 1
        self.finished += 1
        feed.took = moving_mean(feed.took, took)
        return feed.buffer.popleft()

    @property
    def is_at_work(self) -> bool:
        """Whether a handler is running, or a message or an acknowledgement is on its way."""
        return self.running > 0 or any(feed.buffer or feed.port.unanswered for feed in self.feeds)

    @property
    def is_done(self) -> bool:
        """Whether all queues were found empty, in a burst, after the last handler had ended."""
        return not self.is_at_work and all(
            feed.empty_at == self.finished or not feed.places for feed in self.feeds
        )
