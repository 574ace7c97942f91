"""The replies of a reliable queue's scripts and commands, typed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from delayq._reliable.bodies import due_us

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.settings import Policy

LiveState = Literal["delayed", "ready", "leased"]
"""The state of a live message: not due yet, due, or leased to a worker."""
LIVE_STATES: tuple[LiveState, ...] = get_args(LiveState)

_MOST_US = 2**62


def parse_us(score: bytes | float) -> int:
    """Return a score or a stored moment in whole microseconds.

    Other programs may have left an infinity or NaN behind. The result is finite and not negative
    all the same.
    """
    moment = float(score)
    return int(min(max(moment, 0.0), _MOST_US)) if moment == moment else 0  # noqa: PLR0124 - NaN


class Start(NamedTuple):
    """A start that a rate has counted.

    Attributes:
        at_us: When, by the server's clock, in microseconds.
        period_us: The period of the rate, in microseconds.
    """

    at_us: int
    period_us: int


class ClaimExtras:
    """What only some claims have. The attributes are not set before they are needed, because that
    would take time for each message.

    Attributes:
        begun_at: When its handler began, in loop time.
        error: Its last error, if it was read without being claimed.
        result: The encoded result of its handler, if there is one.
        followers: The messages that its acknowledgement stores, or none if it belongs to a batch;
            unset for most messages, from which nothing follows.
        counted_start: Its start, if a rate has counted it.
        ttl_ends_at: Local time at which its time to live ends, in seconds, if it has one.
    """

    __slots__ = ("begun_at", "counted_start", "error", "followers", "result", "ttl_ends_at")

    begun_at: float
    error: str
    result: bytes
    followers: list[OptionsMessage]
    ttl_ends_at: float
    counted_start: Start


@dataclass(slots=True, eq=False)
class Claim(ClaimExtras):
    """A message that belongs to this client until its lease ends.

    Attributes:
        id: The message's id, as stored on the server.
        token: Identifies the lease; empty if the message was only read.
        body: The body stored under the message's id.
        ends_us: When the lease ends, in microseconds.
        fresh_until: Local time until which at least half of the lease is left, in seconds.
        policy: The settings with which it was claimed; None if it was only read.
        partition: The number of the partition in which it lies.
        is_suspect: Whether the message may have killed its last worker.
        priority: 0 to 9.
        attempt: The number of this attempt, from 1.
        uncounted: Number of attempts that do not count towards the message's death, because its
            worker died, perhaps of another message.
        known_due_us: When the message was due, in microseconds; None if the body tells it.
    """

    id: bytes
    token: bytes
    body: bytes = field(repr=False)
    ends_us: int
    fresh_until: float
    policy: Policy | None
    partition: int
    is_suspect: bool = False
    priority: int = 0
    attempt: int = 1
    uncounted: int = 0
    known_due_us: int | None = None

    @property
    def began_alone(self) -> bool:
        """Whether the server believes that it was alone in this client when it was claimed."""
        return int(self.token) % 2 == 1

    @property
    def lease_id(self) -> tuple[bytes, bytes]:
        """The id and the token, which identify the lease."""
        return (self.id, self.token)

    @property
    def start(self) -> Start | None:
        """Its start, as a rate has counted it; None if there is no rate."""
        return getattr(self, "counted_start", None)

    @property
    def expires_at(self) -> float:
        """Local time at which its time to live ends, in seconds."""
        return getattr(self, "ttl_ends_at", math.inf)

    @property
    def due_us(self) -> int:
        """When the message was due, in microseconds; the end of the lease if that is unreadable."""
        if self.known_due_us is not None:
            return self.known_due_us
        stored_us = due_us(self.body)
        return self.ends_us if stored_us is None else stored_us


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
        token: The token of the leases, which is the time of their end; empty if there are none.
        ids: The id of each message that was handed out.
        bodies: The body of each of them.
        details: Of each that has another priority than 0, an expiry, or was handed out before: its
            number from 1, priority, attempt, number of uncounted attempts, due time, which is empty
            if the body tells it, and expiry, which is empty if there is none; one behind the other.
        suspicion: 1 if the message is a suspect, and so the only one; 2 if it is to stay the only
            one in this client for a whole lease; 0 if none is a suspect.
        more_suspects: 1 if suspects wait that were not handed out, or else 0.
        dropped: The ids of occurrences of recurring messages that were dropped or died.
        is_limited: 1 if limits keep back messages that are due, or else 0.
        period_us: The longest period of the rates that have counted the starts of those that were
            handed out, in microseconds; 0 if none has.
    """

    now_us: int
    wait_us: int
    expired: int
    died: int
    listeners: int
    token: bytes
    ids: Sequence[bytes]
    bodies: Sequence[bytes]
    details: Sequence[Any]
    suspicion: Literal[0, 1, 2]
    more_suspects: int
    dropped: list[bytes]
    is_limited: int
    period_us: int

    @property
    def ends_us(self) -> int:
        """When the leases end, in microseconds."""
        return int(self.token or 0)

    def claims(
        self, fresh_until: float, policy: Policy, partition: int, local: Callable[[int], float]
    ) -> list[Claim]:
        """Return the messages that were handed out. ``local`` returns the local time of a moment of
        the server's clock.
        """
        token, ends_us, is_suspect = self.token, self.ends_us, self.suspicion > 0
        claims = [
            Claim(message, token, body, ends_us, fresh_until, policy, partition, is_suspect)
            for message, body in zip(self.ids, self.bodies, strict=True)
        ]
        fields = iter(self.details)
        for number, priority, attempt, uncounted, due, expiry in zip(
            fields, fields, fields, fields, fields, fields, strict=True
        ):
            claim = claims[number - 1]
            claim.priority, claim.attempt, claim.uncounted = priority, attempt, uncounted
            claim.known_due_us = parse_us(due) if due else None
            if expiry:
                claim.ttl_ends_at = local(parse_us(expiry))
                claim.fresh_until = min(claim.fresh_until, claim.ttl_ends_at)
        if self.period_us:
            start = Start(self.now_us, self.period_us)
            for claim in claims:
                claim.counted_start = start  # type: ignore[misc]  # a slot of its base
        return claims


class Extended(NamedTuple):
    """The reply to a renewal: the server's time in microseconds, and whether each lease was still
    ours.
    """

    now_us: int
    are_ours: Sequence[bool]


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
        checkpoint: What its handler has saved, if that was read, and there is something.
    """

    id: bytes
    state: LiveState
    priority: int
    moment_us: int
    attempt: int
    body: bytes
    error: str | None
    checkpoint: bytes | None = None

    @classmethod
    def of(cls, id: bytes, facts: Sequence[Any]) -> StoredMessage:  # noqa: A002
        """Parse what ``get.lua`` and ``list.lua`` return for a message."""
        state, priority, moment, attempt, body, error = facts
        text = None if error is None else error.decode(errors="replace")
        return cls(id, state.decode(), priority, parse_us(moment), attempt, body, text)


class MessageHead(NamedTuple):
    """The order of a live message in a list, as read without its body.

    Attributes:
        priority: 0 to 9.
        moment_us: When it is due, or when its lease ends, in microseconds.
    """

    priority: int
    moment_us: int

    @classmethod
    def of(cls, facts: Sequence[Any]) -> MessageHead:
        """Parse the brief form of what ``list.lua`` returns for a message."""
        _, priority, moment = facts
        return cls(priority, parse_us(moment))


class MessageTimes(NamedTuple):
    """The stored times of a message, in microseconds; None where nothing is stored.

    Attributes:
        due_us: When it is or was due.
        expires_us: When its time to live ends.
    """

    due_us: int | None
    expires_us: int | None

    @classmethod
    def of(cls, body: bytes, attempts: bytes | None, expiry: bytes | None) -> MessageTimes:
        """Parse what the keys of the queue hold for a message."""
        changed_due = (attempts or b"").partition(b":")[2].partition(b":")[0]
        return cls(
            parse_us(changed_due) if changed_due else due_us(body),
            None if expiry is None else parse_us(expiry),
        )


class StoredGroup(NamedTuple):
    """A group.

    Attributes:
        name: Its name.
        waiting: Number of its messages that wait.
        due: Number of these that are due.
        running: Number of its messages that workers have.
        next_us: When one of its messages may be handed out, in microseconds; None if none is
            foreseen.
        limit: Its limit, as the server stores it; empty if it has none.
        has_own_limit: Whether that limit is its own.
        is_paused: Whether it is paused.
        oldest_us: When the oldest of its due messages fell due, in microseconds; None if none is
            due.
    """

    name: bytes
    waiting: int
    due: int
    running: int
    next_us: int | None
    limit: str
    has_own_limit: bool
    is_paused: bool
    oldest_us: int | None

    @classmethod
    def of(cls, facts: Sequence[Any]) -> StoredGroup:
        """Parse what ``list_groups.lua`` returns for a group."""
        name, waiting, due, running, next_turn, limit, has_own, is_paused, oldest = facts
        return cls(
            name,
            waiting,
            due,
            running,
            parse_us(next_turn) if next_turn else None,
            limit.decode(),
            bool(has_own),
            bool(is_paused),
            parse_us(oldest) if oldest else None,
        )


class Purged(NamedTuple):
    """One step of a purge.

    Attributes:
        dropped: Number of messages that were dropped, without those that had expired.
        expired: Number of messages that were dropped, and had expired.
        is_end: Whether it has come to the end of all messages.
        after: The place to go on behind, which is empty as long as none was spared.
    """

    dropped: int
    expired: int
    is_end: bool
    after: bytes
