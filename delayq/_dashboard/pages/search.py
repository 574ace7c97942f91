"""A search for messages by their contents, over one queue or all of them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from delayq._dashboard.board import Page
from delayq._dashboard.forms import whole_number
from delayq._dashboard.rendering import link, name_of
from delayq._dashboard.sources import ReliableSource
from delayq.admin.search import Search, SearchFields, SearchQuery
from delayq.errors import DecodeError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq._dashboard.rows import Row
    from delayq._dashboard.sources import AnySource
    from delayq.admin.catalog import QueueKind
    from delayq.admin.payloads import PayloadCipher

STATES = ("ready", "delayed", "leased", "dead", "handled", "unreadable")
_PER_PAGE = 25
# The bounds of one page: visitors go on to the next one. A page opens within 300 ms.
_MAX_EXAMINED = 5_000
_SECONDS = 0.2
# The longest payload that is parsed to be searched, in bytes.
_PARSED = 256 * 1024
_MAX_TROUBLES = 10


@dataclass
class _Progress:
    """The results of one page so far."""

    deadline: float = 0.0
    matches: list[tuple[AnySource, Row]] = field(default_factory=list)
    searched: int = 0
    encrypted: int = 0
    troubles: list[str] = field(default_factory=list)
    # Where to go on: a queue, and how many of its messages to skip.
    next: tuple[QueueKind, str, int] | None = None

    @property
    def is_full(self) -> bool:
        return (
            len(self.matches) >= _PER_PAGE
            or self.searched >= _MAX_EXAMINED
            or time.monotonic() >= self.deadline
        )


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    params = request.query_params
    texts = {name: params.get(name, "").strip() for name in ("q", "id", "error", "group", "header")}
    state = params.get("state", "")
    if state and state not in STATES:
        raise HTTPException(404, "Unknown message state.")
    source = await board.source(request) if params.get("name") else None
    query, wrong = _query(texts)
    work = None
    if not query.is_empty and not wrong:
        work = _Progress()
        states = (state,) if state else STATES
        if source is not None:
            work.deadline = time.monotonic() + _SECONDS
            await _search_queue(
                board.cipher, source, query, states, whole_number(params.get("offset")), work
            )
        else:
            after = params.get("from", ""), params.get("from_kind", "")
            await _search_all(board, query, states, after, whole_number(params.get("offset")), work)
    examined = whole_number(params.get("seen")) + (0 if work is None else work.searched)
    return {
        "only": source,
        "texts": texts,
        "state": state,
        "states": STATES,
        "wrong": wrong,
        "work": work,
        "seen": examined,
        "more": ""
        if work is None or work.next is None
        else _next_link(source, texts, state, work, examined),
        "now": await board.now(),
    }


def _query(texts: Mapping[str, str]) -> tuple[SearchQuery, str]:
    """Return what to search for, and why it is invalid."""
    name, equals, text = texts["header"].partition("=")
    headers = {name.strip(): text.strip()} if equals and name.strip() else {}
    query = SearchQuery(texts["q"], texts["id"], texts["error"], texts["group"], headers)
    if texts["header"] and not headers:
        return query, "The header must be NAME=TEXT."
    return query, ""


async def _search_all(
    board: Board,
    query: SearchQuery,
    states: Sequence[str],
    start: tuple[str, str],
    offset: int,
    work: _Progress,
) -> None:
    """Search all queues by name, from a name and kind on."""
    queues = sorted(await board.queues.find_all(), key=lambda queue: (queue[1], queue[0]))
    work.deadline = time.monotonic() + _SECONDS
    remaining = [queue for queue in queues if (queue[1], queue[0]) >= start]
    for number, (kind, name, partitions) in enumerate(remaining):
        if number and work.is_full:
            work.next = kind, name, 0
            return
        source = board.queues.of(kind, name, partitions)
        skip = offset if (name, kind) == start else 0
        try:
            await _search_queue(board.cipher, source, query, states, skip, work)
        except ServerRefused as error:
            # A queue whose keys hold something else must not hide the others.
            if len(work.troubles) < _MAX_TROUBLES:
                work.troubles.append(f"{name}: {error}")
        if work.next is not None:
            return


async def _search_queue(
    cipher: PayloadCipher,
    source: AnySource,
    query: SearchQuery,
    states: Sequence[str],
    offset: int,
    work: _Progress,
) -> None:
    """Search one queue, from an offset on."""
    if source.kind == "delayed" and query.needs_reliable:
        return
    exact_id = ""
    if query.id and isinstance(source, ReliableSource):
        # A whole id is found at once, however long the queue is.
        exact_id = query.id
        rows = await source.find_by_id(exact_id) if not offset else []
        for row in rows:
            is_match = row.state in states and query.matches(_fields(row, source, cipher))
            work.encrypted += is_match is None
            if is_match:
                work.matches.append((source, row))

    def matches(row: Row) -> bool | None:
        fields = _fields(row, source, cipher)
        return not (exact_id and fields.id == exact_id) and query.matches(fields)

    search = Search(await source.search_pages(states), matches, offset)
    rows = await search.run(
        max_examined=max(0, _MAX_EXAMINED - work.searched),
        limit=max(1, _PER_PAGE - len(work.matches)),
        deadline=work.deadline,
    )
    work.matches += [(source, row) for row in rows]
    work.searched += search.searched
    work.encrypted += search.encrypted
    if (next_offset := search.next_offset) is not None:
        work.next = source.kind, source.name, next_offset


def _fields(row: Row, source: AnySource, cipher: PayloadCipher) -> SearchFields:
    name = "" if row.ref is None else name_of(row.ref)
    payload = (row.result if row.state == "handled" else row.payload) or b""
    try:
        texts = _texts(cipher.decrypt(payload, source.name))
    except DecodeError:
        texts = []
    return SearchFields(texts, name, row.error_line, row.group, row.headers)


def _texts(payload: bytes) -> list[str]:
    """Return a payload as it is stored, and JSON with escapes also without them."""
    texts = [payload.decode(errors="replace")]
    if b"\\" in payload and len(payload) <= _PARSED:
        with suppress(ValueError, RecursionError):
            texts.append(json.dumps(json.loads(payload), ensure_ascii=False))
    return texts


def _next_link(
    source: AnySource | None, texts: Mapping[str, str], state: str, work: _Progress, examined: int
) -> str:
    """Return the address of the next page."""
    assert work.next is not None
    kind, name, offset = work.next
    start = {} if source is not None else {"from": name, "from_kind": kind}
    return link("search", source, None, **texts, state=state, **start, offset=offset, seen=examined)


PAGE = Page("/search", "search.html", load, label="Search", scope="server")
