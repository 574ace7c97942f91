"""The commands about groups: ``groups list``, ``limit``, ``pause`` and ``resume``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq._reliable.limits import Limit
from delayq.admin.reliable import ReliableInspector
from delayq.admin.wording import describe_group_limit, describe_group_state
from delayq.cli._typer import HelpfulGroup
from delayq.cli.options import (
    LIMIT_METAVAR,
    AsJson,
    MaxRows,
    ReliableOnly,
    Url,
    UrlBefore,
    limit_of,
    limit_text,
)
from delayq.cli.output import (
    CommandFailed,
    moment_cell,
    moment_json,
    print_json,
    report,
    say,
    show_fields,
    show_table,
    span,
    tell,
)
from delayq.cli.running import at_server_time, with_client

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client, QueueSettings
    from delayq._reliable.groups import Group

groups: typer.Typer = typer.Typer(cls=HelpfulGroup)

_DOING = "have groups"
Name = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the group.")]


@groups.callback()
def of_groups(url: UrlBefore = None) -> None:
    """List, limit, pause or resume the groups of a reliable queue's messages.

    Example: `delayq groups list mails`
    """


@groups.command("list")
def list_groups(
    queue: ReliableOnly,
    limit: MaxRows = 20,
    after: Annotated[
        str | None,
        typer.Option(metavar="GROUP", help="List only groups whose names come after this one."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List groups by name: those that have messages, a limit of their own, or a pause.

    Exit status: 0, or 1 if there are none.

    Example: `delayq groups list mails`
    """
    queue.check_reliable(_DOING)

    async def read(client: Client) -> list[Group]:
        # One more tells whether there are more.
        return await (await queue.existing(client, _DOING)).groups.list(
            after=after, limit=limit + 1
        )

    groups, now = at_server_time(url, read)
    page = groups[:limit]
    if as_json:
        for group in page:
            print_json(_facts(group, now))
    elif not page:
        say("no groups")
    else:
        columns = ("group", "waiting", "ready", "oldest", "running", "next", "limit", "state")
        show_table(columns, [_row(group, now) for group in page], wide=["group", "limit"])
        if len(groups) > limit:
            say(f"there are more; continue with --after {page[-1].name!r}, or use --limit")
    raise typer.Exit(0 if page else 1)


@groups.command("limit")
def set_limit(
    queue: ReliableOnly,
    group: Name,
    limit: Annotated[
        str | None,
        typer.Argument(
            metavar=LIMIT_METAVAR,
            help=(
                "How many messages run at a time, or start within a period: 5, 100/s, 5,100/10m,"
                " ordered. none lifts every limit, that of the queue's groups, too."
            ),
        ),
    ] = None,
    unset: Annotated[
        bool,
        typer.Option("--unset", help="Let the group limit of the queue apply again."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a group a limit of its own, and show the group. Running messages continue, and count.

    Examples: `delayq groups limit mails acme 1`, and to undo it, `delayq groups limit mails acme
    --unset`.
    """
    queue.check_reliable(_DOING)
    if (limit is None) != unset:
        raise CommandFailed("pass a limit, such as 5 or 100/s, or --unset")
    # None is the limit of the queue.
    own_limit = None if limit is None else limit_of(limit, "LIMIT") or Limit()

    async def act(client: Client) -> tuple[Group, QueueSettings | None]:
        groups = (await queue.existing(client, _DOING)).groups
        await groups.set_limit(group, own_limit)
        settings = await ReliableInspector.of(client, queue.name).visible_settings()
        return await groups.get(group), settings

    (changed, settings), now = at_server_time(url, act)
    usual = None if settings is None else settings.group_limit
    if as_json:
        print_json({"queue": queue.name, **_facts(changed, now)})
    else:
        show_fields(
            [
                ("group", changed.name),
                ("limit", describe_group_limit(changed, usual, span)),
                ("waiting", f"{changed.waiting:,}"),
                ("ready", f"{changed.ready:,}"),
                ("running", f"{changed.running:,}"),
            ]
        )
    if limit is not None and changed.limit is None:
        undo = f"delayq groups limit {queue.argument} {shlex.quote(group)} --unset"
        tell(
            f"warning: nothing limits {group} now, whatever the group limit of the queue is; to let"
            f" that apply again: {undo}"
        )


@groups.command()
def pause(queue: ReliableOnly, group: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Pause a group: no process takes its messages until it is resumed.

    Leased messages are not affected, and neither are other groups.

    Example: `delayq groups pause mails acme`
    """
    queue.check_reliable(_DOING)

    async def act(client: Client) -> None:
        await (await queue.existing(client, _DOING)).groups.pause(group)

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

    Example: `delayq groups resume mails acme`
    """
    queue.check_reliable(_DOING)

    async def act(client: Client) -> bool:
        return await (await queue.existing(client, _DOING)).groups.resume(group)

    there_was_one = with_client(url, act)
    report(
        {"queue": queue.name, "group": group, "resumed": there_was_one},
        f"{group} is resumed" if there_was_one else f"{group} was not paused",
        as_json=as_json,
    )
    raise typer.Exit(0 if there_was_one else 1)


def _facts(group: Group, now: datetime) -> dict[str, Any]:
    return {
        "group": group.name,
        "waiting": group.waiting,
        "ready": group.ready,
        "running": group.running,
        "next_at": moment_json(group.next_at),
        "limit": None if group.limit is None else asdict(group.limit),
        "has_own_limit": group.has_own_limit,
        "paused": group.paused,
        "oldest_due_at": moment_json(group.oldest_due_at),
        "state": describe_group_state(group, now),
    }


def _row(group: Group, now: datetime) -> list[str]:
    return [
        group.name,
        f"{group.waiting:,}",
        f"{group.ready:,}",
        "-" if group.oldest_due_at is None else span((now - group.oldest_due_at).total_seconds()),
        f"{group.running:,}",
        moment_cell(group.next_at, now),
        limit_text(group.limit),
        describe_group_state(group, now),
    ]
