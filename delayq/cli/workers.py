"""The command ``workers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from delayq.admin.catalog import list_workers
from delayq.cli.errors import CommandFailed
from delayq.cli.options import AsJson, ReliableOrAll, Url  # noqa: TC001 - typer reads them
from delayq.cli.output import moment_json, print_json, say, show_table, span
from delayq.cli.running import at_server_time
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client
    from delayq.stats import WorkerInfo

_COLUMNS = ("queue", "host", "pid", "delayq", "running", "slots", "longest", "up", "seen")


def workers(
    queue: ReliableOrAll = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the processes that work on reliable queues, and what they handle.

    A process that dies stays in the list for up to a minute. `--json` also prints the messages
    that each of them handles: the 20 that have run longest.

    Exit status: 0, or 1 if there are none.

    Example: `delayq workers mails`
    """
    name = None
    if queue is not None:
        queue.check_reliable("have workers")
        name = queue.name

    async def look(client: Client) -> list[WorkerInfo]:
        if queue is not None:
            await queue.check_existence(client)
        return await list_workers(client, name)

    try:
        found, now = at_server_time(url, look)
    except ServerRefused as error:
        hint = (
            "; without +scan, name a queue: delayq workers NAME" if "'scan'" in str(error) else ""
        )
        raise CommandFailed(f"{error}{hint}") from error
    if as_json:
        for each in found:
            print_json(_facts(each))
    elif found:
        show_table(_COLUMNS, [_row(each, now) for each in found], wide=["queue", "longest"])
    else:
        say("no workers")
    raise typer.Exit(0 if found else 1)


def _facts(worker: WorkerInfo) -> dict[str, Any]:
    return {
        **vars(worker),
        "messages": [{**vars(each), "since": moment_json(each.since)} for each in worker.messages],
        "started_at": moment_json(worker.started_at),
        "seen_at": moment_json(worker.seen_at),
    }


def _row(worker: WorkerInfo, now: datetime) -> list[str]:
    def ago(at: datetime) -> str:
        return span(max(0.0, (now - at).total_seconds()))

    first = worker.messages[0] if worker.messages else None
    return [
        worker.queue,
        worker.host,
        str(worker.pid),
        worker.version,
        f"{worker.running:,}",
        f"{worker.slots:,}" if worker.slots else "-",
        "-" if first is None else f"{first.id} {ago(first.since)}",
        ago(worker.started_at),
        f"{ago(worker.seen_at)} ago",
    ]
