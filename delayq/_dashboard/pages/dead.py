"""The dead letters of a reliable queue: all, some by their conditions, and counts by cause."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_args
from urllib.parse import unquote

from starlette.exceptions import HTTPException

from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import UNITS, farthest, offset_of, redirect, whole_number
from delayq._dashboard.health import SECOND
from delayq._dashboard.pages.queue import PER_PAGE
from delayq._dashboard.rendering import link
from delayq._durations import moment_us
from delayq.admin import letters
from delayq.admin.letters import GroupBy, LetterQuery
from delayq.admin.search import Search

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq._dashboard.rows import Row
    from delayq._dashboard.sources import ReliableSource


async def load_letters(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    offset = offset_of(request, source)
    # Those that die from now on are not among those that the visitor acts on.
    now = await board.now()
    depth, listing = await asyncio.gather(source.depth(), source.page("dead", offset, PER_PAGE))
    return {
        "source": source,
        "depth": depth,
        "rows": listing.rows,
        "offset": offset,
        "limit": PER_PAGE,
        "farthest": farthest(source),
        "total": depth.dead,
        "now": now,
        "until": moment_us(now).isoformat(),
    }


async def redrive(board: Board, source: ReliableSource, form: Form) -> Response:
    if (refs := form.refs()) is None:
        count = await letters.redrive(
            await source.all_stores(), LetterQuery(died_before=form.shown_at())
        )
    elif not refs:
        return redirect("dead", source, done="unchosen")
    else:
        count = await source.redrive([ref for ref in refs if source.may_hold(ref)])
    return redirect("dead", source, done="redriven", count=str(count))


async def purge(board: Board, source: ReliableSource, form: Form) -> Response:
    if (refs := form.refs()) is None:
        count = await letters.purge(
            await source.all_stores(), LetterQuery(died_before=form.shown_at())
        )
    elif not refs:
        return redirect("dead", source, done="unchosen")
    else:
        count = await source.purge_dead([ref for ref in refs if source.may_hold(ref)])
    return redirect("dead", source, done="purged", count=str(count))


LETTERS = Page(
    "/dead",
    "dead.html",
    load_letters,
    label="Dead letters",
    scope="queue",
    kinds=("reliable",),
    actions={"redrive": Action(redrive, ("reliable",)), "purge": Action(purge, ("reliable",))},
    notes={
        "redriven": Note("message re-queued.", "messages re-queued."),
        "purged": Note("dead letter dropped.", "dead letters dropped."),
        "unchosen": Note(
            "Nothing changed: select messages, or confirm that the action applies to all of them.",
            bad=True,
        ),
    },
)


GROUPINGS: tuple[GroupBy, ...] = get_args(GroupBy)
# The bounds of one page: the most letters that are examined to count them, and then to find those
# to show, and the time for each, in seconds. A page opens within 300 ms.
_MAX_EXAMINED = 10_000
_SECONDS = 0.1
# The longest age, in seconds: a hundred years.
_OLDEST = 100 * 365 * 86_400
_FIELDS = ("error", "reason", "older", "unit", "by", "cause")


@dataclass(frozen=True)
class _Filter:
    """The conditions in an address, as texts.

    Attributes:
        texts: The texts.
        query: The letters that they choose.
        wrong: Why the age is invalid.
    """

    texts: dict[str, str]
    query: LetterQuery
    wrong: str = ""

    @classmethod
    def of(cls, params: Mapping[str, str], now: int) -> _Filter:
        """Read the conditions. Raises HTTPException."""
        texts = {name: params.get(name, "").strip() for name in _FIELDS}
        texts["cause"] = params.get("cause", "")
        if texts["by"] and texts["by"] not in GROUPINGS:
            raise HTTPException(404, "Dead letters are grouped by error, type or reason.")
        query = LetterQuery(texts["error"], texts["reason"], cause=_cause(texts))
        if not texts["older"]:
            return cls(texts, query)
        try:
            age = float(texts["older"]) * UNITS[texts["unit"]]
        except (ValueError, KeyError):
            age = -1.0
        if not 0 <= age <= _OLDEST:
            return cls(texts, query, "The age must be a number from 0 to 100 years.")
        died_before = moment_us(max(0, now - int(age * SECOND)))
        return cls(texts, replace(query, died_before=died_before))

    @property
    def is_grouped(self) -> bool:
        return bool(self.texts["by"]) and self.query.cause is None

    @property
    def chooses(self) -> bool:
        return self.query != LetterQuery()


async def load_matching(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    depth, now = await asyncio.gather(source.depth(), board.now())
    conditions = _Filter.of(request.query_params, now)
    values = {
        "source": source,
        "total": depth.dead,
        "now": now,
        "chosen": conditions,
        "units": tuple(UNITS),
        "groupings": GROUPINGS,
        "rows": (),
        "groups": None,
        "matching": None,
        "examined": 0,
        "more": "",
    }
    if conditions.wrong:
        return values
    if conditions.is_grouped:
        return values | await _groups(source, conditions)
    offset = whole_number(request.query_params.get("offset"))
    return values | await _find_matching(source, conditions, offset, now)


async def _groups(source: ReliableSource, conditions: _Filter) -> dict[str, Any]:
    by, examined = cast("GroupBy", conditions.texts["by"]), 0

    def tell(done: int, _: int) -> None:
        nonlocal examined
        examined = done

    stores = await source.all_stores()
    groups = await letters.groups(
        stores,
        by,
        conditions.query,
        progress=tell,
        max_examined=_MAX_EXAMINED,
        deadline=time.monotonic() + _SECONDS,
    )
    texts = {name: text for name, text in conditions.texts.items() if name != "cause"}
    return {
        "examined": examined,
        "groups": [
            (
                group,
                None
                if group.cause == letters.OTHER_CAUSES
                else link("letters", source, None, **texts, cause=group.cause),
            )
            for group in groups
        ],
    }


async def _find_matching(
    source: ReliableSource, conditions: _Filter, offset: int, now: int
) -> dict[str, Any]:
    examined = 0

    def tell(done: int, _: int) -> None:
        nonlocal examined
        examined = done

    # Those that die from now on are not among those that the visitor acts on.
    query = _dead_until(conditions.query, now)
    stores = await source.all_stores()
    deadline = time.monotonic() + _SECONDS
    matching = await letters.count(
        stores, query, progress=tell, max_examined=_MAX_EXAMINED, deadline=deadline
    )
    search = Search(await source.letters(), lambda match: query.matches(match[1]), offset)
    matches = await search.run(
        max_examined=_MAX_EXAMINED, limit=PER_PAGE, deadline=time.monotonic() + _SECONDS
    )
    rows: list[Row] = [row for row, _ in matches]
    assert query.died_before is not None
    following = search.next_offset
    return {
        "rows": rows,
        "matching": matching,
        "examined": examined,
        "until": query.died_before.isoformat(),
        "more": ""
        if following is None or search.searched + offset >= search.total
        else link("letters", source, None, **conditions.texts, offset=following),
    }


def _dead_until(query: LetterQuery, now: int) -> LetterQuery:
    latest = moment_us(now)
    return replace(query, died_before=min(query.died_before or latest, latest))


def _cause(texts: Mapping[str, str]) -> tuple[GroupBy, str] | None:
    return (cast("GroupBy", texts["by"]), texts["cause"]) if texts["cause"] else None


async def redrive_matching(board: Board, source: ReliableSource, form: Form) -> Response:
    if form.refs() is not None:
        return _refuse_without_query(source, form)
    count = await letters.redrive(await source.all_stores(), _query_in(form))
    return redirect("dead", source, done="redriven", count=str(count), undo="no")


async def purge_matching(board: Board, source: ReliableSource, form: Form) -> Response:
    if form.refs() is not None:
        return _refuse_without_query(source, form)
    count = await letters.purge(await source.all_stores(), _query_in(form))
    return redirect("dead", source, done="purged", count=str(count), undo="no")


def _refuse_without_query(source: ReliableSource, form: Form) -> Response:
    """Show the same letters again: the form of another page would change all of them."""
    texts = {name: text for name in _FIELDS if (text := unquote(form.get(name)))}
    return redirect("letters", source, **texts, done="unsure_letters")


def _query_in(form: Form) -> LetterQuery:
    """Return the conditions of a form. Raises HTTPException."""
    texts = {name: unquote(form.get(name)) for name in _FIELDS}
    if texts["by"] and texts["by"] not in GROUPINGS:
        raise HTTPException(400, "Dead letters are grouped by error, type or reason.")
    return LetterQuery(texts["error"], texts["reason"], form.shown_at(), _cause(texts))


MATCHING_LETTERS = Page(
    "/letters",
    "letters.html",
    load_matching,
    kinds=("reliable",),
    actions={
        "redrive_matching": Action(redrive_matching, ("reliable",)),
        "purge_matching": Action(purge_matching, ("reliable",)),
    },
    notes={
        "unsure_letters": Note(
            "Nothing changed: confirm that the action applies to all that match.", bad=True
        )
    },
)
