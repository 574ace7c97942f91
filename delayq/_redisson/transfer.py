"""The transfer task: moves one queue's due messages, and hands them to the callers here."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from delayq._engine.context import Counters
from delayq._engine.dispatcher import ClaimSource, Dispatcher
from delayq._engine.lease_keeper import LeaseKeeper
from delayq._engine.wakeup import WakeupLoop
from delayq._engine.wakeup_plan import DUE_NOW, CallOutcome, moment_after
from delayq._logging import about
from delayq._redis.return_calls import ReturnCall
from delayq._redisson.delivery import Lease, LeaseAcknowledger
from delayq._redisson.ready_watch import ReadyWatch
from delayq._redisson.store import BATCH
from delayq._redisson.take_calls import TakeCalls
from delayq.errors import DelayqError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.caller_queue import CallerQueue
    from delayq._engine.context import Channels, EngineContext
    from delayq._engine.store import NextDue
    from delayq._engine.wakeup_plan import NextCall
    from delayq._redis.return_calls import ShutdownCalls
    from delayq._redisson.store import DelayedStore, Transferred

_log = logging.getLogger("delayq")

# How long giving back may hold up the next transfer, which would otherwise overtake it, in seconds.
RETURN_WITHIN = 1.0


@dataclass(frozen=True, slots=True)
class LeasedCallers:
    """The callers that take under leases of the same length, which ``keeper`` renews."""

    dispatcher: Dispatcher[Lease]
    keeper: LeaseKeeper[Lease]

    @property
    def is_idle(self) -> bool:
        """Whether no caller is taking, and nothing is held or on its way back."""
        return self.dispatcher.is_idle and not self.keeper.count


class TransferTask:
    """Asks the server to move the due messages of one queue, and to hand over those wanted here."""

    def __init__(self, store: DelayedStore, services: EngineContext) -> None:
        self.counts: Counters = Counters()
        self._store = store
        self._services = services
        self.take_calls: TakeCalls = TakeCalls(store, services)
        self.wakeups: WakeupLoop = WakeupLoop(
            store.keys.name,
            self.transfer_once,
            replace(services, listen=self._listen),
            lambda: self.has_patient_callers,
        )
        self._watch = ReadyWatch(store, services, self.wakeups.wake)
        self.acknowledger: LeaseAcknowledger = LeaseAcknowledger(
            store, services, self.wakeups.on_due, self.counts
        )
        source: ClaimSource[bytes] = self._new_source(self.take_calls.return_payloads, len)
        self.dispatcher: Dispatcher[bytes] = source.dispatcher
        # By the length of their leases (0: for good), those that have waited longest first.
        self._sources: dict[int, ClaimSource[Any]] = {0: source}
        self._leased: dict[int, LeasedCallers] = {}
        # Whether the ready list was empty when we last looked.
        self._emptied = False
        # Whether the server has said that we may not move anything.
        self._forbidden = False

    @property
    def has_patient_callers(self) -> bool:
        """Whether a caller waits for messages that are still to come."""
        return any(callers.has_patient_callers for callers in self._caller_queues)

    @property
    def _caller_queues(self) -> list[CallerQueue[Any]]:
        return [source.dispatcher.caller_queue for source in self._sources.values()]

    @property
    def lease_count(self) -> int:
        """Number of messages whose leases are being renewed."""
        return sum(callers.keeper.count for callers in self._leased.values())

    def leased_callers(self, lease_us: int) -> LeasedCallers:
        """Return the callers that take under a lease of ``lease_us`` microseconds."""
        if lease_us not in self._leased:
            for unused in [length for length, callers in self._leased.items() if callers.is_idle]:
                self._leased.pop(unused).keeper.close()
                del self._sources[unused]
            source: ClaimSource[Lease] = self._new_source(self._release, lambda _: 0)
            keeper = LeaseKeeper(
                self._store.keys.name, lease_us, self.acknowledger.extend, self._services
            )
            self._leased[lease_us] = LeasedCallers(source.dispatcher, keeper)
            self._sources = {lease_us: source, **self._sources}
        return self._leased[lease_us]

    def on_recheck(self, due_us: int, next_due: NextDue) -> None:
        """Act on the re-check, which found the next due time and the number of ready payloads."""
        self.take_calls.confirm_in_doubt()
        if next_due.ready_or_schedules:
            self._watch.overlooked()
        if next_due.ready_or_schedules and self.has_patient_callers:
            self.wakeups.wake()
        self.wakeups.on_recheck(due_us, next_due)

    @property
    def watches(self) -> bool:
        """Whether it needs the re-check, because moving is not left to other processes."""
        return not self._forbidden or self.has_patient_callers

    async def transfer_once(self) -> NextCall:
        """Make one round of calls, and return when the next one is needed.

        For a user who may only offer, or only look, this moves nothing, and says so once. Callers
        that cannot wait receive the errors of :meth:`RedisClient.run_once`.
        """
        has_callers = any(
            callers.has_patient_callers or callers.wants_items for callers in self._caller_queues
        )
        if self._forbidden and not has_callers:
            return CallOutcome.NO_CALLERS
        try:
            due_us = await self._transfer_once()
        except ServerRefused as error:
            # NOPERM: nothing was carried out. A caller that waits must learn of it all the same.
            if not str(error).startswith("NOPERM") or has_callers:
                raise
            self._forbidden = True
            self._warn("no permission to move due messages, so other processes have to: %s", error)
            return CallOutcome.NO_CALLERS
        self._forbidden = False
        return due_us

    async def _transfer_once(self) -> int:
        sources = [*self._sources.items()]
        try:
            await self.take_calls.recover()
            # Messages on their way back come first.
            for _, source in sources:
                await source.return_queue.drain(RETURN_WITHIN)
            # The callers that have had nothing for longest come first.
            asking = [item for item in sources if item[1].is_wanted]
            moments = [await self._call(*item) for item in asking or [(0, self._sources[0])]]
        except DelayqError as error:
            for _, source in sources:
                source.fail_claim(error)
            raise
        finally:
            for _, source in sources:
                source.end_claim()
        due_us = DUE_NOW if DUE_NOW in moments else moments[-1]
        is_dormant = self.wakeups.plan.stagger.is_dormant
        if due_us != DUE_NOW and self.has_patient_callers and not is_dormant:
            self._watch.start()
        return due_us

    async def _call(self, lease_us: int, source: ClaimSource[Any]) -> int:
        take = source.begin_claim(BATCH).size
        wakeups = self.wakeups
        call, reply = await self.take_calls.transfer(
            take, lease_us, wakeups.signature(), wakeups.timer_at
        )
        if reply.due_count < BATCH:
            self.wakeups.handed_out(reply.settled_us)
        self._count(reply)
        if reply.payloads and lease_us in self._sources:
            self._sources[lease_us] = self._sources.pop(lease_us)
        source.deliver(
            self.acknowledger.create(call, reply, lease_us) if lease_us else reply.payloads,
            has_more=reply.ready_count > 0 or reply.wait_us == 0,
        )
        self._emptied = not reply.ready_count
        if reply.due_count:
            self.wakeups.took_messages(reply.listeners)
        if reply.ready_count:
            self.wakeups.more_is_due(partial(self._store.summon, max(1, take)))
        return (
            DUE_NOW
            if reply.ready_count and source.is_wanted
            else moment_after(reply.now_us, reply.wait_us)
        )

    def _count(self, reply: Transferred) -> None:
        """Count and log the unreadable records and the ended leases that a call found."""
        if reply.quarantined:
            self.counts.quarantined += reply.quarantined
            self._warn(
                "moved %d unreadable records to %r", reply.quarantined, self._store.keys.quarantine
            )
        if reply.returned:
            self.counts.lease_ended += reply.returned
            self._warn("the leases of %d messages ended, and they are ready again", reply.returned)

    def _warn(self, text: str, *args: object) -> None:
        name = self._store.keys.name
        _log.warning(f"queue %r: {text}", name, *args, extra=about(name))

    def _release(self, leases: Sequence[Lease]) -> ReturnCall:
        return ReturnCall(self._store.release_request([lease.token for lease in leases]))

    def close(self, last: ShutdownCalls) -> None:
        """Make no more calls, and write those that give back all undelivered messages."""
        self.wakeups.close()
        self._watch.close()
        self.take_calls.close(last)
        for callers in self._leased.values():
            callers.keeper.close()
        for source in self._sources.values():
            source.dispatcher.close(last)

    async def aclose(self, grace: float) -> None:
        """Wait until the calls written by :meth:`close` have arrived: ``grace`` seconds at most."""
        await asyncio.gather(
            self.acknowledger.aclose(grace),
            *(source.return_queue.aclose(grace) for source in self._sources.values()),
        )
        await self.wakeups.aclose(0)

    def _unwanted(self) -> None:
        if not self.has_patient_callers:
            self._watch.idle()

    def _new_source(
        self, return_call: Callable[[Sequence[Any]], ReturnCall], size: Callable[[Any], int]
    ) -> ClaimSource[Any]:
        dispatcher: Dispatcher[Any] = Dispatcher(
            self._services, on_join=self._on_caller_joined, on_last_left=self._unwanted
        )
        return dispatcher.add_source(
            self._store.keys.name, self.wakeups.wake, return_call=return_call, size=size
        )

    def _listen(self, to: Channels) -> None:
        """Watch the ready list only while this client listens: a push wakes all who watch."""
        self._services.listen(to)
        if to == "notices" and self.has_patient_callers:
            self._watch.start()
        elif to != "notices":
            self._watch.idle()

    def _on_caller_joined(self, nowait: bool) -> None:
        """Call the server, unless the caller waits and the list was empty and is watched since."""
        is_dormant = self.wakeups.plan.stagger.is_dormant
        if not nowait and not is_dormant and self._emptied and self._watch.is_watching:
            self._watch.start()
        else:
            self.wakeups.wake()
        self.wakeups.on_caller_joined()
