"""The timer that a queue has armed: at most one, changed only by compare-and-set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._timer.timer import HashedWheelTimer
    from delayq._timer.wheel import Timeout


@dataclass(eq=False, slots=True)
class Armed:
    """An armed wake-up: ``wake_at`` in seconds on the timer's clock, for messages due at ``due_us`` by the server's clock.

    Requests for a later wake-up rely on this one while it is armed. ``last_us`` is the latest moment it covers.
    """

    wake_at: float
    due_us: float = math.inf
    last_us: float = math.inf
    timeout: Timeout | None = field(default=None, repr=False)


def gives_way(held: Armed | None, wake_at: float) -> bool:
    """Return whether the held wake-up gives way to one at ``wake_at``, which it does only if that one is earlier.

    Answers and notifications travel on different connections, so an old one may arrive after a newer one. Whichever arrives
    last, the earlier moment is kept: waking too early costs a call, while waking too late breaks the promise.
    """
    return held is None or wake_at < held.wake_at


class LastTimeout:
    """Holds the one wake-up that counts.

    As in Redisson, a change names the wake-up it expects to find. A wake-up that was replaced in the meantime is thus
    recognised when it fires, and the loser of a race leaves the winner's timer alone.
    """

    def __init__(self, timer: HashedWheelTimer, now: Callable[[], float], fire: Callable[[float], None]) -> None:
        """Args:
        timer: Arms the wake-ups.
        now: Returns the time on the timer's clock, in seconds.
        fire: Called with ``last_us`` of the held wake-up when that is due.
        """
        self._timer = timer
        self._now = now
        self._fire = fire
        self._held: Armed | None = None

    @property
    def held(self) -> Armed | None:
        """The armed wake-up, if any."""
        return self._held

    def compare_and_set(self, expected: Armed | None, new: Armed | None) -> bool:
        """Hold ``new`` if ``expected`` is held now. Returns whether it was."""
        if self._held is not expected:
            return False
        self._held = new
        return True

    def arm(self, wait: float, due_us: float = math.inf) -> None:
        """Arm a wake-up in ``wait`` seconds for messages due at ``due_us``, unless one that wakes earlier is armed already.

        An infinite ``due_us`` means "whatever is due". A wake-up that replaces one with this meaning inherits it.
        """
        wake_at = self._now() + wait
        held = self._held
        last_us = due_us
        if held is not None:
            if math.inf in (held.due_us, due_us):
                held.due_us = due_us = math.inf
            held.last_us = last_us = max(held.last_us, due_us)
        if not gives_way(held, wake_at):
            return
        armed = Armed(wake_at, due_us, last_us)
        armed.timeout = self._timer.new_timeout(lambda _: self._fired(armed), wait)
        if not self.compare_and_set(held, armed):
            # Another wake-up was armed in the meantime. Ours stays as an extra one: it does no harm, and none is lost.
            return
        if held is not None and held.timeout is not None:
            held.timeout.cancel()

    def disarm(self) -> None:
        """Cancel the armed wake-up, if any."""
        held, self._held = self._held, None
        if held is not None and held.timeout is not None:
            held.timeout.cancel()

    def _fired(self, armed: Armed) -> None:
        self.compare_and_set(armed, None)
        self._fire(armed.last_us)
