"""Run a command at a real pseudo-terminal, and read the final state of its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, NamedTuple

from delayq.cli.app import run
from tests.support.forks import FORKS

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
_STEP = re.compile(
    r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[()=>][0-9A-B]?|(\r)|(\n)|(\x08)|([^\x1b\r\n\x08])",
    re.DOTALL,
)


class Seen(NamedTuple):
    """The output of a command, including standard error, and its exit status."""

    raw: str
    status: int


def screen(raw: str, columns: int) -> list[str]:  # noqa: PLR0912 - a case for each thing that a terminal can do
    """Return the final screen of a terminal with the few control sequences used here."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for step in _STEP.finditer(raw):
        numbers, letter, back, down, left, shown = step.groups()
        if letter is not None:
            count = int(numbers) if numbers.isdigit() else 1
            if letter == "A":
                row = max(0, row - count)
            elif letter == "K":
                lines[row] = [] if numbers == "2" else lines[row][:column]
            elif letter == "H" and not numbers:
                row = column = 0
            elif letter == "G":
                column = count - 1
        elif back:
            column = 0
        elif down:
            row += 1
        elif left:
            column = max(0, column - 1)
        elif shown is not None:
            if column >= columns:
                row, column = row + 1, 0
            while len(lines) <= row:
                lines.append([])
            line = lines[row]
            line += " " * (column + 1 - len(line))
            line[column] = shown
            column += 1
        while len(lines) <= row:
            lines.append([])
    shown_lines = ["".join(line).rstrip() for line in lines]
    while shown_lines and not shown_lines[-1]:
        shown_lines.pop()
    return shown_lines


def at_terminal(
    *arguments: str,
    columns: int = 80,
    rows: int = 24,
    act: Callable[[BaseProcess, str, Callable[[str], None]], None] | None = None,
    constants: dict[str, object] | None = None,
    **variables: str,
) -> Seen:
    """Run ``delayq`` with these arguments, and with other values for constants of the package, by
    their dotted names. ``act`` is called after each output with the process, its whole output so
    far, and a function that types text.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DELAYQ_URL", "COLUMNS", "LINES", "NO_COLOR")
    }
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | variables
    with Connection(theirs) as terminal:
        process = FORKS.Process(
            target=_command, args=(terminal, arguments, environment, constants or {})
        )
        process.start()

    def type_(text: str) -> None:
        os.write(ours, text.encode())

    output = b""
    deadline = time.monotonic() + PATIENCE
    # Reading from the terminal fails when its last program has gone.
    with suppress(OSError):
        while True:
            if not select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                process.kill()
                raise AssertionError(
                    f"it goes on and on: {output.decode(errors='replace')[-2000:]}"
                )
            chunk = os.read(ours, 65536)
            if not chunk:
                break
            output += chunk
            if act is not None:
                act(process, output.decode(errors="replace"), type_)
    os.close(ours)
    process.join(PATIENCE)
    assert process.exitcode is not None, "it has closed its terminal, but goes on"
    return Seen(output.decode(errors="replace"), process.exitcode)


def _command(
    terminal: Connection[bytes, bytes],
    arguments: tuple[str, ...],
    environment: dict[str, str],
    constants: dict[str, object],
) -> None:
    # The process gets its own terminal session, so a typed Ctrl-C reaches only this process.
    os.setsid()
    # A job that a shell runs in the background ignores Ctrl-C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(terminal.fileno(), termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(terminal.fileno(), stream)
    terminal.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        setattr(import_module(module), constant, value)
    sys.exit(run([*arguments]))
