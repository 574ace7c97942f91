"""What a reliable queue stores of a message under its id. Pure.

``enqueued_us headers``, a newline, the payload: the server's time of the offer in decimal, written by ``offer.lua``; the
headers as JSON on one line, or nothing; the payload as the codec made it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


# Of microseconds. More digits are no moment, and take long to read.
_MOMENT = re.compile(rb"[0-9]{1,20}")


def content(headers: Mapping[str, str] | None, payload: bytes) -> bytes:
    """What a client sends of a body: all but the time."""
    # ASCII, and without newlines: the first newline ends the headers.
    line = json.dumps(dict(headers), separators=(",", ":")).encode() if headers else b""
    return line + b"\n" + payload


def parse(body: bytes) -> tuple[int, dict[str, str], bytes]:
    """The server's time of the offer in microseconds, the headers, and the payload.

    Raises:
        ValueError: It is no body.
    """
    line, newline, payload = body.partition(b"\n")
    enqueued, _, headers = line.partition(b" ")
    if not newline:
        raise ValueError("a body without a newline")
    if not _MOMENT.fullmatch(enqueued):
        raise ValueError("a body without a moment")
    return int(enqueued), _object(headers) if headers else {}, payload


def parse_letter(letter: bytes) -> tuple[dict[str, Any], bytes]:
    """Why a dead letter died, and its body. Raises as :func:`parse`."""
    why, newline, body = letter.partition(b"\n")
    if not newline:
        raise ValueError("a dead letter without a newline")
    return _object(why), body


class Why(NamedTuple):
    """Why a message died: what a dead letter holds besides the body."""

    reason: str
    attempt: int
    priority: int
    error: str


def read_letter(letter: bytes) -> tuple[Why, int | None, dict[str, str], bytes]:
    """Why a message died, and its body as :func:`parse` returns it. What cannot be read has a default: the letter has to be
    shown all the same. The moment is None where there is no body.
    """
    found: dict[str, Any] = {}
    try:
        found, body = parse_letter(letter)
    except ValueError:
        body = letter.partition(b"\n")[2]
    why = Why(
        _text(found.get("reason")) or "unreadable",
        _count(found.get("attempt")),
        _count(found.get("priority")),
        _text(found.get("error")),
    )
    try:
        return why, *parse(body)
    except ValueError:
        return why, None, {}, body


def _text(found: object) -> str:
    return found if isinstance(found, str) else ""


def _count(found: object) -> int:
    return int(found) if isinstance(found, int | float) and 0 <= found < 2**53 else 0


def _object(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises ``ValueError``, in words that quote nothing of it."""
    try:
        value = json.loads(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("no JSON object where there should be one")  # noqa: TRY004 - of a body, not of an argument
    return value
