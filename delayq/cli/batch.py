"""The command about batches of messages: ``batch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq.admin.reliable import ReliableInspector
from delayq.admin.wording import describe_batch_state
from delayq.cli.options import AsJson, MaxRows, ReliableOnly, Url
from delayq.cli.output import (
    CommandFailed,
    moment_cell,
    moment_json,
    print_json,
    say,
    show_fields,
    show_table,
    tell,
)
from delayq.cli.running import at_server_time
from delayq.errors import NoBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayq import BatchStatus, Client

_DOING = "have batches"
_COUNTS = ("total", "waiting", "running", "handled", "dead", "cancelled")


def batch(
    queue: ReliableOnly,
    batch_id: Annotated[
        str | None, typer.Argument(metavar="BATCH", help="Show this batch only.")
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the messages of BATCH that have not ended.")
    ] = False,
    running: Annotated[
        bool, typer.Option("--running", help="With --cancel: also those that workers have.")
    ] = False,
    limit: MaxRows = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the batches of a reliable queue, newest first, show one, or cancel it.

    Exit status: 0, or 1 if there are none.

    Examples: `delayq batch imports`, `delayq batch imports 1764262996123000000001 --cancel`
    """
    queue.check_reliable(_DOING)
    if cancel and batch_id is None:
        raise CommandFailed("pass the BATCH to cancel")
    if running and not cancel:
        raise CommandFailed("--running belongs to --cancel")

    async def read(client: Client) -> list[BatchStatus]:
        jobs = await queue.existing(client, _DOING)
        if batch_id is None:
            # One more tells whether there are more.
            return await ReliableInspector.of(client, queue.name).batches(limit + 1)
        chosen = jobs.batch(batch_id)
        if cancel:
            cancelled = await chosen.cancel(running=running)
            if not as_json:
                say(f"{cancelled:,} messages were cancelled")
        return [await chosen.status()]

    try:
        statuses, now = at_server_time(url, read)
    except NoBatch as error:
        tell(f"{error}; list those that there are with: delayq batch {queue.argument}")
        raise typer.Exit(1) from None
    if as_json:
        for status in statuses[:limit]:
            print_json(_facts(status))
    else:
        _show(statuses, limit, now, in_full=batch_id is not None)
    raise typer.Exit(0 if statuses else 1)


def _show(statuses: Sequence[BatchStatus], limit: int, now: datetime, *, in_full: bool) -> None:
    if in_full:
        show_fields(_fields(statuses[0], now))
    else:
        _show_list(statuses, limit, now)


def _show_list(statuses: Sequence[BatchStatus], limit: int, now: datetime) -> None:
    if not statuses:
        say("no batches")
        return
    rows = [_row(status, now) for status in statuses[:limit]]
    show_table(("batch", "created", *_COUNTS, "state"), rows, wide=["batch"])
    if len(statuses) > limit:
        say("there are more: use --limit")


def _facts(status: BatchStatus) -> dict[str, Any]:
    return {
        "batch": status.id,
        **{name: getattr(status, name) for name in _COUNTS},
        "created_at": moment_json(status.created_at),
        "finished_at": moment_json(status.finished_at),
        "was_offered_whole": status.was_offered_whole,
        "state": describe_batch_state(status),
    }


def _fields(status: BatchStatus, now: datetime) -> list[tuple[str, str]]:
    return [
        ("batch", status.id),
        ("state", describe_batch_state(status)),
        *((name, f"{getattr(status, name):,}") for name in _COUNTS),
        ("created", moment_cell(status.created_at, now)),
        ("finished", moment_cell(status.finished_at, now)),
    ]


def _row(status: BatchStatus, now: datetime) -> list[str]:
    counts = [f"{getattr(status, name):,}" for name in _COUNTS]
    return [status.id, moment_cell(status.created_at, now), *counts, describe_batch_state(status)]
