"""The command ``delayq acl``: prints the rights that a user of the server needs."""

from __future__ import annotations

from typing import Annotated

import typer

from delayq.admin.acl import Role, Servers, acl_rules
from delayq.cli.options import AsJson, Queues  # noqa: TC001 - typer reads them
from delayq.cli.output import print_json, write


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
