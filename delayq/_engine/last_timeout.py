"""The wake-up that a queue has armed: at most one, which gives way only to an earlier one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Armed:
    """An armed wake-up: ``wake_at`` in local seconds, for messages due at ``due_us`` by the
    server's clock.

    Requests for a later wake-up rely on this one while it is armed. ``last_us`` is the latest
    moment it covers.
    """

    wake_at: float
    due_us: float = math.inf
    last_us: float = math.inf


def gives_way(held: Armed | None, wake_at: float) -> bool:
    """Return whether the held wake-up gives way to one at ``wake_at``, which it does only if that
    one is earlier.

    Replies and notifications travel on different connections, so an old one may arrive after a
    newer one. Whichever arrives last, the earlier moment is kept: waking too early costs a call,
    while waking too late breaks the promise.
    """
    return held is None or wake_at < held.wake_at


class LastTimeout:
    """Holds the one wake-up that counts."""

    def __init__(self) -> None:
        self._held: Armed | None = None

    @property
    def held(self) -> Armed | None:
        """The armed wake-up, if any."""
        return self._held

    def arm(self, wake_at: float, due_us: float = math.inf) -> Armed | None:
        """Hold a wake-up at ``wake_at`` for messages due at ``due_us``, unless one that wakes
        earlier is held already.

        An infinite ``due_us`` means "whatever is due". A wake-up that replaces one with this
        meaning inherits it.

        Returns:
            The wake-up that now replaces the one held before, or None if that one stays.
        """
        held = self._held
        last_us = due_us
        if held is not None:
            if math.inf in (held.due_us, due_us):
                held.due_us = due_us = math.inf
            held.last_us = last_us = max(held.last_us, due_us)
        if not gives_way(held, wake_at):
            return None
        self._held = armed = Armed(wake_at, due_us, last_us)
        return armed

    def release(self, armed: Armed) -> None:
        """Stop holding a wake-up that has fired, or whose timer could not be set.

        Does nothing if another one is held by now: that one stays armed.
        """
        if self._held is armed:
            self._held = None

    def disarm(self) -> bool:
        """Stop holding any wake-up. Returns whether one was held."""
        held, self._held = self._held, None
        return held is not None
