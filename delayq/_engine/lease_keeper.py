"""Renews the leases of messages that are being handled."""

from __future__ import annotations

import asyncio
from itertools import islice
from logging import WARNING
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from delayq._logging import log
from delayq.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._timer.wheel import Timeout

# Number of renewals during a lease: two calls may fail before it ends.
_TIMES = 3
# After a failed call, the next one comes this many times sooner.
_HASTE = 4
# If a renewal is due during another one, it is tried again after this part of a lease.
_SOON = 100


class Leased(Protocol):
    """An item leased to this client.

    Attributes:
        ends_us: When the lease ends by the server's clock, in microseconds.
        fresh_until: Local time until which at least half of the lease is left, in seconds.
    """

    ends_us: int
    fresh_until: float


L = TypeVar("L", bound=Leased)


class LeaseKeeper(Generic[L]):
    """Keeps leases of one length alive, with one timer for all messages of a queue or partition."""

    def __init__(
        self,
        name: str,
        lease_us: int,
        extend: Callable[[Sequence[L], int], Awaitable[list[bool]]],
        services: EngineContext,
    ) -> None:
        """Renew leases with ``extend``, which gets leases and their new length in microseconds, and
        returns which of them are still ours.
        """
        self._name = name
        self._lease_us = lease_us
        self._extend = extend
        self._timer = services.timer
        self._clock = services.clock
        self._background = services.background
        # The leases held, those held longest first, and what to call if they are lost.
        self._on_lost: dict[L, Callable[[], None]] = {}
        self._timeout: Timeout | None = None
        self._task: asyncio.Task[Any] | None = None
        # When the timer fires, in local seconds.
        self._due_at = 0.0
        self.lost_count: int = 0
        self.closed: bool = False

    @property
    def count(self) -> int:
        """Number of leases held."""
        return len(self._on_lost)

    def oldest(self, limit: int) -> list[L]:
        """Return up to ``limit`` of the leases held, those held longest first."""
        return [*islice(self._on_lost, limit)]

    def hold(self, claim: L, on_lost: Callable[[], None]) -> None:
        """Renew a lease until :meth:`let_go`.

        ``on_lost`` is called once if the lease ends nevertheless.
        """
        if self.closed:
            return
        self._on_lost[claim] = on_lost
        if self._timeout is None and self._task is None:
            self._arm(self._lease_us / _TIMES)

    def hurry(self, claim: L) -> None:
        """Renew leases in time for one of which less than usual may be left, if it is held."""
        if claim in self._on_lost:
            left_us = self._clock.seconds_until(claim.ends_us) * 1_000_000
            self._arm(min(self._lease_us / _TIMES, left_us / 2))

    def extended(self, claim: L, lease_us: int) -> None:
        """Note that a lease was made to end in ``lease_us`` microseconds: if it is held, it is
        renewed in time.
        """
        if claim in self._on_lost:
            self._arm(lease_us / _TIMES)

    def let_go(self, claim: L) -> None:
        """Stop renewing a lease."""
        # Leave the timer armed: keeping it is worth an occasional firing that finds no leases.
        self._on_lost.pop(claim, None)

    def lose(self, is_lost: Callable[[L], bool]) -> None:
        """Give up the leases for which ``is_lost`` returns true, as if they had ended."""
        for claim in [claim for claim in self._on_lost if is_lost(claim)]:
            self._lose(claim)

    def close(self) -> None:
        """Stop renewing all leases."""
        self.closed = True
        self._on_lost.clear()
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    async def freshen(self, claims: Sequence[L]) -> list[L]:
        """Restore the full lease of claims that have waited here. Return those that are lost."""
        try:
            ours = await self._extend(claims, self._lease_us)
        except ServerError:
            # The outcome is unknown. Only claims whose lease has certainly ended count as lost.
            return [claim for claim in claims if not self._clock.seconds_until(claim.ends_us)]
        return [claim for claim, is_ours in zip(claims, ours, strict=True) if not is_ours]

    async def renew(self) -> bool:
        """Renew all leases held. Return whether the call has succeeded."""
        # Skip leases that were already extended further than a renewal would extend them.
        lease = self._lease_us / 1_000_000
        claims = [
            claim for claim in self._on_lost if self._clock.seconds_until(claim.ends_us) < lease
        ]
        try:
            # Fail early enough to try again, or to notify the handlers.
            async with asyncio.timeout(lease / _TIMES):
                ours = await self._extend(claims, self._lease_us)
        except (ServerError, TimeoutError) as error:
            reason = str(error) or "no reply in time"
            log(WARNING, self._name, "cannot renew %d leases: %s", len(claims), reason)
            for claim in claims:
                # As far as we can tell the lease has ended, so another worker may have the message.
                if not self._clock.seconds_until(claim.ends_us):
                    self._lose(claim)
            return False
        for claim, is_ours in zip(claims, ours, strict=True):
            if not is_ours:
                self._lose(claim)
        return True

    def _lose(self, claim: L) -> None:
        on_lost = self._on_lost.pop(claim, None)
        if on_lost is not None:
            self.lost_count += 1
            on_lost()

    def _arm(self, wait_us: float) -> None:
        """Renew the leases after ``wait_us`` microseconds, unless that happens sooner anyway."""
        wait = wait_us / 1_000_000
        due_at = self._clock.local() + wait
        if self._timeout is not None:
            if self._due_at <= due_at:
                return
            self._timeout.cancel()
        self._due_at = due_at
        self._timeout = self._timer.new_timeout(lambda _: self._due(), wait)

    def _due(self) -> None:
        self._timeout = None
        if self._task is not None:
            # That renewal may have left out a lease that ends soon.
            self._arm(self._lease_us / _SOON)
        elif self._on_lost:
            self._task = self._background.spawn(self._run(), f"leases of {self._name}")

    async def _run(self) -> None:
        has_succeeded = False
        try:
            has_succeeded = await self.renew()
        finally:
            self._task = None
            if self._on_lost:
                self._arm(self._lease_us / _TIMES / (1 if has_succeeded else _HASTE))
