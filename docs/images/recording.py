"""Records ``delayq demo`` at a terminal and draws it as a moving picture:
``python docs/images/recording.py`` writes ``demo.svg`` beside this file, or into a directory.

The picture shows a real run at its real speed. It moves by CSS alone, so it also moves where pages
show it as an image, and readers who prefer less motion, and programs that know no animations, see
the end of the run. Run it on a machine that is otherwise idle.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from diagrams import BLUE, DARK, GREEN, INK, MONO, ORANGE, RED

ARGUMENTS = ("demo", "--messages", "120")
COLUMNS, ROWS = 80, 25
# Pixels of a character, and around the terminal.
WIDE, HIGH, EDGE = 7.8, 18, 14
# Seconds from the command to its first output, and for which its end stays.
BEFORE, AFTER = 0.8, 5.0
PURPLE, FRAME, PAPER = "#7a4fa3", "#ccd2dc", "#fcfcfe"
COLOURS = {31: RED[0], 32: GREEN[0], 33: ORANGE[0], 34: BLUE[0], 35: PURPLE, 90: FRAME}
# Draws a bar: a cell, and half of one.
BAR = {"━": 1.0, "╸": 0.5}
STEP = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|([^\x1b])")
WORDS = re.compile(r"\S+(?: \S+)*")
UNFINISHED = re.compile(r"\x1b(?:\[\??[0-9;]*)?$")


class Look(NamedTuple):
    """How characters look."""

    bold: bool = False
    colour: str = INK


Line = tuple[tuple[str, Look], ...]


class Screen:
    """The lines of a terminal that understands what the demo writes."""

    def __init__(self) -> None:
        self._lines: list[dict[int, tuple[str, Look]]] = [{}]
        self._row = self._column = 0
        self._look = Look()

    def write(self, text: str) -> None:
        for numbers, letter, shown in STEP.findall(text):
            if letter == "m":
                self._style(numbers)
            elif letter == "A":
                self._row = max(0, self._row - int(numbers or 1))
            elif letter == "K":
                self._lines[self._row].clear()
            elif shown == "\r":
                self._column = 0
            elif shown == "\n":
                self._row += 1
                if self._row == len(self._lines):
                    self._lines.append({})
            elif shown:
                self._lines[self._row][self._column] = (shown, self._look)
                self._column += 1

    def _style(self, numbers: str) -> None:
        for number in map(int, numbers.split(";")):
            if number == 0:
                self._look = Look()
            elif number == 1:
                self._look = self._look._replace(bold=True)
            else:
                self._look = self._look._replace(colour=COLOURS[number])

    def lines(self) -> tuple[Line, ...]:
        """Return what is seen, without spaces at the end of lines."""
        blank = (" ", Look())
        found = []
        for line in self._lines:
            end = max((at for at, (shown, _) in line.items() if shown != " "), default=-1)
            found.append(tuple(line.get(at, blank) for at in range(end + 1)))
        return tuple(found)


def record(*arguments: str) -> list[tuple[float, tuple[Line, ...]]]:
    """Run ``delayq`` at a terminal. Return what is seen, and from which second on."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen = Screen()
    screen.write("$ delayq " + " ".join(arguments) + "\r\n")
    frames = [(0.0, screen.lines())]
    variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = subprocess.Popen(  # noqa: S603 - delayq itself
        [sys.executable, "-m", "delayq", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables | {"TERM": "xterm-256color", "TZ": "UTC", "LANG": "C.UTF-8"},
        cwd=Path(__file__).parents[2],
    )
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = ""
    while some := _read(ours):
        text += decoder.decode(some)
        # The rest of a control sequence is still to come.
        whole = UNFINISHED.sub("", text)
        screen.write(whole)
        text = text[len(whole) :]
        frames.append((time.monotonic(), screen.lines()))
    os.close(ours)
    if status := process.wait():
        sys.exit(f"delayq ended with {status}")
    # The start of Python is left out.
    left_out = frames[1][0] - BEFORE
    return [frames[0], *((at - left_out, lines) for at, lines in frames[1:])]


def _read(terminal: int) -> bytes:
    """Read what was written to a terminal, or nothing once its last program has gone."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def settled(frames: list[tuple[float, tuple[Line, ...]]]) -> list[tuple[float, tuple[Line, ...]]]:
    """Leave out frames that are replaced at once, and those that change nothing."""
    found = [now for now, later in pairwise(frames) if later[0] - now[0] > 0.03] + [frames[-1]]
    return [found[0], *(now for before, now in pairwise(found) if before[1] != now[1])]


def drawn(line: Line) -> str:
    """Return the elements of a line: text, and bars, which fonts would draw with gaps."""
    parts, at = [], 0
    for (look, is_bar), group in groupby(line, key=lambda each: (each[1], each[0] in BAR)):
        words = "".join(shown for shown, _ in group)
        x = round(EDGE + at * WIDE, 1)
        if is_bar:
            width = round(sum(BAR[each] for each in words) * WIDE, 1)
            parts.append(f'<path d="M{x:g} -5h{width:g}" stroke="{look.colour}" stroke-width="3"/>')
        style = f' fill="{look.colour}"' if look.colour != INK else ""
        style += ' font-weight="700"' if look.bold else ""
        # Whatever font there is, columns stay in line. Several spaces would become one.
        for word in () if is_bar else WORDS.finditer(words):
            long = len(word[0]) * WIDE
            parts.append(
                f'<text x="{x + word.start() * WIDE:g}" textLength="{long:g}"{style}>'
                f"{escape(word[0])}</text>"
            )
        at += len(words)
    return "".join(parts)


def animated(frames: list[tuple[float, tuple[Line, ...]]]) -> str:
    """Draw frames below each other, of which the picture shows one at a time."""
    tall = max(len(lines) for _, lines in frames)
    width, height = round(COLUMNS * WIDE + 2 * EDGE), tall * HIGH + 2 * EDGE
    total = frames[-1][0] + AFTER
    names: dict[Line, str] = {}
    places = []
    for number, (_, lines) in enumerate(frames):
        for row, line in enumerate(lines):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                y = number * height + EDGE + (row + 0.8) * HIGH
                places.append(f'<use href="#{name}" y="{y:g}"/>')
    moves = "".join(
        f"{100 * at / total:.2f}%{{transform:translateY({-number * height}px)}}"
        for number, (at, _) in enumerate(frames)
    )
    last = f"translate(0 {-(len(frames) - 1) * height})"
    dark = DARK | {PURPLE: "#c39be6"}
    used = (INK, FRAME, PAPER, PURPLE, *(each[0] for each in (BLUE, GREEN, ORANGE, RED)))
    fonts = f'font-family="{MONO}" font-size="13" fill="{INK}"'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts}>',
        f"<title>A run of delayq {' '.join(ARGUMENTS)}</title>",
        "<style>@media (prefers-color-scheme: dark) {",
        *(
            f'[fill="{light}"]{{fill:{dark[light]}}}[stroke="{light}"]{{stroke:{dark[light]}}}'
            for light in used
        ),
        f"}}@keyframes run {{{moves}}}",
        "@media (prefers-reduced-motion: no-preference) {",
        f"#frames{{animation:run {total:.2f}s step-end infinite}}}}</style>",
        "<defs>",
        *(f'<g id="{name}">{drawn(line)}</g>' for line, name in names.items()),
        "</defs>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" fill="{PAPER}"',
        f' stroke="{FRAME}"/><g id="frames" transform="{last}">',
        *places,
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (directory / "demo.svg").write_text(animated(settled(record(*ARGUMENTS))), "utf-8")
