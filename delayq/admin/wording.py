"""Durations, limits and settings as people write them: ``1h30m``; ``5``, ``100/s``, ``5,100/10m``.
Pure.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delayq._reliable.limits import Limit, decimal, write_limit
from delayq._reliable.settings import FORMATS
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from delayq._reliable.batches import BatchStatus
    from delayq._reliable.groups import Group

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|min|m|h|d|w)")
_MOST_DIGITS = 100


def read_duration(text: str, name: str) -> float:
    """Return the seconds in ``90``, ``1.5s`` or ``1h30m``.

    Args:
        text: The text.
        name: How the caller calls it, for errors.

    Raises:
        BadInput: It is not a duration.
    """
    # Python also accepts 1_000, and the digits of other scripts.
    if text.isascii() and "_" not in text:
        with suppress(ValueError):
            if not math.isnan(seconds := float(text)):
                return seconds
    compact = text.replace(" ", "")
    parts = _PART.findall(compact)
    if not parts or "".join(map("".join, parts)) != compact:
        raise BadInput(
            f"{name} must be a duration such as 90, 1.5s, 30m, 2h or 1d12h, not {text!r}"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def read_limit(text: str, name: str) -> Limit | None:
    """Return the limit that a text describes; None for ``none``.

    The arguments are as for :func:`read_duration`.

    Raises:
        BadInput: It describes none, or an impossible one.
    """
    if text.strip() == "none":
        return None
    concurrency: int | None = None
    rate: tuple[int, float] | None = None
    ordered = False
    for part in text.replace(" ", "").split(","):
        number, slash, period = part.partition("/")
        if part == "ordered" and not ordered:
            ordered = True
        elif not _is_number(number):
            raise _bad_limit(text, name)
        elif slash and period and rate is None:
            # "100/s" is short for "100/1s".
            every = read_duration(period if _begins_with_digit(period) else f"1{period}", name)
            rate = (_number(number, name), every)
        elif not slash and concurrency is None:
            concurrency = _number(number, name)
        else:
            raise _bad_limit(text, name)
    try:
        if rate is None:
            return Limit(concurrency, ordered=ordered)
        return Limit(concurrency, rate[0], rate[1], ordered)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error


def read_setting(name: str, text: str, label: str) -> Any:
    """Return a setting of a queue from its text, as :meth:`ReliableQueue.configure` takes it.

    Args:
        name: The setting.
        text: The text.
        label: How the caller calls the setting, for errors.

    Raises:
        BadInput: The text is of another form.
    """
    kind = FORMATS[name].kind
    if kind == "limit":
        return read_limit(text, label)
    if kind == "choice":
        return text
    if kind != "number" and text == "none":
        return FORMATS[name].read(None)
    if kind == "duration":
        return read_duration(text, label)
    if not _is_number(text) or not text.strip("0"):
        alternative = ", or none" if kind == "count" else ""
        raise BadInput(f"{label} must be a number from 1 up{alternative}, not {text!r}")
    return _number(text, label)


def write_setting(name: str, value: Any) -> str:
    """Return a setting of a queue as :func:`read_setting` reads it."""
    kind = FORMATS[name].kind
    if kind == "limit":
        return write_limit(value)
    if kind != "duration" or not value:
        return str(value or "none")
    unit = next((unit for unit in ("d", "h", "m") if value % _UNITS[unit] == 0), "s")
    return f"{decimal(value / _UNITS[unit])}{unit}"


def describe_setting(name: str, value: Any, span: Callable[[float], str]) -> str:
    """Return a setting of a queue in words. ``span`` formats a duration in seconds."""
    kind = FORMATS[name].kind
    if kind == "limit":
        return describe_limit(value, span)
    if not value:
        return "for good" if name == "keep_dead" else "none"
    if kind == "duration":
        return span(value)
    return str(value) if kind == "choice" else f"{value:,}"


def describe_limit(limit: Limit | None, span: Callable[[float], str]) -> str:
    """Return a limit in words, such as ``5 at a time, 100 in 10 min``.

    ``span`` formats a duration in seconds.
    """
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


def describe_group_limit(
    group: Group, queue_limit: Limit | None, span: Callable[[float], str]
) -> str:
    """Return the limit of a group in words, and whether it is its own.

    ``queue_limit`` is the group limit of the queue.
    """
    limit = describe_limit(group.limit, span)
    if not group.has_own_limit:
        return f"{limit}: the group limit of the queue"
    return (
        f"{limit}: its own, instead of the queue's group limit, {describe_limit(queue_limit, span)}"
    )


def describe_group_state(group: Group, now: datetime) -> str:
    """Return in a few words what becomes of the messages of a group."""
    if group.paused:
        return "paused"
    if not group.ready:
        return "ok"
    if group.next_at is not None and group.next_at <= now:
        return "due"
    is_held_up = group.limit is not None and group.limit.ordered and not group.running
    return "held up" if is_held_up else "at its limit"


def describe_batch_state(status: BatchStatus) -> str:
    """Return in a few words how far a batch is."""
    if status.is_finished:
        return "all handled" if status.handled == status.total else "ended"
    return "in progress" if status.was_offered_whole else "not offered whole"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _number(digits: str, name: str) -> int:
    # Python converts no more than some thousand digits, and an error need not repeat a hundred.
    if len(digits) > _MOST_DIGITS:
        raise BadInput(f"{name} is too large: it has a number of {len(digits):,} digits")
    return int(digits)


def _begins_with_digit(period: str) -> bool:
    return period[:1].isdigit()


def _bad_limit(text: str, name: str) -> BadInput:
    return BadInput(
        f"{name} must be how many run at a time, such as 5, how many start within a period, such as"
        f" 100/s, both, such as 5,100/s, or none, not {text!r}"
    )
