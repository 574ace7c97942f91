"""A queue: counts, due times, the messages in each state; and dropping them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from starlette.exceptions import HTTPException

from delayq._background import gather_mixed
from delayq._dashboard import changes
from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import NO_DELAY, UNITS, farthest, offset_of, redirect
from delayq._dashboard.health import count_in, late_us
from delayq._dashboard.rendering import link
from delayq._dashboard.sources import ReliableSource
from delayq._reliable.stored_messages import PURGEABLE
from delayq.admin.states import is_late, states

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.changes import Changed
    from delayq._dashboard.forms import Form
    from delayq._dashboard.rows import MessageRef
    from delayq._dashboard.sources import AnySource
    from delayq._durations import DueTime
    from delayq.admin.delayed import PurgeState
    from delayq.admin.delays import Delay
    from delayq.stats import QueueDepth


PER_PAGE = 25
"""How many messages a page of a list shows."""
_BARS = ("next minute", "next hour", "next day", "later")


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.source(request)
    offset = offset_of(request, source)
    if (state := request.query_params.get("state")) is None:
        state = _fullest(source, await source.depth())
    return await _values(board, source, state, offset)


def _fullest(source: AnySource, depth: QueueDepth) -> str:
    """Return the state that has the most messages; the first one if there are none."""
    return max(source.states, key=lambda state: count_in(depth, state))


async def _values(board: Board, source: AnySource, state: str, offset: int) -> dict[str, Any]:
    handled = isinstance(source, ReliableSource) and await source.keeps_records()
    if state not in source.states and not (state == "handled" and source.kind == "reliable"):
        raise HTTPException(404, "Unknown message state.")
    now = await board.now()
    depth, (soon, *bars), listing = await gather_mixed(
        source.depth(), source.histogram(now), source.page(state, offset, PER_PAGE)
    )
    count = count_in(depth, state) if state in source.states else 0
    following = listing.next_offset
    more = following is not None and following <= farthest(source)
    bars[0] += soon
    trail = board.live.trail(source)
    trail.add(depth, late_us(depth, source.kind), soon)
    (minutes,) = await board.live.minutes([source])
    is_failing = minutes is not None and minutes.is_wave
    delay: Delay | None = None
    if is_late(states(depth, source.kind)):
        (delay,) = await board.live.delays([source])
    return {
        "cause": "" if delay is None else delay.cause,
        "states": states(depth, source.kind, is_failing=is_failing, delay=delay),
        "source": source,
        "depth": depth,
        "trail": trail,
        "bars": list(zip(_BARS, bars, (_share(bar, bars) for bar in bars), strict=True)),
        "state": state,
        "handled": handled or state == "handled",
        # Live updates stay with the state that was chosen.
        "settled": {"state": state},
        "count": count,
        "total": listing.total(offset, count),
        "listing": listing,
        "rows": listing.rows,
        "offset": offset,
        "limit": PER_PAGE,
        "farthest": farthest(source),
        "more": link("queue", source, None, state=state, offset=following) if more else "",
        "now": now,
        "units": tuple(UNITS),
        "most": changes.MAX_MESSAGES,
        **NO_DELAY,
    }


async def pause(board: Board, source: ReliableSource, form: Form) -> Response:
    await source.pause()
    return board.redirect_back(form, source, "queue", done="paused")


async def resume(board: Board, source: ReliableSource, form: Form) -> Response:
    await source.resume()
    return board.redirect_back(form, source, "queue", done="resumed")


async def cancel_many(board: Board, source: AnySource, form: Form) -> Response:
    state = _state(source, form)
    if not (refs := await _selected_refs(source, state, form)):
        return board.redirect_back(form, source, "queue", state=state, done="unselected")
    changed = await changes.cancel(board, source, refs, running=state == "leased")
    return redirect_after(board, form, source, "cancelled_many", changed)


async def reschedule_many(board: Board, source: AnySource, form: Form) -> Response:
    state = _state(source, form)
    try:
        when = form.due_time(await board.now())
    except HTTPException as error:
        values = await _values(board, source, state, 0)
        refused = form.refused_delay(error)
        return await board.refuse(form, PAGE, **values | refused)
    return await _reschedule(board, source, form, state, when)


async def run_now(board: Board, source: AnySource, form: Form) -> Response:
    return await _reschedule(board, source, form, _state(source, form), 0)


async def _reschedule(
    board: Board, source: AnySource, form: Form, state: str, when: DueTime
) -> Response:
    if not (refs := await _selected_refs(source, state, form)):
        return board.redirect_back(form, source, "queue", state=state, done="unselected")
    changed = await changes.reschedule(board, source, refs, when)
    return redirect_after(board, form, source, "rescheduled_many", changed)


async def undo(board: Board, source: AnySource, form: Form) -> Response:
    if (undone := await board.undos.run(form.get("undo"))) is None:
        return board.redirect_back(form, source, "queue", done="late")
    (count, unsure, with_all_attempts), total = undone
    if count == total:
        done = "restored" if with_all_attempts else "undone"
    else:
        done = "perhaps" if unsure else "partly"
    return board.redirect_back(form, source, "queue", done=done, count=str(count))


def _state(source: AnySource, form: Form) -> str:
    if (state := form.get("state")) not in source.states:
        raise HTTPException(400, "Unknown message state.")
    return state


async def _selected_refs(source: AnySource, state: str, form: Form) -> list[MessageRef]:
    """Return references to the selected messages, or of all in that state."""
    selected = form.refs()
    if selected is None:
        return await changes.refs_in(source, state)
    return [ref for ref in selected if source.may_hold(ref)]


def redirect_after(
    board: Board, form: Form, source: AnySource, done: str, changed: Changed
) -> Response:
    """Lead back, or to the list of the queue, with a note on what was changed."""
    count = len(changed.refs)
    if not changed.is_whole:
        done = "stopped"
    elif changed.is_full:
        done = "full"
    return board.redirect_back(
        form,
        source,
        "queue",
        state=form.get("state") or source.states[0],
        done=done if count or not changed.is_whole else "gone",
        count=str(count),
        undo=changed.undo or ("no" if count else ""),
    )


def _share(bar: int, bars: Iterable[int]) -> int:
    """Return the length of a bar, out of 100. A bar that is not empty is visible."""
    longest = max(bars, default=0)
    return 0 if not bar else max(1, round(100 * bar / longest))


PAGE = Page(
    "/queue",
    "queue.html",
    load,
    label="Messages",
    scope="queue",
    refresh=10,
    actions={
        "pause": Action(pause, ("reliable",)),
        "resume": Action(resume, ("reliable",)),
        "cancel_many": Action(cancel_many),
        "reschedule_many": Action(reschedule_many),
        "run_now": Action(run_now),
        "undo": Action(undo),
    },
    notes={
        "cancelled_many": Note("message cancelled.", "messages cancelled."),
        "rescheduled_many": Note("message rescheduled.", "messages rescheduled."),
        "stopped": Note(
            "message changed, and perhaps more: the server failed in between. Check the list.",
            "messages changed, and perhaps more: the server failed in between. Check the list.",
            bad=True,
        ),
        "full": Note(
            "message cancelled, and not the others: an undo of more would not fit. Cancel them in"
            " the same way.",
            "messages cancelled, and not the others: an undo of more would not fit. Cancel them in"
            " the same way.",
            bad=True,
        ),
        "unselected": Note("Nothing changed: select messages first.", bad=True),
        "undone": Note("message is as before.", "messages are as before."),
        "restored": Note(
            "message is restored, with all attempts.", "messages are restored, with all attempts."
        ),
        "partly": Note(
            "message is as before. The others could not be brought back.",
            "messages are as before. The others could not be brought back: they are gone, their ids"
            " are taken, or the queue is full.",
            bad=True,
        ),
        "perhaps": Note(
            "message is as before, and perhaps more: a reply of the server was lost. Check the"
            " list.",
            "messages are as before, and perhaps more: a reply of the server was lost. Check the"
            " list.",
            bad=True,
        ),
        "late": Note(
            "Nothing changed: an action can be undone within a minute, once, by the server process"
            " that ran it.",
            bad=True,
        ),
        "paused": Note("Queue paused. No messages are delivered until you resume it."),
        "resumed": Note("Queue resumed."),
    },
)


async def load_purge(board: Board, request: Request) -> Mapping[str, Any]:
    return await _purge_values(await board.source(request), "", "", {})


async def _purge_values(
    source: AnySource, state: str, typed: str, wrong: Mapping[str, str]
) -> dict[str, Any]:
    depth = await source.depth()
    # Payloads that workers of a delayed queue have are no longer in it.
    leased = depth.leased if source.kind == "reliable" else 0
    counts = {
        "delayed": depth.delayed,
        "ready": depth.ready,
        "all": depth.delayed + depth.ready + leased,
    }
    return {"source": source, "counts": counts, "state": state, "typed": typed, "wrong": wrong}


async def purge_queue(board: Board, source: AnySource, form: Form) -> Response:
    state, typed = form.get("state"), form.get("typed")
    wrong = {}
    if state not in PURGEABLE:
        wrong["state"] = "Choose which messages to drop."
    if typed.replace("\r\n", "\n").strip() != source.name.strip():
        wrong["typed"] = "This is not the name of the queue."
    if wrong:
        values = await _purge_values(source, state, typed, wrong)
        return await board.refuse(form, PURGE, **values)
    count = await source.purge(cast("PurgeState", state))
    return redirect("queue", source, done="dropped", count=str(count), undo="no")


PURGE = Page(
    "/purge",
    "purge.html",
    load_purge,
    label="Purge",
    scope="queue",
    operators=True,
    actions={"purge_queue": Action(purge_queue)},
    notes={"dropped": Note("message dropped.", "messages dropped.")},
)
