"""The commands about groups: ``groups list``, ``limit``, ``pause`` and ``resume``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq._reliable.limits import Limit
from delayq.cli.limits import LIMIT_METAVAR, limit_of, limit_shown
from delayq.cli.options import AsJson, ReliableOnly, Url  # noqa: TC001 - typer reads them
from delayq.cli.options import Limit as Most  # noqa: TC001
from delayq.cli.output import (
    moment_cell,
    moment_json,
    print_json,
    report,
    say,
    show_fields,
    show_table,
)
from delayq.cli.running import at_server_time, with_client

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client
    from delayq._reliable.groups import Group

groups: typer.Typer = typer.Typer(
    help="List, limit, pause or resume the groups of a reliable queue's messages."
)

_DOING = "have groups"
Name = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the group.")]


@groups.command("list")
def list_groups(
    queue: ReliableOnly,
    limit: Most = 20,
    after: Annotated[
        str | None,
        typer.Option(metavar="GROUP", help="List only groups whose names come after this one."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List groups by name: those that have messages, a limit of their own, or a pause.

    Exit status: 0, or 1 if there are none.
    """
    queue.check_reliable(_DOING)

    async def look(client: Client) -> list[Group]:
        # One more tells whether there are more.
        return await queue.reliable(client, _DOING).groups.list(after=after, limit=limit + 1)

    found, now = at_server_time(url, look)
    shown = found[:limit]
    if as_json:
        for group in shown:
            print_json(_facts(group))
    elif not shown:
        say("no groups")
    else:
        columns = ("group", "waiting", "running", "next", "limit", "state")
        show_table(columns, [_row(group, now) for group in shown], wide=["group", "limit"])
        if len(found) > limit:
            say(f"there are more; continue with --after {shown[-1].name!r}, or use --limit")
    raise typer.Exit(0 if shown else 1)


@groups.command("limit")
def set_limit(
    queue: ReliableOnly,
    group: Name,
    limit: Annotated[
        str,
        typer.Argument(
            metavar=f"{LIMIT_METAVAR}|queue",
            help=(
                "How many messages run at a time, or start within a period: 5, 100/s, 5,100/10m,"
                " ordered; none; or queue, for the group limit of the queue."
            ),
        ),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a group a limit of its own, and show the group. Running messages continue, and count."""
    queue.check_reliable(_DOING)
    # None is the limit of the queue.
    chosen = None if limit == "queue" else limit_of(limit, "LIMIT") or Limit()

    async def act(client: Client) -> Group:
        found = queue.reliable(client, _DOING).groups
        await found.set_limit(group, chosen)
        return await found.get(group)

    changed = with_client(url, act)
    if as_json:
        print_json({"queue": queue.name, **_facts(changed)})
    else:
        show_fields(
            [
                ("group", changed.name),
                ("limit", limit_shown(changed.limit)),
                ("waiting", f"{changed.waiting:,}"),
                ("running", f"{changed.running:,}"),
            ]
        )


@groups.command()
def pause(queue: ReliableOnly, group: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Pause a group: no process takes its messages until it is resumed.

    Leased messages are not affected, and neither are other groups.
    """
    queue.check_reliable(_DOING)

    async def act(client: Client) -> None:
        await queue.reliable(client, _DOING).groups.pause(group)

    with_client(url, act)
    resuming = f"delayq groups resume {queue.argument} {shlex.quote(group)}"
    report(
        {"queue": queue.name, "group": group, "paused": True},
        f"{group} is paused; resume it with: {resuming}",
        as_json=as_json,
    )


@groups.command()
def resume(queue: ReliableOnly, group: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Resume a paused group.

    Exit status: 0, or 1 if it was not paused.
    """
    queue.check_reliable(_DOING)

    async def act(client: Client) -> bool:
        return await queue.reliable(client, _DOING).groups.resume(group)

    there_was_one = with_client(url, act)
    report(
        {"queue": queue.name, "group": group, "resumed": there_was_one},
        f"{group} is resumed" if there_was_one else f"{group} was not paused",
        as_json=as_json,
    )
    raise typer.Exit(0 if there_was_one else 1)


def _facts(group: Group) -> dict[str, Any]:
    return {
        "group": group.name,
        "waiting": group.waiting,
        "running": group.running,
        "next_at": moment_json(group.next_at),
        "limit": None if group.limit is None else asdict(group.limit),
        "paused": group.paused,
    }


def _row(group: Group, now: datetime) -> list[str]:
    return [
        group.name,
        f"{group.waiting:,}",
        f"{group.running:,}",
        moment_cell(group.next_at, now),
        limit_shown(group.limit),
        "paused" if group.paused else "ok",
    ]
