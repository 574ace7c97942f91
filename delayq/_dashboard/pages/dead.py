"""Dead letters: those of a reliable queue, some by their conditions, and all queues by cause."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import unquote

from starlette.exceptions import HTTPException

from delayq._background import gather_mixed
from delayq._dashboard.board import Action, Note, Page, is_live
from delayq._dashboard.causes import GROUPINGS, causes_page, check_grouping
from delayq._dashboard.forms import UNITS, button_link, farthest, offset_of, whole_number
from delayq._dashboard.health import SECOND
from delayq._dashboard.pages.queue import PER_PAGE
from delayq._dashboard.rendering import link
from delayq._dashboard.sources import ReliableSource
from delayq._durations import datetime_at
from delayq.admin import letters
from delayq.admin.letters import LetterCount, LetterQuery
from delayq.admin.search import Search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.causes import Causes
    from delayq._dashboard.forms import Form
    from delayq._dashboard.rows import Row
    from delayq._dashboard.sources import AnySource
    from delayq.admin.letters import GroupBy, LetterGroup


async def load_letters(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    offset = offset_of(request, source)
    # Those that die from now on are not among those that the visitor acts on.
    now = await board.now()
    depth, listing = await gather_mixed(source.depth(), source.page("dead", offset, PER_PAGE))
    return {
        "source": source,
        "depth": depth,
        "rows": listing.rows,
        "offset": offset,
        "limit": PER_PAGE,
        "farthest": farthest(source),
        "total": depth.dead,
        "now": now,
        "until": datetime_at(now).isoformat(),
    }


async def redrive(board: Board, source: ReliableSource, form: Form) -> Response:
    if (refs := form.refs()) is None:
        count = await letters.redrive(
            await source.all_stores(), LetterQuery(died_before=form.shown_at())
        )
    elif not refs:
        return board.redirect_back(form, source, "dead", done="unchosen")
    else:
        count = await source.redrive([ref for ref in refs if source.may_hold(ref)])
    return board.redirect_back(form, source, "dead", done="redriven", count=str(count))


async def purge(board: Board, source: ReliableSource, form: Form) -> Response:
    if (refs := form.refs()) is None:
        count = await letters.purge(
            await source.all_stores(), LetterQuery(died_before=form.shown_at())
        )
    elif not refs:
        return board.redirect_back(form, source, "dead", done="unchosen")
    else:
        count = await source.purge_dead([ref for ref in refs if source.may_hold(ref)])
    return board.redirect_back(form, source, "dead", done="purged", count=str(count), undo="no")


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


# The bounds of a page of letters that match: the most that are examined, and the time in seconds.
# A page opens within 300 ms.
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
        check_grouping(texts["by"])
        query = LetterQuery(texts["error"], texts["reason"], cause=_cause(texts))
        if not texts["older"]:
            return cls(texts, query)
        try:
            age = float(texts["older"]) * UNITS[texts["unit"]]
        except (ValueError, KeyError):
            age = -1.0
        if not 0 <= age <= _OLDEST:
            return cls(texts, query, "The age must be a number from 0 to 100 years.")
        died_before = datetime_at(max(0, now - int(age * SECOND)))
        return cls(texts, replace(query, died_before=died_before))

    @property
    def is_grouped(self) -> bool:
        return bool(self.texts["by"]) and self.query.cause is None

    @property
    def chooses(self) -> bool:
        return self.query != LetterQuery()

    @property
    def by(self) -> GroupBy:
        return cast("GroupBy", self.texts["by"] or "type")


class CauseLine(NamedTuple):
    """A cause in one queue.

    Attributes:
        source: The queue.
        group: Its letters.
        address: The page of these letters; empty if they have no cause in common.
        act: The address to which a form about them is sent; empty until all are counted.
    """

    source: AnySource
    group: LetterGroup
    address: str
    act: str


async def _count(
    board: Board, request: Request, sources: Sequence[ReliableSource], conditions: _Filter, now: int
) -> list[LetterCount | str | None]:
    """Go on with counting the letters of some queues, and return the counts; None for each that has
    not begun, and for each that the server refused, why.
    """
    # Letters that die from now on are not among those that the visitor acts on.
    until = min(conditions.query.died_before or datetime_at(now), datetime_at(now))
    query = replace(conditions.query, died_before=until)

    async def begin(source: ReliableSource) -> LetterCount:
        stores = await source.all_stores()
        return await LetterCount.begin(stores, conditions.by, query)

    about = tuple(sorted(conditions.texts.items()))
    return await board.counts.go_on(
        [
            ((source.name, "letters", source.partitions, about), partial(begin, source))
            for source in sources
        ],
        is_live=is_live(request),
    )


def _causes(
    counts: Iterable[tuple[ReliableSource, int, LetterCount | str | None]],
    conditions: _Filter,
    offset: int,
) -> Causes:
    """Return a page of the causes so far, those of the last deaths first."""

    def line(source: ReliableSource, count: LetterCount, group: LetterGroup) -> CauseLine:
        # Without a cause, a form would be about all letters.
        if group.cause in ("", letters.OTHER_CAUSES):
            return CauseLine(source, group, "", "")
        texts = conditions.texts | {"by": conditions.by, "cause": group.cause}
        act = ""
        if count.is_complete and count.query.died_before is not None:
            # The letters that are counted, and no others.
            until = count.query.died_before.isoformat()
            act = button_link(source, texts, all="1", sure="1", until=until)
        return CauseLine(source, group, link("letters", source, None, **texts), act)

    return causes_page(counts, offset, LetterCount.newest, attrgetter("last"), line)


async def load_matching(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    depth, now = await gather_mixed(source.depth(), board.now())
    conditions = _Filter.of(request.query_params, now)
    offset = whole_number(request.query_params.get("offset"))
    values: dict[str, Any] = {
        "source": source,
        "total": depth.dead,
        "now": now,
        "chosen": conditions,
        "units": tuple(UNITS),
        "groupings": GROUPINGS,
        "rows": (),
        "causes": None,
        # Only the counts change by themselves.
        "is_live": False,
        "counting": None,
        "more": "",
    }
    if conditions.wrong:
        return values
    counts = await _count(board, request, [source], conditions, now)
    if conditions.is_grouped:
        causes = _causes(zip([source], [depth.dead], counts, strict=True), conditions, offset)
        return values | {"causes": causes, "refresh": causes.refresh, "is_live": True}
    if is_live(request):
        return values
    values |= await _find_matching(source, conditions, offset, now)
    (counting,) = counts
    if isinstance(counting, LetterCount):
        values["counting"] = counting
        if counting.is_complete and counting.query.died_before is not None:
            # The form names the number that was counted.
            values["until"] = counting.query.died_before.isoformat()
    return values


async def _find_matching(
    source: ReliableSource, conditions: _Filter, offset: int, now: int
) -> dict[str, Any]:
    # Those that die from now on are not among those that the visitor acts on.
    latest = datetime_at(now)
    until = min(conditions.query.died_before or latest, latest)
    query = replace(conditions.query, died_before=until)
    search = Search(await source.letters(), lambda match: query.matches(match[1]), offset)
    matches = await search.run(
        max_examined=_MAX_EXAMINED, limit=PER_PAGE, deadline=time.monotonic() + _SECONDS
    )
    rows: list[Row] = [row for row, _ in matches]
    following = search.next_offset
    return {
        "rows": rows,
        "until": until.isoformat(),
        "more": ""
        if following is None or search.searched + offset >= search.total
        else link("letters", source, None, **conditions.texts, offset=following),
    }


def _cause(texts: Mapping[str, str]) -> tuple[GroupBy, str] | None:
    return (cast("GroupBy", texts["by"]), texts["cause"]) if texts["cause"] else None


async def redrive_matching(board: Board, source: ReliableSource, form: Form) -> Response:
    return await _change_matching(board, source, form, letters.redrive, "redriven")


async def purge_matching(board: Board, source: ReliableSource, form: Form) -> Response:
    return await _change_matching(board, source, form, letters.purge, "purged")


async def _change_matching(
    board: Board, source: ReliableSource, form: Form, change: Callable[..., Any], done: str
) -> Response:
    if form.refs() is not None:
        # Show the same letters again: the form of another page would change all of them.
        texts = {name: text for name in _FIELDS if (text := unquote(form.get(name)))}
        return board.redirect_back(form, source, "letters", **texts, done="unsure_letters")
    count: int = await change(await source.all_stores(), _query_in(form))
    return board.redirect_back(form, source, "dead", done=done, count=str(count), undo="no")


def _query_in(form: Form) -> LetterQuery:
    """Return the conditions of a form. Raises HTTPException."""
    texts = {name: unquote(form.get(name)) for name in _FIELDS}
    if texts["by"] and texts["by"] not in GROUPINGS:
        raise HTTPException(400, "Dead letters are grouped by error, type or reason.")
    if texts["by"] and not texts["cause"]:
        # Without a cause, it would be about all letters.
        raise HTTPException(400, "The form is incomplete.")
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


async def load_all(board: Board, request: Request) -> Mapping[str, Any]:
    now = await board.now()
    conditions = _Filter.of(request.query_params, now)
    offset = whole_number(request.query_params.get("offset"))
    queues = await board.queues.find_all()
    sources = [board.queues.of(*queue) for queue in queues if queue[0] == "reliable"]
    dying: list[tuple[int, ReliableSource]] = []
    refused: list[tuple[AnySource, str]] = []
    for source, depth in zip(sources, await board.live.depths(sources), strict=True):
        if isinstance(depth, str):
            refused.append((source, depth))
        elif isinstance(source, ReliableSource) and depth.dead:
            dying.append((depth.dead, source))
    # The small ones first: their counts are complete at once.
    dying.sort(key=lambda entry: entry[0])
    counts = await _count(board, request, [source for _, source in dying], conditions, now)
    pairs = zip(dying, counts, strict=True)
    causes = _causes(((source, dead, count) for (dead, source), count in pairs), conditions, offset)
    return {
        "now": now,
        "chosen": conditions,
        "groupings": GROUPINGS,
        "causes": causes._replace(troubles=[*refused, *causes.troubles]),
        "refresh": causes.refresh,
    }


ALL_LETTERS = Page("/all-dead", "all_dead.html", load_all, label="Dead letters", scope="server")
