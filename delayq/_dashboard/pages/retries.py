"""The messages that have failed and will be tried again: of a reliable queue, and of all queues."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import unquote

from starlette.exceptions import HTTPException

from delayq._dashboard import changes
from delayq._dashboard.board import Action, Note, Page, is_live
from delayq._dashboard.causes import GROUPINGS, causes_page, check_grouping
from delayq._dashboard.forms import button_link, whole_number
from delayq._dashboard.pages.queue import PER_PAGE, redirect_after
from delayq._dashboard.rendering import link
from delayq._dashboard.sources import ReliableSource
from delayq.admin.letters import OTHER_CAUSES, cause_of
from delayq.admin.retries import START, ReadPosition, RetryCount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.causes import Causes
    from delayq._dashboard.forms import Form
    from delayq._dashboard.rows import MessageRef
    from delayq.admin.letters import GroupBy

# An error has no reason beside it, as that of a dead letter has.
_GROUPINGS = tuple(by for by in GROUPINGS if by != "reason")
# How long a page reads messages, in seconds: it opens within 300 ms.
_SECONDS = 0.1
# How long a button looks for the messages with its cause, in seconds.
_SECONDS_TO_FIND = 10
_POSITION = re.compile("([0-9]{1,4})[.]([0-9]{1,20})")
# The server refuses cursors that do not fit into 64 bits.
_LAST_CURSOR = 2**64 - 1


class RetryLine(NamedTuple):
    """A cause in one queue.

    Attributes:
        source: The queue.
        cause: The cause.
        failed: The number of messages that have failed for it.
        address: The page of these messages; empty if they have no cause in common.
        act: The address to which a form about them is sent.
    """

    source: ReliableSource
    cause: str
    failed: int
    address: str
    act: str


def _grouping(request: Request) -> GroupBy:
    by = request.query_params.get("by", "")
    check_grouping(by)
    return cast("GroupBy", by if by in _GROUPINGS else "type")


async def _count(
    board: Board, request: Request, failed: Sequence[tuple[int, ReliableSource]], by: GroupBy
) -> Causes:
    """Go on with counting the failed messages of some queues, which are given with the number of
    these. Returns a page of the causes so far, the most frequent first.
    """
    counts = await board.counts.go_on(
        [
            ((source.name, "retries", source.partitions, by), partial(_begin, source, by))
            for _, source in failed
        ],
        is_live=is_live(request),
    )

    def line(source: ReliableSource, _: RetryCount, group: tuple[str, int]) -> RetryLine:
        cause, failed = group
        if cause in ("", OTHER_CAUSES):
            return RetryLine(source, cause, failed, "", "")
        address = link("retries", source, None, by=by, cause=cause)
        return RetryLine(
            source, cause, failed, address, button_link(source, {"by": by, "cause": cause})
        )

    offset = whole_number(request.query_params.get("offset"))
    pairs = zip(failed, counts, strict=True)
    queues = ((source, number, count) for (number, source), count in pairs)
    return causes_page(queues, offset, RetryCount.causes, lambda group: group[1], line)


def _values(causes: Causes, by: GroupBy) -> dict[str, Any]:
    return {
        "causes": causes,
        "refresh": causes.refresh,
        "by": by,
        "groupings": _GROUPINGS,
        "most": changes.MAX_MESSAGES,
    }


async def _begin(source: ReliableSource, by: GroupBy) -> RetryCount:
    return await RetryCount.begin(await source.all_stores(), by)


def _matcher(by: GroupBy, cause: str) -> Callable[[str], bool]:
    """Return a function that tells whether an error has a cause; any, if that is empty."""
    return lambda error: not cause or cause_of(error, "", by) == cause


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.reliable(request)
    params = request.query_params
    by, cause, start = _grouping(request), params.get("cause", ""), START
    if params.get("from"):
        position = _POSITION.fullmatch(params["from"])
        if position is None or int(position[2]) > _LAST_CURSOR:
            raise HTTPException(404, "There is no such page.")
        start = ReadPosition(int(position[1]), position[2])
    values = _values(await _count(board, request, [(0, source)], by), by)
    values |= {"source": source, "cause": cause}
    if is_live(request):
        # The list of messages does not change by itself.
        return values
    rows, following = await source.failed_page(
        start, _matcher(by, cause), PER_PAGE, time.monotonic() + _SECONDS
    )
    more = "" if following is None else f"{following.partition}.{following.cursor}"
    return values | {
        "rows": rows,
        "is_first": start == START,
        "more": more and link("retries", source, None, by=by, cause=cause, **{"from": more}),
        "now": await board.now(),
    }


async def retry_cause(board: Board, source: ReliableSource, form: Form) -> Response:
    # Those that are due would be found again, and not the others.
    refs, is_end = await _refs_of(source, form, only_delayed=True)
    if not refs:
        return board.redirect_back(form, source, "retries", done="none_delayed")
    changed = await changes.reschedule(board, source, refs, 0)
    done = "rescheduled_many" if is_end else "rescheduled_first"
    return redirect_after(board, form, source, done, changed)


async def cancel_cause(board: Board, source: ReliableSource, form: Form) -> Response:
    refs, is_end = await _refs_of(source, form)
    changed = await changes.cancel(board, source, refs)
    done = "cancelled_many" if is_end else "cancelled_first"
    return redirect_after(board, form, source, done, changed)


async def bury_cause(board: Board, source: ReliableSource, form: Form) -> Response:
    return await bury(board, source, form, *await _refs_of(source, form))


async def bury_selected(board: Board, source: ReliableSource, form: Form) -> Response:
    if not (refs := [ref for ref in form.refs() or () if source.may_hold(ref)]):
        return board.redirect_back(form, source, "retries", done="unselected")
    return await bury(board, source, form, refs)


async def bury(
    board: Board,
    source: ReliableSource,
    form: Form,
    refs: Sequence[MessageRef],
    is_end: bool = True,
) -> Response:
    changed = await changes.bury(board, source, refs)
    done = "buried" if len(changed.refs) == len(refs) else "buried_some"
    return redirect_after(board, form, source, done if is_end else "buried_first", changed)


async def _refs_of(
    source: ReliableSource, form: Form, *, only_delayed: bool = False
) -> tuple[list[MessageRef], bool]:
    """Return references to the first messages with the form's cause, and whether these are all.

    If ``only_delayed``, messages that are due or leased are left out. Raises HTTPException.
    """
    by, cause = form.get("by"), unquote(form.get("cause"))
    if by not in _GROUPINGS or not cause:
        raise HTTPException(400, "The form is incomplete.")
    await source.all_stores()
    deadline = time.monotonic() + _SECONDS_TO_FIND
    matches = _matcher(cast("GroupBy", by), cause)
    refs, is_end = await source.failed_refs(
        matches, changes.MAX_MESSAGES, deadline, only_delayed=only_delayed
    )
    if not refs and not is_end:
        raise HTTPException(
            503, f"Nothing changed: no such message was found within {_SECONDS_TO_FIND} s."
        )
    return refs, is_end


# Those that were not found are changed by the same button.
_MORE = "There may be more with this cause: use its button again."

PAGE = Page(
    "/retries",
    "retries.html",
    load,
    label="Retries",
    scope="queue",
    kinds=("reliable",),
    actions={
        "retry_cause": Action(retry_cause, ("reliable",)),
        "cancel_cause": Action(cancel_cause, ("reliable",)),
        "bury_cause": Action(bury_cause, ("reliable",)),
        "bury_selected": Action(bury_selected, ("reliable",)),
    },
    notes={
        "rescheduled_first": Note(
            f"message rescheduled. {_MORE}", f"messages rescheduled. {_MORE}"
        ),
        "cancelled_first": Note(f"message cancelled. {_MORE}", f"messages cancelled. {_MORE}"),
        "buried_first": Note(
            f"message is a dead letter now. {_MORE}", f"messages are dead letters now. {_MORE}"
        ),
        "none_delayed": Note(
            "Nothing changed: all messages with this cause are due, leased or gone.", bad=True
        ),
        "buried": Note("message is a dead letter now.", "messages are dead letters now."),
        "buried_some": Note(
            "message is a dead letter now. The others are gone, or a worker has them: these are as"
            " before.",
            "messages are dead letters now. The others are gone, or a worker has them: these are as"
            " before.",
        ),
    },
)


async def load_all(board: Board, request: Request) -> Mapping[str, Any]:
    by = _grouping(request)
    # Those that have failed messages, the fewest first: their counts are complete at once.
    answers = await board.ask_all("failed", ReliableSource.count_failed)
    counted = sorted(
        ((number, source) for source, number in answers if isinstance(number, int) and number),
        key=lambda entry: entry[0],
    )
    causes = await _count(board, request, counted, by)
    refused = [(source, answer) for source, answer in answers if isinstance(answer, str)]
    return _values(causes._replace(troubles=[*refused, *causes.troubles]), by)


ALL_RETRIES = Page("/all-retries", "all_retries.html", load_all, label="Retries", scope="server")
