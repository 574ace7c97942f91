"""The counts of a queue's history, and the text in which the server keeps them. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from delayq.errors import BadInput
from delayq.stats import Activity, Spread, bucket_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayq.stats import QueueStats

Unit = Literal["m", "h"]
"""Minutes or hours."""

SECONDS: Mapping[Unit, int] = {"m": 60, "h": 3600}
KEPT: Mapping[Unit, int] = {"m": 1440, "h": 720}
"""How many minutes and hours ``lua/reliable/include/history.lua`` keeps."""
# How the server names the counts.
_NAMES = {"offered": "o", "handled": "h", "failed": "f", "dead": "d", "expired": "e"}
NOTHING: Mapping[str, int] = dict.fromkeys(_NAMES.values(), 0)
"""The counts of a client that has done nothing."""
_LATENESS, _HANDLING = "l", "t"
_COUNT = re.compile(r"([a-z])([0-9]*)=([0-9]+)")
# After this many measurements, only half as many of the messages that follow are measured.
_MEASURED = 256


class Sampler:
    """Measures durations: of all messages while there are few, otherwise of every second, every
    fourth, and so on, each of which then counts for the others. So busy queues lose no time to it.

    Callers take 1 from ``skip`` for each message, and measure it if that makes it negative.
    """

    __slots__ = ("_buckets", "_measured", "_stride", "skip")

    def __init__(self) -> None:
        self.skip: int = 0
        self._measured = 0
        self._stride = 1
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Count a duration."""
        bucket = bucket_of(seconds)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + self._stride
        self._measured += 1
        if self._measured == _MEASURED:
            self._measured = 0
            self._stride *= 2
        self.skip = self._stride - 1

    def drain(self) -> dict[int, int]:
        """Return what was counted, by bucket, and begin anew."""
        buckets, self._buckets = self._buckets, {}
        self.skip, self._measured, self._stride = 0, 0, 1
        return buckets

    def put_back(self, buckets: Mapping[int, int]) -> None:
        """Add what :meth:`drain` has returned again."""
        for bucket, count in buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count


def checked_span(minutes: int | None, hours: int | None) -> tuple[Unit, int]:
    """Return the unit and number of what a caller asks for. Raise BadInput if that is invalid."""
    if minutes is not None and hours is not None:
        raise BadInput("pass minutes or hours, not both")
    unit: Unit = "m" if hours is None else "h"
    name, span = (
        ("minutes", 60 if minutes is None else minutes) if hours is None else ("hours", hours)
    )
    most = KEPT[unit]
    if isinstance(span, bool) or not isinstance(span, int) or not 1 <= span <= most:
        raise BadInput(f"{name} must be an int from 1 to {most:,}, not {span!r}")
    return unit, span


def counts_of(stats: QueueStats) -> dict[str, int]:
    """Return the counts that go into the history, by the names that the server has for them."""
    every = (stats.offered, stats.acked, stats.retried, stats.dead, stats.expired)
    return dict(zip(_NAMES.values(), every, strict=True))


def packed(counts: Mapping[str, int], late: Mapping[int, int], handling: Mapping[int, int]) -> str:
    """Write counts and measurements as ``tally.lua`` takes them, without zeros."""
    every = [
        *counts.items(),
        *((f"{_LATENESS}{bucket}", count) for bucket, count in late.items()),
        *((f"{_HANDLING}{bucket}", count) for bucket, count in handling.items()),
    ]
    return " ".join(f"{name}={count}" for name, count in every if count)


def activity_of(unit: Unit, stored: bytes) -> Activity:
    """Read the counts of one minute or hour. Skip anything unreadable."""
    number, _, rest = stored.decode(errors="replace").partition(" ")
    counts: dict[str, int] = {}
    spreads: dict[str, dict[int, int]] = {_LATENESS: {}, _HANDLING: {}}
    for name, bucket, count in _COUNT.findall(rest):
        if name in spreads and bucket:
            spreads[name][int(bucket)] = int(count)
        elif not bucket:
            counts[name] = int(count)
    return Activity(
        start=datetime.fromtimestamp(int(number) * SECONDS[unit], UTC),
        seconds=SECONDS[unit],
        **{field: counts.get(name, 0) for field, name in _NAMES.items()},
        lateness=Spread(spreads[_LATENESS]),
        handling=Spread(spreads[_HANDLING]),
    )
