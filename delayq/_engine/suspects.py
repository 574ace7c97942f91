"""Tells which messages are alone in a client, so that one that kills its worker is found out."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from delayq._timer.timer import HashedWheelTimer
    from delayq._timer.wheel import Timeout

T = TypeVar("T")

# How long messages wait for the reply that another one is not alone any more, in seconds.
_TOLD_WITHIN = 1.0


class ClaimTerms(NamedTuple):
    """The terms of one claim.

    Attributes:
        may_bring_suspect: Whether it may bring a suspect.
        is_alone: Whether what it brings is alone in this client: nothing else is at work, and no
            other claim is under way.
    """

    may_bring_suspect: bool
    is_alone: bool


class Suspects(Generic[T]):
    """The messages that a client has at work in its reliable queues, and the suspect among them.

    When a worker's process dies, all its messages lose their leases, and any of them may be the
    cause. Those that lose two in a row come back one at a time, so that the cause takes none of the
    others down again, and none of them is blamed for it. A suspect that has been at work for a
    whole lease counts as cleared.

    A message that is alone here has a lease that says so. If its process dies, it is to blame. So
    before others begin beside it, the server is told.

    Attributes:
        suspect: The suspect at work, if any.
        others_wait_for: For how long a suspect is the only message that the client takes, in
            seconds: most of those that kill a process do so at once.
    """

    def __init__(self) -> None:
        self.suspect: T | None = None
        self.others_wait_for: float = 1.0
        # Whether a claim is under way that may bring a suspect.
        self._asking = False
        # Ordered, so that those whose leases are over are found first.
        self._at_work: dict[T, None] = {}
        self._claims = 0
        # Tells the server that the message that is alone is not any more.
        self._tell: Callable[[], Awaitable[None]] | None = None
        # Runs until the suspect counts as cleared.
        self._clearance: Timeout | None = None
        # Runs while the suspect is the only message that the client takes.
        self._exclusion: Timeout | None = None
        # Ordered, so that queues take turns.
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def is_free(self) -> bool:
        """Whether another suspect may be handed out."""
        return self.suspect is None and not self._asking

    @property
    def keeps_others_out(self) -> bool:
        """Whether the client takes no messages now, because of the suspect that it has at work."""
        return self._exclusion is not None

    def begin_claim(self, is_over: Callable[[T], bool], own_suspect: T | None) -> ClaimTerms:
        """Begin a claim from a queue, whose last suspect was ``own_suspect``.

        ``is_over`` tells whether the lease of a message has ended. :meth:`end_claim` must follow,
        with the terms that this returns.
        """
        self._claims += 1
        while self._at_work and is_over(first := next(iter(self._at_work))):
            del self._at_work[first]
        if not self._at_work:
            self._tell = None
        # A suspect at work in another queue cannot be looked up there.
        may_bring = not self._asking and (self.suspect is None or self.suspect is own_suspect)
        self._asking = self._asking or may_bring
        return ClaimTerms(may_bring, not self._at_work and self._claims == 1)

    def add(self, items: Iterable[T], tell: Callable[[], Awaitable[None]] | None) -> bool:
        """Add what a claim has brought. If that counts as alone, ``tell`` tells the server that it
        is not any more.

        Returns whether to call :meth:`tell_not_alone` now, before what has come begins.
        """
        self._at_work.update(dict.fromkeys(items))
        self._tell = tell or self._tell
        return self._tell is not None and len(self._at_work) > 1

    async def tell_not_alone(self) -> None:
        """Tell the server that the message that was alone is not any more."""
        assert self._tell is not None
        # Without a reply, one of several may be blamed alone if this process dies.
        with suppress(DelayqError, TimeoutError):
            async with asyncio.timeout(_TOLD_WITHIN):
                await self._tell()
        self._tell = None

    def end_claim(
        self,
        terms: ClaimTerms,
        suspect: T | None,
        timer: HashedWheelTimer,
        cleared_in: float,
        *,
        keeps_others_out: bool,
    ) -> None:
        """End a claim, whatever its outcome.

        Args:
            terms: Returned by :meth:`begin_claim`.
            suspect: The suspect that it brought, if any.
            timer: Runs the waits.
            cleared_in: After how many seconds that suspect counts as cleared.
            keeps_others_out: Whether the client takes nothing else until then.
        """
        self._claims -= 1
        if not terms.may_bring_suspect:
            return
        self._asking = False
        if suspect is None:
            if self._waiting and self.suspect is None:
                self._wake()
            return
        if self._clearance is not None:
            # The previous suspect has lost its lease.
            self._clearance.cancel()
        if self._exclusion is not None:
            self._exclusion.cancel()
            self._exclusion = None
        self.suspect = suspect
        if self.others_wait_for:
            wait = cleared_in if keeps_others_out else min(self.others_wait_for, cleared_in)
            self._exclusion = timer.new_timeout(lambda _: self._let_others_in(), wait)
        self._clearance = timer.new_timeout(lambda _: self.remove((suspect,)), cleared_in)

    def remove(self, items: Sequence[T]) -> None:
        """Note that messages are not at work any more. If the suspect is among them, let the next
        one be handed out.
        """
        for item in items:
            self._at_work.pop(item, None)
        if self.suspect is None or self.suspect not in items:
            return
        self.suspect = None
        if self._clearance is not None:
            self._clearance.cancel()
            self._clearance = None
        self._let_others_in()

    def when_others_may_come(self, push: Callable[[], None]) -> None:
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
        if self._exclusion is not None:
            self._exclusion.cancel()
            self._exclusion = None
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for push in waiting:
            push()
