"""Reads forms and addresses."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote

from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from delayq._dashboard.rendering import link, name_of, parse_ref, us
from delayq._durations import microseconds, when_due
from delayq._redisson.queue import MAX_PAYLOAD
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from delayq._dashboard.rows import MessageRef
    from delayq._dashboard.sources import AnySource
    from delayq._durations import DueTime

UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
NO_DELAY: dict[str, Any] = {"delay": "", "unit": "minutes", "at_time": "", "wrong": {}}
"""The initial values of a form for another due time."""
_MOST_FORM = 64 * 1024
# Room for a payload that is somewhat too large, so that its field can say so: a browser turns most
# characters into three, and a line break into six.
_MOST_FORM_OF_OPERATORS = 6 * MAX_PAYLOAD + _MOST_FORM
_MOST_FIELDS = 1000
# The messages of partitions are merged up to the end of a page, so a page's offset is limited.
_FARTHEST = 1_000_000
_FARTHEST_IN_PARTITIONS = 10_000


class Form:
    """The fields of a form. Each may have several values.

    Attributes:
        request: The request that has sent it.
    """

    def __init__(self, fields: dict[str, list[str]], request: Request) -> None:
        self._fields = fields
        self.request = request

    @classmethod
    async def of(cls, request: Request, *, operator: bool = False) -> Form:
        """Read the form of a request. Forms carry no files, so no parser for files is needed.

        Only operators send payloads, so their forms may be larger.
        """
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > (_MOST_FORM_OF_OPERATORS if operator else _MOST_FORM):
                raise HTTPException(413, "The form is too large.")
        text = body.decode(errors="replace")
        try:
            return cls(parse_qs(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS), request)
        except ValueError:
            raise HTTPException(400, "The form cannot be parsed.") from None

    def add_address(self) -> None:
        """Add the fields in the address of the request, as :func:`button_link` has built it.

        Raises:
            HTTPException: The address cannot be parsed.
        """
        try:
            self._fields |= parse_qs(self.request.url.query, max_num_fields=20)
        except ValueError:
            raise HTTPException(400, "The form cannot be parsed.") from None

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> str:
        """Return the first value of a field; an empty one if it is missing."""
        return self._fields.get(name, [""])[0]

    def has_changed(self, *names: str) -> bool:
        """Return whether the visitor has changed one of the fields, as shown by their ``was_``."""
        return any(name in self and self.get(name) != self.get(f"was_{name}") for name in names)

    def queue(self) -> tuple[str, str]:
        """Return kind and name of the form's queue."""
        return self.get("kind"), unquote(self.get("name"))

    def target(self) -> str:
        """Return what the form is about in its queue, for the log: a group, a schedule, a batch, or
        the id of a message; "" if it is about several messages, or the whole queue.
        """
        for name in ("group", "schedule", "batch"):
            if text := unquote(self.get(name)):
                return text
        refs = self.refs() or ()
        return name_of(refs[0]) if len(refs) == 1 else ""

    def ref(self, source: AnySource) -> MessageRef:
        """Return the reference to the form's message.

        Raises:
            HTTPException: The queue can hold no such message.
        """
        ref = parse_ref(self.get("at"))
        if ref is None or not source.may_hold(ref):
            raise HTTPException(400, "Unknown message.")
        return ref

    def refs(self) -> list[MessageRef] | None:
        """Return references to the selected messages; None for all messages of the list."""
        if self.get("all") == "1":
            return None if self.get("sure") == "1" else []
        refs = map(parse_ref, self._fields.get("at", []))
        return [ref for ref in refs if ref is not None]

    def shown_at(self) -> datetime:
        """Return the moment at which the page of a form on all dead letters was read.

        Raises:
            HTTPException: There is none.
        """
        try:
            return datetime.fromisoformat(self.get("until")).astimezone(UTC)
        except (ValueError, OverflowError):
            raise HTTPException(400, "The form is incomplete.") from None

    def seconds(self, name: str) -> float:
        """Return a duration, in seconds. Its unit is in the field ``unit``."""
        try:
            return float(self.get(name)) * UNITS[self.get("unit")]
        except (ValueError, KeyError):
            label = name.replace("_", " ")
            raise HTTPException(
                400, f"The {label} must be a number of {', '.join(UNITS)}."
            ) from None

    def delay_us(self) -> int:
        """Return the field ``delay``, in microseconds. Raises HTTPException."""
        try:
            return microseconds(self.seconds("delay"))
        except BadInput as error:
            raise HTTPException(400, str(error)) from None

    def at(self) -> datetime | None:
        """Return the date in the field ``at_time``; None if it is empty.

        Raises:
            HTTPException: The field has something else than a date.
        """
        if not (text := self.get("at_time").strip()):
            return None
        try:
            at = datetime.fromisoformat(text)
            # A browser's field has no offset, and is in UTC.
            return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        except (ValueError, OverflowError):
            raise HTTPException(400, "The date must look like 2030-01-31T12:00, in UTC.") from None

    def due_time(self, now: int) -> DueTime:
        """Return the new due time, by the field ``delay`` or ``at_time``.

        Raises:
            HTTPException: It is not one of the two, or the date is before ``now``, microseconds.
        """
        at, has_delay = self.at(), bool(self.get("delay").strip())
        if (at is None) != has_delay:
            raise HTTPException(400, "Give either a delay or a date.")
        if at is None:
            return self.delay_us()
        if us(at) < now:
            raise HTTPException(400, "This date has passed.")
        return when_due(None, at)

    def refused_delay(self, error: HTTPException) -> dict[str, Any]:
        """Return the values of a page that shows the due time again, and why it was refused."""
        texts = {name: self.get(name) for name in ("delay", "unit", "at_time")}
        return texts | {"wrong": {"delay": error.detail}}

    def count(self, name: str) -> int:
        """Return a whole number, 1 or more."""
        if not (count := whole_number(self.get(name), 10**15)):
            label = name.replace("_", " ")
            raise HTTPException(400, f"The {label} must be a whole number, 1 or more.")
        return count


def redirect(page: str, source: AnySource | None = None, /, **query: str) -> Response:
    """Send the browser to a page, so that reloading it repeats nothing."""
    return RedirectResponse(link(page, source, None, **query), 303)


def button_link(source: AnySource, texts: Mapping[str, str], **more: str) -> str:
    """Return where a button of one row sends the form that it shares with others. The address has
    the queue and the texts that hidden fields of a form would have, and further fields.
    """
    about = {"kind": source.kind, "name": quote(source.name, safe="")}
    about |= {name: quote(text, safe="") for name, text in texts.items() if text}
    return link("act", None, None, **about, **more)


def offset_of(request: Request, source: AnySource) -> int:
    """Return where a page of a list begins."""
    return whole_number(request.query_params.get("offset"), farthest(source))


def farthest(source: AnySource) -> int:
    """Return the offset of the last page of a list that is shown."""
    return _FARTHEST if source.partitions == 1 else _FARTHEST_IN_PARTITIONS


def whole_number(text: str | None, maximum: int = _FARTHEST * 1000) -> int:
    """Return a whole number, ``maximum`` at most; 0 if it is none."""
    return min(int(text), maximum) if text and re.fullmatch("[0-9]{1,15}", text) else 0
