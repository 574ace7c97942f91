"""The transfer task: moves what is due of one delayed queue, and hands it to whoever waits here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delayq._logging import about
from delayq._redis.scripts import GIVE_BACK, RECOVER, TRANSFER
from delayq._scheduling.counts import Counts
from delayq._scheduling.leases import Lease, Leases, token
from delayq._scheduling.push import NOT_ASKED, Pushes, due_us
from delayq._scheduling.ready_watch import ReadyWatch
from delayq._scheduling.taker import Taker
from delayq.errors import DelayqError, OutcomeUnknown, ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._redis.keys import DelayedKeys
    from delayq._scheduling.services import Services

_log = logging.getLogger("delayq")

# Messages moved or taken per script: a script blocks the whole server while it runs.
BATCH = 100
# What a call hands out is kept on the server until its answer has arrived, for so long at most; ms.
KEEP_MS = 3_600_000
# A hand-back may hold up the next transfer for so long; seconds.
RETURN_WITHIN = 0.1
# A call that was given up may still reach the server, through a slow network, for so long; ms.
FENCE_MS = 60_000


class TransferTask:
    """Asks the server to move what is due of one queue, and to hand over what is wanted here.

    Attributes:
        pushes: When it does so.
        taker: Those who take for good.
        counts: What was done.
        leases: What is out under a lease.
        quarantined: Unreadable records found so far.
        returned: Messages found so far whose lease had ended.
    """

    def __init__(self, keys: DelayedKeys, services: Services, *, listed: bool) -> None:
        self.keys: DelayedKeys = keys
        self.counts: Counts = Counts()
        self._services = services
        self._server = services.server
        self._clock = services.clock
        self.pushes: Pushes = Pushes(keys.name, self.run_once, services, lambda: self.waiting)
        self._watch = ReadyWatch(keys, services, self.pushes.push)
        self.leases: Leases = Leases(keys, services, self.announced, self.counts, listed=listed)
        self.taker: Taker[bytes] = self._new_taker(self._put_back)
        self._lessees: dict[int, Taker[Lease]] = {}
        # The last call's name, how many it was to hand out, and for how long, if its answer was lost.
        self._unsure: tuple[str, int, int] | None = None
        # The name of the last call that gave back, if its answer was lost.
        self._unsure_back = ""
        # Names this task's calls on the server.
        self._token = secrets.token_hex(6)
        self._calls = itertools.count()
        # The last call that had something for those who take for good (0), or under a lease of so long.
        self._served: dict[int, int] = {}
        # Whether the ready list was empty when we last looked.
        self._emptied = False
        # Whether the server has said that we may not move anything.
        self._barred = False
        self.quarantined: int = 0
        self.returned: int = 0

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for messages that are still to come."""
        return self.taker.waiting or any(taker.waiting for taker in self._lessees.values())

    def lessee(self, lease_us: int) -> Taker[Lease]:
        """Those who take under a lease of so many microseconds."""
        if lease_us not in self._lessees:
            self._lessees[lease_us] = self._new_taker(self._release)
        return self._lessees[lease_us]

    def announced(self, due_ms: int) -> None:
        """Somebody says that a message is due at ``due_ms`` by the server's clock."""
        self.pushes.announced(due_ms * 1000)

    def resynced(self, due_us: int, ready: int) -> None:
        """The safety re-check found when the next one is due, as :meth:`Pushes.next_due` takes it, and ``ready`` payloads."""
        if ready:
            self._watch.overlooked()
        self.pushes.next_due(0 if ready and self.waiting else due_us)

    @property
    def watches(self) -> bool:
        """Whether it needs to be told what the safety re-check finds: not where moving is left to others."""
        return not self._barred or self.waiting

    async def run_once(self) -> int:
        """One push. Returns when the next one is due, as :meth:`Pushes.next_due` takes it.

        A user who may only offer, or only look, moves nothing, and says so once.

        Raises:
            ServerError: As :meth:`Server.run_once`. Who can wait waits on, the others have the error.
        """
        wanted = self.waiting or any(taker.wanted for _, taker in self._takers())
        if self._barred and not wanted:
            return NOT_ASKED
        try:
            due = await self._run_once()
        except ServerRefused as error:
            # So it begins where nothing was carried out. Nobody who waits is left alone with it.
            if not str(error).startswith("NOPERM") or wanted:
                raise
            self._barred = True
            _log.warning(
                "queue %r: this user may not move what is due, other processes have to: %s",
                self.keys.name,
                error,
                extra=about(self.keys.name),
            )
            return NOT_ASKED
        self._barred = False
        return due

    def _takers(self) -> list[tuple[int, Taker[Any]]]:
        return [(0, self.taker), *self._lessees.items()]

    async def _run_once(self) -> int:
        takers = self._takers()
        try:
            await self._recover()
            # What is on its way back comes first.
            for _, taker in takers:
                await taker.returned(RETURN_WITHIN)
            wanted = [taker for taker in takers if taker[1].wanted] or takers[:1]
            # Whoever has had nothing for longest comes first.
            wanted.sort(key=lambda taker: self._served.get(taker[0], -1))
            dues = [await self._call(*taker) for taker in wanted]
        except DelayqError as error:
            for _, taker in takers:
                taker.fail(error)
            raise
        finally:
            for _, taker in takers:
                taker.over()
        due = 0 if 0 in dues else dues[-1]
        if due and self.waiting:
            self._watch.start()
        return due

    async def _call(self, lease_us: int, taker: Taker[Any]) -> int:
        keys, number = self.keys, next(self._calls)
        # Of one length, for ACL patterns; what a call leaves behind is long gone when its number comes again.
        call = f"{self._token}-{number % 10**8:08}"
        taken_key = keys.taken(call)

        def confirm(answer: Any) -> tuple[str, ...] | None:
            return ("UNLINK", taken_key) if answer[-1] and not lease_us else None

        take = min(taker.begin(), BATCH)
        asked_at = self._clock.local()
        try:
            now, wait, moved, poison, returned, left, listeners, payloads = await self._server.run_once(
                TRANSFER,
                (keys.ready, keys.timeout, keys.ordered, keys.quarantine, taken_key, keys.leases, keys.leased, keys.turns),
                (BATCH, take, KEEP_MS, lease_us, call, self.pushes.signature()),
                confirm,
            )
        except OutcomeUnknown:
            if take:
                self._unsure = call, take, lease_us
            raise
        self._clock.observe(now, asked_at)
        if moved < BATCH:
            # One that is due in this very millisecond may be offered yet.
            self.pushes.settled(now - now % 1000)
        if poison:
            self.quarantined += poison
            _log.warning(
                "queue %r: %d unreadable records moved to %r", keys.name, poison, keys.quarantine, extra=about(keys.name)
            )
        if returned:
            self.returned += returned
            _log.warning(
                "queue %r: the lease of %d messages ended, they are ready again", keys.name, returned, extra=about(keys.name)
            )
        if payloads:
            self._served[lease_us] = number
        if lease_us:
            ends_ms = -(-(now + lease_us) // 1000)
            taker.end(Lease(token(call, place), payload, ends_ms) for place, payload in enumerate(payloads, 1))
        else:
            taker.end(payloads)
        self._emptied = not left
        if moved:
            self.pushes.found(listeners)
        return 0 if left and taker.waiting else due_us(now, wait)

    async def _recover(self) -> None:
        """Settle what the last call handed out, if its answer was lost, so that it reaches somebody after all."""
        if self._unsure is None:
            return
        call, take, lease_us = self._unsure
        if lease_us:
            await self.leases.release([token(call, place) for place in range(1, take + 1)])
            self._unsure = None
            return
        taken_key = self.keys.taken(call)
        payloads = await self._server.run(RECOVER, (taken_key,), (FENCE_MS,))
        self._unsure = None
        if payloads:
            self.taker.receive(payloads)
            await self._server.command("UNLINK", taken_key)

    async def aclose(self, grace: float) -> None:
        """Stop, within ``grace`` seconds, and bring back what was taken for nobody."""
        self.pushes.close()
        self._watch.close()
        takers: list[Taker[Any]] = [self.taker, *self._lessees.values()]
        for taker in takers:
            taker.close()
        await self.pushes.aclose(grace)
        with suppress(ServerError, TimeoutError):
            async with asyncio.timeout(grace / 2):
                await self._recover()
        await asyncio.gather(self.leases.aclose(grace / 2), *(taker.aclose(grace / 2) for taker in takers))

    def _idle(self) -> None:
        if not self.waiting:
            self._watch.idle()

    def _new_taker(self, put_back: Callable[[Sequence[Any], str], Awaitable[None]]) -> Taker[Any]:
        return Taker(
            self.keys.name,
            self._services,
            push=self.pushes.push,
            wanted=self._wanted,
            idle=self._idle,
            put_back=put_back,
        )

    def _wanted(self) -> None:
        """Somebody waits. There is nothing to ask where the ready list was empty, and is watched since."""
        if self._emptied and self._watch.is_watching and self.pushes.knows:
            self._watch.start()
        else:
            self.pushes.push()

    async def _put_back(self, payloads: Sequence[bytes], call: str) -> None:
        marker = self.keys.marker(call)
        keys = (self.keys.ready, marker)
        if call != self._unsure_back:
            try:
                await self._server.run_once(GIVE_BACK, keys, payloads, lambda _: ("UNLINK", marker))
            except OutcomeUnknown:
                self._unsure_back = call
            else:
                return
        # The first try may arrive yet, after this one: the marker that makes it do nothing stays until it expires.
        try:
            await self._server.run(GIVE_BACK, keys, payloads)
        except ServerUnavailable as error:
            raise OutcomeUnknown(str(error)) from error.__cause__

    async def _release(self, leases: Sequence[Lease], _call: str) -> None:
        await self.leases.release([lease.token for lease in leases])
