"""Tells which messages are alone in a client, so that one that kills its worker is found out."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from delayq._timer.timer import HashedWheelTimer
    from delayq._timer.wheel import Timeout

T = TypeVar("T")

# How long messages wait for the answer that another one is not alone any more, in seconds.
_SHARED_WITHIN = 1.0


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
        alone_for: For how long a suspect is the only message that the client takes, in seconds:
            most of those that kill a process do so at once.
    """

    def __init__(self) -> None:
        self.suspect: T | None = None
        self.alone_for: float = 1.0
        self._asking = False
        # Ordered, so that those whose leases are over are found first.
        self._at_work: dict[T, None] = {}
        self._claims = 0
        # Tells the server that the message that is alone is not any more.
        self._share: Callable[[], Awaitable[None]] | None = None
        self._timeout: Timeout | None = None
        self._alone: Timeout | None = None
        # Ordered, so that queues take turns.
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def is_free(self) -> bool:
        """Whether another suspect may be handed out."""
        return self.suspect is None and not self._asking

    @property
    def works_alone(self) -> bool:
        """Whether the client takes no messages now, because of the suspect that it has at work."""
        return self._alone is not None

    def begin_claim(self, is_over: Callable[[T], bool], own_suspect: T | None) -> tuple[bool, bool]:
        """Begin a claim from a queue, whose last suspect was ``own_suspect``.

        ``is_over`` tells whether the lease of a message has ended. Returns whether the claim may
        bring a suspect, which :meth:`end_claim` takes, and whether what it brings is alone here.
        """
        self._claims += 1
        while self._at_work and is_over(first := next(iter(self._at_work))):
            del self._at_work[first]
        if not self._at_work:
            self._share = None
        # A suspect at work in another queue cannot be looked up there.
        asks = not self._asking and (self.suspect is None or self.suspect is own_suspect)
        self._asking = self._asking or asks
        return asks, not self._at_work and self._claims == 1

    def add(self, items: Iterable[T], share: Callable[[], Awaitable[None]] | None) -> bool:
        """Add what a claim has brought. If that counts as alone, ``share`` tells the server that it
        is not any more.

        Returns whether to :meth:`share` now, before what has come begins.
        """
        self._at_work.update(dict.fromkeys(items))
        self._share = share or self._share
        return self._share is not None and len(self._at_work) > 1

    async def share(self) -> None:
        """Tell the server that the message that was alone is not any more."""
        assert self._share is not None
        # Without an answer, one of several may be blamed alone if this process dies.
        with suppress(DelayqError, TimeoutError):
            async with asyncio.timeout(_SHARED_WITHIN):
                await self._share()
        self._share = None

    def end_claim(
        self,
        suspect: T | None,
        timer: HashedWheelTimer,
        proven_in: float,
        *,
        asks: bool,
        stays_alone: bool,
    ) -> None:
        """End a claim, whatever its outcome.

        The suspect that it brought, if it ``asks`` for one, counts as cleared after ``proven_in``
        seconds, and if it ``stays_alone``, the client takes nothing else until then.
        """
        self._claims -= 1
        if not asks:
            return
        self._asking = False
        if suspect is None:
            if self._waiting and self.suspect is None:
                self._wake()
            return
        if self._timeout is not None:
            # The previous suspect has lost its lease.
            self._timeout.cancel()
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        self.suspect = suspect
        if self.alone_for:
            alone_for = proven_in if stays_alone else min(self.alone_for, proven_in)
            self._alone = timer.new_timeout(lambda _: self._let_others_in(), alone_for)
        self._timeout = timer.new_timeout(lambda _: self.finish((suspect,)), proven_in)

    def finish(self, items: Sequence[T]) -> None:
        """Note that messages are not at work any more. If the suspect is among them, let the next
        one be handed out.
        """
        for item in items:
            self._at_work.pop(item, None)
        if self.suspect is None or self.suspect not in items:
            return
        self.suspect = None
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
