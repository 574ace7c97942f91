"""Generates the ids of a queue's messages, and thereby decides in which partitions these lie."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from delayq._reliable.ids import new_block, new_id
from delayq._reliable.placement import endings_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delayq._engine.batcher import Batcher
    from delayq._reliable.new_message import NewMessage
    from delayq._reliable.partition import Partition

# The largest number of messages in a row for one partition, as many as share a call; and for how
# long it gets them, in nanoseconds: not for longer, because its server may hang.
_IN_A_ROW = 200
_TURN_NS = 5_000_000


class IdSource:
    """Generates ids for messages that are about to be sent.

    Messages of one partition share calls, so a partition gets many messages in a row. The
    partitions take turns, except those on servers that failed lately.

    Attributes:
        partitions: Among how many partitions new messages are placed.
        new_id: Returns a new id.
        commits: Stores the message that gets this id: submit it before anything else runs.
    """

    def __init__(
        self, partitions: Sequence[Partition], is_unreachable: Callable[[Partition], bool]
    ) -> None:
        """Args:
        partitions: The open partitions, in order, to which others may be added.
        is_unreachable: Returns whether the server of a partition is not available.
        """
        self._opened_partitions = partitions
        self._is_unreachable = is_unreachable
        self._partition = random.randrange(1024)
        # How many more ids are for this partition, and until when; those that are prepared, and
        # until when these are used.
        self._left = 0
        self._turn_ends_ns = 0
        self._ids: Iterator[str] = iter(())
        self._until_ns = 0
        self.partitions: int = 1
        self.new_id: Callable[[], str] = new_id
        self.commits: Batcher[NewMessage, int] = partitions[0].offers.commits

    def settings_changed(self, partitions: int) -> None:
        """Generate ids for this number of partitions from now on."""
        self._left, self.partitions = 0, partitions
        self.commits = self._opened_partitions[0].offers.commits
        self.new_id = new_id if partitions == 1 else self._new_id

    def _new_id(self) -> str:
        # If the clock was set back, the ids continue where they were.
        while not (
            self._left
            and time.time_ns() < self._until_ns
            and (found := next(self._ids, None)) is not None
        ):
            self._renew()
        self._left -= 1
        return found

    def _renew(self) -> None:
        opened, count = self._opened_partitions, self.partitions
        now_ns = time.time_ns()
        # The clock may have been set back.
        if not self._left or not 0 < self._turn_ends_ns - now_ns <= _TURN_NS:
            self._left, self._turn_ends_ns = _IN_A_ROW, now_ns + _TURN_NS
            for _ in range(count):
                self._partition = (self._partition + 1) % count
                if not self._is_unreachable(opened[self._partition]):
                    break
            self.commits = opened[self._partition].offers.commits
        beginning, self._until_ns = new_block()
        self._ids = map(beginning.__add__, endings_in(beginning, self._partition, count))
