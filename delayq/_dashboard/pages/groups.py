"""The groups of a reliable queue's messages, and the limits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import redirect
from delayq._dashboard.rendering import link
from delayq._durations import moment_us
from delayq._reliable.limits import Limit, write_limit
from delayq.admin.wording import describe_group_state, read_limit
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.sources import ReliableSource

_PER_PAGE = 50


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    params = request.query_params
    return await _values(board, source, params.get("q", ""), params.get("after"))


async def _values(
    board: Board, source: ReliableSource, name: str, after: str | None
) -> dict[str, Any]:
    wrong: dict[str, str] = {}
    settings, now = await asyncio.gather(source.settings(), board.now())
    try:
        if name:
            groups = [await source.groups.get(name)]
        else:
            # One more tells whether there are more.
            groups = await source.groups.list(after=after or None, limit=_PER_PAGE + 1)
    except BadInput as error:
        wrong, groups = {"q": str(error)}, []
    listed = groups[:_PER_PAGE]
    return {
        "source": source,
        "settings": settings,
        "rows": listed,
        "states": [describe_group_state(group, moment_us(now)) for group in listed],
        "wanted": name,
        "now": now,
        "wrong": wrong,
        # The refused input.
        "group": "",
        "limit": "",
        "next": link("groups", source, None, after=listed[-1].name)
        if len(groups) > len(listed)
        else "",
    }


async def limit_group(board: Board, source: ReliableSource, form: Form) -> Response:
    """Give a group a limit of its own: one of the list, or one that is typed."""
    group, typed = unquote(form.get("group")), form.get("new_group").strip()
    try:
        # None would be the limit of the queue.
        limit = read_limit(form.get("limit"), "The limit") or Limit()
        await source.groups.set_limit(group or typed, limit)
    except BadInput as error:
        name = "limit" if "limit" in str(error) or group else "new_group"
        values = await _values(board, source, group, None)
        refused = {"group": group or typed, "limit": form.get("limit"), "wrong": {name: str(error)}}
        return await board.refuse(form, PAGE, **values | refused)
    return redirect("groups", source, done="limited" if write_limit(limit) != "none" else "lifted")


async def clear_limit(board: Board, source: ReliableSource, form: Form) -> Response:
    await source.groups.set_limit(unquote(form.get("group")), None)
    return redirect("groups", source, done="unlimited")


async def pause_group(board: Board, source: ReliableSource, form: Form) -> Response:
    await source.groups.pause(unquote(form.get("group")))
    return redirect("groups", source, done="group_paused")


async def resume_group(board: Board, source: ReliableSource, form: Form) -> Response:
    was_paused = await source.groups.resume(unquote(form.get("group")))
    return redirect("groups", source, done="group_resumed" if was_paused else "not_paused")


PAGE = Page(
    "/groups",
    "groups.html",
    load,
    label="Groups",
    scope="queue",
    kinds=("reliable",),
    actions={
        name: Action(run, ("reliable",))
        for name, run in (
            ("limit_group", limit_group),
            ("clear_limit", clear_limit),
            ("pause_group", pause_group),
            ("resume_group", resume_group),
        )
    },
    notes={
        "limited": Note("Limit set. Running messages continue, and count towards it."),
        "lifted": Note(
            "Nothing limits this group now, whatever the queue's group limit is. To let that apply"
            " again, unset the limit of the group.",
            bad=True,
        ),
        "unlimited": Note("Limit unset. The queue's group limit applies again."),
        "group_paused": Note("Group paused. None of its messages start until you resume it."),
        "group_resumed": Note("Group resumed."),
        "not_paused": Note("Nothing changed: the group is not paused.", bad=True),
    },
)
