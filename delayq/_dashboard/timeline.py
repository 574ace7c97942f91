"""Assembles the known events of a message's life. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delayq._durations import MICROSECOND

if TYPE_CHECKING:
    from datetime import datetime

    from delayq._dashboard.rows import Row
    from delayq._reliable.outcomes import Attempt, MessageHistory


@dataclass(frozen=True)
class Event:
    """An event in a message's life, past or still to come.

    Attributes:
        what: The event.
        at_us: When, in microseconds; None if that is unknown.
        took_us: How long it took, in microseconds; None if that is unknown, or nothing.
        worker: The worker.
        error: The error in one line.
        traceback: The end of its traceback.
        note: A remark on the event.
        is_bad: Whether it is a failure.
    """

    what: str
    at_us: int | None = None
    took_us: int | None = None
    worker: str = ""
    error: str = ""
    traceback: str = ""
    note: str = ""
    is_bad: bool = False


def timeline(row: Row, history: MessageHistory | None, now: int) -> list[Event]:
    """Return the events of a message's life in their order, as far as they are known."""
    events = [Event("Offered", row.enqueued_us)] if row.enqueued_us is not None else []
    attempts = () if history is None else history.attempts
    events += map(_attempt, attempts)
    last = attempts[-1].number if attempts else 0
    running = row.state == "leased"
    # Attempts that have ended. Those of a message that was redriven count from 1 again.
    ended = row.attempt - running
    if ended > last:
        count = f"Attempt {ended}" if ended == last + 1 else f"Attempts {last + 1} to {ended}"
        events.append(
            Event(
                count,
                error=row.error_line,
                note=(
                    "Nothing is recorded: the worker has died or lost the lease, or the queue keeps"
                    " no records."
                ),
                is_bad=True,
            )
        )
    if running:
        events.append(Event(f"Attempt {row.attempt} is running", note="A worker has the message."))
        events.append(Event("Lease ends", row.lease_us))
    if row.due_us is not None:
        events = _placed(events, Event("Due", row.due_us))
    if row.state == "dead":
        events.append(Event("Died", row.died_us, note=row.reason, is_bad=True))
    if row.expires_us is not None:
        events.append(Event("Expires", row.expires_us))
    return [_marked(event, now) for event in events]


def _attempt(attempt: Attempt) -> Event:
    what = f"Attempt {attempt.number}"
    if attempt.started_at is None:
        return Event(what, note="Its worker has died or lost the lease.", is_bad=True)
    took = None
    if attempt.finished_at is not None:
        took = (attempt.finished_at - attempt.started_at) // MICROSECOND
    return Event(
        what,
        _us(attempt.started_at),
        took,
        attempt.worker,
        attempt.error,
        attempt.traceback,
        is_bad=bool(attempt.error),
    )


def _placed(events: list[Event], event: Event) -> list[Event]:
    """Insert an event before the first one that is known to be later."""
    assert event.at_us is not None
    for place, other in enumerate(events):
        if other.at_us is not None and other.at_us > event.at_us:
            return [*events[:place], event, *events[place:]]
    return [*events, event]


def _marked(event: Event, now: int) -> Event:
    """Say that an event is still to come."""
    is_ahead = event.at_us is not None and event.at_us > now and not event.note
    return replace(event, note="still to come") if is_ahead else event


def _us(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000)
