"""Gives a worker access to a queue, by the same paths that the queue's own loop takes."""
# ruff: noqa: SLF001 - the worker and the queue are one library

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._engine.line import Taken
    from delayq._reliable.message import Message
    from delayq._reliable.queue import ReliableQueue
    from delayq._reliable.replies import Claim

    Claimed = Taken[Claim]

# Maximum number of messages that one call claims from a partition.
_BATCH = 100


class Source:
    """Claims messages of one queue, and gives back those that no handler has begun."""

    def __init__(self, queue: ReliableQueue[Any]) -> None:
        self._queue = queue
        self._open = queue._open

    @property
    def name(self) -> str:
        return self._queue.name

    async def claim(self, count: int, wait: float | None) -> Sequence[Claimed]:
        """Take up to ``count`` due messages, waiting at most ``wait`` seconds for the first (None:
        indefinitely).

        Raises:
            ServerUnavailable, OutcomeUnknown: Only with a ``wait`` of 0. Otherwise as for
                :meth:`ReliableQueue.claim`.
        """
        return await self._queue._take(count, wait)

    def give_back(self, claimed: Sequence[Claimed]) -> None:
        """Give messages back as they were, without counting an attempt."""
        self._open.waiters.give_back(claimed)

    async def quiet(self, within: float) -> None:
        """Wait until the messages given back are on the server, for at most ``within`` seconds."""
        await self._open.quiet(within)

    @property
    def most_at_once(self) -> int:
        """Maximum number of messages to claim at once."""
        return _BATCH * len(self._open.partitions)

    @property
    def unanswered(self) -> int:
        """Number of acknowledgements in flight."""
        return self._open.unanswered

    async def flush(self) -> None:
        """Wait for the answers to all acknowledgements sent before now."""
        await self._open.flush()

    def message(self, claimed: Claimed) -> Message[Any]:
        """Return the message to handle."""
        return self._queue._leased(claimed[1])
