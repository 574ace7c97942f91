"""Follow a page literally: write its files, type its commands, and compare what they print.

A block of ``console`` has commands after ``$``, each with its output. A line of ``...`` stands for
any lines, ``...`` within one for any text, and ``^C`` is typed once the lines before it are there.
A block of ``python`` is a file if the paragraph before it names it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE = 180.0
_BLOCK = re.compile(
    r"`([\w.]+\.py)`:\n\n```python\n(.*?)^```|^```console\n(.*?)^```", re.MULTILINE | re.DOTALL
)
_CTRL_C = "^C"
# A process in the background of a shell ignores Ctrl-C, and so would its commands.
_HEARS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_SHELL = (sys.executable, "-c", _HEARS_CTRL_C, "bash", "-ec")
# Patterns of text that differs from run to run, each with its replacement.
_CHANGING = (
    (r"[ \t]+", " "),
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \d+ ", "LOG "),
    # A moment of another day is shown with its date.
    (r"(?:\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d(?: \d\d:\d\d)?)(?: UTC)?", "TIME"),
    (r"\b[A-Z][a-z]{2} \d\d \d\d:\d\d\b", "TIME"),
    (r"\(?\b(?:in )?\d[\d.]*(?: ?(?:ms|s|min|m|h|d)\b)+(?: \d+ ?(?:min|s)\b)?(?: ago)?\)?", "SPAN"),
    (r"\b\d+\.\d+\.\d+\b", "VERSION"),
    (r'File ".*/', 'File "'),
    # How often a message has been tried that is still being tried.
    (r"(?<=attempts: )\d+|(?<=SPAN )\d+(?= \{)", "N"),
    # Ids that delayq makes.
    (r"(?<!\S)[\w-]{12}(?= TIME)", "ID"),
)


@dataclass(frozen=True)
class File:
    """A file that the page tells you to write."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command, and its output on the page."""

    line: str
    output: tuple[str, ...]


class Differs(Exception):
    """Raised when a command does not print what the page shows."""


def steps(page: str) -> Iterator[File | Command]:
    """Yield what a page tells you to do."""
    for name, text, session in _BLOCK.findall(page):
        if name:
            yield File(name, text)
        for entry in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
            line, *output = entry.rstrip("\n").split("\n")
            yield Command(line, tuple(output))


def masked(line: str) -> str:
    """Return a line without what differs from run to run."""
    for pattern, word in _CHANGING:
        line = re.sub(pattern, word, line)
    return line.strip()


def matches(shown: tuple[str, ...], printed: str) -> bool:
    """Tell whether the output of a command is the one that the page shows."""
    pattern = "".join(
        r"(?:.*\n)*?"
        if line == "..."
        else re.escape(masked(line)).replace(re.escape("..."), ".*") + r"\n"
        for line in shown
        if line != _CTRL_C
    )
    lines = [masked(line) for line in printed.splitlines() if line.strip()]
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


class Terminal:
    """A directory in which commands are typed, one after the other."""

    def __init__(
        self,
        directory: Path,
        *,
        path: str = os.environ["PATH"],
        typed: Callable[[str], str] = str,
    ) -> None:
        """Prepare a terminal, whose ``$PATH`` is ``path``. ``typed`` changes commands before."""
        self._directory = directory
        self._path = path
        self._typed = typed
        # Commands that set variables, which run again before each other command.
        self._settings: list[str] = []

    def follow(self, page: str, at_ctrl_c: Callable[[str], None]) -> list[str]:
        """Follow a page, and return the commands that were typed. ``at_ctrl_c`` is called with what
        a command has printed, before Ctrl-C is typed. Raise Differs if a command fails, or does not
        print what the page shows.
        """
        done = []
        for step in steps(page):
            if isinstance(step, File):
                (self._directory / step.name).write_text(step.text, "utf-8")
                continue
            self._type(step, at_ctrl_c)
            done.append(step.line)
        return done

    def _type(self, command: Command, at_ctrl_c: Callable[[str], None]) -> None:
        line = self._typed(command.line)
        if line.startswith(("export ", ". ")):
            self._settings.append(line)
            line = ":"
        # Of the rest, pip needs its configuration.
        variables = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        variables |= {"PATH": self._path, "HOME": os.environ["HOME"]}
        process = subprocess.Popen(
            [*_SHELL, "\n".join([*self._settings, line])],
            cwd=self._directory,
            env=variables | {"PYTHONUNBUFFERED": "1", "COLUMNS": "150"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        printed: list[str] = []
        reader = threading.Thread(target=_collect, args=(process, printed))
        reader.start()
        deadline = time.monotonic() + PATIENCE
        if _CTRL_C in command.output:
            before = command.output[: command.output.index(_CTRL_C)]
            while not matches(before, "".join(printed)) and reader.is_alive():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            at_ctrl_c("".join(printed))
            os.killpg(process.pid, signal.SIGINT)
        reader.join(max(1.0, deadline - time.monotonic()))
        if reader.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        # Ctrl-C ends a command with its own status.
        if status not in ((0, 130, -signal.SIGINT) if _CTRL_C in command.output else (0,)):
            raise Differs(f"$ {command.line}\nended with {status}:\n{''.join(printed)}")
        if not matches(command.output, "".join(printed)):
            shown = "\n".join(command.output)
            raise Differs(
                f"$ {command.line}\nprinted:\n{''.join(printed)}\nbut the page shows:\n{shown}"
            )


def _collect(process: subprocess.Popen[str], printed: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        printed.extend(lines)
