"""Turns values into text. The templates escape it: nothing here makes HTML."""

from __future__ import annotations

import json
import math
import re
from codecs import getincrementaldecoder
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from delayq._dashboard.health import SECOND, late_us
from delayq._dashboard.rows import MessageRef
from delayq._durations import MICROSECOND, datetime_at
from delayq._reliable.limits import write_limit
from delayq.admin.states import undeliverable
from delayq.admin.wording import describe_group_state, describe_limit
from delayq.codecs.encrypted import key_id_of
from delayq.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._dashboard.rows import Row
    from delayq._dashboard.sources import AnySource
    from delayq._reliable.groups import Group
    from delayq._reliable.limits import Limit
    from delayq.admin.payloads import PayloadCipher

# Maximum number of characters of a payload on a page, and in a row of a list.
MAX_SHOWN = 100_000
_PREVIEW = 140
_BYTES_SHOWN = 4096
# The largest payload that is read as a whole, in bytes: larger ones would hold up all requests.
_MAX_PARSED = 2 * 1024 * 1024
# The last moment that can be written as a date.
_LAST = 253402300799 * SECOND
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STEPS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_SCORE = re.compile(r"-?([0-9]{1,400}(\.[0-9]{1,400})?(e[+-]?[0-9]{1,4})?|inf)")
_REF = re.compile("([0-9]{0,4})/([^/]*)/(.+)", re.DOTALL)


def decrypt(
    payload: bytes | None, cipher: PayloadCipher, source: AnySource
) -> bytes | DecodeError | None:
    """Return a payload of a queue without its encryption; the error if it cannot be decrypted."""
    try:
        return None if payload is None else cipher.decrypt(payload, source.name)
    except DecodeError as error:
        return error


def pretty(payload: bytes | DecodeError | None) -> tuple[str, str]:
    """Return a payload as text, and its kind: indented JSON, text, or a dump of other bytes; of one
    that cannot be decrypted, why.
    """
    if payload is None:
        return "", "no longer available"
    if isinstance(payload, DecodeError):
        return f"{payload.fault[0].upper()}{payload.fault[1:]}.", "encrypted"
    is_whole = len(payload) <= _MAX_PARSED
    try:
        # A part may end within a character.
        part = payload if is_whole else payload[: 4 * MAX_SHOWN]
        text = getincrementaldecoder("utf-8")().decode(part, final=is_whole)
    except UnicodeDecodeError:
        return _dump(payload), "binary"
    try:
        if is_whole:
            return _indent(json.loads(text)), "JSON"
    except (ValueError, RecursionError):
        pass
    if any(ord(character) < 32 and character not in "\t\r\n" for character in text):
        return _dump(payload), "binary"
    return _cut(text), "text"


def preview(payload: bytes | DecodeError | None) -> str:
    """Return the beginning of a payload on one line."""
    if payload is None:
        return "no longer available"
    if isinstance(payload, DecodeError):
        return f"encrypted with key {key_id_of(payload.payload)}"
    text = payload[: 4 * _PREVIEW].decode(errors="replace")
    line = " ".join(text.split())
    line = "".join(character if character.isprintable() else "·" for character in line)
    return line if len(line) <= _PREVIEW else line[: _PREVIEW - 1] + "…"


def _indent(value: object) -> str:
    parts: list[str] = []
    length = 0
    # Piece by piece: deep nesting makes a little input much longer.
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        parts.append(part)
        length += len(part)
        if length > MAX_SHOWN:
            break
    # A lone surrogate is valid in JSON but cannot be sent.
    return _cut("".join(parts).encode(errors="backslashreplace").decode())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}\n… truncated"


def _dump(payload: bytes) -> str:
    lines = []
    for at in range(0, min(len(payload), _BYTES_SHOWN), 16):
        row = payload[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {letters}")
    if len(payload) > _BYTES_SHOWN:
        lines.append(f"… {len(payload) - _BYTES_SHOWN:,} more bytes")
    return "\n".join(lines)


def us(date: datetime) -> int:
    """Return a moment in microseconds."""
    return (date - _EPOCH) // MICROSECOND


def moment(us: int | None) -> str:
    """Format a moment in UTC."""
    if us is None:
        return "unknown"
    date = datetime.fromtimestamp(min(us, _LAST) // SECOND, UTC)
    return f"{date:%Y-%m-%d %H:%M:%S}.{us % SECOND // 1000:03d}"


def minute(us: int) -> str:
    """Format a moment in UTC, to the minute."""
    return moment(us)[:16]


def iso(us: int) -> str:
    """Format a moment for programs."""
    return datetime.fromtimestamp(min(us, _LAST) / SECOND, UTC).isoformat()


def span(us: float) -> str:
    """Format a duration, in two parts at most."""
    seconds = abs(us) / SECOND
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{math.floor(seconds * 10) / 10:g} s"
    total = int(seconds)
    (size, unit), (smaller, of_rest) = next(
        steps for steps in pairwise(_STEPS) if total >= steps[0][0]
    )
    remainder = total % size // smaller
    return f"{total // size:,} {unit}" + (f" {remainder} {of_rest}" if remainder else "")


def limit(value: Limit | None) -> str:
    """Format a limit in words."""
    return describe_limit(value, lambda seconds: span(seconds * SECOND))


def group_state(group: Group, now: int) -> str:
    """Return in a few words what becomes of the messages of a group."""
    return describe_group_state(group, datetime_at(now))


def relative(us: int | None, now: int) -> str:
    """Format a moment relative to now."""
    if us is None:
        return "unknown"
    return f"in {span(us - now)}" if us > now else f"{span(now - us)} ago"


def size(value: bytes | None) -> str:
    """Format the size of a value."""
    count = len(value or b"")
    return f"{count:,} B" if count < 10_000 else f"{count / 1024:,.0f} KiB"


def name_of(ref: MessageRef) -> str:
    """Return a message's id as it is shown."""
    if ref.due:
        return (ref.id[1:] if len(ref.id) == 9 else ref.id).hex()
    return ref.id.decode(errors="replace")


def pack_ref(ref: MessageRef) -> str:
    """Pack a reference into one text, for addresses and forms.

    Any id is accepted, even one that is not text.
    """
    return f"{ref.partition or ''}/{quote(ref.due, safe='')}/{quote(ref.id, safe='')}"


def parse_ref(text: str) -> MessageRef | None:
    """Unpack a reference from a text; None if the text is not one."""
    if (parts := _REF.fullmatch(text)) is None:
        return None
    partition, due, name = parts.groups()
    due = unquote_to_bytes(due).decode(errors="replace")
    if due and not _is_score(due):
        return None
    return MessageRef(unquote_to_bytes(name), int(partition or 0), due)


def _is_score(text: str) -> bool:
    """Return whether the server reads a text as a number. Python also reads ``1_0``."""
    return _SCORE.fullmatch(text) is not None


def link(
    page: str,
    source: AnySource | None = None,
    row: Row | None = None,
    /,
    **params: Any,
) -> str:
    """Return a page's address relative to this one, so that it works below any prefix."""
    query: dict[str, Any] = {}
    if source is not None:
        query |= {"kind": source.kind, "name": source.name}
    if row is not None and row.ref is not None:
        query["at"] = pack_ref(row.ref)
    query |= {name: value for name, value in params.items() if value}
    return page + ("?" + urlencode(query) if query else "")


def points(values: Sequence[float]) -> str:
    """Return the points of a line through the values, on a field of 120 by 30."""
    peak, last = max([1.0, *values]), max(1, len(values) - 1)
    return " ".join(
        f"{120 * at / last:.1f},{28 - 26 * value / peak:.1f}" for at, value in enumerate(values)
    )


def environment() -> Environment:
    """Create the environment of the templates. All of them escape."""
    templates = Environment(
        loader=PackageLoader("delayq._dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    of_moments = (us, moment, minute, iso, span, relative)
    of_values = (
        decrypt,
        pretty,
        preview,
        limit,
        write_limit,
        group_state,
        size,
        name_of,
        pack_ref,
        points,
    )
    of_queues = (late_us, undeliverable)
    filters = {function.__name__: function for function in (*of_moments, *of_values, *of_queues)}
    templates.filters.update(filters, number="{:,}".format)
    templates.globals["link"] = link
    # Live parts are rendered by themselves, without the imports of their templates.
    macros = vars(templates.get_template("macros.html").module)
    templates.globals |= {
        name: function for name, function in macros.items() if not name.startswith("_")
    }
    return templates
