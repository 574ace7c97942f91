"""The command ``search``: finds messages by what they contain."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from delayq._reliable.dead_letters import read_dead_letter
from delayq.admin.delayed import DelayedInspector
from delayq.admin.reliable import ReliableInspector
from delayq.admin.search import Search, SearchFields, SearchPages, SearchQuery
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
from delayq.codecs import BytesCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq import Client
    from delayq._reliable.replies import State
    from delayq.codecs import Codec

SearchState = Literal["ready", "delayed", "leased", "dead", "all"]


def _fields(view: MessageView) -> SearchFields:
    value = view.facts["value"]
    texts = [view.text, value] if isinstance(value, str) else [view.text]
    return SearchFields(
        texts,
        view.facts["id"] or "",
        view.error,
        view.facts.get("group") or "",
        view.facts.get("headers") or {},
    )


async def _sources(
    client: Client, queue: Target, states: Sequence[str], codec: Codec[Any]
) -> list[SearchPages[MessageView]]:
    if not queue.is_reliable:
        delayed = DelayedInspector.of(client, queue.name)
        depth = await delayed.depth()

        async def records(state: Any, offset: int, limit: int) -> list[MessageView]:
            page = await delayed.records(state, offset=offset, limit=limit)
            return [MessageView.of_record(record, state, codec) for record in page]

        return [SearchPages(getattr(depth, state), partial(records, state)) for state in states]
    await queue.check_existence(client)
    inspector = ReliableInspector.of(client, queue.name)
    await inspector.all_stores(at_rest=True)
    sources: list[SearchPages[MessageView]] = []
    for state in states:
        if state == "dead":
            await inspector.trim_letters()
            sources += await inspector.letter_pages(
                lambda _, letter: MessageView.of_letter(
                    read_dead_letter(letter, BytesCodec()), codec
                )
            )
        else:
            sources += await inspector.message_pages(
                cast("State", state), lambda _, message: MessageView.of_message(message, codec)
            )
    return sources


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
    group: Annotated[
        str, typer.Option(metavar="TEXT", help="Messages whose group contains this.")
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
    """Find the messages that meet all conditions, ignoring case, and say how many were searched.

    Looks at messages one after the other: ready ones first, then delayed, leased and dead ones.

    Exit status: 0, or 1 if none was found.

    Example: `delayq search mails --payload ada@example.org`
    """
    query = SearchQuery(payload, id, error, group, headers_of(header) or {})
    if query.is_empty:
        raise CommandFailed(
            "nothing to search for: pass --payload, --id, --header, --error or --group"
        )
    states: tuple[str, ...] = ("ready", "delayed", "leased", "dead")
    if not queue.is_reliable:
        if query.needs_reliable or state == "dead":
            raise CommandFailed("--header, --error, --group and --state dead need a reliable queue")
        states = states[:-1]
    how = codec_of(codec)
    chosen = states if state == "all" else (state,)

    async def look(client: Client) -> tuple[Search[MessageView], list[MessageView]]:
        sources = await _sources(client, queue, chosen, how)
        work = Search(sources, lambda view: query.matches(_fields(view)), offset)
        with progress("searched", shown=not as_json) as show:
            return work, await work.run(max_examined=scan, limit=limit, progress=show)

    (work, found), now = at_server_time(url, look)
    more = work.next_offset
    if found or as_json:
        show_list(found, now, as_json=as_json, mixed=True)
    if as_json:
        figures = {"searched": work.searched, "total": work.total, "found": len(found)}
        print_json({**figures, "next_offset": more})
    else:
        hint = "" if more is None else f"; continue with --offset {more}"
        say(
            f"{len(found):,} found; {work.searched:,} of {work.total:,} messages were searched"
            f"{hint}"
        )
    raise typer.Exit(0 if found else 1)
