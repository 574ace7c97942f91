"""The command ``delayq migrate``: its options, its output, and its exit status."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

import delayq
from delayq.admin.migrate import MAX_BATCH
from delayq.admin.migrate import migrate as steps_of
from delayq.cli.options import AsJson, DelayedOnly, RequiredUrl
from delayq.cli.output import print_json, tell, write
from delayq.cli.running import public_part, server_of, until_signalled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rich.progress import TaskID

    from delayq.admin.migrate import Migration

WARNING = (
    "Redisson before 3.21.1 cannot read the current format: while such a client is still attached,"
    " it delivers the messages before such a record again and again, and none after it. Stop or"
    " upgrade it first."
)
# The length of the longest phase name, so that the bars start in the same column.
_PHASE_WIDTH = len("ordered list, again")
# How often a run without a terminal reports its progress, seconds.
_SAY_EVERY = 5.0


def migrate(
    queue: DelayedOnly,
    url: RequiredUrl = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; report what would be rewritten.")
    ] = False,
    batch: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_BATCH, help="The largest number of records to rewrite in a step."
        ),
    ] = 100,
    as_json: AsJson = False,
) -> None:
    """Rewrite records that Redisson before 3.21.1 wrote, while the queue is in use.

    Exit status: 0 if every readable record is current, or in a dry run; 1 if a client keeps writing
    outdated ones; 2 if the command could not be carried out. A queue without pending messages
    counts as current.

    Example: `delayq migrate orders --dry-run`
    """
    address = server_of(url)
    console = Console(highlight=False)
    view: AbstractContextManager[Callable[[Migration], None]]
    if as_json:
        view = nullcontext(lambda _: None)
    # Ask stdout itself, because the environment may tell the console to write as if to a terminal.
    elif sys.stdout.isatty() and not console.is_dumb_terminal:
        view = _bars(console)
    else:
        view = nullcontext(_lines())
    started = time.monotonic()
    with view as show:
        result = _run(address, queue.name, dry_run, batch, show)
    seconds = time.monotonic() - started
    if as_json:
        print_json(figures(result, public_part(address), seconds))
    else:
        for line in summary(result, seconds):
            write(line)
    raise typer.Exit(0 if result.complete or dry_run else 1)


def _run(
    address: str, queue: str, dry_run: bool, batch: int, show: Callable[[Migration], None]
) -> Migration:
    """Migrate. A signal that would end the process stops the migration between two steps."""

    async def act(_: list[int]) -> Migration:
        result: Migration | None = None
        async with delayq.connect(address) as client:
            async for result in steps_of(client, queue, dry_run=dry_run, batch=batch):
                if result.phase:
                    show(result)
                elif not dry_run:
                    # The server has been asked, and nothing has changed yet.
                    tell(f"warning: {WARNING}")
        assert result is not None, "the last result is always yielded"
        return result

    try:
        return until_signalled(act)
    except typer.Exit:
        tell("stopped; every record is intact; run the command again to continue")
        raise


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[Migration], None]]:
    """Show a progress bar for each phase on a terminal, so that the finished ones stay visible."""
    bars = Progress(
        TextColumn(f"{{task.description:<{_PHASE_WIDTH}}}"),
        BarColumn(
            bar_width=None, style="bright_black", complete_style="green", finished_style="green"
        ),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        expand=True,
    )
    phases: dict[tuple[int, str], TaskID] = {}

    def show(now: Migration) -> None:
        phase = (now.passes, now.phase)
        if phase not in phases:
            phases[phase] = bars.add_task(now.phase)
        bars.update(phases[phase], completed=now.done, total=now.total)
        # Not earlier, so that messages printed up front are above it.
        bars.start()

    try:
        yield show
    finally:
        bars.stop()
        console.print()


def _lines() -> Callable[[Migration], None]:
    """Return a function that prints a line now and then, as for a log file."""
    said_at = time.monotonic()

    def show(now: Migration) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= _SAY_EVERY:
            said_at = time.monotonic()
            write(f"{now.phase}: {now.done:,} of {now.total:,}, {now.rewritten:,} rewritten")

    return show


def summary(result: Migration, seconds: float) -> list[str]:
    """Return what was done, or in a dry run would be, as lines with one figure each."""
    outdated = sum(result.outdated.values())
    if not result.examined:
        verdict = f"queue {result.queue!r} has no pending messages, so nothing was rewritten"
        return [f"{verdict}; check that this is its name on the server"]
    lines = [
        f"checked: {result.examined:,}",
        f"would be rewritten: {outdated:,}"
        if result.dry_run
        else f"rewritten: {result.rewritten:,}",
        *(f"  {form}: {count:,}" for form, count in result.outdated.items()),
        f"already current: {result.current:,}",
        f"malformed, left unchanged: {result.malformed:,}",
    ]
    if result.merged:
        lines.append(f"stored in both formats, one kept: {result.merged:,}")
    lines += [f"seconds: {seconds:.1f}", f"longest step: {result.longest_step * 1000:.1f} ms"]
    if not result.dry_run:
        lines.append(
            "every readable record is current"
            if result.complete
            else "NOT FINISHED: outdated records keep arriving; stop or upgrade the clients that"
            " write them, and run the command again"
        )
    return lines


def figures(result: Migration, server: str, seconds: float) -> dict[str, Any]:
    """Return the same figures for programs."""
    counts = ("rewritten", "current", "malformed", "merged", "passes")
    return {
        "queue": result.queue,
        "server": server,
        "dry_run": result.dry_run,
        "looked_at": result.examined,
        **{name: getattr(result, name) for name in counts},
        "outdated": dict(result.outdated),
        "complete": result.complete,
        "seconds": round(seconds, 3),
        "longest_step_ms": round(result.longest_step * 1000, 3),
    }
