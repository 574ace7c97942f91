"""The settings of a reliable queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._dashboard.forms import UNITS, in_units, see
from delayq._dashboard.page import Action, Note, Page
from delayq._reliable.keys import MOST_PARTITIONS
from delayq._reliable.settings import declare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.source import ReliableSource
    from delayq._reliable.settings import Declared


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    settings = await source.settings()
    window, unit = in_units(settings.dedup_window)
    return {
        "source": source,
        "settings": settings,
        "window": window,
        "unit": unit,
        "units": tuple(UNITS),
        "most_partitions": MOST_PARTITIONS,
    }


async def configure(board: Board, source: ReliableSource, form: Form) -> Response:
    changes = _changes(form)
    if not changes:
        return see("queue", source, done="unchanged")
    if "partitions" in changes and form.get("sure") != "1":
        return see("settings", source, done="unsure")
    await source.configure(changes)
    board.queues.search_again()
    return see("queue", source, done="configured")


def _changes(form: Form) -> Declared:
    """Return the settings in a form that differ from those that it showed.

    The others stay as they are, even if another visitor has changed them meanwhile.

    Raises:
        HTTPException, BadInput: One of them is invalid.
    """
    given: dict[str, Any] = {}
    if form.edited("partitions"):
        given["partitions"] = form.count("partitions")
    if form.edited("max_size"):
        given["max_size"] = form.count("max_size") if form.get("max_size") else None
    if form.edited("expired"):
        given["expired"] = form.get("expired")
    if form.edited("dedup_window", "unit"):
        given["dedup_window"] = form.seconds("dedup_window")
    return declare(**given)


PAGE = Page(
    "/settings",
    "settings.html",
    load,
    label="Settings",
    scope="queue",
    kinds=("reliable",),
    actions={"configure": Action(configure, ("reliable",))},
    notes={
        "configured": Note(
            "Settings changed. All clients use the new ones from their next call on."
        ),
        "unchanged": Note("Nothing changed: the queue already has these settings.", bad=True),
        "unsure": Note(
            "Nothing changed: confirm that you want another number of partitions.", bad=True
        ),
    },
)
