"""Gives a worker access to a queue, by the same paths that the queue's own loop takes."""
# ruff: noqa: SLF001 - the worker and the queue are one library

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._reliable.partitions import PartitionedQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._engine.waiters import Taken
    from delayq._reliable.message import Message
    from delayq._reliable.queue import ReliableQueue
    from delayq._reliable.replies import Claim

    # A claimed message, and the queue or partition that holds it.
    Claimed = tuple[ReliableQueue[Any], Taken[Claim]]

# Maximum number of messages that one call claims from a queue or partition.
_BATCH = 100


class Source:
    """Claims messages of one queue, and gives back those that no handler has begun.

    Its partitions, if any, take turns.
    """

    def __init__(self, queue: ReliableQueue[Any] | PartitionedQueue[Any]) -> None:
        self._queue = queue
        self._parts = queue.partitions if isinstance(queue, PartitionedQueue) else (queue,)

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
        if isinstance(self._queue, PartitionedQueue):
            return [*await self._queue._take(count, wait)]
        return [(self._queue, taken) for taken in await self._queue._take(count, wait)]

    def give_back(self, claimed: Sequence[Claimed]) -> None:
        """Give messages back as they were, without counting an attempt."""
        for part in self._parts:
            if some := [taken for queue, taken in claimed if queue is part]:
                part._open.claims.taker.give_back(some)

    async def quiet(self, within: float) -> None:
        """Wait until the messages given back are on the server, for at most ``within`` seconds."""
        await asyncio.gather(*(part._open.claims.quiet(within) for part in self._parts))

    @property
    def most_at_once(self) -> int:
        """Maximum number of messages to claim at once."""
        return _BATCH * len(self._parts)

    @property
    def unanswered(self) -> int:
        """Number of acknowledgements in flight."""
        return sum(part._open.settling.unanswered for part in self._parts)

    async def flush(self) -> None:
        """Wait for the answers to all acknowledgements sent before now."""
        await asyncio.gather(*(part._open.settling.flush() for part in self._parts))

    def message(self, claimed: Claimed) -> Message[Any]:
        """Return the message to handle."""
        queue, taken = claimed
        return queue._leased(taken[1])
