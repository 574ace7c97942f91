"""Gives a worker access to a queue, by the same paths that the queue's own loop takes."""
# ruff: noqa: SLF001 - the worker and the queue are one library

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delayq._engine.line import Taken
    from delayq._reliable.message import Message
    from delayq._reliable.queue import ReliableQueue
    from delayq._reliable.replies import Claim

    Claimed = Taken[Claim]

# Maximum number of messages that one call claims from a partition.
_BATCH = 100


class Source:
    """Claims messages of one queue, and gives back those that no handler has begun.

    Attributes:
        name: The queue's name.
    """

    def __init__(self, queue: ReliableQueue[Any]) -> None:
        self._queue = queue
        self._open = queue._open
        self.name: str = queue.name
        # Claims up to a number of due messages, waiting at most some seconds for the first.
        self.claim = queue._take
        # Gives messages back as they were, without counting an attempt.
        self.give_back = self._open.waiters.give_back
        self.quiet = self._open.quiet
        self.flush = self._open.flush

    @property
    def most_at_once(self) -> int:
        """Maximum number of messages to claim at once."""
        return _BATCH * len(self._open.partitions)

    @property
    def unanswered(self) -> int:
        """Number of acknowledgements in flight."""
        return self._open.unanswered

    def message(self, claimed: Claimed) -> Message[Any]:
        """Return the message to handle."""
        return self._queue._leased(claimed[1])
