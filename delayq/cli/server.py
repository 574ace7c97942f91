"""The commands ``doctor`` and ``acl``: problems of a server, and the rights of its users."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from delayq.admin.acl import (
    Role,
    Servers,
    acl_rules,
)
from delayq.admin.doctor import diagnose
from delayq.cli.options import AsJson, Queues, Url, duration
from delayq.cli.output import print_json, say, show_fields, words, write
from delayq.cli.running import with_client

if TYPE_CHECKING:
    from delayq import Client
    from delayq.admin.doctor import Finding


_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}
# The width of a level; one column more comes before the text.
_INDENT = 6


def doctor(
    queues: Queues = None,
    role: Annotated[
        Role | None, typer.Option(help="The role that this user must have the rights for.")
    ] = None,
    overdue: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help=(
                "Report a queue whose messages have been due, but not taken, for this long, in"
                " seconds or as 90s, 2m."
            ),
        ),
    ] = "60",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Report problems with the server, this user's rights and the queues, and how to solve them.

    Checks all queues, or those that you name, and changes nothing. Exit status: 0 if nothing is
    wrong; 1 if something is; 2 if the server does not answer.

    Example: `delayq doctor`
    """
    seconds = duration(overdue, "--overdue") or 0.0
    findings: list[Finding] = []

    async def act(client: Client) -> None:
        async for finding in diagnose(client, queues or None, role=role, overdue=seconds):
            findings.append(finding)
            if as_json:
                print_json(asdict(finding))
            else:
                _show(finding)

    with_client(url, act)
    wrong = sum(finding.level == "wrong" for finding in findings)
    if not as_json:
        say(
            f"{wrong} {'thing is' if wrong == 1 else 'things are'} wrong"
            if wrong
            else "nothing is wrong"
        )
    raise typer.Exit(1 if wrong else 0)


def _show(finding: Finding) -> None:
    level = words(f"{finding.level:<{_INDENT}}", _STYLES[finding.level])
    lines = [(level, f"{finding.check}: {finding.text}")]
    if finding.advice:
        lines.append((words(""), f"-> {finding.advice}"))
    show_fields(lines)


def acl(
    role: Annotated[Role, typer.Argument(help="The role of the user.")],
    queues: Queues = None,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Treat the queue names as prefixes.")
    ] = False,
    database: Annotated[int, typer.Option(min=0, help="The number of the database.")] = 0,
    partitions: Annotated[
        int, typer.Option(min=1, help="The most partitions that the reliable queues have or get.")
    ] = 1,
    servers: Annotated[Servers, typer.Option(help="The kind of deployment.")] = "one",
    durability: Annotated[
        str, typer.Option(help='The durability of offers: "memory", "fsync" or "replicas:N".')
    ] = "memory",
    as_json: AsJson = False,
) -> None:
    """Print the ACL rules that a user of the server needs for a role, on one line.

    In redis-cli: ACL SETUSER name on >password RULES. In an ACL file: user name on >password RULES.
    Give queue names as they are stored on the server. The rules work with Redis 6.2 and later.

    Example: `delayq acl producer mails`
    """
    rules = acl_rules(
        role,
        delayed=[queue.name for queue in queues or () if not queue.is_reliable],
        reliable=[queue.name for queue in queues or () if queue.is_reliable],
        prefix=prefix,
        database=database,
        partitions=partitions,
        servers=servers,
        durability=durability,
    )
    if as_json:
        print_json({"role": role, "rules": rules})
    else:
        write(" ".join(rules))
