"""A message, or a dead letter, and the events of its life."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from delayq._dashboard import changes
from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import NO_DELAY, UNITS, redirect
from delayq._dashboard.pages.queue import redirect_after
from delayq._dashboard.rendering import link, pack_ref, parse_ref, us
from delayq._dashboard.sources import ReliableSource
from delayq._durations import MICROSECOND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.rows import MessageRef, Row
    from delayq._dashboard.sources import AnySource
    from delayq._reliable.outcomes import Attempt, MessageHistory


@dataclass(frozen=True)
class Event:
    """An event in a message's life, past or still to come.

    Attributes:
        title: The event.
        at_us: When, in microseconds; None if that is unknown.
        took_us: How long it took, in microseconds; None if that is unknown, or nothing.
        worker: The worker.
        error: The error in one line.
        traceback: The end of its traceback.
        note: A remark on the event.
        is_bad: Whether it is a failure.
    """

    title: str
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
    events += map(_attempt_event, attempts)
    last = attempts[-1].number if attempts else 0
    running = row.state == "leased"
    # Attempts that have ended. Those of a message that was redriven count from 1 again.
    ended_attempts = row.attempt - running
    if ended_attempts > last:
        count = (
            f"Attempt {ended_attempts}"
            if ended_attempts == last + 1
            else f"Attempts {last + 1} to {ended_attempts}"
        )
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
        events = _insert_by_time(events, Event("Due", row.due_us))
    if row.state == "handled":
        events.append(Event("Handled", row.finished_us))
    if row.state == "dead":
        events.append(Event("Died", row.died_us, note=row.reason, is_bad=True))
    if row.expires_us is not None:
        events.append(Event("Expires", row.expires_us))
    return [_mark_if_ahead(event, now) for event in events]


def _attempt_event(attempt: Attempt) -> Event:
    title = f"Attempt {attempt.number}"
    if attempt.started_at is None:
        return Event(title, note="Its worker has died or lost the lease.", is_bad=True)
    took = None
    if attempt.finished_at is not None:
        took = (attempt.finished_at - attempt.started_at) // MICROSECOND
    return Event(
        title,
        us(attempt.started_at),
        took,
        attempt.worker,
        attempt.error,
        attempt.traceback,
        is_bad=bool(attempt.error),
    )


def _insert_by_time(events: list[Event], event: Event) -> list[Event]:
    """Insert an event before the first one that is known to be later."""
    assert event.at_us is not None
    for index, later_event in enumerate(events):
        if later_event.at_us is not None and later_event.at_us > event.at_us:
            return [*events[:index], event, *events[index:]]
    return [*events, event]


def _mark_if_ahead(event: Event, now: int) -> Event:
    """Say that an event is still to come."""
    is_ahead = event.at_us is not None and event.at_us > now and not event.note
    return replace(event, note="still to come") if is_ahead else event


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    ref = parse_ref(request.query_params.get("at", ""))
    dead, back = request.query_params.get("dead") == "1", request.query_params.get("back", "")
    return await _values(board, await board.source(request), ref, back, dead=dead)


async def _values(
    board: Board, source: AnySource, ref: MessageRef | None, back: str, *, dead: bool
) -> dict[str, Any]:
    address, query = board.own_address(back)
    row = await source.find(ref, dead=dead) if ref is not None else None
    if row is None:
        raise HTTPException(
            404,
            "This message no longer exists: it was delivered, cancelled, moved or dropped. Queues"
            " with the setting keep show messages for some time after they were handled.",
        )
    now = await board.now()
    history = await source.history(row) if isinstance(source, ReliableSource) else None
    return {
        "source": source,
        "row": row,
        # The list from which the visitor has come.
        "origin": link(address, **query) if back else "",
        "now": now,
        "units": tuple(UNITS),
        "events": timeline(row, history, now) if source.kind == "reliable" else (),
        **NO_DELAY,
    }


async def cancel(board: Board, source: AnySource, form: Form) -> Response:
    changed = await changes.cancel(board, source, [form.ref(source)])
    return redirect_after(board, form, source, "cancelled", changed)


async def bury(board: Board, source: ReliableSource, form: Form) -> Response:
    changed = await changes.bury(board, source, [form.ref(source)])
    return redirect_after(board, form, source, "buried", changed)


async def reschedule(board: Board, source: AnySource, form: Form) -> Response:
    ref = form.ref(source)
    try:
        when = form.due_time(await board.now())
    except HTTPException as error:
        values = await _values(board, source, ref, form.get("back"), dead=False)
        return await board.refuse(form, PAGE, **values | form.refused_delay(error))
    changed = await changes.reschedule(board, source, [ref], when)
    if not changed.refs:
        return board.redirect_back(form, source, "queue", done="gone")
    # In a delayed queue, the message has another reference now.
    at, back = pack_ref(changed.refs[0]), form.get("back")
    return redirect("message", source, at=at, back=back, done="rescheduled", undo=changed.undo)


PAGE = Page(
    "/message",
    "message.html",
    load,
    actions={
        "cancel": Action(cancel),
        "reschedule": Action(reschedule),
        "bury": Action(bury, ("reliable",)),
    },
    notes={
        "cancelled": Note("Message cancelled. It will not be delivered."),
        "rescheduled": Note("Message rescheduled."),
        "gone": Note(
            "Nothing changed: the message no longer exists, or a worker is handling it.", bad=True
        ),
    },
)
