"""The last hour of a queue by minutes, as a small chart, and waves of failures in it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from delayq._dashboard import charts
from delayq.admin import failures
from delayq.admin.states import LATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._dashboard.charts import TimeAxis
    from delayq.stats import Activity

MINUTES = 60
"""How many minutes the last hour has."""
# The heights of the parts of a strip, from its top, in pixels: messages that were handled, and
# attempts that failed, on either side of a line at zero; and lateness, from 10 ms to an hour on a
# logarithmic scale.
_UP, _DOWN, _APART, _LATE = 26.0, 12.0, 5.0, 13.0
_SHORTEST, _LONGEST = 0.01, 3600.0
# A live page draws them every second, but they change every few seconds.
_MOST_STRIPS = 500


@dataclass(frozen=True)
class Minutes:
    """The work on a queue by minutes, the current one last.

    Attributes:
        start: The number of the first minute, since 1970.
        handled: How many messages were acknowledged.
        retried: How many attempts failed, after which the message was to be retried.
        dead: How many messages became dead letters.
        late: The lateness that 99 % did not exceed, in seconds; None where none was handed out.
    """

    start: int
    handled: tuple[int, ...]
    retried: tuple[int, ...]
    dead: tuple[int, ...]
    late: tuple[float | None, ...]

    @classmethod
    def of(cls, activities: Sequence[Activity]) -> Minutes:
        """Keep of minutes that follow each other what is shown of them."""
        return cls(
            int(activities[0].start.timestamp()) // 60,
            tuple(minute.handled for minute in activities),
            tuple(minute.failed for minute in activities),
            tuple(minute.dead for minute in activities),
            tuple(minute.lateness.p99 for minute in activities),
        )

    @property
    def failed(self) -> list[int]:
        """How many attempts failed, with those after which the message died."""
        return [sum(counts) for counts in zip(self.retried, self.dead, strict=True)]

    @property
    def worked(self) -> list[bool]:
        """Whether any work was reported in each minute."""
        minutes = zip(self.handled, self.retried, self.dead, self.late, strict=True)
        return [any(figures) for figures in minutes]

    def reaches(self, newer: Minutes) -> bool:
        """Return whether newer ones begin among these. The last of these had not ended."""
        return self.start <= newer.start < self.start + len(self.handled)

    def joined(self, newer: Minutes) -> Minutes:
        """Return up to an hour that ends with newer ones, which these reach."""
        kept = newer.start - self.start
        count = kept + len(newer.handled)
        if count < len(self.handled):
            # These were read later.
            return self
        first = max(0, count - MINUTES)

        def join(name: str) -> Any:
            return (getattr(self, name)[:kept] + getattr(newer, name))[first:]

        figures = (join(name) for name in ("handled", "retried", "dead", "late"))
        return Minutes(self.start + first, *figures)

    def since_work(self) -> int | None:
        """Return for how many minutes no work was reported; None if none was in all of them."""
        return next((ago for ago, did in enumerate(reversed(self.worked)) if did), None)

    @property
    def is_wave(self) -> bool:
        """Whether a tenth or more of the attempts failed, and at least ten of them."""
        return failures.is_wave(sum(self.handled), sum(self.failed))

    def describe_failures(self, now: float, errors: Iterable[str]) -> str:
        """Return the rate of the failures, and the most frequent of some errors.

        ``now`` is in seconds since 1970. If it is wrong, the rate may be half as high again.
        """
        # The current minute has not ended. It may have begun after these were read.
        full = 60.0 * len(self.handled)
        seconds = min(full, max(full - 60.0, now - 60 * self.start))
        return failures.describe_wave(sum(self.retried), sum(self.dead), seconds, errors).text


@dataclass(frozen=True)
class Strip:
    """The last hour of a queue as a small chart: the paths of its marks, and what it shows."""

    hour: Minutes
    handled: str
    failed: str
    late: str
    too_late: str
    recorded: str

    height: float = _UP + _DOWN + _APART + _LATE
    zero: float = _UP

    @property
    def late_text(self) -> str:
        """The lateness that 99 % did not exceed in the worst minute; empty if it is unknown."""
        known = [late for late in self.hour.late if late is not None]
        return charts.duration(max(known)) if known else ""

    @property
    def handled_count(self) -> int:
        """How many messages were handled."""
        return sum(self.hour.handled)

    @property
    def failed_count(self) -> int:
        """How many attempts failed."""
        return sum(self.hour.failed)

    @property
    def about(self) -> str:
        """The same in words."""
        late = f"; 99 % of each minute were at most {self.late_text} late" if self.late_text else ""
        return (
            f"{self.handled_count:,} handled, at most {max(self.hour.handled):,} a minute;"
            f" {self.failed_count:,} attempts failed, at most {max(self.hour.failed):,} a"
            f" minute{late}"
        )


@lru_cache(maxsize=_MOST_STRIPS)
def strip(hour: Minutes, axis: TimeAxis) -> Strip:
    """Draw the last hour of a queue along an axis of 60 minutes, which may begin a little later."""
    ago = axis.start // 60 - hour.start
    handled, failed, late = hour.handled[ago:], hour.failed[ago:], hour.late[ago:]
    # One scale for both, so that their sizes can be compared.
    units = [
        room / most
        for room, most in ((_UP, max(handled, default=0)), (_DOWN, max(failed, default=0)))
        if most
    ]
    unit = min(units, default=0.0)
    bottom = _UP + _DOWN + _APART + _LATE

    def length(count: int) -> float:
        return max(1.5, round(count * unit, 1)) if count else 0.0

    def lates(*, too_late: bool) -> str:
        heights = [
            _share(level) * _LATE if level is not None and (level > LATE) == too_late else 0.0
            for level in late
        ]
        return charts.bars([(bottom - height, height) for height in heights])

    return Strip(
        hour,
        charts.bars([(_UP - length(count), length(count)) for count in handled]),
        charts.bars([(_UP, length(count)) for count in failed]),
        lates(too_late=False),
        lates(too_late=True),
        "".join(charts.runs(hour.worked[ago:], height, are_there=True) for height in (_UP, bottom)),
    )


def _share(seconds: float) -> float:
    """Return how much of the height for lateness a duration takes, at least a tenth."""
    share = math.log(max(seconds, _SHORTEST) / _SHORTEST) / math.log(_LONGEST / _SHORTEST)
    return min(1.0, max(0.1, share))
