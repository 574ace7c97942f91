"""The recurring messages: of a reliable queue, and of all queues."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from delayq._background import gather_mixed
from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import whole_number
from delayq._dashboard.sources import ReliableSource
from delayq._dashboard.undo import Undo, Undone
from delayq.admin.catalog import FoundQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form

_PER_PAGE = 50
# The memory that an undo takes at most, in bytes.
_SIZE = 2000


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    offset = whole_number(request.query_params.get("offset"))
    schedules, now = await gather_mixed(source.schedules(), board.now())
    return {
        "source": source,
        "rows": schedules[offset : offset + _PER_PAGE],
        "offset": offset,
        "limit": _PER_PAGE,
        "total": len(schedules),
        "now": now,
    }


async def run_schedule(board: Board, source: ReliableSource, form: Form) -> Response:
    """Bring the next run forward. It can be set back as long as no worker has taken it."""
    name = unquote(form.get("schedule"))
    runs = {listed.name: listed.runs for listed in await source.schedules()}.get(name)
    brought_forward = await source.run_schedule_now(name)
    if brought_forward is None or not runs:
        return board.redirect_back(form, source, "schedules", done="not_run")
    store, occurrence = brought_forward
    due_us = round(runs[0].timestamp() * 1_000_000)

    async def undo() -> Undone:
        delay_us = max(0, due_us - await board.now())
        return Undone(sum(await store.reschedule([occurrence], delay_us)))

    token = board.undos.keep(Undo(undo, 1, _SIZE, FoundQueue(source.kind, source.name)))
    return board.redirect_back(form, source, "schedules", done="run", undo=token)


async def unschedule(board: Board, source: ReliableSource, form: Form) -> Response:
    name = unquote(form.get("schedule"))
    done = await source.unschedule(name)
    return board.redirect_back(
        form, source, "schedules", done="unscheduled" if done else "no_schedule"
    )


async def pause_schedule(board: Board, source: ReliableSource, form: Form) -> Response:
    done = await source.pause_schedule(unquote(form.get("schedule")))
    return board.redirect_back(
        form, source, "schedules", done="schedule_paused" if done else "no_schedule"
    )


async def resume_schedule(board: Board, source: ReliableSource, form: Form) -> Response:
    done = await source.resume_schedule(unquote(form.get("schedule")))
    return board.redirect_back(
        form, source, "schedules", done="schedule_resumed" if done else "no_schedule"
    )


PAGE = Page(
    "/schedules",
    "schedules.html",
    load,
    label="Schedules",
    scope="queue",
    kinds=("reliable",),
    actions={
        "run_schedule": Action(run_schedule, ("reliable",)),
        "pause_schedule": Action(pause_schedule, ("reliable",)),
        "resume_schedule": Action(resume_schedule, ("reliable",)),
        "unschedule": Action(unschedule, ("reliable",)),
    },
    notes={
        "run": Note("The next run is due now. Later runs keep their times."),
        "not_run": Note(
            "Nothing changed: there is no such schedule, or a worker has its message.", bad=True
        ),
        "schedule_paused": Note("Schedule paused. It adds no messages until you resume it."),
        "schedule_resumed": Note("Schedule resumed. Missed runs are skipped."),
        "unscheduled": Note(
            "Schedule removed. This cannot be undone, but an application that calls schedule() when"
            " it starts brings it back."
        ),
        "no_schedule": Note("Nothing changed: there is no such schedule.", bad=True),
    },
)


_LAST = datetime.max.replace(tzinfo=UTC)


async def load_all(board: Board, request: Request) -> Mapping[str, Any]:
    pattern = request.query_params.get("q", "")
    offset = whole_number(request.query_params.get("offset"))
    answers = await board.ask_all("schedules", ReliableSource.schedules)
    schedules = [
        (source, listed)
        for source, answer in answers
        for listed in ([] if isinstance(answer, str) else answer)
        if pattern.casefold() in f"{source.name} {listed.name}".casefold()
    ]
    # The next ones first; those that are paused, or cannot be read, last.
    schedules.sort(key=lambda entry: entry[1].runs[0] if entry[1].runs else _LAST)
    return {
        "wanted": pattern,
        "troubles": [
            f"{source.name}: {answer}" for source, answer in answers if isinstance(answer, str)
        ],
        "schedules": schedules[offset : offset + _PER_PAGE],
        "offset": offset,
        "limit": _PER_PAGE,
        "total": len(schedules),
        "now": await board.now(),
    }


ALL_SCHEDULES = Page(
    "/all-schedules", "all_schedules.html", load_all, label="Schedules", scope="server"
)
