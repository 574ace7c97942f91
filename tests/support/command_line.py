"""The command line in this process: as in a pipe, or at a terminal of a fixed size."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import typer

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from delayq.cli.app import run
from tests.support.terminal import screen

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import PrivateServer

# typer makes its commands again whenever it is called, which takes far longer than most commands.
typer.main.get_command = cache(typer.main.get_command)

MAILS = ReliableKeys.of("mails")
CLOSING = DelayedKeys.of("closing")
SECRET = "geheim"


class Stream(io.StringIO):
    """A terminal that notes what is written to it, and calls ``act`` with all of it so far."""

    act: Callable[[str], object] = len

    def write(self, text: str) -> int:
        written = super().write(text)
        self.act(self.getvalue())
        return written

    def isatty(self) -> bool:
        return True


def ctrl_c_at(word: str) -> Callable[[str], object]:
    """Return a function that types Ctrl-C, once, when the output has the word."""
    typed: list[str] = []

    def act(written: str) -> None:
        if word in written and not typed:
            typed.append(word)
            os.kill(os.getpid(), signal.SIGINT)

    return act


class Cli:
    """Runs the command line in this process, against one server."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys
        self.error = ""

    def __call__(self, line: str, *arguments: str) -> tuple[int, list[Any]]:
        """Run a command with ``--json``, and return its exit status and its JSON documents."""
        status, out = self.plain(line, *arguments, "--json")
        return status, [json.loads(line) for line in out.splitlines()]

    def plain(self, line: str, *arguments: str) -> tuple[int, str]:
        """Run a command: a line as in a shell, and further arguments."""
        self._capsys.readouterr()
        status = run([*shlex.split(line), *arguments, "--url", self.url])
        captured = self._capsys.readouterr()
        self.error = captured.err
        return status, captured.out

    def at_terminal(
        self,
        line: str,
        *arguments: str,
        act: Callable[[str], object] = len,
        stdin: str = "",
        **variables: str,
    ) -> tuple[int, str]:
        """Run a command at a terminal of 24 lines, and call ``act`` after each output with all of
        it so far. Return its status, and all that it writes.
        """
        terminal, keyboard = Stream(), Stream(stdin)
        terminal.act = act
        size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, terminal)
            patch.setattr(sys, "stdin", keyboard)
            for name, value in ({"DELAYQ_URL": self.url} | size | variables).items():
                patch.setenv(name, value)
            # typer sets it for good.
            patch.setattr(sys, "excepthook", sys.excepthook)
            status = run([*shlex.split(line), *arguments])
        # As terminals do.
        return status, terminal.getvalue().replace("\n", "\r\n")

    def screen(self, line: str, *arguments: str, **options: Any) -> tuple[int, str]:
        """Run a command at a terminal of 80 columns. Return its status, and its final screen, which
        no line may exceed.
        """
        status, raw = self.at_terminal(line, *arguments, **options)
        for shown_line in raw.replace("\r\n", "\n").split("\n"):
            for plain in screen(shown_line, 10_000):
                assert len(plain) <= 80, (line, plain)
        return status, "\n".join(screen(raw, 80))

    def assert_refused(self, line: str, *arguments: str, words: str = "") -> None:
        """Assert that a command fails with status 2 and one line on stderr that has the words."""
        assert self.plain(line, *arguments) == (2, ""), line
        assert self.error.startswith("delayq: "), line
        assert self.error.count("\n") == 1, line
        assert words.lower() in self.error.lower(), line

    def check(self, name: str, line: str = "doctor") -> dict[str, Any]:
        """Return what a doctor says of one check. Its status is 1 if anything is wrong."""
        status, every = self(line)
        assert status == any(row["level"] == "wrong" for row in every)
        (check,) = [row for row in every if row["check"] == name]
        assert isinstance(check, dict)
        return check


@pytest.fixture
def cli(
    server: PrivateServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    # With the first, lines would be wrapped as at a terminal of that width.
    for name in ("COLUMNS", "DELAYQ_URL", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    # Lateness is measured for a moment only.
    monkeypatch.setattr("delayq.cli.bench._SPREAD", (0.1, 0.2))
    return Cli(server.url, capsys)


def seed(url: str) -> None:
    """Fill two whole queues and a partitioned one; between them, messages are in every state."""

    async def main() -> None:
        async with delayq.connect(url) as client:
            mails = client.reliable_queue("mails", lease=3600)
            subject = "a subject that does not fit into a table of eighty columns"
            long = {"to": "ada@example.org", "subject": subject}
            for place, delay in enumerate((0, 90, 4000, 100_000)):
                await mails.offer(
                    long, delay, id=f"welcome-{place}", priority=place, headers={"tenant": "acme"}
                )
            await mails.offer({"n": 1}, id="bad", priority=9)
            await mails.offer({"n": 2}, id="busy", priority=8)
            bad, busy = await mails.claim(2)
            assert (bad.id, busy.id) == ("bad", "busy")
            await bad.bury("rejected")
            closing = client.delayed_queue("closing")
            order = {"order": 1, "customer": "Ada Lovelace, 12 St James's Square, London"}
            await closing.offer_many([(order, 3000), (order, 100_000)])
            await closing.ready.size()
            parts = client.reliable_queue("orders", partitions=4)
            await parts.offer_many(delayq.Offer(number, delay=500) for number in range(40))

    asyncio.run(main())
