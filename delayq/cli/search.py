"""The command ``search``: finds messages by what they contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from delayq.admin import inspect as inspection
from delayq.cli.errors import CommandFailed
from delayq.cli.options import (
    AsJson,
    CodecName,
    Limit,
    Offset,
    Queue,
    Target,
    Url,
    codec_of,
    headers_of,
)
from delayq.cli.output import print_json, progress, say
from delayq.cli.running import at_server_time
from delayq.cli.shown import MessageView, show_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq import Client
    from delayq.codecs import Codec

SearchState = Literal["ready", "delayed", "leased", "dead", "all"]

# The number of messages read in a step.
_AT_A_TIME = 500


@dataclass(frozen=True)
class _Conditions:
    """What a message must contain: all of it, in any case."""

    payload: str
    id: str
    headers: dict[str, str]
    error: str

    def match(self, view: MessageView) -> bool:
        value = view.facts["value"]
        texts = [view.text, value] if isinstance(value, str) else [view.text]
        headers = view.facts.get("headers") or {}
        return (
            any(self.payload.lower() in text.lower() for text in texts)
            and self.id.lower() in (view.facts["id"] or "").lower()
            and self.error.lower() in view.error.lower()
            and all(
                name in headers and text.lower() in headers[name].lower()
                for name, text in self.headers.items()
            )
        )


@dataclass
class _Search:
    """A search, and how far it has come."""

    queue: Target
    conditions: _Conditions
    codec: Codec[Any]
    states: tuple[str, ...]
    offset: int
    most: int
    limit: int
    total: int = 0
    searched: int = 0
    # Messages that were counted, and gone when they were to be read.
    missing: int = 0

    @property
    def next_offset(self) -> int | None:
        """Where to search on; None at the end."""
        until = self.offset + self.searched + self.missing
        return until if until < self.total else None

    async def run(self, client: Client, show: Callable[[int, int], None]) -> list[MessageView]:
        """Return the first messages that match among those to look at."""
        found: list[MessageView] = []
        skip = self.offset
        counts = await self._counts(client)
        self.total = sum(counts.values())
        for state, count in counts.items():
            at, skip = min(skip, count), max(0, skip - count)
            while at < count and (left := self.most - self.searched) > 0:
                page = await self._page(client, state, at, min(_AT_A_TIME, left, count - at))
                if not page:
                    # They are gone meanwhile. To search on from here would find none again.
                    self.missing += count - at
                    break
                for view in page:
                    self.searched += 1
                    if self.conditions.match(view):
                        found.append(view)
                        if len(found) == self.limit:
                            return found
                at += len(page)
                show(self.searched, min(self.most, self.total - self.offset))
        return found

    async def _counts(self, client: Client) -> dict[str, int]:
        if self.queue.is_reliable:
            depth = await inspection.reliable_stats(client, self.queue.name)
        else:
            depth = await inspection.delayed_stats(client, self.queue.name)
        return {state: getattr(depth, state) for state in self.states}

    async def _page(self, client: Client, state: Any, offset: int, limit: int) -> list[MessageView]:
        if not self.queue.is_reliable:
            records = await inspection.records(
                client, self.queue.name, state, offset=offset, limit=limit
            )
            return [MessageView.of_record(one, state, self.codec) for one in records]
        handle = self.queue.reliable(client)
        if state == "dead":
            letters = await handle.dead.list(offset=offset, limit=limit)
            return [MessageView.of_letter(one, self.codec) for one in letters]
        messages = await handle.list(state, offset=offset, limit=limit)
        return [MessageView.of_message(one, self.codec) for one in messages]


def search(
    queue: Queue,
    payload: Annotated[
        str, typer.Option(metavar="TEXT", help="Messages whose value, as JSON, contains this.")
    ] = "",
    id: Annotated[  # noqa: A002
        str, typer.Option("--id", metavar="TEXT", help="Messages whose id contains this.")
    ] = "",
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            "-H",
            metavar="NAME=TEXT",
            help="Messages with a header that contains this. Repeatable.",
        ),
    ] = None,
    error: Annotated[
        str, typer.Option(metavar="TEXT", help="Messages whose last error contains this.")
    ] = "",
    state: Annotated[SearchState, typer.Option(help="The state of the messages.")] = "all",
    limit: Limit = 20,
    scan: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Look at this many messages at most.")
    ] = 10_000,
    offset: Offset = 0,
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Find the messages that meet all conditions, in any case, and say how many were looked at.

    Looks at messages one after the other: ready ones first, then delayed, leased and dead ones.

    Exit status: 0, or 1 if none was found.
    """
    conditions = _Conditions(payload, id, headers_of(header) or {}, error)
    if not (payload or id or header or error):
        raise CommandFailed("nothing to search for: pass --payload, --id, --header or --error")
    states: tuple[str, ...] = ("ready", "delayed", "leased", "dead")
    if not queue.is_reliable:
        if header or error or state == "dead":
            raise CommandFailed("--header, --error and --state dead need a reliable queue")
        states = states[:-1]
    work = _Search(
        queue,
        conditions,
        codec_of(codec),
        states if state == "all" else (state,),
        offset,
        scan,
        limit,
    )

    async def look(client: Client) -> list[MessageView]:
        with progress("searched", shown=not as_json) as show:
            return await work.run(client, show)

    found, now = at_server_time(url, look)
    if found or as_json:
        show_list(found, now, as_json=as_json, mixed=True)
    if as_json:
        figures = {"searched": work.searched, "total": work.total, "found": len(found)}
        print_json({**figures, "next_offset": work.next_offset})
    else:
        more = work.next_offset
        hint = "" if more is None else f"; continue with --offset {more}"
        say(
            f"{len(found):,} found; {work.searched:,} of {work.total:,} messages were searched"
            f"{hint}"
        )
    raise typer.Exit(0 if found else 1)
