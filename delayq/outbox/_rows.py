"""The rows of an outbox: what they hold, and how they become messages. Pure.

A batch is a number of rows that are sent together, in their order. Before it is sent, its *mark* is
committed in its first row: a token, the number of partitions by which its messages are placed, and
the numbers of its rows. As long as one row of a queue has a mark, no other batch of this queue is
begun. So whoever takes over from a relay that has died sends the same messages under the same
token, which stores nothing twice, and rows never overtake each other.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from delayq._durations import when_due
from delayq._reliable.bodies import OptionsMessage, format_delay, group_in
from delayq._reliable.ids import checked_id, new_id
from delayq._reliable.keys import PRIORITIES
from delayq._reliable.offer_encoder import OfferEncoder
from delayq._reliable.relay_port import TOKEN_LENGTH
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from delayq._reliable.offer import Offer
    from delayq.codecs import Codec

CHANNEL = "delayq_outbox"
"""The channel on which PostgreSQL announces rows, with the queue's name."""
BATCH_ROWS, BATCH_BYTES = 500, 4 * 1024 * 1024
"""The largest number of rows in a batch, and of their bytes, of which one row may have more."""
LONGEST_NAME = 512
"""The largest number of characters in the name of a queue, or in an id."""
_MARK = re.compile(r"1 (\S{1,64}) ([0-9]{1,6}) ([0-9,-]+)")
# The most characters of an error in its row.
_LONGEST_ERROR = 2000


@dataclass(frozen=True)
class Row:
    """A row that was read.

    Attributes:
        number: Tells the order.
        id: The message's id.
        body: Its limits, headers and payload, as the server stores them.
        priority: 0 to 9.
        delay_us: The delay, counted from ``created_us``, in microseconds; None with ``at_us``.
        at_us: The moment when it is due, in microseconds since 1970.
        ttl_us: Its time to live, counted from ``created_us``; 0 for no limit.
        unique_us: For how long its id counts as taken, likewise.
        on_duplicate: How to treat an id that is taken.
        created_us: When it was written, by the database's clock, in microseconds since 1970.
    """

    number: int
    id: str
    body: bytes = field(repr=False)
    priority: int
    delay_us: int | None
    at_us: int | None
    ttl_us: int
    unique_us: int
    on_duplicate: str
    created_us: int

    def message(self, now_us: int) -> OptionsMessage:
        """Return the message, whose delay counts from now.

        Args:
            now_us: The time on the database's clock.

        Raises:
            BadInput: It can never be stored, because somebody has changed the row.
        """
        elapsed_us = max(0, now_us - self.created_us)
        if not isinstance(self.body, bytes) or b"\n" not in self.body:
            raise BadInput("the body is damaged: it has no newline before the payload")
        if not 0 <= self.priority < PRIORITIES:
            raise BadInput(f"the priority is {self.priority}")
        if self.on_duplicate not in ("raise", "ignore", "replace"):
            raise BadInput(f"on_duplicate is {self.on_duplicate!r}")
        delay_us = max(0, (self.delay_us or 0) - elapsed_us)
        return OptionsMessage(
            checked_id(self.id),
            self.priority,
            format_delay(delay_us) if self.at_us is None else f"@{max(0, self.at_us)}",
            _remaining(self.ttl_us, elapsed_us),
            _remaining(self.unique_us, elapsed_us),
            self.on_duplicate,
            self.body,
            id_generated=False,
            group=group_in(self.body),
        )


FIELDS = (
    *("id", "body", "priority", "delay_us", "at_us", "ttl_us", "unique_us", "on_duplicate"),
    "created_us",
)
"""The fields of :class:`Row` behind its number, in order: columns of the table."""


def _remaining(duration_us: int, elapsed_us: int) -> int:
    """Return the rest of a duration, 0 if there is none to begin with."""
    # One that has ended must not become endless.
    return max(1, duration_us - elapsed_us) if duration_us else 0


def new_row(queue: str, offer: Offer[Any], codec: Codec[Any], max_payload: int) -> dict[str, Any]:
    """Check and encode an offer, and return the values of its row by column, without
    ``created_us``.

    Raises:
        BadInput, EncodeError: As for :meth:`delayq.ReliableQueue.offer`.
    """
    message = OfferEncoder(codec, max_payload).with_options(offer)
    when = when_due(offer.delay, offer.at)
    return {
        "queue": checked_queue(queue),
        # Longer than those of queues: no server can notice that another process makes the same.
        "id": message.id or new_id() + secrets.token_urlsafe(4),
        "body": message.content,
        "priority": message.priority,
        "delay_us": when if isinstance(when, int) else None,
        "at_us": int(when[1:]) if isinstance(when, str) else None,
        "ttl_us": message.ttl_us,
        "unique_us": message.unique_us,
        "on_duplicate": message.on_duplicate,
    }


def new_token() -> str:
    """Return a token for a batch, which no client's calls begin with."""
    return "r" + secrets.token_urlsafe(9)[: TOKEN_LENGTH - 1]


def checked_queue(name: str) -> str:
    """Return the name of a queue if it can be in a row. Raises BadInput otherwise."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise BadInput(f"queue must be a str of 1 to {LONGEST_NAME} characters, not {name!r}")
    return name


@dataclass(frozen=True)
class Mark:
    """The mark of a batch, as its first row has it.

    Attributes:
        token: Names the batch.
        partitions: The number of partitions by which its messages are placed.
        numbers: The numbers of its rows, in order.
    """

    token: str
    partitions: int
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        runs: list[list[int]] = []
        for number in self.numbers:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        text = ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in runs)
        return f"1 {self.token} {self.partitions} {text}"

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Read a mark.

        Raises:
            ValueError: It is none.
        """
        match = _MARK.fullmatch(text)
        if match is None:
            raise ValueError("a mark of a batch cannot be read: a newer delayq has written it")
        numbers: list[int] = []
        for run in match[3].split(","):
            first, _, last = run.partition("-")
            numbers += range(int(first), int(last or first) + 1)
        return cls(match[1], int(match[2]), tuple(numbers))


@dataclass(frozen=True)
class RowBatch:
    """A batch that was read.

    Attributes:
        mark: Its mark, which is committed.
        rows: Its rows, in order.
        now_us: When they were read, by the database's clock.
    """

    mark: Mark
    rows: Sequence[Row]
    now_us: int


@dataclass(frozen=True)
class Result:
    """What became of a batch. Rows that are not named are stored, and can be deleted.

    Attributes:
        mark: Its mark.
        errors: The errors of rows that can never be stored, by number.
        unsent: The numbers of rows to be sent again, in another batch.
    """

    mark: Mark
    errors: Mapping[int, str] = field(default_factory=dict)
    unsent: frozenset[int] = frozenset()

    @property
    def stored(self) -> list[int]:
        """The numbers of the rows that are stored."""
        return [
            number
            for number in self.mark.numbers
            if number not in self.errors and number not in self.unsent
        ]


class Rows(Protocol):
    """The rows of an outbox, in their database. Methods block, and are called in threads, or where
    the database's driver awaits for them.
    """

    def queues(self, connection: Any, /) -> Sequence[str]:
        """Return the names of the queues that have rows to be sent."""

    def begin(
        self, connection: Any, queue: str, new_mark: Callable[[Sequence[int]], Mark] | None, /
    ) -> RowBatch | None:
        """Return the next batch of a queue: the one that has a mark, or else a new one.

        Args:
            connection: A connection, in a transaction that is committed afterwards.
            queue: The queue.
            new_mark: Returns the mark for the rows with these numbers; None to begin nothing.

        Returns:
            The batch; None if there are no rows, or another relay begins a batch at the moment.
        """

    def finish(self, connection: Any, queue: str, result: Result, /) -> None:
        """Delete the rows that are stored, set aside those that never can be, and remove the
        mark.
        """


def first_bytes(sizes: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers of the rows that one batch may have, given numbers and sizes in order."""
    numbers: list[int] = []
    remaining = BATCH_BYTES
    for number, size in sizes:
        remaining -= size
        if numbers and remaining < 0:
            break
        numbers.append(number)
    return numbers


def error_text(error: BaseException) -> str:
    """Return an error as its row has it."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR].replace("\0", "")
