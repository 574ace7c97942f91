"""Lets a client handle one suspect at a time: a message that may have killed its last worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._timer.timer import HashedWheelTimer
    from delayq._timer.wheel import Timeout

T = TypeVar("T")


class Suspects(Generic[T]):
    """The one suspect that a client may have at work, across all its queues.

    When a worker's process dies, all its messages lose their leases, and any of them may be the
    cause. If they came back together, the cause would take the others down again. A suspect that
    has been at work for a whole lease counts as cleared.

    Attributes:
        held: The suspect at work, if any.
    """

    def __init__(self) -> None:
        self.held: T | None = None
        self._asking = False
        self._timeout: Timeout | None = None
        # Ordered, so that queues take turns.
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def is_free(self) -> bool:
        """Whether another suspect may be handed out."""
        return self.held is None and not self._asking

    def ask(self) -> bool:
        """Begin a call that may bring a suspect. Return False if another one is in flight."""
        if self._asking:
            return False
        self._asking = True
        return True

    def answered(self, suspect: T | None, timer: HashedWheelTimer, proven_in: float) -> None:
        """End a call. The suspect that it brought counts as cleared after ``proven_in`` seconds."""
        self._asking = False
        if suspect is None:
            if self.held is None:
                self._wake()
            return
        if self._timeout is not None:
            # The previous suspect has lost its lease.
            self._timeout.cancel()
        self.held = suspect
        self._timeout = timer.new_timeout(lambda _: self.over(suspect), proven_in)

    def over(self, claim: T) -> None:
        """Let the next suspect be handed out, if this one was at work."""
        if self.held is not claim:
            return
        self.held = None
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        self._wake()

    def when_free(self, push: Callable[[], None]) -> None:
        """Call ``push`` as soon as another suspect may be handed out."""
        if self.is_free:
            push()
        else:
            self._waiting[push] = None

    def forget(self, push: Callable[[], None]) -> None:
        """Drop a pending call of ``push``."""
        self._waiting.pop(push, None)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for push in waiting:
            push()
