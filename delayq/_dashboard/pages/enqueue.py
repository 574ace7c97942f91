"""A new message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from delayq._dashboard.board import Action, Note, Page
from delayq._dashboard.forms import UNITS, Form, redirect, whole_number
from delayq._dashboard.rendering import pack_ref
from delayq._dashboard.sources import ReliableSource
from delayq._durations import estimated_delay, when_due
from delayq._redisson.queue import MAX_PAYLOAD
from delayq._reliable.offer import Offer
from delayq.codecs import JsonCodec
from delayq.codecs.encrypted import key_id_of
from delayq.errors import BadInput, DuplicateMessage, EncodeError, PayloadTooLarge, QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.sources import AnySource

_EMPTY = {
    "payload": "",
    "format": "JSON",
    "encrypt": "",
    "delay": "0",
    "unit": "seconds",
    "at_time": "",
    "id": "",
    "group": "",
    "priority": "0",
    "headers": "",
    "ttl": "",
    "ttl_unit": "hours",
    "max_attempts": "",
}
FORMATS = ("JSON", "text")
_TTL = 100 * 365 * 86_400


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    source = await board.source(request)
    is_encrypted = board.cipher.has_keys and await _is_encrypted(source)
    return _values(source, _EMPTY | {"encrypt": "1" if is_encrypted else ""}, {})


async def _is_encrypted(source: AnySource) -> bool:
    """Return whether messages of a queue are encrypted: its consumers refuse all others."""
    for state in source.states:
        for row in (await source.page(state, 0, 1)).rows:
            if row.payload and key_id_of(row.payload) is not None:
                return True
    return False


def _values(
    source: AnySource, texts: Mapping[str, str], wrong: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "source": source,
        "texts": texts,
        "wrong": wrong,
        "units": tuple(UNITS),
        "formats": FORMATS,
    }


async def enqueue(board: Board, source: AnySource, form: Form) -> Response:
    offer, wrong = _read(form)
    if not wrong:
        if board.cipher.has_keys and form.get("encrypt"):
            offer["payload"] = board.cipher.encrypt(offer["payload"], source.name)
        try:
            return await _store(source, offer)
        except DuplicateMessage:
            wrong = {"id": "This id is taken, by a live message or a recent one."}
        except QueueFull:
            wrong = {"form": "The queue is full: it has reached its max size."}
        except PayloadTooLarge as error:
            wrong = {"payload": f"The payload is too large: {error}."}
        except (BadInput, EncodeError) as error:
            wrong = {_field_of(error): str(error)}
    texts = {name: form.get(name) for name in _EMPTY}
    values = _values(source, texts, wrong)
    return await board.refuse(form, PAGE, **values)


async def _store(source: AnySource, offer: dict[str, Any]) -> Response:
    payload = offer.pop("payload")
    if not isinstance(source, ReliableSource):
        if len(payload) > MAX_PAYLOAD:
            raise PayloadTooLarge(len(payload), MAX_PAYLOAD)
        (ref,) = await source.offer([(when_due(offer["delay"], offer["at"]), payload)])
        if not estimated_delay(offer["delay"], offer["at"]):
            # It may be on the ready list by now, where it has no id.
            return redirect("queue", source, done="enqueued")
        return redirect("message", source, at=pack_ref(ref), done="enqueued")
    (name,) = await source.open().offer_many([Offer(payload, **offer)])
    rows = [row for row in await source.find_by_id(name) if row.state != "dead"]
    if not rows or rows[0].ref is None:
        # A worker has taken it already.
        return redirect("queue", source, done="enqueued")
    return redirect("message", source, at=pack_ref(rows[0].ref), done="enqueued")


def _read(form: Form) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of an offer, and what is wrong with the fields that are invalid."""
    options: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, read in _FIELDS.items():
        try:
            options[name] = read(form)
        except HTTPException as error:
            wrong[name] = error.detail
        except (BadInput, EncodeError, ValueError) as error:
            wrong[name] = str(error)
    if options.get("at") is not None:
        options["delay"] = None
        wrong.pop("delay", None)
    return options, wrong


def _payload(form: Form) -> bytes:
    # Browsers send line breaks as two characters.
    text = form.get("payload").replace("\r\n", "\n")
    if form.get("format") == "text":
        return text.encode()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The payload must be JSON: {error}.") from None
    return JsonCodec().encode(value)


def _headers(form: Form) -> dict[str, str] | None:
    headers = {}
    for line in filter(None, map(str.strip, form.get("headers").splitlines())):
        name, equals, value = line.partition("=")
        if not equals or not name:
            raise HTTPException(400, "Each header must be on a line of its own, as NAME=VALUE.")
        headers[name] = value
    return headers or None


def _priority(form: Form) -> int:
    text = form.get("priority") or "0"
    if not (text.isascii() and text.isdigit()) or whole_number(text) > 9:
        raise HTTPException(400, "The priority must be a whole number from 0 to 9.")
    return whole_number(text)


def _ttl(form: Form) -> float | None:
    if not form.get("ttl"):
        return None
    try:
        seconds = float(form.get("ttl")) * UNITS[form.get("ttl_unit")]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 < seconds <= _TTL:
        raise HTTPException(400, "The time to live must be a number, at most 100 years.")
    return seconds


_FIELDS: dict[str, Callable[[Form], Any]] = {
    "payload": _payload,
    "delay": lambda form: form.seconds("delay") if form.get("delay") else None,
    "at": Form.at,
    "id": lambda form: form.get("id") or None,
    "group": lambda form: form.get("group") or None,
    "priority": _priority,
    "headers": _headers,
    "ttl": _ttl,
    "max_attempts": lambda form: form.count("max_attempts") if form.get("max_attempts") else None,
}


def _field_of(error: Exception) -> str:
    """Return the field that an error is about, judging by how it begins."""
    words = str(error).split()
    names = {"an": words[1] if len(words) > 1 else "", "a": words[1] if len(words) > 1 else ""}
    name = names.get(words[0], words[0]) if words else ""
    return name if name in _FIELDS else {"message": "id", "header": "headers"}.get(name, "form")


PAGE = Page(
    "/enqueue",
    "enqueue.html",
    load,
    label="New message",
    scope="queue",
    operators=True,
    actions={"enqueue": Action(enqueue)},
    notes={"enqueued": Note("Message added.")},
)
