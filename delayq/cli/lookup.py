"""The commands that show messages without taking them: peek, list, get, search, inspect.

A :class:`MessageView` is a message of either kind of queue, as commands show it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from delayq._durations import datetime_at
from delayq._reliable.bodies import parse
from delayq._reliable.checkpoints import split_report, unpack
from delayq._reliable.dead_letters import read_dead_letter
from delayq._reliable.failures import unpack_error
from delayq._reliable.following import read_report
from delayq._reliable.replies import LIVE_STATES, LiveState
from delayq.admin.delayed import DelayedInspector, RecordState
from delayq.admin.migrate import form_of
from delayq.admin.payloads import KEYS_VARIABLE
from delayq.admin.reliable import ReliableInspector
from delayq.admin.search import Search, SearchFields, SearchPages, SearchQuery
from delayq.cli.options import (
    AsJson,
    CodecName,
    DelayedOnly,
    Id,
    MaxRows,
    Offset,
    Queue,
    QueueCodec,
    Target,
    Url,
    headers_of,
)
from delayq.cli.output import (
    CommandFailed,
    moment_cell,
    moment_json,
    moment_text,
    payload_json,
    print_json,
    progress,
    progress_text,
    say,
    show_fields,
    show_table,
    tell,
    text_of,
)
from delayq.cli.running import at_server_time
from delayq.codecs import BytesCodec
from delayq.codecs.json import result_codec
from delayq.errors import DecodeError
from delayq.stats import COUNTED_STATES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence
    from datetime import datetime

    from delayq import Client, DeadLetter, MessageHistory
    from delayq._reliable.replies import StoredMessage
    from delayq.admin.delayed import Record
    from delayq.codecs import Codec


@dataclass(frozen=True)
class MessageView:
    """One message, ready to be shown.

    Attributes:
        facts: Its fields, for programs.
        moment: When it is due, or its lease ends.
        error: Its last error on one line.
    """

    facts: dict[str, Any]
    moment: datetime | None
    error: str = ""

    @property
    def text(self) -> str:
        """Its value on one line."""
        return text_of(self.facts)

    @classmethod
    def of_message(cls, message: StoredMessage, codec: Codec[Any]) -> MessageView:
        """Return a live message of a reliable queue."""
        is_leased = message.state == "leased"
        moment = datetime_at(message.moment_us)
        facts: dict[str, Any] = {
            "id": message.id.decode(errors="replace"),
            "state": message.state,
            "due_at": None if is_leased else moment_json(moment),
            "lease_ends_at": moment_json(moment) if is_leased else None,
            "attempt": message.attempt,
            "priority": message.priority,
        }
        try:
            body = parse(message.body)
        except ValueError as error:
            # Not even the queue's own part of it can be decoded.
            facts |= {
                "group": None,
                "enqueued_at": None,
                "headers": {},
                "value": None,
                "hex": message.body.hex(),
                "error": str(DecodeError("ReliableQueue", message.body, str(error))),
            }
        else:
            facts |= {
                "group": body.group,
                "enqueued_at": moment_json(datetime_at(body.enqueued_us)),
                "headers": body.headers,
                **payload_json(codec, body.payload),
            }
        report, checkpoint = split_report(message.checkpoint or b"")
        if (reported := read_report(report)) is not None:
            facts["progress"] = {
                **reported._asdict(),
                "at": moment_json(datetime_at(reported.at_us)),
            }
            del facts["progress"]["at_us"]
        if checkpoint:
            facts["checkpoint"] = _checkpoint_json(codec, checkpoint)
        line, text = unpack_error(message.error or "")
        facts["last_error"] = None if message.error is None else text
        return cls(facts, moment, line)

    @classmethod
    def of_letter(cls, letter: DeadLetter[bytes], codec: Codec[Any]) -> MessageView:
        """Return a dead letter. Its moment is the time it died."""
        facts: dict[str, Any] = {
            "id": letter.id,
            "state": "dead",
            "died_at": moment_json(letter.died_at),
            "attempt": letter.attempt,
            "priority": letter.priority,
            "enqueued_at": moment_json(letter.enqueued_at),
            "headers": letter.headers,
            **payload_json(codec, payload_of(letter)),
            "last_error": letter.error,
        }
        return cls(facts, letter.died_at, letter.error or letter.reason)

    @classmethod
    def of_record(cls, record: Record, state: str, codec: Codec[Any]) -> MessageView:
        """Return a message of a delayed queue."""
        due_at = record.due_at if state != "leased" else None
        facts: dict[str, Any] = {
            "id": record.id,
            "state": state,
            "due_at": moment_json(due_at),
            "lease_ends_at": moment_json(record.due_at) if state == "leased" else None,
        }
        if record.payload is None:
            facts |= {"value": None, "hex": record.raw.hex(), "error": "not a readable record"}
        else:
            facts |= payload_json(codec, record.payload)
        return cls(facts, record.due_at)


def _checkpoint_json(codec: Codec[Any], checkpoint: bytes) -> dict[str, Any]:
    """Return what the handler of a message has saved, for programs."""
    try:
        saved = unpack(checkpoint)
    except ValueError as error:
        return {"state": None, "hex": checkpoint.hex(), "error": str(error)}
    results = result_codec(codec)
    until = saved.sleep_ends_us
    return {
        "state": None if saved.state is None else payload_json(results, saved.state),
        "steps": {name: payload_json(results, result) for name, result in saved.steps.items()},
        "sleep_ends_at": None if until is None else moment_json(datetime_at(until)),
    }


def _checkpoint_lines(saved: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what :func:`_checkpoint_json` returns, for people."""
    if "error" in saved:
        yield "saved", saved["error"]
        return
    if saved["state"] is not None:
        yield "saved", text_of(saved["state"])
    for name, result in saved["steps"].items():
        yield f"step {name}", text_of(result)
    if saved["sleep_ends_at"] is not None:
        yield "sleep ends", saved["sleep_ends_at"]


def payload_of(letter: DeadLetter[bytes]) -> bytes:
    """Return the payload that was offered, or whatever is left of it in a damaged letter."""
    try:
        return letter.value
    except DecodeError as error:
        return error.payload


def show_list(
    messages: Sequence[MessageView],
    now: datetime,
    *,
    as_json: bool,
    mixed: bool = False,
    if_empty: str = "no messages",
) -> None:
    """Print messages as a table, or as JSON lines. ``mixed``: they are in different states."""
    if as_json:
        for message in messages:
            print_json(message.facts)
        return
    if not messages:
        say(if_empty)
        return
    leased = not mixed and messages[0].facts["state"] == "leased"
    cells = {
        "id": [message.facts["id"] or "-" for message in messages],
        "state": [message.facts["state"] for message in messages],
        "lease ends" if leased else "due": [
            moment_cell(message.moment, now) for message in messages
        ],
        "attempt": [str(message.facts.get("attempt") or "-") for message in messages],
        "priority": [str(message.facts.get("priority") or "-") for message in messages],
        "value": [message.text for message in messages],
    }
    # A column that no message needs is left out.
    columns = [
        column
        for column, texts in cells.items()
        if column == "value" or (mixed if column == "state" else set(texts) != {"-"})
    ]
    show_table(columns, zip(*(cells[column] for column in columns), strict=True), wide=["value"])


def show_one(message: MessageView, now: datetime, *, as_json: bool) -> None:
    """Print one message in full."""
    facts = message.facts
    if as_json:
        print_json(facts)
        return
    lines = [("id", facts["id"] or "-"), ("state", facts["state"])]
    lines.append(
        ("lease ends" if facts["state"] == "leased" else "due", moment_text(message.moment, now))
    )
    if "attempt" in facts:
        lines += [("attempts", str(facts["attempt"])), ("priority", str(facts["priority"]))]
        if facts["group"] is not None:
            lines.append(("group", facts["group"]))
        lines.append(("offered", facts["enqueued_at"] or "-"))
        lines += [(f"header {name}", text) for name, text in facts["headers"].items()]
    if reported := facts.get("progress"):
        lines.append(
            ("progress", progress_text(reported["done"], reported["total"], reported["text"]))
        )
    if saved := facts.get("checkpoint"):
        lines += _checkpoint_lines(saved)
    if facts.get("last_error"):
        lines.append(("last error", message.error))
    lines.append(("value", message.text))
    if "error" in facts:
        lines.append(("unreadable", facts["error"]))
    show_fields(lines)


def no_message(id: str) -> typer.Exit:  # noqa: A002
    tell(f"there is no message {id!r}, or it has already been delivered")
    return typer.Exit(1)


def peek(
    queue: Queue,
    limit: MaxRows = 10,
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the next messages without taking them: ready ones first, then those due soonest.

    Exit status: 0, or 1 if there are none.

    Example: `delayq peek mails`
    """
    decoder = QueueCodec(codec, queue)

    async def read(client: Client) -> list[MessageView]:
        await queue.check_existence(client)
        ready = await _page(client, queue, "ready", decoder, 0, limit)
        return ready + await _page(client, queue, "delayed", decoder, 0, limit - len(ready))

    views, now = at_server_time(url, read)
    show_list(views, now, as_json=as_json, mixed=True)
    raise typer.Exit(0 if views else 1)


def list_messages(
    queue: Queue,
    state: Annotated[LiveState, typer.Option(help="The state of the messages.")] = "delayed",
    limit: MaxRows = 100,
    offset: Offset = 0,
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the messages in one state, in order of delivery, without taking them.

    Leased messages are listed with the end of their lease. Exit status: 0, or 1 if there are none.

    Example: `delayq list mails --state ready`
    """
    decoder = QueueCodec(codec, queue)

    async def read(client: Client) -> tuple[list[MessageView], str]:
        await queue.check_existence(client)
        page = await _page(client, queue, state, decoder, offset, limit)
        return page, "" if page else await _elsewhere(client, queue, state, offset)

    (views, elsewhere), now = at_server_time(url, read)
    show_list(views, now, as_json=as_json, if_empty=elsewhere)
    raise typer.Exit(0 if views else 1)


def get(
    queue: Queue,
    id: Id,  # noqa: A002
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show one message without taking it.

    Of a message that has ended, it says how, as far as the queue keeps that. In a delayed queue,
    this works while the message is pending. The command has to search for it.

    Exit status: 0, or 1 if there is no message with that id.

    Example: `delayq get mails welcome-3`
    """
    decoder = QueueCodec(codec, queue)

    async def read(client: Client) -> MessageView | MessageHistory | None:
        if queue.is_reliable:
            await queue.check_existence(client)
            message = await ReliableInspector.of(client, queue.name).get(id)
            if message is None:
                return await (await queue.existing(client)).history(id)
            return MessageView.of_message(message, decoder)
        record = await DelayedInspector.of(client, queue.name).find_record(id)
        return None if record is None else MessageView.of_record(record, "delayed", decoder)

    view, now = at_server_time(url, read)
    if not isinstance(view, MessageView):
        raise no_message(id) if view is None else _ended(queue, view, now)
    show_one(view, now, as_json=as_json)


def _ended(queue: Target, history: MessageHistory, now: datetime) -> typer.Exit:
    """Say how a message has ended, and which command shows more of it."""
    moment = moment_text(history.finished_at, now)
    id = shlex.quote(history.id)  # noqa: A001
    match history.state:
        case "done":
            text = f"was handled at {moment}; for its result: delayq result {queue.argument} {id}"
        case "dead":
            text = f"is a dead letter, since {moment}: {history.error}; to see it:"
            text += f" delayq dead list {queue.argument} --long"
        case "dropped":
            text = "was cancelled or purged, or has expired"
        case _:
            # It has come back between the two questions: a dead letter was redriven, for example.
            text = f"is {history.state} by now: run the command again"
    tell(f"message {history.id!r} {text}")
    return typer.Exit(1)


async def _page(
    client: Client, queue: Target, state: LiveState, codec: Codec[Any], offset: int, limit: int
) -> list[MessageView]:
    if queue.is_reliable:
        inspector = ReliableInspector.of(client, queue.name)
        messages = await inspector.live_messages(state, offset, limit)
        return [MessageView.of_message(message, codec) for message in messages]
    records = await DelayedInspector.of(client, queue.name).records(
        state, offset=offset, limit=limit
    )
    return [MessageView.of_record(record, state, codec) for record in records]


async def _elsewhere(client: Client, queue: Target, state: LiveState, offset: int) -> str:
    """Say where the messages of a queue are if none of one state is listed."""
    inspector = queue.inspector(client)
    if isinstance(inspector, ReliableInspector):
        await inspector.all_stores()
    depth = await inspector.depth()
    counts = {name: getattr(depth, name) for name in LIVE_STATES}
    if offset and counts[state]:
        return f"no messages: --offset is {offset:,}, and {counts[state]:,} are {state}"
    elsewhere = [
        f"{count:,} {'is' if count == 1 else 'are'} {other_state}: --state {other_state}"
        for other_state, count in counts.items()
        if count and other_state != state
    ]
    return "; ".join([f"no {state} messages", *elsewhere])


SearchState = Literal[LiveState, "dead", "all"]


def _fields(view: MessageView) -> SearchFields:
    value = view.facts["value"]
    texts = [view.text, value] if isinstance(value, str) else [view.text]
    if "encrypted" in view.facts:
        texts = []
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
                cast("LiveState", state), lambda _, message: MessageView.of_message(message, codec)
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
    limit: MaxRows = 20,
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
    states: tuple[str, ...] = COUNTED_STATES
    if not queue.is_reliable:
        if query.needs_reliable or state == "dead":
            raise CommandFailed("--header, --error, --group and --state dead need a reliable queue")
        states = states[:-1]
    decoder = QueueCodec(codec, queue)
    searched_states = states if state == "all" else (state,)

    async def read(client: Client) -> tuple[Search[MessageView], list[MessageView]]:
        sources = await _sources(client, queue, searched_states, decoder)
        work = Search(sources, lambda view: query.matches(_fields(view)), offset)
        with progress("searched", is_shown=not as_json) as show:
            return work, await work.run(max_examined=scan, limit=limit, progress=show)

    (work, matches), now = at_server_time(url, read)
    next_offset = work.next_offset
    if matches or as_json:
        show_list(matches, now, as_json=as_json, mixed=True)
    if as_json:
        figures = {"searched": work.searched, "total": work.total, "found": len(matches)}
        print_json({**figures, "encrypted": work.encrypted, "next_offset": next_offset})
    else:
        hint = "" if next_offset is None else f"; continue with --offset {next_offset}"
        say(
            f"{len(matches):,} found; {work.searched:,} of {work.total:,} messages were searched"
            f"{hint}"
        )
        if work.encrypted:
            say(
                f"{work.encrypted:,} of them cannot be searched, because they are encrypted: set"
                f" ${KEYS_VARIABLE} to their keys"
            )
    raise typer.Exit(0 if matches else 1)


# The bytes in a line, and those shown of one message without --all.
_LINE_BYTES = 16
_MAX_BYTES = 128


def inspect(
    queue: DelayedOnly,
    state: Annotated[RecordState, typer.Option(help="The state of the messages.")] = "delayed",
    limit: MaxRows = 5,
    offset: Offset = 0,
    show_all: Annotated[
        bool,
        typer.Option(
            "--all", help=f"Show all bytes of each record, not only the first {_MAX_BYTES}."
        ),
    ] = False,
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the binary records of a delayed queue, and the payloads in them, decoded.

    Values that the codec cannot decode are shown as bytes; try another codec with --codec. Nothing
    is changed.

    Exit status: 0, or 1 if there are none.

    Example: `delayq inspect orders`
    """
    decoder = QueueCodec(codec, queue)

    def read(client: Client) -> Awaitable[list[Record]]:
        return DelayedInspector.of(client, queue.name).records(state, offset=offset, limit=limit)

    records, now = at_server_time(url, read)
    for number, record in enumerate(records):
        if as_json:
            print_json(_record_facts(record, state, decoder))
            continue
        if number:
            say("")
        _show_record(record, state, decoder, now, show_all=show_all)
    if not records and not as_json:
        say("no records")
    raise typer.Exit(0 if records else 1)


def _is_record(state: str) -> bool:
    # Ready and leased messages are payloads alone.
    return state in ("delayed", "quarantined")


def _record_facts(record: Record, state: str, codec: Codec[Any]) -> dict[str, Any]:
    facts = MessageView.of_record(record, state, codec).facts
    facts.pop("hex", None)
    return {
        "error": None,
        **facts,
        "form": form_of(record.raw) if _is_record(state) else None,
        "payload": None if record.payload is None else record.payload.hex(),
        "raw": record.raw.hex(),
    }


def _show_record(
    record: Record, state: str, codec: Codec[Any], now: datetime, *, show_all: bool
) -> None:
    lines = [("id", record.id or "-")]
    if record.due_at is not None:
        lines.append(
            ("lease ends" if state == "leased" else "due", moment_text(record.due_at, now))
        )
    if _is_record(state):
        lines.append(("form", form_of(record.raw)))
    if record.payload is not None:
        fields = payload_json(codec, record.payload)
        failed = "error" in fields
        lines.append(("unreadable", fields["error"]) if failed else ("value", text_of(fields)))
    header = len(record.raw) - len(record.payload) if record.payload is not None else 0
    size = f"{len(record.raw):,}" + (f", of which {header} before the payload" if header else "")
    show_fields([*lines, ("bytes", size)])
    visible = record.raw if show_all else record.raw[:_MAX_BYTES]
    for at in range(0, len(visible), _LINE_BYTES):
        part = visible[at : at + _LINE_BYTES]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        say(f"  {at:04x}  {part[:8].hex(' '):<23}  {part[8:].hex(' '):<23}  {text}")
    if len(visible) < len(record.raw):
        say(f"  ...   {len(record.raw) - len(visible):,} more bytes: --all")
