"""The timer that a queue has armed: at most one, changed only by compare-and-set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.timer import HashedWheelTimer
    from delayq.wheel import Timeout


@dataclass(eq=False, slots=True)
class Armed:
    """One armed wake-up: ``wake_at`` in seconds on the timer's clock, for what is due at ``due_us`` by the server's.

    Whoever asks for a later one meanwhile relies on this one. ``last_us`` is the latest moment that it stands for.
    """

    wake_at: float
    due_us: float = math.inf
    last_us: float = math.inf
    timeout: Timeout | None = field(default=None, repr=False)


def gives_way(held: Armed | None, wake_at: float) -> bool:
    """Whether the held wake-up gives way to one at ``wake_at``: only to an earlier one.

    Answers and notifications travel on different connections, so one may arrive after a newer one. Whichever comes last,
    the earlier moment stays: waking too early costs a call, waking too late breaks the promise.
    """
    return held is None or wake_at < held.wake_at


class LastTimeout:
    """Holds the one wake-up that counts.

    As in Redisson, a change names what it expects to find. A wake-up that was replaced meanwhile is thus recognised when
    it fires, and whoever loses the race leaves the winner's timer alone.
    """

    def __init__(self, timer: HashedWheelTimer, now: Callable[[], float], fire: Callable[[float], None]) -> None:
        """Args:
        timer: Where wake-ups are armed.
        now: The timer's clock, seconds.
        fire: Called when the held wake-up is due, with its ``last_us``.
        """
        self._timer = timer
        self._now = now
        self._fire = fire
        self._held: Armed | None = None

    @property
    def held(self) -> Armed | None:
        """The armed wake-up."""
        return self._held

    def compare_and_set(self, expected: Armed | None, new: Armed | None) -> bool:
        """Hold ``new`` if ``expected`` is held now; say whether it was."""
        if self._held is not expected:
            return False
        self._held = new
        return True

    def arm(self, wait: float, due_us: float = math.inf) -> None:
        """Wake in ``wait`` seconds for what is due at ``due_us``, unless something is armed that wakes earlier.

        Infinity stands for "whatever there is": a wake-up that takes the place of such a one is for that too.
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
            # Somebody armed meanwhile. Ours stays as an extra wake-up: it does no harm, and none is lost.
            return
        if held is not None and held.timeout is not None:
            held.timeout.cancel()

    def disarm(self) -> None:
        """Forget what is armed."""
        held, self._held = self._held, None
        if held is not None and held.timeout is not None:
            held.timeout.cancel()

    def _fired(self, armed: Armed) -> None:
        self.compare_and_set(armed, None)
        self._fire(armed.last_us)
