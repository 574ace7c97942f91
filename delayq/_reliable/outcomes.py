"""Results and attempts of messages, which outlive them.

``lua/reliable/include/records.lua`` describes the format.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from delayq._durations import datetime_at
from delayq._reliable.bodies import body_in, parse, read_letter
from delayq._reliable.failures import unpack_error
from delayq._reliable.replies import LIVE_STATES, parse_us
from delayq.codecs.json import result_codec
from delayq.codecs.protocol import decode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayq._reliable.replies import Claim, LiveState, StoredMessage
    from delayq.codecs import Codec

# The most that is kept of each error, characters. Its end says the most.
_ERROR_MOST = 2000
_OFFERED = re.compile(rb"[0-9]{1,17}")
_RECORD = re.compile(rb"(live|done|result) ([0-9]{1,17}) ([0-9]{1,6})\n")


@dataclass(frozen=True)
class Attempt:
    """An attempt to handle a message.

    Attributes:
        number: From 1. It starts again when a dead letter is redriven.
        started_at: When the worker claimed the message, by the server's clock (UTC). None if
            nothing else is known of the attempt, because its worker died or lost the lease.
        finished_at: When it was acknowledged, retried or buried.
        worker: The host and process id of the worker, as ``host:pid``.
        error: The error in one line; empty if there was none.
        traceback: The traceback of the error, its last 2,000 characters; empty if there was none.
    """

    number: int
    started_at: datetime | None = None
    finished_at: datetime | None = None
    worker: str = ""
    error: str = ""
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True)
class MessageHistory:
    """The history of a message, live or not.

    Attributes:
        id: The message's id.
        state: ``"delayed"``, ``"ready"`` or ``"leased"`` while it lives; then ``"done"``,
            ``"dead"``, or ``"dropped"`` if it was cancelled, purged, or has expired.
        offered_at: When it was offered, by the server's clock (UTC); None if that is unknown.
        finished_at: When it was acknowledged or died; None if it was not.
        attempts: The last ten attempts, oldest first. Those that began before ``keep`` was set are
            missing.
        result: The handler's return value; None until there is one.
        error: Why it died, in one line: the last error, or the reason; empty if it did not.
        payload: The encoded value while it lives or is a dead letter; None if it is gone.
    """

    id: str
    state: Literal[LiveState, "done", "dead", "dropped"]
    offered_at: datetime | None
    finished_at: datetime | None
    attempts: tuple[Attempt, ...]
    result: Any = field(default=None, repr=False)
    error: str = ""
    payload: bytes | None = field(default=None, repr=False)

    @property
    def is_live(self) -> bool:
        """Whether the message waits, or a worker has it."""
        return self.state in LIVE_STATES


class Record(NamedTuple):
    """A record of a message.

    Attributes:
        is_done: Whether the message was acknowledged.
        offered: When it was offered, as its body has it.
        attempts: Its attempts.
        payload: The encoded result; None if there is none.
        moment_us: When the record was changed last, in microseconds.
    """

    is_done: bool
    offered: bytes
    attempts: tuple[Attempt, ...]
    payload: bytes | None
    moment_us: int


class Death(NamedTuple):
    """The death of a message.

    Attributes:
        died_us: When it died, in microseconds.
        reason: Why, as :attr:`delayq.DeadLetter.reason` tells it.
        error: Its last error as it was stored; empty if there was none.
        body: Its body.
    """

    died_us: int
    reason: str
    error: str
    body: bytes


class Outcome(NamedTuple):
    """The end of a message, as its server has recorded it.

    Attributes:
        keeps: Whether the queue keeps records.
        is_live: Whether the message is alive.
        record: Its record, if there is one.
        death: Its last death, unless it was acknowledged since.
        now_us: When that was so, by the server's clock, in microseconds.
        ends_us: When it expires if no worker takes it, in microseconds; None if it does not.
        has_expired: Whether it has expired, and no claim has found it since: then its death is that
            of this very message.
    """

    keeps: bool
    is_live: bool
    record: Record | None
    death: Death | None
    now_us: int
    ends_us: int | None
    has_expired: bool

    @classmethod
    def of(cls, reply: Sequence[Any]) -> Outcome:
        """Parse the reply of ``await.lua``, or the beginning of that of ``outcome.lua``."""
        now_us, keep_us, live, stored, moment, letter, died, ends = reply
        record = (
            None if stored is None or moment is None else parse_record(stored, parse_us(moment))
        )
        death = None
        if letter is not None and died is not None:
            cause = read_letter(letter)[0]
            death = Death(parse_us(died), cause.reason, cause.error, body_in(letter))
            if record is not None and record.is_done:
                if record.moment_us < death.died_us:
                    record = None
                else:
                    death = None
        ends_us = None if ends is None else parse_us(ends)
        return cls(keep_us > 0, live == 1, record, death, now_us, ends_us, live == -1)

    @property
    def is_pending(self) -> bool:
        """Whether its end is yet to come, and will be recorded."""
        return self.is_live and self.keeps

    @property
    def moment_us(self) -> int:
        """When the message ended, in microseconds; 0 if that is unknown."""
        if self.death is not None:
            return self.death.died_us
        return 0 if self.record is None else self.record.moment_us


def parse_record(stored: bytes, moment_us: int) -> Record | None:
    """Parse a record; None if it cannot be read."""
    head = _RECORD.match(stored)
    if head is None:
        return None
    *lines, payload = stored[head.end() :].split(b"\n", int(head[3]))
    if len(lines) != int(head[3]):
        return None
    attempts = [attempt for line in lines if (attempt := _attempt(line)) is not None]
    return Record(
        head[1] != b"live",
        head[2],
        tuple(_with_lost(attempts)),
        payload if head[1] == b"result" else None,
        moment_us,
    )


def _with_lost(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Add the attempts of which nothing was recorded, between those that were."""
    every: list[Attempt] = []
    for attempt in attempts:
        before = every[-1].number if every and every[-1].number < attempt.number else None
        if before is not None:
            every += map(Attempt, range(before + 1, attempt.number))
        every.append(attempt)
    return every


def _attempt(line: bytes) -> Attempt | None:
    finished, _, text = line.partition(b" ")
    try:
        facts = json.loads(text)
        number, started_us, worker = facts["attempt"], facts["started"], facts["worker"]
        error, trace = unpack_error(facts.get("error", ""))
        return Attempt(
            int(number),
            datetime_at(int(started_us)),
            datetime_at(int(finished)),
            worker,
            error,
            trace,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def offered_of(body: bytes) -> bytes:
    """Return the time of the offer from a body: it tells the message from others with its id."""
    offered = _OFFERED.match(body)
    return b"0" if offered is None else offered[0]


def attempt_of(claim: Claim, error: str = "") -> bytes:
    """Return what is recorded about the attempt that is about to end."""
    lease_us = 0 if claim.policy is None else claim.policy.lease_us
    started_us = max(0, int(claim.token) - lease_us)
    head = b'{"attempt":%d,"started":%d,"worker":%b' % (
        claim.attempt,
        started_us,
        _worker(os.getpid()),
    )
    if not error:
        return head + b"}"
    line, newline, trace = error.partition("\n")
    text = f"{line[:_ERROR_MOST]}{newline}{trace[-_ERROR_MOST:]}"
    return b'%b,"error":%b}' % (head, json.dumps(text).encode())


@lru_cache(1)
def _worker(pid: int) -> bytes:
    return json.dumps(f"{socket.gethostname()}:{pid}").encode()


def history_of(
    id: str,  # noqa: A002
    outcome: Outcome,
    live: StoredMessage | None,
    codec: Codec[Any],
) -> MessageHistory | None:
    """Return what is known about a message, which may be ``live``; None if that is nothing.

    Raises:
        DecodeError: The codec cannot decode its result.
    """
    record, death = outcome.record, outcome.death
    if live is not None:
        offered = offered_of(live.body)
        # The record may be that of an earlier message with the same id.
        is_its_own = record is not None and not record.is_done and record.offered == offered
        attempts = record.attempts if record is not None and is_its_own else ()
        return MessageHistory(
            id, live.state, _offered_at(offered), None, attempts, payload=_payload_of(live.body)
        )
    if death is not None:
        offered = offered_of(death.body)
        is_its_own = record is not None and record.offered == offered
        attempts = record.attempts if record is not None and is_its_own else ()
        error = unpack_error(death.error)[0] or death.reason
        died_at = datetime_at(death.died_us)
        return MessageHistory(
            *(id, "dead", _offered_at(offered), died_at, attempts),
            error=error,
            payload=_payload_of(death.body),
        )
    if record is None:
        return None
    finished_at = datetime_at(record.moment_us) if record.is_done else None
    payload = record.payload
    return MessageHistory(
        id,
        "done" if record.is_done else "dropped",
        _offered_at(record.offered),
        finished_at,
        record.attempts,
        None if payload is None else decode(result_codec(codec), payload, "", id),
    )


def _payload_of(body: bytes) -> bytes:
    try:
        return parse(body).payload
    except ValueError:
        return body.partition(b"\n")[2]


def _offered_at(offered: bytes) -> datetime | None:
    return datetime_at(int(offered[:16])) if int(offered) else None
