"""Messages of either kind of queue, as commands show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from delayq._durations import moment_us
from delayq._reliable.bodies import parse
from delayq._reliable.failures import unpack_error
from delayq.cli.output import (
    moment_cell,
    moment_json,
    moment_text,
    payload_json,
    print_json,
    say,
    show_fields,
    show_table,
    tell,
    text_of,
)
from delayq.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayq import DeadLetter
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
        moment = moment_us(message.moment_us)
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
                "enqueued_at": moment_json(moment_us(body.enqueued_us)),
                "headers": body.headers,
                **payload_json(codec, body.payload),
            }
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
    if facts.get("last_error"):
        lines.append(("last error", message.error))
    lines.append(("value", message.text))
    if "error" in facts:
        lines.append(("unreadable", facts["error"]))
    show_fields(lines)


def no_message(id: str) -> typer.Exit:  # noqa: A002
    tell(f"there is no message {id!r}, or it has already been delivered")
    return typer.Exit(1)
