"""Limits as users of the command line write them: ``5``, ``100/s``, ``5,100/10m``, ``ordered``."""

from __future__ import annotations

from typing import Annotated

import typer

from delayq._reliable.limits import Limit
from delayq.cli.errors import CommandFailed
from delayq.cli.options import duration
from delayq.cli.output import span
from delayq.errors import BadInput

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
    if text == "none":
        return None
    concurrency: int | None = None
    rate: tuple[int, float] | None = None
    ordered = False
    for part in text.replace(" ", "").split(","):
        number, slash, period = part.partition("/")
        if part == "ordered" and not ordered:
            ordered = True
        elif not _is_number(number):
            raise _misunderstood(text, option)
        elif slash and period and rate is None:
            rate = (int(number), _seconds(period, option))
        elif not slash and concurrency is None:
            concurrency = int(number)
        else:
            raise _misunderstood(text, option)
    try:
        if rate is None:
            return Limit(concurrency, ordered=ordered)
        return Limit(concurrency, rate[0], rate[1], ordered)
    except BadInput as error:
        raise CommandFailed(f"{option}: {error}") from error


def limit_shown(limit: Limit | None) -> str:
    """Return a limit in words, such as ``5 at a time, 100 in 10 min``."""
    if limit is None:
        return "none"
    parts = []
    if limit.concurrency is not None and not limit.ordered:
        parts.append(f"{limit.concurrency:,} at a time")
    if limit.ordered:
        parts.append("in order")
    if limit.rate is not None:
        assert isinstance(limit.per, float)
        parts.append(f"{limit.rate:,} in {span(limit.per)}")
    return ", ".join(parts) or "none"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _seconds(period: str, option: str) -> float:
    # "100/s" is short for "100/1s".
    seconds = duration(period if period[:1].isdigit() else f"1{period}", option)
    assert seconds is not None
    return seconds


def _misunderstood(text: str, option: str) -> CommandFailed:
    return CommandFailed(
        f"{option} must be how many run at a time, such as 5, how many start within a period, such"
        f" as 100/s, both, such as 5,100/s, or none, not {text!r}"
    )
