"""The demo's records and results. Pure: no clock, no I/O.

Times are whole microseconds since the epoch. Messages are identified by number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T", bound=float)


def latest_offset(exchanges: Iterable[tuple[int, int]]) -> int:
    """Return an upper bound of the server's lead over the local clock, in microseconds (negative:
    the server is behind).

    Each exchange asks the server for its time: the local time of the question, and the reply.
    The server read its clock later than that, so it is ahead by at most ``server - sent``. A local
    time plus this bound is never before the same moment on the server's clock, so no message looks
    early by mistake. It overstates lateness by the one-way trip of the quickest exchange at most.
    """
    # Both clocks are read in whole microseconds, rounded down: the difference may be one more.
    return min(server_us - sent_us for sent_us, server_us in exchanges) + 1


@dataclass(frozen=True)
class Row:
    """One delivery. ``late_us`` is negative if it was early."""

    number: int
    delay_us: int
    due_us: int
    late_us: int


class Ledger:
    """Matches offered and delivered messages by number, reported in any order."""

    def __init__(self) -> None:
        self._offered: dict[int, tuple[int, int]] = {}
        self._arrived: dict[int, int] = {}
        self._offset_us: int | None = None
        self.duplicates: int = 0

    @property
    def offered(self) -> int:
        return len(self._offered)

    @property
    def delivered(self) -> int:
        return len(self._arrived)

    @property
    def waiting(self) -> int:
        return len(self._offered.keys() - self._arrived.keys())

    def offer(self, number: int, delay_us: int, due_us: int) -> None:
        self._offered[number] = (delay_us, due_us)

    def arrive(self, number: int, at_us: int) -> None:
        """Record an arrival, by the consumer's clock. A second one is a duplicate."""
        if number in self._arrived:
            self.duplicates += 1
        else:
            self._arrived[number] = at_us

    def left_over(self, number: int) -> None:
        """Record a message that is still on the server at the end. It may be a duplicate."""
        self.duplicates += number in self._arrived

    def set_offset(self, offset_us: int) -> None:
        """Record by how much the server's clock is ahead of the consumer's.

        The largest estimate counts: clocks may drift, and no message must look early by that.
        """
        self._offset_us = offset_us if self._offset_us is None else max(self._offset_us, offset_us)

    def recent(self, count: int) -> list[Row]:
        """Return the last ``count`` deliveries that were reported as offered, too, newest last."""
        numbers = list(self._arrived)[-count:] if count > 0 else []
        return [self._row(number) for number in numbers if number in self._offered]

    def result(self, seconds: float, server: str) -> Result:
        """Return the result. Messages that have not arrived count as lost."""
        late = sorted(
            self._row(number).late_us for number in self._arrived if number in self._offered
        )
        shares = {"p50": 0.50, "p99": 0.99, "max": 1.0}
        return Result(
            offered=self.offered,
            delivered=self.delivered,
            early=sum(us < 0 for us in late),
            lost=self.waiting,
            duplicates=self.duplicates,
            lateness_ms={
                name: percentile(late, share) / 1000 if late else None
                for name, share in shares.items()
            },
            seconds=round(seconds, 3),
            server=server,
        )

    def _row(self, number: int) -> Row:
        delay_us, due_us = self._offered[number]
        return Row(
            number, delay_us, due_us, self._arrived[number] + (self._offset_us or 0) - due_us
        )


def percentile(ordered: Sequence[T], share: float) -> T:
    """Return the smallest value that at least ``share`` of all values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


@dataclass(frozen=True)
class Result:
    """The results of one run, as in JSON. Lateness is None if no message was delivered."""

    offered: int
    delivered: int
    early: int
    lost: int
    duplicates: int
    lateness_ms: dict[str, float | None]
    seconds: float
    server: str

    @property
    def exit_status(self) -> int:
        return 1 if self.early or self.lost or self.duplicates else 0

    def fields(self) -> list[tuple[str, str, bool]]:
        """Return the lines of the summary: a name, its value, and whether that is as expected."""
        lateness = ", ".join(
            f"{name} {ms:.2f} ms" for name, ms in self.lateness_ms.items() if ms is not None
        )
        return [
            ("offered", str(self.offered), True),
            ("delivered", str(self.delivered), self.lost == 0),
            ("early", str(self.early), self.early == 0),
            ("lost", str(self.lost), self.lost == 0),
            ("duplicates", str(self.duplicates), self.duplicates == 0),
            ("lateness", lateness or "no messages were delivered", True),
        ]
