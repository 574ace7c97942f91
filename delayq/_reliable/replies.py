"""The replies of a reliable queue's scripts and commands, typed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._reliable.settings import Policy

State = Literal["delayed", "ready", "leased"]
"""The state of a live message: not due yet, due, or leased to a worker."""

_MOST_US = 2**62


def parse_us(score: bytes | float) -> int:
    """Return a score or a stored moment in whole microseconds.

    Other programs may have left an infinity or NaN behind. The result is finite and not negative
    all the same.
    """
    moment = float(score)
    return int(min(max(moment, 0.0), _MOST_US)) if moment == moment else 0  # noqa: PLR0124 - NaN


@dataclass(slots=True, eq=False)
class Claim:
    """A message that belongs to this client until its lease ends.

    Attributes:
        id: The message's id, as stored on the server.
        token: Identifies the lease.
        priority: 0 to 9.
        attempt: The number of this attempt, from 1.
        due_us: When the message was due, in microseconds.
        body: The body stored under the message's id.
        ends_us: When the lease ends, in microseconds.
        fresh_until: Local time until which at least half of the lease is left, in seconds.
        forgiven: Number of attempts that do not count towards the message's death, because its
            worker died, perhaps of another message.
        is_suspect: Whether the message may have killed its last worker.
        policy: The settings with which it was claimed; None if it was only read.
        partition: The number of the partition that holds it.
    """

    id: bytes
    token: str
    priority: int
    attempt: int
    due_us: int
    body: bytes = field(repr=False)
    ends_us: int
    fresh_until: float
    forgiven: int = 0
    is_suspect: bool = False
    policy: Policy | None = None
    partition: int = 0

    @property
    def name(self) -> tuple[bytes, str, int]:
        """The id, token and priority that every script needs to settle the claim."""
        return (self.id, self.token, self.priority)


class ClaimReply(NamedTuple):
    """The reply to a claim.

    Attributes:
        now_us: The server's time, in microseconds.
        wait_us: Microseconds until the next message is due or the next lease ends, suspects apart:
            0 if that is now, -1 if there is none or the queue is paused.
        expired: Number of messages that were past their time to live.
        died: Number of messages that had used all their attempts.
        listeners: Number of clients that heard the notice; 0 if there was none, -1 if the user may
            not publish it.
        messages: The id, priority, attempt, due time and body of each message that was handed out,
            one behind the other.
        is_suspect: Whether the message is a suspect, which is handed out alone.
        more_suspects: Whether suspects wait that were not handed out.
        dropped: The ids of occurrences of recurring messages that were dropped or died.
    """

    now_us: int
    wait_us: int
    expired: int
    died: int
    listeners: int
    messages: Sequence[Any]
    is_suspect: int
    more_suspects: int
    dropped: list[bytes]

    def claims(
        self, token: str, ends_us: int, fresh_until: float, policy: Policy, partition: int
    ) -> list[Claim]:
        """Return the messages that were handed out under the lease of that token."""
        parts, is_suspect = iter(self.messages), self.is_suspect == 1
        return [
            Claim(
                message,
                token,
                priority,
                attempt if type(attempt) is int else int(attempt.partition(b"-")[0]),
                # As parse_us() does. The script hands out no message with an infinite score, and a
                # call would cost time here.
                int(float(due)),
                body,
                ends_us,
                fresh_until,
                0 if type(attempt) is int else int(attempt.partition(b"-")[2]),
                is_suspect,
                policy,
                partition,
            )
            for message, priority, attempt, due, body in zip(
                parts, parts, parts, parts, parts, strict=True
            )
        ]


class Offered(NamedTuple):
    """What became of the messages of one call.

    Attributes:
        outcomes: For each message: 1 stored, 2 stored in the place of an earlier one, 0 ignored, -1
            there is one already, -2 full, -4 there is none to swap.
        announced: Whether the user may announce a new head, if there was one.
    """

    outcomes: list[int]
    announced: bool


class Extended(NamedTuple):
    """The reply to a renewal: the server's time in microseconds, and whether each lease was still
    ours.
    """

    now_us: int
    held: Sequence[bool]


class StoredMessage(NamedTuple):
    """A live message, as read without claiming it.

    Attributes:
        id: The message's id.
        state: Its state.
        priority: 0 to 9.
        moment_us: When it is due, or when its lease ends, in microseconds.
        attempt: Number of attempts used, including the one in progress.
        body: The body stored under its id.
        error: The error of its last failed attempt; None if there was none.
    """

    id: bytes
    state: State
    priority: int
    moment_us: int
    attempt: int
    body: bytes
    error: str | None

    @classmethod
    def of(cls, id: bytes, facts: Sequence[Any]) -> StoredMessage:  # noqa: A002
        """Parse what ``get.lua`` and ``list.lua`` return for a message."""
        state, priority, moment, attempt, body, error = facts
        text = None if error is None else error.decode(errors="replace")
        return cls(id, state.decode(), priority, parse_us(moment), attempt, body, text)


class MessageTimes(NamedTuple):
    """The stored times of a message, in microseconds; None where nothing is stored.

    Attributes:
        due_us: When a leased message was due.
        expires_us: When its time to live ends.
    """

    due_us: int | None
    expires_us: int | None

    @classmethod
    def of(cls, lease: bytes | None, expiry: bytes | None) -> MessageTimes:
        """Parse the two stored values."""
        parts = (lease or b"").split(b":", 2)
        return cls(
            parse_us(parts[1]) if len(parts) == 3 else None,
            None if expiry is None else parse_us(expiry),
        )


class StoredLetter(NamedTuple):
    """A dead letter.

    Attributes:
        name: The name under which it is stored.
        letter: The letter, as :func:`delayq._reliable.bodies.parse_letter` takes it.
        died_us: When the message died, in microseconds.
    """

    name: bytes
    letter: bytes
    died_us: int


class Redriven(NamedTuple):
    """How many of some dead letters were requeued, and how many stayed."""

    requeued: int
    stayed: int


class Purged(NamedTuple):
    """One step of a purge.

    Attributes:
        dropped: Number of messages that were dropped.
        passed_over: Number of leased messages among the delayed ones, which the next step has to
            skip.
        is_last: Whether no more messages are left to look at.
    """

    dropped: int
    passed_over: int
    is_last: bool


class StoredSchedules(NamedTuple):
    """The record of each schedule by name, and by how much tests have moved the time, in
    microseconds.
    """

    records: dict[bytes, bytes]
    shift_us: int


class Occurrence(NamedTuple):
    """The outcome for a claimed occurrence of a recurring message.

    Attributes:
        handed_out: Whether to hand it out.
        left: As :meth:`~delayq._reliable.store.ReliableStore.recur` returns it.
    """

    handed_out: bool
    left: int
