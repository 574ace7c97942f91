"""Converts the durations and moments that users pass to microseconds."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta

from delayq._checks import describe_value
from delayq.errors import BadDelay

# Above 2**53 ms, a sorted set's score is no longer exact.
MAX_MS = 2**53
# How far the server's clock may be ahead of ours, seconds. If it is farther ahead, a delay that
# ends at the limit of the scores passes the check.
_AHEAD = 366 * 86_400
# A shorter duration is never too long, seconds: more than 30,000 years.
_USUAL = 1e12
MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Duration = float | timedelta
"""Seconds, or a :class:`~datetime.timedelta`."""

DueTime = int | str
"""The due time that a script gets: the number of microseconds until then; or ``@`` and a moment by
the server's clock, in microseconds since the epoch, such as ``@1795346643813468``.
"""


def microseconds(duration: Duration, name: str = "delay") -> int:
    """Return ``duration`` in whole microseconds, rounded up.

    Raises:
        BadDelay: It is negative, NaN, infinite, past 2**53 ms after 1970, or not a duration at all.
    """
    # Most durations. The rest is for the others, and for those that must be refused.
    if type(duration) is float and 0.0 <= duration < _USUAL:
        exact = duration * 1_000_000
        # Round first: 1.1 s is 1,100,000 microseconds, not one more because the float is slightly
        # larger.
        return int(exact) if exact.is_integer() else math.ceil(round(exact, 3))
    # Before rounding, because the smallest negative duration would become 0.
    if (
        duration < timedelta()
        if isinstance(duration, timedelta)
        else isinstance(duration, int | float) and duration < 0
    ):
        raise BadDelay(f"{name} must not be negative, but is {_number_text(duration)}")
    if type(duration) is int:
        result = duration * 1_000_000
    elif isinstance(duration, timedelta):
        result = duration // MICROSECOND
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        if not math.isfinite(duration):
            raise BadDelay(f"{name} must be finite, not {duration}")
        # Capped, because the product of a huge duration is infinite.
        exact = min(duration, 2.0 * MAX_MS) * 1_000_000
        result = int(exact)
        if result != exact:
            result = math.ceil(round(exact, 3))
    else:
        raise BadDelay(f"{name} must be seconds or a timedelta, not {describe_value(duration)}")
    # Check here, because the server would refuse everything that is sent in the same call.
    if result > MAX_MS * 1000 - int((time.time() + _AHEAD) * 1_000_000):
        raise BadDelay(f"{name} is too long: messages must be due within 2**53 ms after 1970")
    return result


def _number_text(number: object) -> str:
    try:
        return str(number)
    except ValueError:
        # Python refuses to format ints of more than some thousand digits.
        return "this huge number"


def seconds(duration: Duration, name: str) -> float:
    """Return ``duration`` in seconds. Raises as :func:`microseconds`."""
    return microseconds(duration, name) / 1_000_000


def when_due(delay: Duration | None, at: datetime | None) -> DueTime:
    """Return the due time that ``delay`` or ``at`` asks for; 0 if neither is given.

    A moment travels as it is, and the script compares it with the server's clock: so neither this
    machine's clock nor the way there makes a difference.

    Raises:
        BadDelay: As for :func:`microseconds`; or both are given; or ``at`` has no timezone.
    """
    if at is None:
        return 0 if delay is None else microseconds(delay)
    if delay is not None:
        raise BadDelay("pass either delay or at, not both")
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise BadDelay(f"at must be a datetime with a timezone, not {describe_value(at)}")
    return f"@{max(0, (at - _EPOCH) // MICROSECOND)}"


def moment_in(due: DueTime) -> int | None:
    """Return the moment that ``due`` names, in microseconds; None if it is a delay."""
    return int(due[1:]) if isinstance(due, str) else None


def estimated_delay(delay: Duration | None, at: datetime | None) -> float:
    """Return the delay that ``delay`` or ``at`` asks for, in seconds by this machine's clock.

    Only for observers and pages. Raises as :func:`when_due`.
    """
    moment = moment_in(due := when_due(delay, at))
    wait_us = due if moment is None else max(0, moment - time.time_ns() // 1000)
    return float(wait_us) / 1_000_000


def datetime_at(us: float) -> datetime:
    """Return the moment ``us`` microseconds after the epoch; if that is past the year 9999, the
    last moment of that year.
    """
    try:
        return _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)
