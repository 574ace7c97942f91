"""The output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from delayq.codecs import Codec

# Progress bars appear if the work takes longer than this, in seconds, and are drawn this many times a second.
_QUICK = 0.3
_REFRESH = 8
_FIGURE = re.compile(r"[0-9.,]+|-|")
# Widths in columns: the least for a column that is cut off, and the width of a file.
_NARROWEST = 8
_ENDLESS = 100_000


def console() -> Console:
    """Return the console on which people read. In a file, lines may be of any length."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, emoji=False, width=_ENDLESS if piped else None)


def print_json(document: Any) -> None:
    """Print one document, on one line."""
    print(json.dumps(document, ensure_ascii=True, separators=(", ", ": ")), flush=True)


def tell(text: str) -> None:
    """Print a line on stderr. A terminal gets it broken between words, a log file on one line."""
    line = f"delayq: {' '.join(text.split())}"
    if sys.stderr.isatty():
        for part in _lines(clean(line), Console(stderr=True).width, 0):
            print(part, file=sys.stderr)
    else:
        print(line, file=sys.stderr)


def say(text: str, *, indent: int = 0) -> None:
    """Print a line for people. If it is wider than the terminal, it continues below, ``indent`` columns from the left."""
    wrapped(Text(), text, indent)


def wrapped(start: Text, words: str, indent: int) -> None:
    """Print ``start`` and a line behind it, broken between words where necessary."""
    out = console()
    for part in _lines(start.plain + clean(words), out.width, indent):
        out.print(Text.assemble(start, part[len(start.plain) :]), soft_wrap=True)
        start = Text(" " * indent)


def _lines(text: str, width: int, indent: int) -> Iterator[str]:
    """Break a text that is too long for one line. All lines but the first begin ``indent`` columns from the left."""
    while True:
        line, rest = _split(text, max(_NARROWEST + indent, width))
        yield line
        if not rest:
            return
        text = " " * indent + rest


def _split(text: str, room: int) -> tuple[str, str]:
    """Return the part that fits, and the rest."""
    if cell_len(text) <= room:
        return text, ""
    fits = chop_cells(text, room)[0]
    # Between two words, unless that leaves the line half empty.
    at = fits.rfind(" ") if text[len(fits)] != " " else len(fits)
    at = at if at > len(fits) // 2 else len(fits)
    return text[:at], text[at:].lstrip(" ")


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, wide: str = "") -> None:
    """Print a table without lines. If it does not fit, the column ``wide`` is cut off at its end. Figures are right-aligned."""
    out = console()
    with out.capture() as drawn:
        out.print(table(columns, rows, wide=wide, width=out.width))
    # Without the blanks that pad the last column.
    for line in drawn.get().splitlines():
        print(line.rstrip())


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, wide: str, width: int) -> Table:
    """Return the table that :func:`show_table` prints."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    filled = [[clean(cell) for cell in row] for row in rows]
    widths = {column: max(map(cell_len, (column, *(row[place] for row in filled)))) for place, column in enumerate(columns)}
    others = [column for column in columns if column != wide]
    room = width - sum(2 + widths[column] for column in others) if wide else width
    while wide and room < _NARROWEST:
        # The longest column gives way, but not its title.
        longest = max(others, key=lambda column: widths[column] - cell_len(column))
        if widths[longest] <= cell_len(longest):
            break
        widths[longest] -= 1
        room += 1
    for place, column in enumerate(columns):
        cells = [row[place] for row in filled]
        figures = any(any(map(str.isdigit, cell)) for cell in cells) and all(map(_FIGURE.fullmatch, cells))
        result.add_column(
            column,
            justify="right" if figures else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=max(_NARROWEST, room) if column == wide else widths[column],
        )
    for row in filled:
        result.add_row(*(Text(cell) for cell in row))
    return result


def clean(text: str) -> str:
    """Return the text without anything that would move a terminal's cursor or could not be written."""
    printable = "".join(character if character.isprintable() else _escaped(character) for character in text)
    return printable.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode() if not 0xD800 <= ord(character) < 0xE000 else "\ufffd"


def moment_json(at: datetime | None) -> str | None:
    """Format a moment for programs: ISO 8601, UTC."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_text(at: datetime | None, now: datetime) -> str:
    """Format a moment for people: in their local time, and how far away it is."""
    if at is None:
        return "-"
    distance = (at - now).total_seconds()
    local = _local(at)
    shown = local.strftime("%H:%M:%S" if local.date() == _local(now).date() else "%Y-%m-%d %H:%M")
    return f"{shown} ({'in ' if distance >= 0 else ''}{span(abs(distance))}{'' if distance >= 0 else ' ago'})"


def moment_cell(at: datetime | None, now: datetime) -> str:
    """Format a moment briefly, for a table: ``22:51:32 in 50m``."""
    if at is None:
        return "-"
    distance = abs((at - now).total_seconds())
    for size, unit in ((172_800, "d"), (7200, "h"), (120, "m"), (0, "s")):
        if distance >= size:
            away = f"{distance / {'d': 86_400, 'h': 3600, 'm': 60, 's': 1}[unit]:.0f}{unit}"
            break
    shown, today = _local(at), _local(now)
    if shown.date() == today.date():
        written = f"{shown:%H:%M:%S}"
    else:
        written = f"{shown:%b %d %H:%M}" if shown.year == today.year else f"{shown:%Y-%m-%d}"
    return f"{written} in {away}" if at >= now else f"{written} {away} ago"


def _local(at: datetime) -> datetime:
    try:
        return at.astimezone()
    except (OverflowError, ValueError, OSError):
        # The moment is at the limit of what a datetime can hold.
        return at


def span(seconds: float) -> str:
    """Format a duration in two units at most."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24:,} d"


def decoded(codec: Codec[Any], payload: bytes) -> tuple[Any, str | None]:
    """Return the value as JSON has it and None, or None and why it cannot be decoded. The reason quotes no bytes."""
    try:
        value = codec.decode(payload)
        return json.loads(json.dumps(value, default=_as_json)), None
    except Exception as error:  # noqa: BLE001 - a codec may raise anything
        return None, str(error)


def _as_json(value: Any) -> Any:
    # The types that the codecs for Java return in addition to plain values.
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return str(value)


def payload_json(codec: Codec[Any], payload: bytes) -> dict[str, Any]:
    """Return the fields for a payload: ``value``, and ``hex`` and ``error`` if it cannot be decoded."""
    value, error = decoded(codec, payload)
    return {"value": value} if error is None else {"value": None, "hex": payload.hex(), "error": error}


def payload_text(codec: Codec[Any], payload: bytes) -> str:
    """Format a payload for people, on one line."""
    value, error = decoded(codec, payload)
    return json.dumps(value, ensure_ascii=False) if error is None else f"0x{payload.hex()}"


@contextmanager
def progress(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal if the work takes a while. Call what it yields with the number done and the total."""
    out = Console(stderr=True, highlight=False)
    # Leaves room for the ^C of a user who stops it: a line that the terminal breaks could not be erased.
    out.width -= 2
    if not shown or not sys.stderr.isatty() or out.is_dumb_terminal:
        yield lambda _done, _total: None
        return
    began, drawn = time.monotonic(), 0.0
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, style="bright_black", complete_style="green", finished_style="green"),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=out,
        expand=True,
        transient=True,
        auto_refresh=False,
    )
    task = bar.add_task(what, total=None)
    started = False

    def show(done: int, total: int) -> None:
        nonlocal drawn, started
        now = time.monotonic()
        if now - began < _QUICK or now - drawn < 1 / _REFRESH:
            return
        if not started:
            bar.start()
            started = True
        drawn = now
        bar.update(task, completed=done, total=total)
        bar.refresh()

    try:
        yield show
    finally:
        if started:
            bar.stop()
