"""Limits of how many messages run at a time, and start in a period. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from delayq._durations import Duration, microseconds
from delayq.errors import BadInput

# Larger numbers limit nothing that a server can do.
_LARGEST_NUMBER = 10**9
_STORED = re.compile(r"(?:c(\d+))?(?:r(\d+)p(\d+))?(o?)")
NO_LIMIT = "0"
"""No limit, as the server stores it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of a queue, or of each of its groups, over all workers together.

    The server enforces it when it hands messages out. A message runs from then until it is
    acknowledged, retried, snoozed, buried or returned, or until its lease ends; so messages that a
    client fetches ahead count as well. The rate is exact for a sliding window: the server remembers
    each start for one period, so no window of that length has more than ``rate`` of them, wherever
    it begins, and all of them may come at once. Without arguments, nothing is limited.

    Attributes:
        concurrency: The largest number of messages that run at a time; None for no limit.
        rate: The largest number of messages that start within ``per``; None for no limit. A message
            that goes back before its handler has begun, such as one that was fetched ahead, has not
            started; one that you release has.
        per: The length of the window of ``rate``, in seconds or as a timedelta; kept as seconds.
        ordered: Only for groups: one message runs at a time, and once it was handed out it holds
            its group up until it is acknowledged or dead, through retries, snoozes, and the end of
            its lease.
    """

    concurrency: int | None = None
    rate: int | None = None
    per: Duration = 1.0
    ordered: bool = False

    def __post_init__(self) -> None:
        for name in ("concurrency", "rate"):
            number = getattr(self, name)
            if number is not None and (
                isinstance(number, bool)
                or not isinstance(number, int)
                or not 1 <= number <= _LARGEST_NUMBER
            ):
                raise BadInput(
                    f"{name} must be None or an int from 1 to {_LARGEST_NUMBER}, not {number!r}"
                )
        per_us = microseconds(self.per, "per")
        if not per_us:
            raise BadInput("per must be more than 0")
        object.__setattr__(self, "per", per_us / 1_000_000)
        if not isinstance(self.ordered, bool):
            raise BadInput(f"ordered must be a bool, not {self.ordered!r}")
        if self.ordered and self.concurrency not in (None, 1):
            raise BadInput(
                "an ordered group runs one message at a time: leave concurrency out, or make it 1"
            )


def limit_text(limit: Limit | None, name: str, *, of_groups: bool) -> str:
    """Return a limit as the server stores it.

    Args:
        limit: The limit; None for none.
        name: How the caller calls it, for errors.
        of_groups: Whether it is one of groups.

    Raises:
        BadInput: It is not a limit, or one that only groups can have.
    """
    if limit is None:
        return NO_LIMIT
    if not isinstance(limit, Limit):
        raise BadInput(f"{name} must be a delayq.Limit or None, not {type(limit).__name__}")
    if limit.ordered and not of_groups:
        raise BadInput(f"{name} must not be ordered: only groups are, by group_limit")
    text = "" if limit.concurrency is None else f"c{limit.concurrency}"
    if limit.rate is not None:
        text += f"r{limit.rate}p{microseconds(limit.per, 'per')}"
    return text + ("o" if limit.ordered else "") or NO_LIMIT


def parse_limit(text: str | None) -> Limit | None:
    """Return the limit that the server stores; None if there is none, or it cannot be read."""
    match = _STORED.fullmatch(text or "")
    if match is None or not match[0]:
        return None
    concurrency, rate, per, ordered = match.groups()
    try:
        return Limit(
            None if concurrency is None else int(concurrency),
            None if rate is None else int(rate),
            1.0 if per is None else int(per) / 1_000_000,
            bool(ordered),
        )
    except BadInput:
        return None


def decimal(amount: float) -> str:
    """Return an amount with up to six decimals, as whole microseconds have, and no exponent."""
    return f"{amount:.6f}".rstrip("0").rstrip(".")


def write_limit(limit: Limit | None) -> str:
    """Return a limit as users of the command line write it: ``5``, ``100/60s`` or ``none``."""
    if limit is None:
        return "none"
    assert isinstance(limit.per, float)
    parts = [
        "" if limit.concurrency is None or limit.ordered else str(limit.concurrency),
        "" if limit.rate is None else f"{limit.rate}/{decimal(limit.per)}s",
        "ordered" if limit.ordered else "",
    ]
    return ",".join(filter(None, parts)) or "none"
