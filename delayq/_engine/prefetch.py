"""Decides how many messages to fetch ahead, and how many of them go back. Pure.

Messages fetched ahead are out of reach for other consumers, so no more are fetched than can be
handled, or at least begun, within a moment. How long handling takes is known only afterwards: so
whatever waits behind a handler that takes longer than a moment goes back.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

Item = TypeVar("Item")

MAX_MESSAGES = 100
WITHIN = 0.05
"""How soon their handling should begin, in seconds."""
ITERATIONS_TO_SEND = 2
"""Iterations of the event loop until the task that makes a call has started, and has sent it."""
# In smaller batches, handling takes so much time that the time spent fetching does not matter.
_WORTH_FETCHING = 25
# How many times larger the next batch may be. A loop begins with one message, and its third batch
# is full.
_GROWTH = 10
# How many times slower than expected handling may become until messages go back.
_SLOWDOWN = 4
# The weight of one more message in the mean.
_WEIGHT = 1 / 16


def begun_soon(handlers: int, took: float, max_messages: int = MAX_MESSAGES) -> int:
    """Return how many messages ``handlers`` begin within a moment if each takes ``took`` seconds:
    ``max_messages`` at most.
    """
    if took * max_messages <= handlers * WITHIN:
        return max_messages
    return int(handlers * WITHIN / took)


def next_batch(batch: int, handled: int, took: float) -> int:
    """Return how many messages to request after ``handled`` of ``batch`` took ``took`` seconds:
    several times as many while batches come back full, and few at once when handling becomes slow.
    """
    wish = batch * _GROWTH if handled >= batch else batch
    return max(1, min(wish, begun_soon(handled, took)))


def to_keep(ahead: int, handled: int) -> int:
    """Return how many of the messages ``ahead`` to keep if ``handled`` messages were handled in the
    last moment: all, unless handling has become much slower than expected.
    """
    return ahead if ahead <= handled * _SLOWDOWN else handled


def moving_mean(before: float | None, took: float) -> float:
    """Return the mean time after one more message. The most recent ones count most."""
    return took if before is None else before + (took - before) * _WEIGHT


class Pace:
    """How fast one loop handles its messages.

    Attributes:
        batch: The size of the next batch: as many messages as the loop handles in a moment.
        check_at: When to call :meth:`messages_to_keep`, and then :meth:`begin_check`, in seconds.
    """

    def __init__(self) -> None:
        self.batch: int = 1
        self.check_at: float = 0.0
        # The messages of this batch, and how many of them went back.
        self._count = 0
        self._returned = 0
        # The largest size of the next batch.
        self._max_batch = MAX_MESSAGES
        # How many messages waited in hand when the present check began.
        self._waiting = 0

    def begin_batch(self, count: int, now: float) -> None:
        """Begin to handle a batch of ``count`` messages."""
        self._count, self._returned, self._max_batch = count, 0, MAX_MESSAGES
        # The first one is handled at once, so it does not wait.
        self.begin_check(count - 1, now)

    def end_batch(self, took: float) -> None:
        """Adapt the size of the next batch: handling this one took ``took`` seconds."""
        batch = next_batch(self.batch, self._count - self._returned, took)
        self.batch = min(batch, max(1, self._max_batch))

    def on_returned(self, count: int, keep: int) -> None:
        """Record that ``count`` messages of the batch go back, and ``keep`` stay at most."""
        self._returned += count
        self._max_batch = min(self._max_batch, keep)

    def begin_check(self, waiting: int, now: float) -> None:
        """Observe the loop for a moment, while ``waiting`` messages are in hand."""
        self._waiting, self.check_at = waiting, now + WITHIN

    def messages_to_keep(self, waiting: int, ahead: int) -> int | None:
        """Return how many of the messages ``ahead`` to keep, of which ``waiting`` are in hand; None
        if the loop is fast enough for all of them.
        """
        handled = self._waiting - waiting
        keep = to_keep(ahead, handled)
        return keep if keep < ahead or not handled else None

    def fetches_more(self, count: int, requested: int) -> bool:
        """Return whether to fetch the next batch while the loop handles the ``count`` messages of
        this one, of which ``requested`` were requested.
        """
        return count >= requested and self.batch >= _WORTH_FETCHING


class Prefetched(deque[Item]):
    """The messages that a loop has in hand. While there are some, or it fetches more, it does not
    wait for acknowledgements, because it would wait for the server twice.
    """

    ack_time: float = 0.0
    """How long it has waited for acknowledgements, which does not count as handling, in seconds."""
    awaits_ack: bool = False
    """Whether it waits for an acknowledgement."""
    is_fetching: bool = False
    """Whether the next messages are being fetched."""
    max_unanswered: int = 400
    """With this many acknowledgements in flight, it waits for the next one all the same."""


class AlwaysMore:
    """Stands for :class:`Prefetched` in a worker, which always has something else to do while an
    acknowledgement is on its way.
    """

    is_fetching: bool = True

    def __init__(self, max_unanswered: int) -> None:
        self.ack_time: float = 0.0
        self.awaits_ack: bool = False
        self.max_unanswered: int = max_unanswered


Ahead = Prefetched[Any] | AlwaysMore
"""The messages that a consumer handles next."""
