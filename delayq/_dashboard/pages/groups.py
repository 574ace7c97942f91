"""The groups of a reliable queue's messages, and the limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from delayq._background import gather_mixed
from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import redirect
from delayq._dashboard.rendering import link
from delayq._reliable.limits import Limit, write_limit
from delayq.admin.wording import read_limit
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.sources import ReliableSource
    from delayq._reliable.groups import Group

_PER_PAGE = 50


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    params = request.query_params
    return await _values(board, source, params.get("q", ""), params.get("after"))


async def _values(
    board: Board, source: ReliableSource, name: str, after: str | None
) -> dict[str, Any]:
    """Return the facts of one group if it is named, or else of a page of groups."""
    wrong: dict[str, str] = {}
    settings, now = await gather_mixed(source.settings(), board.now())
    group: Group | None = None
    groups: list[Group] = []
    try:
        if name:
            group = await source.groups.get(name)
        else:
            # One more tells whether there are more.
            groups = await source.groups.list(after=after or None, limit=_PER_PAGE + 1)
    except BadInput as error:
        wrong = {"q": str(error)}
    listed = groups[:_PER_PAGE]
    return {
        "source": source,
        "settings": settings,
        "group": group,
        "rows": listed,
        "wanted": name,
        "now": now,
        "wrong": wrong,
        # The refused input.
        "limit": "",
        "next_page": link("groups", source, None, after=listed[-1].name)
        if len(groups) > len(listed)
        else "",
    }


async def limit_group(board: Board, source: ReliableSource, form: Form) -> Response:
    """Give a group a limit of its own."""
    group = unquote(form.get("group"))
    try:
        # None would be the limit of the queue.
        limit = read_limit(form.get("limit"), "The limit") or Limit()
        await source.groups.set_limit(group, limit)
    except BadInput as error:
        values = await _values(board, source, group, None)
        refused = {"limit": form.get("limit"), "wrong": {"limit": str(error)}}
        return await board.refuse(form, PAGE, **values | refused)
    return _back(source, group, "limited" if write_limit(limit) != "none" else "lifted")


async def clear_limit(board: Board, source: ReliableSource, form: Form) -> Response:
    group = unquote(form.get("group"))
    await source.groups.set_limit(group, None)
    return _back(source, group, "unlimited")


async def pause_group(board: Board, source: ReliableSource, form: Form) -> Response:
    group = unquote(form.get("group"))
    await source.groups.pause(group)
    return _back(source, group, "group_paused")


async def resume_group(board: Board, source: ReliableSource, form: Form) -> Response:
    group = unquote(form.get("group"))
    was_paused = await source.groups.resume(group)
    return _back(source, group, "group_resumed" if was_paused else "not_paused")


def _back(source: ReliableSource, group: str, done: str) -> Response:
    """Go back to the page of the group."""
    return redirect("groups", source, q=group, done=done)


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
