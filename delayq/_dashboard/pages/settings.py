"""The settings of a reliable queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import UNITS, in_units, redirect
from delayq._reliable.keys import MOST_PARTITIONS
from delayq._reliable.limits import write_limit
from delayq._reliable.settings import setting_texts
from delayq.admin.wording import read_limit
from delayq.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.sources import ReliableSource
    from delayq._reliable.settings import SettingTexts


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    return await _values(source)


async def _values(source: ReliableSource) -> dict[str, Any]:
    settings, differences = await asyncio.gather(source.settings(), source.differences())
    window, unit = in_units(settings.dedup_window)
    texts = {
        "partitions": str(settings.partitions),
        "max_size": str(settings.max_size or ""),
        "expired": settings.expired,
        "dedup_window": window,
        "unit": unit,
        "limit": write_limit(settings.limit),
        "group_limit": write_limit(settings.group_limit),
    }
    return {
        "source": source,
        "settings": settings,
        "differences": differences,
        # As they are stored, and as the form shows them.
        "was": texts,
        "texts": texts,
        "wrong": {},
        "units": tuple(UNITS),
        "most_partitions": MOST_PARTITIONS,
    }


async def configure(board: Board, source: ReliableSource, form: Form) -> Response:
    changes, wrong = _changes(form)
    if not wrong and changes and ("partitions" not in changes or form.get("sure") == "1"):
        try:
            await source.configure(changes)
        except ConfigurationError as error:
            if "partitions" not in changes:
                raise
            wrong = {"partitions": str(error)}
        else:
            board.queues.search_again()
            return redirect("settings", source, done="configured")
    if wrong:
        values = await _values(source)
        texts = {
            name: form.get(name) if name in form else text for name, text in values["was"].items()
        }
        initial = {
            name: form.get(f"was_{name}") if f"was_{name}" in form else text
            for name, text in values["was"].items()
        }
        page_values = values | {"texts": texts, "was": initial, "wrong": wrong}
        return await board.refuse(form, PAGE, **page_values)
    return redirect("settings", source, done="unsure" if changes else "unchanged")


def _changes(form: Form) -> tuple[SettingTexts, dict[str, str]]:
    """Return the settings in a form that differ from those that it showed, and what is wrong with
    those that are invalid, by their fields.

    The others stay as they are, even if another visitor has changed them in the meantime.
    """
    changes: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for name, (fields, read) in _FIELDS.items():
        if form.has_changed(*fields):
            try:
                changes |= setting_texts(**{name: read(form)})
            except HTTPException as error:
                wrong[name] = error.detail
            except BadInput as error:
                wrong[name] = str(error)
    return changes, wrong


# The fields of each setting, and how to read it.
_FIELDS: dict[str, tuple[tuple[str, ...], Callable[[Form], Any]]] = {
    "partitions": (("partitions",), lambda form: form.count("partitions")),
    "max_size": (
        ("max_size",),
        lambda form: form.count("max_size") if form.get("max_size") else None,
    ),
    "expired": (("expired",), lambda form: form.get("expired")),
    "dedup_window": (("dedup_window", "unit"), lambda form: form.seconds("dedup_window")),
    "limit": (("limit",), lambda form: read_limit(form.get("limit"), "The limit")),
    "group_limit": (
        ("group_limit",),
        lambda form: read_limit(form.get("group_limit"), "The group limit"),
    ),
}


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
