"""The settings of a reliable queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._background import gather_mixed
from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import redirect
from delayq._dashboard.health import SECOND
from delayq._dashboard.rendering import span
from delayq._reliable.keys import MOST_PARTITIONS
from delayq._reliable.settings import setting_texts
from delayq.admin.wording import describe_setting, read_setting, write_setting
from delayq.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    settings, differences = await gather_mixed(source.settings(), source.differences())
    values = {name: getattr(settings, name) for name in FIELDS}
    texts = {name: write_setting(name, value) for name, value in values.items()}
    return {
        "source": source,
        "descriptions": [
            (
                field.label,
                field.options.get(values[name]) or describe_setting(name, values[name], _span),
            )
            for name, field in FIELDS.items()
        ],
        "differences": differences,
        "fields": FIELDS,
        # As they are stored, and as the form shows them.
        "was": texts,
        "texts": texts,
        "wrong": {},
        "most_partitions": MOST_PARTITIONS,
    }


def _span(seconds: float) -> str:
    return span(seconds * SECOND)


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
    for name, field in FIELDS.items():
        if form.has_changed(name):
            try:
                value = read_setting(name, form.get(name).strip() or "none", field.label)
                changes |= setting_texts(**{name: value})
            except BadInput as error:
                wrong[name] = str(error)
    return changes, wrong


class _Field(NamedTuple):
    """A field of the form.

    Attributes:
        label: The name of the setting, on the page and in errors.
        about: The explanation below it.
        options: The words of a choice by their values.
    """

    label: str
    about: str
    options: Mapping[str, str] = {}


# By the names of the settings.
FIELDS: Mapping[str, _Field] = {
    "partitions": _Field(
        "Partitions",
        "More partitions spread the queue over more servers and cores. You can change the number"
        " only while nothing is in the queue.",
    ),
    "max_size": _Field(
        "Max size", "Offers beyond this many live messages are refused; none for no limit."
    ),
    "expired": _Field(
        "Expired messages",
        "How messages past their time to live are treated.",
        {"drop": "are dropped", "dead": "become dead letters"},
    ),
    "dedup_window": _Field(
        "Dedup window",
        "How long the id of a handled message stays taken: 90s, 12h, 30d; none frees it at once.",
    ),
    "keep_dead": _Field(
        "Keep dead letters",
        "How long dead letters stay: 12h, 30d; none keeps them until they are redriven or purged.",
    ),
    "max_dead": _Field(
        "Max dead letters",
        "In each partition, the oldest beyond this many are dropped; none for no limit.",
    ),
    "keep": _Field(
        "Keep results",
        "How long results and attempts of finished messages stay: 12h, 7d, or none.",
    ),
    "max_kept": _Field(
        "Max results", "In each partition, the oldest results beyond this many are dropped."
    ),
    "limit": _Field(
        "Limit",
        "How many messages run at a time (5), how many start within a period (100/s), both"
        " (5,100/10m), or none.",
    ),
    "group_limit": _Field(
        "Limit of each group",
        "The same for each group without a limit of its own; also: ordered.",
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
