"""The transfer task: moves what is due of one queue, and knows when to do so next."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delayq._redis.retry import retry_delay
from delayq._redis.scripts import GIVE_BACK, RECOVER, TRANSFER
from delayq._scheduling.last_timeout import LastTimeout
from delayq._scheduling.leases import Lease, Leases, token
from delayq._scheduling.ready_watch import ReadyWatch
from delayq._scheduling.taker import Taker
from delayq.errors import DelayqError, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._background import Background
    from delayq._redis.connections import Connections
    from delayq._redis.keys import DelayedKeys
    from delayq._redis.server import Server
    from delayq._scheduling.server_clock import ServerClock
    from delayq.timer import HashedWheelTimer

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
    """Pushes one queue: asks the server to move what is due and to hand over what is wanted here, one call at a time.

    A push is asked for by the queue's own timer, by a notification, by every (re)subscription, by the safety re-check,
    and by callers who want messages. Its answer says when the next message is due, and that arms the timer again.

    Attributes:
        taker: Those who take for good.
        leases: What is out under a lease.
        quarantined: Unreadable records found so far.
        returned: Messages found so far whose lease had ended.
    """

    def __init__(
        self,
        keys: DelayedKeys,
        server: Server,
        connections: Connections,
        timer: HashedWheelTimer,
        clock: ServerClock,
        background: Background,
        retry_most: float,
        *,
        listed: bool,
    ) -> None:
        self.keys: DelayedKeys = keys
        self._watch = ReadyWatch(keys, connections, timer, background, self.push, retry_most)
        self._timer = timer
        self._background = background
        self.leases: Leases = Leases(keys, server, background, clock, self.announced, listed=listed)
        self.taker: Taker[bytes] = self._new_taker(self._put_back)
        self._lessees: dict[int, Taker[Lease]] = {}
        self.last_timeout: LastTimeout = LastTimeout(timer, asyncio.get_running_loop().time, self.push)
        self._server = server
        self._clock = clock
        self._retry_most = retry_most
        self._task: asyncio.Task[Any] | None = None
        # The last call's name, how many it was to hand out, and for how long, if its answer was lost.
        self._unsure: tuple[str, int, int] | None = None
        # The push that is asked for: for a message due at this moment, ms; inf for whatever there is; None for none.
        self._asked: float | None = None
        # Everything due before this moment has been moved, ms.
        self._moved_through = 0
        self._failures = 0
        self._closed = False
        # Names this task's calls on the server.
        self._token = secrets.token_hex(6)
        self._calls = itertools.count()
        self._turns = itertools.count()
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

    def push(self, due_ms: float = math.inf) -> None:
        """Move what is due, now, or right after the push that is on its way."""
        if self._closed:
            return
        self._asked = due_ms if self._asked is None else max(self._asked, due_ms)
        if self._task is None:
            self._task = self._background.spawn(self._run(), f"transfer {self.keys.name}")

    def announced(self, due_ms: int) -> None:
        """Somebody says that a message is due at ``due_ms`` by the server's clock."""
        # One that is due in the very millisecond of the last push may have been offered after it.
        if due_ms < self._moved_through:
            return
        wait = self._clock.seconds_until(due_ms)
        if wait > 0:
            self.wake_in(wait)
        else:
            self.push(due_ms)

    def wake_in(self, seconds: float) -> None:
        """Push in ``seconds``, unless that is to happen earlier anyhow."""
        if not self._closed:
            self.last_timeout.arm(seconds)

    def resynced(self, wait_us: int, ready: int) -> None:
        """The safety re-check found the next one due in ``wait_us`` (-1: none) and ``ready`` payloads waiting."""
        if wait_us == 0 or (ready and self.waiting):
            self.push()
        elif wait_us > 0:
            self.wake_in(wait_us / 1_000_000)

    async def run_once(self) -> int:
        """One push. Returns the microseconds until the next one is due: 0 when it is already, -1 when there is none.

        Raises:
            ServerError: As :meth:`Server.run_once`. Who can wait waits on, the others have the error.
        """
        takers: list[tuple[int, Taker[Any]]] = [(0, self.taker), *self._lessees.items()]
        try:
            await self._recover()
            # What is on its way back comes first.
            for _, taker in takers:
                await taker.returned(RETURN_WITHIN)
            wanted = [taker for taker in takers if taker[1].wanted] or takers[:1]
            # Whoever was last comes first the next time.
            waits = [await self._call(*taker) for taker in (wanted if next(self._turns) % 2 else reversed(wanted))]
        except DelayqError as error:
            for _, taker in takers:
                taker.fail(error)
            raise
        return 0 if 0 in waits else waits[-1]

    async def _call(self, lease_us: int, taker: Taker[Any]) -> int:
        keys, call = self.keys, f"{self._token}-{next(self._calls):08}"
        taken_key = keys.taken(call)

        def confirm(answer: Any) -> tuple[str, ...] | None:
            return ("UNLINK", taken_key) if answer[5] and not lease_us else None

        take = min(taker.begin(), BATCH)
        try:
            now, wait, moved, poison, returned, payloads = await self._server.run_once(
                TRANSFER,
                (keys.ready, keys.timeout, keys.ordered, keys.quarantine, taken_key, keys.leases, keys.leased),
                (BATCH, take, KEEP_MS, lease_us, call),
                confirm,
            )
        except OutcomeUnknown:
            if take:
                self._unsure = call, take, lease_us
            raise
        self._clock.observe(now)
        if moved < BATCH:
            self._moved_through = now // 1000
        if poison:
            self.quarantined += poison
            _log.warning("queue %r: %d unreadable records moved to %r", keys.name, poison, keys.quarantine)
        if returned:
            self.returned += returned
            _log.warning("queue %r: the lease of %d messages ended, they are ready again", keys.name, returned)
        if lease_us:
            ends_ms = -(-(now + lease_us) // 1000)
            taker.end(Lease(token(call, place), payload, ends_ms) for place, payload in enumerate(payloads, 1))
        else:
            taker.end(payloads)
        if take and len(payloads) == take and taker.waiting:
            return 0  # there may be more
        return int(wait)

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
        self._closed = True
        self._asked = None
        self.last_timeout.disarm()
        self._watch.close()
        takers: list[Taker[Any]] = [self.taker, *self._lessees.values()]
        for taker in takers:
            taker.close()
        if (task := self._task) is not None:
            await asyncio.wait({task}, timeout=grace)
            task.cancel()
        with suppress(ServerError, TimeoutError):
            async with asyncio.timeout(grace / 2):
                await self._recover()
        await asyncio.gather(self.leases.aclose(grace / 2), *(taker.aclose(grace / 2) for taker in takers))

    async def _run(self) -> None:
        try:
            while self._asked is not None:
                asked, self._asked = self._asked, None
                if asked < self._moved_through:
                    continue
                self._act_on(await self._try_once())
        finally:
            self._task = None

    async def _try_once(self) -> int | None:
        try:
            return await self.run_once()
        except ServerError as error:
            self._failures += 1
            if self._failures == 1:
                _log.warning("queue %r: a transfer failed: %s", self.keys.name, error)
            return None

    def _act_on(self, wait: int | None) -> None:
        if wait is None:
            self.wake_in(retry_delay(self._failures, most=self._retry_most))
            return
        self._failures = 0
        if wait == 0:
            self.push()
        else:
            if wait > 0:
                self.wake_in(wait / 1_000_000)
            if self.waiting:
                self._watch.start()

    def _idle(self) -> None:
        if not self.waiting:
            self._watch.idle()

    def _new_taker(self, put_back: Callable[[Sequence[Any], str], Awaitable[None]]) -> Taker[Any]:
        return Taker(self.keys.name, self._timer, self._background, push=self.push, idle=self._idle, put_back=put_back)

    async def _put_back(self, payloads: Sequence[bytes], call: str) -> None:
        marker = self.keys.marker(call)
        await self._server.run(GIVE_BACK, (self.keys.ready, marker), payloads)
        with suppress(DelayqError):
            await self._server.command("UNLINK", marker)

    async def _release(self, leases: Sequence[Lease], _call: str) -> None:
        await self.leases.release([lease.token for lease in leases])
