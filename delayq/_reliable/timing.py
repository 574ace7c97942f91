"""Computes when a recurring message is due: a period, or a cron expression in a time zone. Pure.

**Daylight saving.** An expression whose minute and hour are both fixed means a time of day, and runs once on each day that it
names: if the clock skips that time, it runs at the first moment after the jump; if the clock shows it twice, the first time. An
expression whose minute or hour begins with ``*`` follows the clock: it runs whenever the clock shows a matching time, so it runs
twice in an hour that is repeated, and not in an hour that is skipped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from delayq._durations import MICROSECOND, Duration, microseconds
from delayq.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

AHEAD = 32
"""The number of an expression's moments that are computed at a time."""

_SHORTEST_US = 1_000
_LONGEST_CRON = 512
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIXED_OFFSET = re.compile(r"UTC(?:([+-])(\d\d):(\d\d))?")
# Longer than any jump of a clock: one country has moved across the date line.
_LONGEST_JUMP = timedelta(hours=25)
# No clock changes twice within this time.
_STEADY = timedelta(hours=6)
_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Timing:
    """The rule by which a message recurs.

    Attributes:
        every_us: The period, microseconds; 0 for an expression.
        cron: The expression, with single spaces between its fields; empty for a period.
        timezone: The name of its time zone; empty for a period.
    """

    every_us: int
    cron: str = ""
    timezone: str = ""

    @property
    def text(self) -> str:
        """The stored form: equal timings have equal texts."""
        facts = {"cron": self.cron, "timezone": self.timezone} if self.cron else {"every_us": self.every_us}
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Timing:
        """Parse the value of :attr:`text`. Raises ValueError, TypeError or KeyError if it is not one."""
        facts: dict[str, Any] = json.loads(text)
        if "cron" in facts:
            return cls(0, str(facts["cron"]), str(facts["timezone"]))
        return cls(int(facts["every_us"]))

    def moments(self, after_us: int) -> list[int]:
        """Return the next moments of the expression after ``after_us``, microseconds since the epoch; none for a period.

        Raises:
            BadInput: The expression or the time zone cannot be read, or no moment ever matches.
            ConfigurationError: The library for cron expressions is not installed.
        """
        if not self.cron:
            return []
        zone = zone_of(self.timezone)[1]
        found = [
            (moment - _EPOCH) // MICROSECOND
            for moment in islice(cron_moments(self.cron, zone, _EPOCH + after_us * MICROSECOND), AHEAD)
        ]
        if not found:
            raise BadInput(f"the cron expression {self.cron!r} never matches")
        return found


def timing_of(cron: str | None, every: Duration | None, timezone: str | tzinfo) -> Timing:
    """Check the arguments of a call, and return the timing they describe.

    Raises:
        BadInput: Neither or both of ``cron`` and ``every`` are given, or a value is invalid.
    """
    if (cron is None) == (every is None):
        raise BadInput("pass either cron or every")
    if every is not None:
        every_us = microseconds(every, "every")
        if every_us < _SHORTEST_US:
            raise BadInput("every must be at least 1 ms")
        return Timing(every_us)
    if not isinstance(cron, str) or not cron.strip():
        raise BadInput(f"cron must be a non-empty str, not {cron!r}")
    if len(cron) > _LONGEST_CRON:
        raise BadInput(f"a cron expression must have at most {_LONGEST_CRON} characters, not {len(cron)}")
    return Timing(0, " ".join(cron.split()), zone_of(timezone)[0])


def zone_of(timezone: str | tzinfo) -> tuple[str, tzinfo]:
    """Return a time zone, and a name for it that every process understands.

    Raises:
        BadInput: There is no time zone of that name, or the time zone has no name.
    """
    name = timezone if isinstance(timezone, str) else _zone_name(timezone)
    if fixed := _FIXED_OFFSET.fullmatch(name):
        sign, hours, minutes = fixed.groups(default="0")
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        if offset >= timedelta(days=1):
            raise BadInput(f"unknown time zone {name!r}")
        return name, _fixed(-offset if sign == "-" else offset)
    try:
        return name, ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadInput(
            f"unknown time zone {name!r}: use a name such as Europe/Berlin (if the system has no time zones: pip install tzdata)"
        ) from None


def _fixed(offset: timedelta) -> tzinfo:
    return timezone(offset) if offset else UTC


def _zone_name(zone: tzinfo) -> str:
    if isinstance(zone, ZoneInfo) and zone.key is not None:
        return zone.key
    if isinstance(zone, timezone):
        minutes, rest = divmod(zone.utcoffset(None), timedelta(minutes=1))
        if not rest:
            hours, minutes_left = divmod(abs(minutes), 60)
            return f"UTC{'-' if minutes < 0 else '+'}{hours:02}:{minutes_left:02}" if minutes else "UTC"
    raise BadInput(
        f"timezone must be a name such as Europe/Berlin, a ZoneInfo, or a datetime.timezone of whole minutes, not {zone!r}"
    )


def cron_moments(expression: str, zone: tzinfo, after: datetime) -> Iterator[datetime]:
    """Return the moments (UTC) after ``after`` that match an expression, in order; see the module for daylight saving.

    The library parses the expression and counts in plain local time; this function decides which moments those times mean in a
    zone.

    Raises:
        BadInput: The expression cannot be parsed.
        ConfigurationError: The library is not installed.
    """
    fields = expression.split()
    minute_and_hour = fields[-5:-3]
    if any(field.startswith("*") for field in minute_and_hour):
        return _following_the_clock(expression, zone, after)
    return _once_a_day(expression, zone, after)


def _local_times(expression: str, after: datetime) -> Iterator[datetime]:
    """Return the plain local times after ``after`` that match the expression."""
    try:
        from cronsim import CronSim, CronSimError  # noqa: PLC0415 - an extra, loaded only when needed
    except ImportError:
        raise ConfigurationError("cron expressions need an extra: pip install 'delayq[cron]'") from None
    try:
        return CronSim(expression, after)
    except CronSimError as error:
        raise BadInput(f"the cron expression {expression!r} is invalid: {error}") from None


def _once_a_day(expression: str, zone: tzinfo, after: datetime) -> Iterator[datetime]:
    # Times that the clock has already shown once, or has jumped over, are past.
    times = _local_times(expression, _shown(zone, after))
    last = after
    return (last := moment for time in times if (moment := first_moment(time, zone)) > last)


def first_moment(local: datetime, zone: tzinfo) -> datetime:
    """Return the first moment (UTC) at which a clock in ``zone`` shows a local time; the end of the jump if it never does."""
    # For a time that is shown twice, the first one: the moment it was computed from may have left a fold.
    moment = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == local:
        return moment
    # The change is within the longest jump before that moment.
    return _change(zone, moment - _LONGEST_JUMP, moment)


def _change(zone: tzinfo, before: datetime, after: datetime) -> datetime:
    """Return the first moment at which the clock has its offset of ``after``, which it did not have at ``before``."""
    offset = after.astimezone(zone).utcoffset()
    while after - before > _SECOND:
        middle = before + (after - before) // 2 // _SECOND * _SECOND
        if middle.astimezone(zone).utcoffset() == offset:
            after = middle
        else:
            before = middle
    return after


def _following_the_clock(expression: str, zone: tzinfo, after: datetime) -> Iterator[datetime]:
    # Called here, so that an invalid expression is found before the first moment is requested.
    times = _local_times(expression, _shown(zone, after))

    def moments() -> Iterator[datetime]:
        nonlocal times
        at = after.replace(microsecond=0)
        offset = _offset(zone, at)
        while True:
            for time in times:
                moment = (time - offset).replace(tzinfo=UTC)
                # Does the clock change between these two moments?
                while at < moment and _offset(zone, min(at + _STEADY, moment)) == offset:
                    at = min(at + _STEADY, moment)
                if at < moment:
                    break
                yield moment
            else:
                return
            at = _change(zone, at, min(at + _STEADY, moment))
            offset = _offset(zone, at)
            times = _local_times(expression, _shown(zone, at) - _SECOND)

    return moments()


def _offset(zone: tzinfo, moment: datetime) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta()


def _shown(zone: tzinfo, moment: datetime) -> datetime:
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)
