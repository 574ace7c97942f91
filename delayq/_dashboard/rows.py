"""Messages as the dashboard shows them, and where to find each again. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delayq._reliable.bodies import Body, parse, parse_letter
from delayq._reliable.checkpoints import Saved, split_report, unpack
from delayq._reliable.failures import unpack_error
from delayq._reliable.following import Report, read_report

if TYPE_CHECKING:
    from delayq._redisson.records import PendingRecord
    from delayq._reliable.letter_store import StoredLetter
    from delayq._reliable.outcomes import Record
    from delayq._reliable.replies import MessageTimes, StoredMessage


@dataclass(frozen=True)
class MessageRef:
    """A reference by which one message is found again.

    Attributes:
        id: The message's id.
        partition: The partition that holds the message.
        due: In a delayed queue, the message's score, as the server writes it.
    """

    id: bytes
    partition: int = 0
    due: str = ""


@dataclass(frozen=True)
class Row:
    """A message, as it is shown. Moments are in microseconds; unknown ones are None."""

    ref: MessageRef | None
    state: str
    payload: bytes | None
    due_us: int | None = None
    lease_us: int | None = None
    died_us: int | None = None
    enqueued_us: int | None = None
    expires_us: int | None = None
    taken_until_us: int | None = None
    priority: int = 0
    attempt: int = 0
    error: str = ""
    error_line: str = ""
    reason: str = ""
    group: str = ""
    batch: str = ""
    max_attempts: int | None = None
    timeout_us: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    saved: Saved | None = None
    report: Report | None = None
    finished_us: int | None = None
    result: bytes | None = None

    @property
    def has_ended(self) -> bool:
        """Whether only a record is left of it."""
        return self.state in ("handled", "dropped")

    @property
    def is_restorable(self) -> bool:
        """Whether it can be offered again, which takes an id that is text and a readable body."""
        if self.ref is None or self.payload is None or self.state == "unreadable":
            return False
        if self.ref.due:
            return True
        try:
            self.ref.id.decode()
        except UnicodeDecodeError:
            return False
        return self.enqueued_us is not None

    @property
    def moment_us(self) -> int | None:
        """When it ended, its lease ends, or it is due."""
        return self.finished_us or self.died_us or self.lease_us or self.due_us

    def delay_us(self, now: int) -> int:
        """Return the time until it is due, in microseconds; 0 if that has passed."""
        return max(0, (self.due_us or 0) - now)


@dataclass(frozen=True)
class Listing:
    """A page of a list.

    Attributes:
        rows: The messages on it.
        has_more: Whether another page has more; None if the count of the messages tells.
        cut_at: How many messages of each partition were looked at, if there may be more: the work
            for a page is bounded.
        next_offset: Where the next page begins, if that does not follow from the number of rows.
    """

    rows: list[Row]
    has_more: bool | None = None
    cut_at: int | None = None
    next_offset: int | None = None

    def total(self, offset: int, count: int) -> int:
        """Return how many messages the pages show, for the count of those that there may be."""
        if self.has_more is None:
            return count
        end = offset + len(self.rows)
        if self.has_more:
            return max(count, end + 1)
        return end if self.rows or not offset else min(count, offset)


def of_record(record: PendingRecord) -> Row:
    ref = MessageRef(record.start, 0, record.score.decode(errors="replace"))
    payload = record.payload
    state = "unreadable" if payload is None else "delayed"
    return Row(ref, state, record.record if payload is None else payload, record.due_us)


def of_message(ref: MessageRef, stored: StoredMessage, times: MessageTimes | None = None) -> Row:
    parts = _body(stored.body)
    leased = stored.state == "leased"
    due_us = stored.moment_us if not leased else None if times is None else times.due_us
    line, error = unpack_error(stored.error or "")
    return Row(
        ref,
        stored.state,
        parts.payload,
        due_us=due_us,
        lease_us=stored.moment_us if leased else None,
        enqueued_us=parts.enqueued_us or None,
        expires_us=None if times is None else times.expires_us,
        priority=stored.priority,
        attempt=stored.attempt,
        error=error,
        error_line=line,
        group=parts.group or "",
        batch=parts.batch or "",
        max_attempts=parts.max_attempts,
        timeout_us=parts.timeout_us,
        headers=_texts(parts.headers),
        saved=_saved(stored.checkpoint),
        report=_report(stored.checkpoint),
    )


def of_letter(ref: MessageRef, stored: StoredLetter) -> Row:
    try:
        death, body, checkpoint = parse_letter(stored.letter)
    except ValueError:
        # A letter that cannot be read must not hide the others.
        return Row(ref, "dead", stored.letter, died_us=stored.died_us, reason="unreadable")
    parts = _body(body)
    line, error = unpack_error(str(death.get("error") or ""))
    return Row(
        ref,
        "dead",
        parts.payload,
        died_us=stored.died_us,
        enqueued_us=parts.enqueued_us or None,
        priority=_number(death.get("priority")),
        attempt=_number(death.get("attempt")),
        error=error,
        error_line=line,
        reason=str(death.get("reason") or ""),
        group=parts.group or "",
        batch=parts.batch or "",
        max_attempts=parts.max_attempts,
        timeout_us=parts.timeout_us,
        headers=_texts(parts.headers),
        saved=_saved(checkpoint),
        report=_report(checkpoint),
    )


def of_record_kept(ref: MessageRef, record: Record, moment_us: int) -> Row:
    """Return the row of a message of which only a record is left."""
    attempts = record.attempts
    failures = [attempt for attempt in attempts if attempt.error]
    return Row(
        ref,
        "handled" if record.is_done else "dropped",
        None,
        enqueued_us=int(record.offered[:16]) or None,
        attempt=attempts[-1].number if attempts else 0,
        error=failures[-1].traceback if failures else "",
        error_line=failures[-1].error if failures else "",
        finished_us=moment_us if record.is_done else None,
        result=record.payload,
    )


def _report(checkpoint: bytes | None) -> Report | None:
    return None if checkpoint is None else read_report(split_report(checkpoint)[0])


def _saved(checkpoint: bytes | None) -> Saved | None:
    """Return the content of a checkpoint; of one that cannot be read, all of it as the state."""
    if checkpoint is None or not split_report(checkpoint)[1]:
        return None
    try:
        return unpack(checkpoint)
    except ValueError:
        return Saved(state=checkpoint)


def _body(body: bytes) -> Body:
    """Return the parts of a body; of one that cannot be read, all of it as the payload."""
    try:
        return parse(body)
    except ValueError:
        return Body(0, {}, body, None, None)


def _texts(headers: dict[str, Any]) -> dict[str, str]:
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in headers.items()
    }


def _number(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0
