"""Computes when a recurring message is due: a period, or a cron expression in a time zone.
Pure.

Also parses stored schedules.

**Daylight saving.** An expression whose minute and hour are both fixed means a time of day, and
runs once on each day that it names: if the clock skips that time, it runs at the first moment after
the jump; if the clock shows it twice, the first time. An expression whose minute or hour begins
with ``*`` follows the clock: it runs whenever the clock shows a matching time, so it runs twice in
an hour that is repeated, and not in an hour that is skipped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from heapq import merge
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
_MINUTE = timedelta(minutes=1)
_MOMENT_US = re.compile("[0-9]{1,20}")


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
        facts = (
            {"cron": self.cron, "timezone": self.timezone}
            if self.cron
            else {"every_us": self.every_us}
        )
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Timing:
        """Parse the value of :attr:`text`.

        Raises ValueError, TypeError or KeyError if it is not one.
        """
        facts: dict[str, Any] = json.loads(text)
        if "cron" in facts:
            return cls(0, str(facts["cron"]), str(facts["timezone"]))
        return cls(int(facts["every_us"]))

    def moments(self, after_us: int) -> list[int]:
        """Return the next moments of the expression after ``after_us``, microseconds since the
        epoch; none for a period.

        Raises:
            BadInput: The expression or the time zone cannot be read, or no moment ever matches.
            ConfigurationError: The library for cron expressions is not installed.
        """
        if not self.cron:
            return []
        zone = zone_of(self.timezone)[1]
        moments = [
            (moment - _EPOCH) // MICROSECOND
            for moment in islice(
                cron_moments(self.cron, zone, _EPOCH + after_us * MICROSECOND), AHEAD
            )
        ]
        if not moments:
            raise BadInput(f"the cron expression {self.cron!r} never matches")
        return moments


class UnreadableSchedule(Exception):
    """Raised when the data stored on the server cannot be read as a schedule."""


def parse_schedule(entry: bytes) -> tuple[dict[str, Any], Timing]:
    """Parse a stored schedule. Returns its facts and its timing.

    Raises :class:`UnreadableSchedule`.
    """
    try:
        facts: dict[str, Any] = json.loads(entry.partition(b"\n")[0])
        moments = facts["next"], facts["last"]
        if not all(moment == "" or _MOMENT_US.fullmatch(moment) for moment in moments):
            raise ValueError(moments)  # noqa: TRY301
        facts["priority"], facts["version"] = int(facts["priority"]), int(facts["version"])
        facts["paused"] = bool(facts.get("paused"))
        return facts, Timing.parse(facts["timing"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise UnreadableSchedule(f"the schedule cannot be read: {type(error).__name__}") from None


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
        raise BadInput(
            f"a cron expression must have at most {_LONGEST_CRON} characters, not {len(cron)}"
        )
    return Timing(0, " ".join(cron.split()), zone_of(timezone)[0])


def zone_of(zone: str | tzinfo) -> tuple[str, tzinfo]:
    """Return a time zone, and a name for it that every process understands.

    Raises:
        BadInput: There is no time zone of that name, or the time zone has no name.
    """
    name = zone if isinstance(zone, str) else _zone_name(zone)
    if fixed := _FIXED_OFFSET.fullmatch(name):
        sign, hours, minutes = fixed.groups(default="0")
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        if offset >= timedelta(days=1):
            raise BadInput(f"unknown time zone {name!r}")
        return name, timezone(-offset if sign == "-" else offset)
    try:
        return name, ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadInput(
            f"unknown time zone {name!r}: use a name such as Europe/Berlin (if the system has no"
            " time zones: pip install tzdata)"
        ) from None


def _zone_name(zone: tzinfo) -> str:
    if isinstance(zone, ZoneInfo) and zone.key is not None:
        return zone.key
    if isinstance(zone, timezone) and not (offset := zone.utcoffset(None)) % _MINUTE:
        return str(timezone(offset))
    raise BadInput(
        "timezone must be a name such as Europe/Berlin, a ZoneInfo, or a datetime.timezone of"
        f" whole minutes, not {zone!r}"
    )


def cron_moments(expression: str, zone: tzinfo, after: datetime) -> Iterator[datetime]:
    """Yield the moments (UTC) after ``after`` that match an expression, in order; see the module
    for daylight saving.

    Raises:
        BadInput: The expression cannot be parsed.
        ConfigurationError: The library is not installed.
    """
    follows_clock = any(field.startswith("*") for field in expression.split()[-5:-3])
    # A local time that occurs twice comes from both folds, and one that occurs once comes from both
    # as the same moment.
    folds = [
        _moments(expression, zone, after, fold, follows_clock=follows_clock)
        for fold in range(1 + follows_clock)
    ]
    last = after
    for moment in merge(*folds):
        if moment > last:
            last = moment
            yield moment


def _moments(
    expression: str, zone: tzinfo, after: datetime, fold: int, *, follows_clock: bool
) -> Iterator[datetime]:
    """Yield the moments (UTC) of matching local times, from ``after`` on or a little earlier."""
    local_after = after.astimezone(zone)
    # Within an hour that occurs twice, start from its beginning.
    offsets = (local_after.replace(fold=side).utcoffset() for side in (0, 1))
    start = after + min(offset or timedelta() for offset in offsets)
    for local in _local_times(expression, start.replace(tzinfo=None)):
        # A skipped time of day moves to the end of the jump; clocks jump to a whole minute.
        while not _occurs(moment := local.replace(tzinfo=zone, fold=fold)) and not follows_clock:
            local = local.replace(second=0) + _MINUTE  # noqa: PLW2901
        if _occurs(moment):
            yield moment.astimezone(UTC)


def _occurs(moment: datetime) -> bool:
    """Return whether clocks ever show a local time, or skip it."""
    return moment.astimezone(UTC).astimezone(moment.tzinfo).replace(tzinfo=None) == moment.replace(
        tzinfo=None
    )


def _local_times(expression: str, after: datetime) -> Iterator[datetime]:
    """Return the plain local times after ``after`` that match the expression."""
    try:
        from cronsim import CronSim, CronSimError  # noqa: PLC0415 - an extra, loaded only when needed
    except ImportError:
        raise ConfigurationError(
            "cron expressions need an extra: pip install 'delayq[cron]'"
        ) from None
    try:
        return CronSim(expression, after)
    except CronSimError as error:
        raise BadInput(f"the cron expression {expression!r} is invalid: {error}") from None
