"""The output of commands: tables for people, JSON for programs, and the errors that end them.

Everything that a command prints goes through :func:`words`, :func:`write` or :func:`print_json`,
because anyone who may offer chooses ids, headers, errors and names: a terminal would carry out the
control sequences in them, and a line break would begin a line that only looks like one of ours. So
``print`` and :class:`rich.text.Text` are forbidden elsewhere in this package.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from delayq.codecs.encrypted import key_id_of
from delayq.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from delayq._reliable.following import MessageEvent
    from delayq.codecs import Codec

# Progress bars appear if the work takes longer than this, in seconds.
_QUICK = 0.3
_FIGURE = re.compile(r"[0-9.,]+|-|")
# Widths in columns: the least for columns that are cut off, and the width of a file.
_NARROWEST = 8
_ENDLESS = 2**31
_BARS = " ▁▂▃▄▅▆▇█"


class CommandFailed(Exception):
    """The command cannot be carried out: one line on stderr, and exit status 2."""

    status = 2


class NoQueue(CommandFailed):
    """There is no such queue: one line on stderr, and exit status 1."""

    status = 1


def console(*, stderr: bool = False) -> Console:
    """Return the console on which people read. In a file, lines may be of any length."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and (
        stderr or "COLUMNS" not in os.environ
    )
    return Console(stderr=stderr, highlight=False, emoji=False, width=_ENDLESS if piped else None)


def print_json(document: Any) -> None:
    """Print one document, on one line."""
    print(json.dumps(document, ensure_ascii=True, separators=(", ", ": ")), flush=True)


def tell(text: str, *, prefix: str = "delayq: ") -> None:
    """Print a line on stderr. A terminal gets it broken between words, a log file on one line."""
    console(stderr=True).print(words(f"{prefix}{' '.join(text.split())}"))


def say(text: str) -> None:
    """Print a line for people, broken between words if it is wider than the terminal."""
    console().print(words(text))


def write(text: str, *, stderr: bool = False, end: str = "\n") -> None:
    """Print text on one line, however long, because it may be copied or piped."""
    print(clean(text), end=end, file=sys.stderr if stderr else sys.stdout, flush=True)


def words(text: str, style: str = "") -> Text:
    """Return text to be drawn, without anything that controls a terminal."""
    return Text(clean(text), style)


def report(facts: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print a result: its facts for programs, or a line for people."""
    if as_json:
        print_json(facts)
    else:
        say(text)


def show_fields(lines: Iterable[tuple[str | Text, str]]) -> None:
    """Print names and their values. On a terminal, a long value continues below its beginning."""
    fields = Table.grid("", Column(overflow="fold"), padding=(0, 1, 0, 0), pad_edge=False)
    for name, text in lines:
        title = name if isinstance(name, Text) else words(f"{name}:")
        title.no_wrap = True
        fields.add_row(title, words(text))
    _print(fields)


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, wide: Sequence[str] = ()
) -> None:
    """Print a table without lines.

    If it does not fit, the columns ``wide`` are cut off at their ends, and others only then.
    """
    _print(table(columns, rows, wide=wide))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, wide: Sequence[str] = ()
) -> Table:
    """Return the table that :func:`show_table` prints. Figures are right-aligned."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    lines = [[clean(cell) for cell in row] for row in (columns, *rows)]
    cells = dict(zip(columns, zip(*lines, strict=True), strict=True))
    room = console().width - sum(
        2 + max(map(cell_len, cells[column])) for column in columns if column not in wide
    )
    for column, (title, *values) in cells.items():
        figures = any(any(map(str.isdigit, cell)) for cell in values) and all(
            map(_FIGURE.fullmatch, values)
        )
        # Only columns that may wrap become narrower; the texts in them are cut off instead.
        fixed = column not in wide and room >= _NARROWEST
        result.add_column(_cell(title), justify="right" if figures else "left", no_wrap=fixed)
    for line in lines[1:]:
        result.add_row(*map(_cell, line))
    return result


def _cell(text: str) -> Text:
    return cut(words(text))


def cut(text: Text) -> Text:
    """Let a text be cut off at its end where it does not fit."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _print(drawing: Table) -> None:
    """Print without the blanks that pad the last column."""
    out = console()
    with out.capture() as drawn:
        out.print(drawing)
    for line in drawn.get().splitlines():
        print(line.rstrip())


def clean(text: str) -> str:
    """Return the text with every character escaped that controls a terminal, breaks a line or
    cannot be written.
    """
    printable = "".join(
        character if character.isprintable() else _escape(character) for character in text
    )
    encoding = sys.stdout.encoding or "utf-8"
    return printable.encode(encoding, "backslashreplace").decode(encoding)


def _escape(character: str) -> str:
    is_surrogate = 0xD800 <= ord(character) < 0xE000
    return "\ufffd" if is_surrogate else character.encode("unicode_escape").decode()


def moment_json(at: datetime | None) -> str | None:
    """Format a moment for programs: ISO 8601, UTC."""
    if at is None:
        return None
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_text(at: datetime | None, now: datetime, *, zone: bool = False) -> str:
    """Format a moment for people: in their local time, and how far away it is.

    With ``zone``, name their timezone.
    """
    if at is None:
        return "-"
    distance = (at - now).total_seconds()
    local = _local(at)
    clock = local.strftime("%H:%M:%S" if local.date() == _local(now).date() else "%Y-%m-%d %H:%M")
    if zone:
        clock += f" {local:%Z}"
    away = f"in {span(distance)}" if distance >= 0 else f"{span(-distance)} ago"
    return f"{clock} ({away})"


def moment_cell(at: datetime | None, now: datetime) -> str:
    """Format a moment briefly, for a table: ``22:51:32 in 50m``."""
    if at is None:
        return "-"
    distance = abs((at - now).total_seconds())
    units = ((86_400, "d"), (3600, "h"), (60, "m"))
    size, unit = next((unit_size for unit_size in units if distance >= 2 * unit_size[0]), (1, "s"))
    away = f"{distance / size:.0f}{unit}"
    local, today = _local(at), _local(now)
    if local.date() == today.date():
        date = f"{local:%H:%M:%S}"
    else:
        date = f"{local:%b %d %H:%M}" if local.year == today.year else f"{local:%Y-%m-%d}"
    return f"{date} in {away}" if at >= now else f"{date} {away} ago"


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


def duration_text(seconds: float | None) -> str:
    """Format a short duration to two digits: ``0.12 ms``, ``3.4 s``; ``-`` if there is none."""
    if seconds is None:
        return "-"
    if seconds >= 9.95:
        return span(seconds)
    figure, unit = (seconds, "s") if seconds >= 0.995 else (seconds * 1000, "ms")
    return f"{figure:.0f} {unit}" if figure >= 9.95 else f"{figure:.2g} {unit}"


def sparkline(figures: Sequence[float], width: int = 60) -> str:
    """Draw figures as a line of bars, of at most ``width`` characters. Neighbours share one."""
    share = max(1, -(-len(figures) // width))
    sums = [sum(figures[at : at + share]) for at in range(0, len(figures), share)]
    highest = max(sums, default=0)
    # A single message among millions is seen, too.
    return "".join(
        _BARS[-(-int(total * 1000) * (len(_BARS) - 1) // int(highest * 1000))]
        if total > 0
        else _BARS[0]
        for total in sums
    )


def _as_json(value: Any) -> Any:
    # The types that the codecs for Java return in addition to plain values.
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return str(value)


def payload_json(codec: Codec[Any], payload: bytes) -> dict[str, Any]:
    """Return the ``value`` of a payload; also ``hex`` and ``error`` if it cannot be decoded, and
    ``encrypted``, the id of the key, if that is because it is encrypted.
    """
    try:
        value = codec.decode(payload)
        return {"value": json.loads(json.dumps(value, default=_as_json))}
    except Exception as error:  # noqa: BLE001 - a codec may raise anything
        fields: dict[str, Any] = {"value": None, "hex": payload.hex(), "error": str(error)}
        if isinstance(error, DecodeError) and error.codec == "EncryptedCodec":
            fields["encrypted"] = key_id_of(payload)
        return fields


def payload_text(codec: Codec[Any], payload: bytes) -> str:
    """Format a payload for people, on one line."""
    return text_of(payload_json(codec, payload))


def text_of(fields: dict[str, Any]) -> str:
    """Format the fields of :func:`payload_json` for people, on one line."""
    if "encrypted" in fields:
        return f"encrypted with key {fields['encrypted']}"
    if "error" in fields:
        return f"0x{fields['hex']}"
    return json.dumps(fields["value"], ensure_ascii=False)


@contextmanager
def progress(verb: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal if the work takes a while.

    Call what it yields with the number done and the total.
    """
    out = Console(stderr=True, highlight=False)
    # Leave room for the user's ^C: a line that the terminal breaks cannot be erased.
    out.width -= 2
    if not is_shown or not sys.stderr.isatty() or out.is_dumb_terminal:
        yield lambda _done, _total: None
        return
    began = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(
            bar_width=None, style="bright_black", complete_style="green", finished_style="green"
        ),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=out,
        expand=True,
        transient=True,
    )
    task = bar.add_task(verb, total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - began >= _QUICK:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


@contextmanager
def following_bar(name: str) -> Iterator[Callable[[MessageEvent], None]]:
    """Give the block a function that shows the events of a message: by a bar on a terminal, or else
    a line each.
    """
    out = console()
    if not out.is_terminal or out.is_dumb_terminal:
        yield lambda event: say(_event_text(name, event))
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(style="bright_black", complete_style="green", finished_style="green"),
        TextColumn("{task.fields[figures]}", markup=False),
        console=out,
        transient=True,
    )
    task = bar.add_task(clean(name), total=None, figures="")
    with bar:
        yield lambda event: bar.update(
            task,
            description=clean(f"{name} {event.state}"),
            completed=event.done or 0,
            total=event.total,
            figures=clean(_figures(event)),
        )


def _event_text(name: str, event: MessageEvent) -> str:
    return " ".join(filter(None, (name, event.state, _figures(event))))


def _figures(event: MessageEvent) -> str:
    return "" if event.done is None else progress_text(event.done, event.total, event.text)


def progress_text(done: float, total: float | None, text: str | None) -> str:
    """Return how far a handler is, such as ``3/10 rendering``."""
    amount = f"{done:g}" if total is None else f"{done:g}/{total:g}"
    return " ".join(filter(None, (amount, text)))
