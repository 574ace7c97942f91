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
    cause. Those that lose two in a row come back one at a time, so that the cause takes none of the
    others down again, and none of them is blamed for it. A suspect that has been at work for a
    whole lease counts as cleared.

    Attributes:
        held: The suspect at work, if any.
        alone_for: For how long a suspect is the only message that the client takes, in seconds:
            most of those that kill a process do so at once.
    """

    def __init__(self) -> None:
        self.held: T | None = None
        self.alone_for: float = 1.0
        self._asking = False
        self._timeout: Timeout | None = None
        self._alone: Timeout | None = None
        # Ordered, so that queues take turns.
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def is_free(self) -> bool:
        """Whether another suspect may be handed out."""
        return self.held is None and not self._asking

    @property
    def works_alone(self) -> bool:
        """Whether the client takes no messages now, because of the suspect that it has at work."""
        return self._alone is not None

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
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        self.held = suspect
        if self.alone_for:
            self._alone = timer.new_timeout(
                lambda _: self._let_others_in(), min(self.alone_for, proven_in)
            )
        self._timeout = timer.new_timeout(lambda _: self.over(suspect), proven_in)

    def over(self, claim: T) -> None:
        """Let the next suspect be handed out, if this one was at work."""
        if self.held is not claim:
            return
        self.held = None
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        self._let_others_in()

    def when_not_alone(self, push: Callable[[], None]) -> None:
        """Call ``push`` once the client takes other messages beside the suspect at work."""
        self._waiting[push] = None

    def when_free(self, push: Callable[[], None]) -> None:
        """Call ``push`` as soon as another suspect may be handed out."""
        if self.is_free:
            push()
        else:
            self._waiting[push] = None

    def forget(self, push: Callable[[], None]) -> None:
        """Drop a pending call of ``push``."""
        self._waiting.pop(push, None)

    def _let_others_in(self) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for push in waiting:
            push()
