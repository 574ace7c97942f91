"""The demo's two processes, as the parent sees them. The other ends of their pipes are in ``pipes.py``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import anyio

from delayq.cli.errors import CommandFailed
from delayq.client import URL_VARIABLE

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable

    from delayq.cli.demo.figures import Ledger

# How long a process may take to start and warm up, and to end when asked to, seconds.
_READY_WITHIN = 20.0
_END_WITHIN = 5.0


class Child:
    """A process and its reports. Created by :func:`child`."""

    def __init__(self, role: str, process: Process, stderr: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._role = role
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._stderr = stderr
        self._ready = False

    async def wait_until_ready(self, ledger: Ledger) -> None:
        """Wait until the process has started and warmed up.

        Raises:
            CommandFailed: The process failed, or took too long.
        """
        with anyio.move_on_after(_READY_WITHIN) as scope:
            await self.follow(ledger, until=lambda: self._ready)
        if scope.cancelled_caught:
            raise CommandFailed(f"the {self._role} was not ready within {_READY_WITHIN:g} s")
        if not self._ready:
            raise self.failed()

    def begin(self) -> None:
        """Tell the process that all processes are ready."""
        self._stdin.write(b"go\n")

    async def follow(self, ledger: Ledger, until: Callable[[], bool] = lambda: False) -> None:
        """Record the process's reports until ``until`` returns True or the process has ended.

        Raises:
            CommandFailed: The process failed.
        """
        while not until():
            line = await self._stdout.readline()
            if not line:
                return
            report = json.loads(line)
            self._ready = self._ready or "ready" in report
            if "error" in report:
                raise CommandFailed(report["error"])
            if "offset_us" in report:
                ledger.set_offset(report["offset_us"])
            for offered in report.get("offered", ()):
                ledger.offer(*offered)
            for arrived in report.get("arrived", ()):
                ledger.arrive(*arrived)

    async def finish(self, ledger: Ledger) -> None:
        """Ask the process to end, and record the rest of its reports."""
        self._stdin.close()
        with anyio.move_on_after(_END_WITHIN):
            await self.follow(ledger)

    def failed(self) -> CommandFailed:
        """Return an error with the last line on stderr of a process that ended too early."""
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(words) if line.strip()), "it ended without any output")
        return CommandFailed(f"the {self._role} failed: {last}")

    async def end(self) -> None:
        """End the process: ask it to end, and kill it if that does not help."""
        self._stdin.close()
        with anyio.move_on_after(_END_WITHIN):
            # It may have more to say than the pipe holds.
            while await self._stdout.read(65536):
                pass
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def child(role: str, url: str, *arguments: str) -> AsyncIterator[Child]:
    """Run ``delayq.cli.demo.<role>`` on the server at ``url``. It ends with the block, and when this process dies."""
    # As in this process, modules come from the working directory only if it was asked for.
    flags = [] if {"", str(Path.cwd())} & set(sys.path) else ["-P"]
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *flags,
            "-m",
            f"delayq.cli.demo.{role}",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # Not as an argument, because other users can read those, and the URL may contain a password.
            env=os.environ | {URL_VARIABLE: url},
            # Ctrl-C must reach only this process, which ends the others in order.
            process_group=0,
        )
        a_child = Child(role, process, stderr)
        try:
            yield a_child
        finally:
            with anyio.CancelScope(shield=True):
                await a_child.end()
