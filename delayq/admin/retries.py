"""Finds the live messages of which an attempt has failed, and counts them by cause.

Messages are read in steps of about 100, so no call holds up the server. Every function may raise
the errors of :class:`~delayq.errors.ServerError`.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from delayq._background import gather_all
from delayq.admin.letters import MAX_CAUSES, OTHER_CAUSES, cause_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._reliable.store import ReliableStore
    from delayq.admin.letters import GroupBy


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
    """Reads the failed messages of a queue step by step, in no order.

    Messages that fail or end meanwhile may be missing.

    Attributes:
        position: Where the next step begins; None at the end.
    """

    def __init__(self, stores: Sequence[ReliableStore], position: ReadPosition = START) -> None:
        self._stores = stores
        self.position: ReadPosition | None = position if position.partition < len(stores) else None

    async def step(self) -> list[FailedMessage]:
        """Return the next messages, about 100; none if there are none in this step, or left."""
        if self.position is None:
            return []
        number = self.position.partition
        cursor, errors = await self._stores[number].failed(self.position.cursor)
        if cursor != "0":
            self.position = ReadPosition(number, cursor)
        else:
            is_last = number + 1 == len(self._stores)
            self.position = None if is_last else ReadPosition(number + 1, "0")
        return [FailedMessage(number, *item) for item in errors.items()]


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


async def count(stores: Sequence[ReliableStore]) -> int:
    """Return the number of failed messages."""
    return sum(await gather_all([store.count_failed() for store in stores]))
