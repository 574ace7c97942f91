"""The command ``inspect``: shows the data on the server, byte for byte, and what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq.admin.delayed import DelayedInspector, RecordState
from delayq.admin.migrate import form_of
from delayq.cli.options import AsJson, CodecName, DelayedOnly, Limit, Offset, Url, codec_of
from delayq.cli.output import moment_text, payload_json, print_json, say, show_fields, text_of
from delayq.cli.running import at_server_time
from delayq.cli.shown import MessageView

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from datetime import datetime

    from delayq import Client
    from delayq.admin.delayed import Record
    from delayq.codecs import Codec

# The bytes in a line, and those shown of one message without --all.
_LINE = 16
_MOST = 128


def inspect(
    queue: DelayedOnly,
    state: Annotated[RecordState, typer.Option(help="The state of the messages.")] = "delayed",
    limit: Limit = 5,
    offset: Offset = 0,
    whole: Annotated[
        bool,
        typer.Option("--all", help=f"Show all bytes of each record, not only the first {_MOST}."),
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
    how = codec_of(codec)

    def look(client: Client) -> Awaitable[list[Record]]:
        return DelayedInspector.of(client, queue.name).records(state, offset=offset, limit=limit)

    records, now = at_server_time(url, look)
    for place, record in enumerate(records):
        if as_json:
            print_json(_facts(record, state, how))
            continue
        if place:
            say("")
        _show(record, state, how, now, whole=whole)
    if not records and not as_json:
        say("no records")
    raise typer.Exit(0 if records else 1)


def _is_record(state: str) -> bool:
    # Ready and leased messages are payloads alone.
    return state in ("delayed", "quarantined")


def _facts(record: Record, state: str, codec: Codec[Any]) -> dict[str, Any]:
    facts = MessageView.of_record(record, state, codec).facts
    facts.pop("hex", None)
    return {
        "error": None,
        **facts,
        "form": form_of(record.raw) if _is_record(state) else None,
        "payload": None if record.payload is None else record.payload.hex(),
        "raw": record.raw.hex(),
    }


def _show(record: Record, state: str, codec: Codec[Any], now: datetime, *, whole: bool) -> None:
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
    shown = record.raw if whole else record.raw[:_MOST]
    for at in range(0, len(shown), _LINE):
        part = shown[at : at + _LINE]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        say(f"  {at:04x}  {part[:8].hex(' '):<23}  {part[8:].hex(' '):<23}  {text}")
    if len(shown) < len(record.raw):
        say(f"  ...   {len(record.raw) - len(shown):,} more bytes: --all")
