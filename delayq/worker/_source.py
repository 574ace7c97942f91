"""What a worker uses of a queue: the same ways as the queue's own loop takes."""
# ruff: noqa: SLF001 - the worker and the queue are one library

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._scheduling.claims import Claim
    from delayq._scheduling.taker import Taken
    from delayq.message import Message
    from delayq.reliable_queue import ReliableQueue


class Source:
    """Claims messages of one queue, and gives back what nobody began to handle."""

    def __init__(self, queue: ReliableQueue[Any]) -> None:
        self._queue = queue
        self._claims = queue._open.claims
        self._recurrence = queue._open.recurrence
        self._settling = queue._open.settling

    @property
    def name(self) -> str:
        return self._queue.name

    async def claim(self, count: int, wait: float | None) -> list[Taken[Claim]]:
        """Take what is due, up to ``count``, waiting so many seconds for the first (None: as long as it takes).

        Raises:
            ServerUnavailable, OutcomeUnknown: Only with a ``wait`` of 0. Otherwise as :meth:`ReliableQueue.claim`.
        """
        while taken := await self._claims.taker.get(count, wait):
            # Occurrences that are not to be handed out are left out.
            if kept := await self._recurrence.begin(taken):
                return kept
        return []

    def give_back(self, taken: Sequence[Taken[Claim]]) -> None:
        """These go back as they were; no attempt is counted."""
        self._claims.taker.give_back(taken)

    async def quiet(self, within: float) -> None:
        """Wait until what was given back is on the server, ``within`` seconds at most."""
        await self._claims.quiet(within)

    @property
    def unanswered(self) -> int:
        """How many acknowledgements are on their way."""
        return self._settling.unanswered

    async def flush(self) -> None:
        """Wait for the answers to all acknowledgements that were sent before now."""
        await self._settling.flush()

    def message(self, claim: Claim) -> Message[Any]:
        return self._queue._leased(claim)
