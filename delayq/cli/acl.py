"""The command ``delayq acl``: prints the rights that a user of the server needs."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from delayq.admin.acl import ROLES, Role, Servers, acl_rules
from delayq.cli.options import AsJson  # noqa: TC001 - typer reads it
from delayq.cli.output import print_json


def acl(
    role: Annotated[str, typer.Argument(help=f"What the user does: {', '.join(ROLES)}.", show_default=False)],
    reliable: Annotated[list[str] | None, typer.Option("--queue", help="A reliable queue. May be given several times.")] = None,
    delayed: Annotated[list[str] | None, typer.Option("--delayed", help="A delayed queue. May be given several times.")] = None,
    prefix: Annotated[bool, typer.Option("--prefix", help="These are the beginnings of names.")] = False,
    database: Annotated[int, typer.Option(min=0, help="The database.")] = 0,
    partitions: Annotated[int | None, typer.Option(min=1, help="How many partitions the reliable queues have.")] = None,
    servers: Annotated[str, typer.Option(help='"one", "cluster" or "sentinel".')] = "one",
    durability: Annotated[str, typer.Option(help='What offers are promised: "memory", "fsync" or "replicas:N".')] = "memory",
    as_json: AsJson = False,
) -> None:
    """Print the ACL rules that a user of the server needs for a role, on one line.

    For redis-cli: ACL SETUSER name on >password RULES. For an ACL file: user name on >password RULES. Names are those that the
    server knows. The rules work from Redis 6.2 on.
    """
    rules = acl_rules(
        cast("Role", role),
        delayed=delayed or (),
        reliable=reliable or (),
        prefix=prefix,
        database=database,
        partitions=partitions,
        servers=cast("Servers", servers),
        durability=durability,
    )
    if as_json:
        print_json({"role": role, "rules": rules})
    else:
        print(*rules)
