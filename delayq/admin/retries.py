"""Finds the live messages of which an attempt has failed, counts them by cause, and buries them.

Messages are read in steps of about 100, so no call holds up the server. Every function may raise
the errors of :class:`~delayq.errors.ServerError`.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from delayq._background import gather_all
from delayq._reliable.dead_letters import half_way
from delayq.admin.letters import MAX_CAUSES, OTHER_CAUSES, cause_of
from delayq.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._reliable.store import ReliableStore
    from delayq.admin.letters import GroupBy

BURIED = "buried by an operator"
"""The reason of dead letters that an operator has made, unless another one is given."""
# A hash that shrinks while it is read repeats a few of the fields that came just before.
_REMEMBERED = 10_000
# How many messages a call buries: to bury one takes as long as to redrive it.
_AT_A_TIME = 10


class FailedMessage(NamedTuple):
    """A live message of which an attempt has failed.

    Attributes:
        partition: The number of the partition that holds it.
        id: Its id.
        error: The last error in one line.
    """

    partition: int
    id: bytes
    error: str


class ReadPosition(NamedTuple):
    """Where to go on: a partition, and the server's cursor in it."""

    partition: int
    cursor: str


START = ReadPosition(0, "0")
"""The position of the first step."""


class FailedReader:
    """Reads the failed messages of a queue step by step, in no order, each once.

    Messages that fail or end meanwhile may be missing.

    Attributes:
        position: Where the next step begins; None at the end.
    """

    def __init__(self, stores: Sequence[ReliableStore], position: ReadPosition = START) -> None:
        self._stores = stores
        self._seen: dict[bytes, None] = {}
        self.position: ReadPosition | None = position if position.partition < len(stores) else None

    async def step(self) -> list[FailedMessage]:
        """Return the next messages, about 100; none if there are none in this step, or left."""
        if self.position is None:
            return []
        number = self.position.partition
        cursor, errors = await self._stores[number].failed(self.position.cursor)
        messages = [
            FailedMessage(number, id, error)
            for id, error in errors.items()  # noqa: A001
            if id not in self._seen
        ]
        if cursor != "0":
            self.position = ReadPosition(number, cursor)
            self._seen |= dict.fromkeys(errors)
            for id in [*islice(self._seen, max(0, len(self._seen) - _REMEMBERED))]:  # noqa: A001
                del self._seen[id]
        else:
            is_last = number + 1 == len(self._stores)
            self.position = None if is_last else ReadPosition(number + 1, "0")
            self._seen.clear()
        return messages


class RetryCount:
    """A count of the failed messages of a queue by their cause, and how far it has come.

    Attributes:
        total: The number of messages that had failed when the count began.
        examined: How many were examined.
    """

    def __init__(self, reader: FailedReader, by: GroupBy, total: int) -> None:
        self._reader = reader
        self._by = by
        self._counts: Counter[str] = Counter()
        self.total = total

    @classmethod
    async def begin(cls, stores: Sequence[ReliableStore], by: GroupBy) -> RetryCount:
        """Begin a count."""
        return cls(FailedReader(stores), by, await count(stores))

    @property
    def examined(self) -> int:
        return self._counts.total()

    @property
    def is_complete(self) -> bool:
        """Whether all messages were examined."""
        return self._reader.position is None

    async def go_on(self, deadline: float = float("inf")) -> None:
        """Go on with the count; begin no step but the first after ``deadline``, a moment of the
        monotonic clock.
        """
        while not self.is_complete:
            for message in await self._reader.step():
                cause = cause_of(message.error, "", self._by)
                if cause not in self._counts and len(self._counts) >= MAX_CAUSES:
                    cause = OTHER_CAUSES
                self._counts[cause] += 1
            if time.monotonic() >= deadline:
                return

    @property
    def number_of_causes(self) -> int:
        return len(self._counts)

    def causes(self, limit: int) -> list[tuple[str, int]]:
        """Return up to ``limit`` causes so far with their counts, the most frequent first."""
        return self._counts.most_common(limit)


async def bury(
    stores: Sequence[ReliableStore],
    error: str,
    reason: str = BURIED,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Make dead letters of the failed messages whose last error contains a text, in any case.

    Args:
        stores: The partitions of the queue.
        error: The text.
        reason: Why they are buried.
        dry_run: Change nothing.
        progress: Called after each step with the number of messages examined so far, and the total.

    Returns:
        How many messages match, and how many were buried: all of them but those that workers have,
        or that are gone.

    Raises:
        OutcomeUnknown: Some were buried, or may have been. With any other error, none was.
    """
    reader, total = FailedReader(stores), await count(stores)
    examined = matching = buried = 0
    while reader.position is not None:
        try:
            messages = await reader.step()
            matches = [message for message in messages if error.lower() in message.error.lower()]
            examined, matching = examined + len(messages), matching + len(matches)
            for at in range(0, 0 if dry_run else len(matches), _AT_A_TIME):
                page = matches[at : at + _AT_A_TIME]
                names = await stores[page[0].partition].bury_waiting(
                    [message.id for message in page], reason
                )
                buried += sum(name is not None for name in names)
        except ServerError as refusal:
            raise half_way(refusal, buried) from refusal.__cause__
        if progress is not None:
            progress(min(examined, total), total)
    return matching, buried


async def count(stores: Sequence[ReliableStore]) -> int:
    """Return the number of failed messages."""
    return sum(await gather_all([store.count_failed() for store in stores]))
