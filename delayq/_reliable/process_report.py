"""The facts about this process that all of its reports to the server tell."""

from __future__ import annotations

import time
from dataclasses import dataclass

# How long a report tells that the event loop was blocked, seconds.
_TOLD_FOR = 3600.0


@dataclass(frozen=True)
class Blocking:
    """Code that blocked an event loop.

    Attributes:
        code: The function, with its file and line.
        seconds: How long the loop was blocked.
        recent: For how much of the last minute before it ran again loops were blocked, in seconds.
        ended_at: When it ran again, on the clock of ``time.monotonic()``.
    """

    code: str
    seconds: float
    recent: float
    ended_at: float


@dataclass
class ProcessReport:
    """The facts about a process, whichever queue a report is about.

    Attributes:
        slots: How many messages its workers handle at a time, at most, of all queues together.
    """

    slots: int = 0
    _blocking: Blocking | None = None

    @property
    def blocking(self) -> Blocking | None:
        """The code that blocked an event loop last; None if none has within an hour."""
        blocking = self._blocking
        if blocking is None or time.monotonic() - blocking.ended_at > _TOLD_FOR:
            return None
        return blocking

    def note_blocking(self, code: str, seconds: float) -> None:
        """Note that an event loop runs again; from any thread."""
        now = time.monotonic()
        before = self._blocking
        # As if all of that had been at its end.
        earlier = 0.0 if before is None else min(before.recent, 60.0 - (now - before.ended_at))
        recent = min(60.0, seconds + max(0.0, earlier))
        self._blocking = Blocking(code, seconds, recent, now)


PROCESS = ProcessReport()
"""The facts about this process."""
