"""Keeps a number of worker processes running."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress

from delayq._redis.retry import retry_delay
from delayq.cli.errors import CommandFailed
from delayq.cli.output import print_json
from delayq.cli.running import SIGNALS, python

# A process that lived longer, seconds, did not fail to start: the next one starts soon.
_STEADY = 10.0


class Supervisor:
    """Starts the processes, replaces those that die, and passes signals on."""

    def __init__(
        self,
        where: str,
        processes: int,
        *,
        burst: bool,
        metrics: tuple[str, int] | None = None,
        as_json: bool = False,
    ) -> None:
        # As ``module:attribute``.
        self._where = where
        self._count = processes
        self._burst = burst
        # Host and port of the first process's; the others use the next ports.
        self._metrics = metrics
        self._as_json = as_json
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._killed_by: int | None = None
        # Whether a process has ever started. Until then, a failure is the command's.
        self._proven = False
        self._refused: str | None = None
        self._died = 0

    async def run(self) -> int:
        """Run until everything has ended, and return the exit status. Raises CommandFailed."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            await asyncio.gather(*(self._keep(place) for place in range(1, self._count + 1)))
        finally:
            for process in self._running:
                send(process, signal.SIGKILL)
        if self._killed_by is not None:
            return 128 + self._killed_by
        if self._refused is not None:
            raise CommandFailed(self._refused)
        return 1 if self._burst and self._died else 0

    async def _keep(self, place: int) -> None:
        """Keep one process running, restarting it when it dies."""
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._run_once(place)
            if self._stopping.is_set() or (self._burst and status == 0):
                return
            if time.monotonic() - started > _STEADY:
                failures = 0
            failures += 1
            self._died += 1
            how = (
                f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            )
            if self._burst:
                self._say(f"process {place} {how}")
                return
            wait = retry_delay(failures, base=0.5, most=30.0)
            self._say(f"process {place} {how}; restarting it in {wait:.1f} s")
            try:
                await asyncio.wait_for(self._stopping.wait(), wait)
            except TimeoutError:
                continue

    async def _run_once(self, place: int) -> int:
        """Run one process, and return its exit status."""
        theirs, lifeline = os.pipe()
        report, told = os.pipe()
        try:
            command = python("delayq.cli.worker.child")
            if self._burst:
                command.append("--burst")
            if self._metrics is not None:
                host, first = self._metrics
                command.append(f"--metrics={host}:{first + place - 1}")
            process = await asyncio.create_subprocess_exec(
                *command,
                "--",
                self._where,
                str(theirs),
                str(told),
                stdin=asyncio.subprocess.DEVNULL,
                # The output of handlers must not be mixed with our JSON documents.
                stdout=2 if self._as_json else None,
                pass_fds=(theirs, told),
                # Ctrl-C is for this process, which passes it on.
                process_group=0,
            )
            self._running.add(process)
            os.close(theirs)
            os.close(told)
            theirs = told = -1
            if self._stopping.is_set():
                # A signal came while it started.
                send(process, signal.SIGTERM if self._killed_by is None else signal.SIGKILL)
            if await self._listen(report):
                self._tell(place, process.pid, "ready")
            status = await process.wait()
            self._running.discard(process)
            self._tell(place, process.pid, "ended", status=status)
            return status
        finally:
            for descriptor in (theirs, told, lifeline, report):
                if descriptor >= 0:
                    os.close(descriptor)

    async def _listen(self, report: int) -> bool:
        """Wait until the process reports how it started. Returns whether it started."""
        loop = asyncio.get_running_loop()
        said = asyncio.Event()
        loop.add_reader(report, said.set)
        try:
            await said.wait()
        finally:
            loop.remove_reader(report)
        line = os.read(report, 4096).decode(errors="replace").strip()
        if line == "ready":
            self._proven = True
        elif line and self._proven:
            self._say(line)
        elif line and self._refused is None:
            self._refused = line
            self._stop(signal.SIGTERM)
        return line == "ready"

    def _signalled(self, number: int) -> None:
        if self._stopping.is_set():
            self._killed_by = number
            self._stop(signal.SIGKILL)
        else:
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._stopping.set()
        for process in self._running:
            send(process, number)

    def _tell(self, place: int, pid: int, event: str, **more: int) -> None:
        """Print an event, for programs."""
        if not self._as_json:
            return
        # The reader may be gone, but the work continues.
        with suppress(OSError):
            print_json({"process": place, "pid": pid, "event": event, **more})

    def _say(self, line: str) -> None:
        """Print a problem, for people."""
        print(f"delayq: {line}", file=sys.stderr, flush=True)


def send(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a process a signal, if it is still running."""
    # Before CPython 3.13, asyncio's own way may collect the exit status of a child that has just
    # ended, so that its watcher finds none and takes it for 255 (python/cpython#87744).
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
