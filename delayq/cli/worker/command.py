"""The command ``delayq worker``: keeps processes running, and restarts them when code changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from delayq._redis.retry import retry_delay
from delayq.cli.options import AsJson, LogLevel, LogLevels, WorkerUrl
from delayq.cli.output import CommandFailed, print_json, tell, write
from delayq.cli.running import SIGNALS, python
from delayq.client import URL_VARIABLE
from delayq.worker import HealthServer

if TYPE_CHECKING:
    from collections.abc import Mapping


_PORTS = 65_536


def worker(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:ATTRIBUTE", help="The delayq.Worker to run, such as app.jobs:worker."
        ),
    ],
    processes: Annotated[int, typer.Option(min=1, help="The number of processes.")] = 1,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help=(
                "Serve Prometheus metrics on this port; further processes use the next ports. Needs"
                " the extra `prometheus`."
            ),
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="The address to serve metrics on.")
    ] = "127.0.0.1",
    health: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=(
                "Answer probes and autoscalers at this address: /livez, /readyz, /scale/QUEUE, and"
                " /metrics where the extra `prometheus` is installed. Further processes use the"
                " next ports."
            ),
        ),
    ] = None,
    burst: Annotated[
        bool, typer.Option("--burst", help="Exit when no more messages are due.")
    ] = False,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help=(
                "Restart the worker when a Python file below the working directory changes. Needs"
                " the extra `reload`."
            ),
        ),
    ] = False,
    reload_dir: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Watch this directory instead of the working directory. Repeatable.",
        ),
    ] = None,
    log_level: LogLevel = LogLevels.INFO,
    url: WorkerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Run a worker in one or more processes.

    Modules are also imported from the working directory. SIGTERM or Ctrl-C stops the worker
    gracefully: handlers finish, and the other messages are given back. A second signal kills it at
    once. A process that dies is replaced.

    Exit status: 0 after a stop or a burst; 1 if processes died in a burst; 2 if the worker could
    not be started; 128 plus the signal's number after a second signal.

    Example: `delayq worker app.jobs:worker --processes 4`
    """
    metrics = None
    if metrics_port is not None:
        if find_spec("prometheus_client") is None:
            raise CommandFailed("prometheus_client is missing: pip install 'delayq[prometheus]'")
        _check_ports(metrics_port, processes)
        metrics = (metrics_host, metrics_port)
    health_server = None if health is None else HealthServer(health)
    if health_server is not None:
        _check_ports(health_server.port, processes)
    watched = tuple(reload_dir or (Path(),)) if reload or reload_dir else ()
    if watched and burst:
        raise CommandFailed("--reload and --burst cannot be combined")
    if watched and find_spec("watchfiles") is None:
        raise CommandFailed("watchfiles is missing: pip install 'delayq[reload]'")
    plan = Plan(
        reference=reference,
        processes=processes,
        url=url or None,
        burst=burst,
        reload=watched,
        metrics=metrics,
        health=health_server,
        log_level=log_level,
        as_json=as_json,
    )
    raise typer.Exit(anyio.run(Supervisor(plan).run))


def _check_ports(first: int, processes: int) -> None:
    """Raise CommandFailed unless each process has a port."""
    if first + processes > _PORTS:
        raise CommandFailed(
            f"{processes} processes need as many ports, but there are not enough from {first} on"
        )


# A process that lived longer, seconds, did not fail to start: the next one starts soon.
_STEADY = 10.0
# The number of queues that the first line names.
_MOST_QUEUES = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run, and how.

    Attributes:
        reference: The worker, as ``module:attribute``.
        processes: The number of processes.
        url: The server; None if the worker knows it.
        burst: Whether to end when nothing is due.
        reload: The directories whose Python files restart the worker when they change.
        metrics: Host and port of the first process's; the others use the next ports.
        health: The same for the answers to probes.
        log_level: From which level on the processes print what is logged.
        as_json: Whether events are printed for programs.
    """

    reference: str
    processes: int = 1
    url: str | None = None
    burst: bool = False
    reload: tuple[Path, ...] = ()
    metrics: tuple[str, int] | None = None
    health: HealthServer | None = None
    log_level: str = "info"
    as_json: bool = False


class Supervisor:
    """Starts the processes, replaces those that die, and passes signals on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._killed_by: int | None = None
        # Whether a process has ever started. Until then, a failure is the command's.
        self._has_started = False
        self._start_error: str | None = None
        self._deaths = 0
        self._is_introduced = False
        # Set when the code has changed, and replaced for the next change.
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Run until everything has ended, and return the exit status. Raises CommandFailed."""
        loop = asyncio.get_running_loop()
        for signal_number in SIGNALS:
            loop.add_signal_handler(signal_number, self._on_signal, signal_number)
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.gather(
                *(self._keep(number) for number in range(1, self._plan.processes + 1))
            )
        finally:
            watching.cancel()
            for process in self._running:
                send(process, signal.SIGKILL)
        if self._killed_by is not None:
            return 128 + self._killed_by
        if self._start_error is not None:
            raise CommandFailed(self._start_error)
        return 1 if self._plan.burst and self._deaths else 0

    async def _watch(self) -> None:
        """Stop the processes, to be started again, whenever their code changes."""
        if not self._plan.reload:
            return
        from watchfiles import PythonFilter, awatch  # noqa: PLC0415 - an extra

        try:
            async for changes in awatch(*self._plan.reload, watch_filter=PythonFilter()):
                first, *other_files = sorted({Path(path).name for _, path in changes})
                suffix = f" and {len(other_files)} more" if other_files else ""
                self._say(f"{first}{suffix} changed: restarting the worker")
                before, self._changed = self._changed, asyncio.Event()
                before.set()
        except (OSError, RuntimeError) as error:
            self._say(f"cannot watch for changes any longer: {error}")

    async def _keep(self, number: int) -> None:
        """Keep one process running, restarting it when it dies."""
        failures = 0
        while not self._stopping.is_set():
            started, changed = time.monotonic(), self._changed
            status = await self._run_once(number, changed)
            if self._stopping.is_set() or (self._plan.burst and status == 0):
                return
            if changed.is_set():
                failures = 0
                continue
            if time.monotonic() - started > _STEADY:
                failures = 0
            failures += 1
            self._deaths += 1
            ending = (
                f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            )
            if self._plan.burst:
                self._say(f"process {number} {ending}")
                return
            if self._plan.reload:
                self._say(f"process {number} {ending}; it is started again when the code changes")
                await _wait_for_any(self._stopping, changed)
                continue
            wait = retry_delay(failures, base=0.5, longest=30.0)
            self._say(f"process {number} {ending}; restarting it in {wait:.1f} s")
            try:
                await asyncio.wait_for(self._stopping.wait(), wait)
            except TimeoutError:
                continue

    async def _run_once(self, number: int, changed: asyncio.Event) -> int:
        """Run one process, and return its exit status. Ask it to stop when the code changes."""
        theirs, lifeline = os.pipe()
        report, status_pipe = os.pipe()
        try:
            command = python("delayq.cli.worker.child")
            command += ["--log-level", self._plan.log_level]
            if self._plan.burst:
                command.append("--burst")
            if self._plan.url is not None:
                command.append("--url")
            if self._plan.metrics is not None:
                host, first = self._plan.metrics
                command.append(f"--metrics={host}:{first + number - 1}")
            if self._plan.health is not None:
                command.append(f"--health={self._plan.health.address_of(number - 1)}")
            process = await asyncio.create_subprocess_exec(
                *command,
                "--",
                self._plan.reference,
                str(theirs),
                str(status_pipe),
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                # The output of handlers must not be mixed with our JSON documents.
                stdout=2 if self._plan.as_json else None,
                pass_fds=(theirs, status_pipe),
                # Ctrl-C is for this process, which passes it on.
                process_group=0,
            )
            self._running.add(process)
            os.close(theirs)
            os.close(status_pipe)
            theirs = status_pipe = -1
            if self._stopping.is_set():
                # A signal came while it started.
                send(process, signal.SIGTERM if self._killed_by is None else signal.SIGKILL)
            stopping = asyncio.ensure_future(_stop_on_change(changed, process))
            try:
                if (facts := await self._listen(report)) is not None:
                    self._introduce(facts)
                    self._tell(number, process.pid, "ready", facts)
                status = await process.wait()
            finally:
                stopping.cancel()
            self._running.discard(process)
            self._tell(number, process.pid, "ended", {"status": status})
            return status
        finally:
            for descriptor in (theirs, status_pipe, lifeline, report):
                if descriptor >= 0:
                    os.close(descriptor)

    async def _listen(self, report: int) -> dict[str, Any] | None:
        """Wait until the process reports how it started. Returns what it does; None if it failed
        to start.
        """
        loop = asyncio.get_running_loop()
        has_reported = asyncio.Event()
        loop.add_reader(report, has_reported.set)
        try:
            await has_reported.wait()
        finally:
            loop.remove_reader(report)
        with open(report, "rb", closefd=False) as lines:  # noqa: ASYNC230 - it is there already
            line = lines.readline().decode(errors="replace").strip()
        word, _, facts = line.partition(" ")
        if word == "ready":
            self._has_started = True
            started: dict[str, Any] = json.loads(facts)
            return started
        if line and (self._has_started or self._plan.reload):
            self._say(line)
        elif line and self._start_error is None:
            self._start_error = line
            self._stop(signal.SIGTERM)
        return None

    def _introduce(self, facts: Mapping[str, Any]) -> None:
        """Print once what the worker does, for people."""
        if self._is_introduced or self._plan.as_json:
            return
        self._is_introduced = True
        plan, queues = self._plan, facts["queues"]
        names = ", ".join(queues[:_MOST_QUEUES])
        if len(queues) > _MOST_QUEUES:
            names += f" and {len(queues) - _MOST_QUEUES} more"
        suffix = f" in each of {plan.processes} processes" if plan.processes > 1 else ""
        # Without the command's name, which introduces problems.
        tell(
            f"{plan.reference} handles {'queue' if len(queues) == 1 else 'queues'} {names} of"
            f" {facts['server']}, up to {facts['concurrency']:,} messages at a time{suffix}",
            prefix="",
        )

    def _environment(self) -> dict[str, str] | None:
        return None if self._plan.url is None else os.environ | {URL_VARIABLE: self._plan.url}

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            self._killed_by = number
            self._stop(signal.SIGKILL)
        else:
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._stopping.set()
        for process in self._running:
            send(process, number)

    def _tell(self, number: int, pid: int, event: str, facts: Mapping[str, Any]) -> None:
        """Print an event, for programs."""
        if not self._plan.as_json:
            return
        # The reader may be gone, but the work continues.
        with suppress(OSError):
            print_json({"process": number, "pid": pid, "event": event, **facts})

    def _say(self, line: str) -> None:
        """Print a problem, for people."""
        write(f"delayq: {line}", stderr=True)


async def _stop_on_change(changed: asyncio.Event, process: asyncio.subprocess.Process) -> None:
    await changed.wait()
    send(process, signal.SIGTERM)


async def _wait_for_any(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def send(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a process a signal, if it is still running."""
    # Before CPython 3.13, asyncio's own way may collect the exit status of a child that has just
    # ended, so that its watcher finds none and takes it for 255 (python/cpython#87744).
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
