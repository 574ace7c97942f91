"""The commands about recurring messages: ``schedules``, ``unschedule``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from delayq.admin.catalog import list_queues
from delayq.admin.reliable import ReliableInspector
from delayq.cli.options import (
    AsJson,
    MaxRows,
    ReliableOnly,
    ReliableOrAll,
    Url,
)
from delayq.cli.output import (
    CommandFailed,
    moment_cell,
    moment_json,
    print_json,
    report,
    say,
    show_table,
    span,
    tell,
)
from delayq.cli.running import at_server_time, with_client
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client, Schedule

_DOING = "have schedules"


def schedules(
    queue: ReliableOrAll = None,
    limit: MaxRows = 100,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the schedules of a reliable queue, or of all, with their next and last occurrences.

    Exit status: 0, or 1 if there are none.

    Examples: `delayq schedules`, `delayq schedules reports`
    """
    if queue is not None:
        queue.check_reliable(_DOING)

    async def read(client: Client) -> list[tuple[str, Schedule]]:
        if queue is not None:
            await queue.check_existence(client)
            names = [queue.name]
        else:
            names = [entry.name for entry in await list_queues(client) if entry.kind == "reliable"]
        rows = []
        for name in names:
            inspector = ReliableInspector.of(client, name)
            await inspector.all_stores(at_rest=True)
            rows += [
                (name, listed.schedule)
                for listed in await inspector.schedules()
                if listed.schedule is not None
            ]
        return rows

    try:
        every, now = at_server_time(url, read)
    except ServerRefused as error:
        hint = (
            "; without +scan, name a queue: delayq schedules NAME" if "'scan'" in str(error) else ""
        )
        raise CommandFailed(f"{error}{hint}") from error
    page = every[:limit]
    if as_json:
        for name, schedule in page:
            print_json(
                {
                    "queue": name,
                    "name": schedule.name,
                    "cron": schedule.cron,
                    "every": None if schedule.every is None else schedule.every.total_seconds(),
                    "timezone": schedule.timezone,
                    "next_at": moment_json(schedule.next_at),
                    "last_at": moment_json(schedule.last_at),
                    "priority": schedule.priority,
                    "version": schedule.version,
                    "paused": schedule.paused,
                }
            )
    elif page:
        columns = ("queue", "name", "when", "next", "last", "priority", "version")
        rows = [[name, *_row(schedule, now)] for name, schedule in page]
        show_table(columns, rows, wide=["queue", "name"])
        if len(every) > len(page):
            say(f"{len(every) - len(page):,} more: use --limit, or name a queue")
    else:
        say("no schedules")
    raise typer.Exit(0 if page else 1)


def unschedule(
    queue: ReliableOnly,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the schedule.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete a schedule, and drop its waiting message, unless a worker already has it.

    An application that calls `schedule()` when it starts brings the schedule back.

    Exit status: 0, or 1 if there is no such schedule.

    Example: `delayq unschedule reports nightly`
    """
    change_schedule(queue, name, "unscheduled", url, as_json=as_json)


def change_schedule(
    queue: ReliableOnly, name: str, done: str, url: str | None, *, as_json: bool
) -> None:
    """Pause, resume or delete a schedule, so that it is ``done``."""

    async def act(client: Client) -> bool:
        jobs = await queue.existing(client, _DOING)
        return await {
            "paused": jobs.pause_schedule,
            "resumed": jobs.resume_schedule,
            "unscheduled": jobs.unschedule,
        }[done](name)

    if not with_client(url, act):
        tell(f"there is no schedule {name!r}")
        raise typer.Exit(1)
    report({"queue": queue.name, "name": name, done: True}, f"{name} is {done}", as_json=as_json)


def _row(schedule: Schedule, now: datetime) -> list[str]:
    if schedule.every is not None:
        recurrence = f"every {span(schedule.every.total_seconds())}"
    else:
        recurrence = f"{schedule.cron} {schedule.timezone}"
    return [
        schedule.name,
        recurrence,
        "paused" if schedule.paused else moment_cell(schedule.next_at, now),
        moment_cell(schedule.last_at, now),
        str(schedule.priority),
        str(schedule.version),
    ]
