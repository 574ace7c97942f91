"""What the server's clock shows, guessed from its last answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ServerClock:
    """The server's time, never ahead of it.

    Each answer carries the server's time. It is older when it arrives than when it left, so a guess that counts on from
    there lags by the answer's way, and a wake-up computed from it is late by that much, not early.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._server_us: int | None = None
        self._seen_at = 0.0

    def observe(self, server_us: int) -> None:
        """Note the time that an answer carried, microseconds since the epoch."""
        self._server_us = server_us
        self._seen_at = self._now()

    def seconds_until(self, due_us: int) -> float:
        """How long until the server's clock shows ``due_us``; 0 if that has passed, or if it never answered."""
        if self._server_us is None:
            return 0.0
        elapsed = self._now() - self._seen_at
        return max(0.0, (due_us - self._server_us) / 1_000_000 - elapsed)
