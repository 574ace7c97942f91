"""What the server's clock shows, guessed from its answers. Never ahead of it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# So much may two clocks drift apart, seconds per second; the next answer corrects it.
_DRIFT = 1e-5


class ServerClock:
    """The server's time.

    An answer carries the time at which the server wrote it: after the question left here, and before the answer arrived. So
    each bounds the offset between the two clocks from both sides. The lower bound never leads; it lags by the answer's way.
    The highest of the last answers' lower bounds lags least, so that one is kept until an answer contradicts it.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """Args:
        now: Monotonic seconds.
        """
        self.local: Callable[[], float] = now
        self._offset: float | None = None
        self._seen_at = 0.0

    def observe(self, server_us: int, asked_at: float) -> None:
        """Note the time that an answer carried, microseconds since the epoch, to a question that left at ``asked_at``."""
        arrived = self.local()
        # The server cuts its time to microseconds: it was up to one later.
        lowest, highest = server_us / 1_000_000 - arrived, (server_us + 1) / 1_000_000 - asked_at
        kept = None if self._offset is None else self._offset - _DRIFT * (arrived - self._seen_at)
        # Above the highest, one of the clocks was set.
        if kept is None or not lowest <= kept <= highest:
            self._offset, self._seen_at = lowest, arrived

    def seconds_until(self, due_us: int) -> float:
        """How long until the server's clock shows ``due_us``; 0 if that has passed, or if it never answered."""
        return max(0.0, self.seconds_from_now(due_us))

    def seconds_from_now(self, due_us: float) -> float:
        """The same; negative if it has passed."""
        if self._offset is None:
            return 0.0
        now = self.local()
        return due_us / 1_000_000 - self._offset + _DRIFT * (now - self._seen_at) - now
