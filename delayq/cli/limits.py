"""Limits as users of the command line write them: ``5``, ``100/s``, ``5,100/10m``, ``ordered``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from delayq.admin.wording import describe_limit, read_limit
from delayq.cli.errors import CommandFailed
from delayq.cli.output import span
from delayq.errors import BadInput

if TYPE_CHECKING:
    from delayq._reliable.limits import Limit

LIMIT_METAVAR = "N|N/PERIOD|none"

QueueLimit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar=LIMIT_METAVAR,
        help="How many messages run at a time, or start within a period: 5, 100/s, 5,100/10m.",
    ),
]
GroupLimit = Annotated[
    str | None,
    typer.Option(
        "--group-limit",
        metavar=LIMIT_METAVAR,
        help="The same for each group without a limit of its own; also: ordered.",
    ),
]


def limit_of(text: str, option: str) -> Limit | None:
    """Return the limit that a text describes.

    Raises:
        CommandFailed: It describes none, or an impossible one.
    """
    try:
        return read_limit(text, option)
    except BadInput as error:
        raise CommandFailed(str(error)) from error


def limit_shown(limit: Limit | None) -> str:
    """Return a limit in words, such as ``5 at a time, 100 in 10 min``."""
    return describe_limit(limit, span)
