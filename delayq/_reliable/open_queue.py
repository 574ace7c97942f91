"""A reliable queue that is open on this client, shared by all handles of its name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from delayq._engine.counters import Counters
from delayq._engine.lease_keeper import LeaseKeeper
from delayq._reliable.acks import Acknowledger
from delayq._reliable.claims import Claims
from delayq._reliable.offers import ReliableOffers
from delayq._reliable.recurrence import Recurrence
from delayq._reliable.store import ReliableStore
from delayq.stats import QueueStats

if TYPE_CHECKING:
    from delayq._engine.context import EngineContext
    from delayq._engine.server_clock import ServerClock
    from delayq._engine.stagger import TransferNotice
    from delayq._engine.wakeup import WakeupLoop
    from delayq._redis.hand_back import LastCalls
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings import Policy
    from delayq.instrumentation import Hooks
    from delayq.stats import QueueDepth


class OpenReliableQueue:
    """An open reliable queue: stores its messages, claims them and settles them.

    Attributes:
        keys: The queue's keys.
        store: The queue's data on the server.
        offers: Stores messages.
        policy: This client's settings for the queue.
        claims: Claims due messages and hands them out.
        settling: Settles the messages that were handed out.
        keeper: Renews the leases of messages that are being handled.
        recurrence: Puts recurring messages in place.
        loop: The client's event loop.
        clock: The clock of the queue's server.
        counters: Counts of what was done.
        hooks: The observers to notify.
        closed: Whether the queue was closed.
    """

    def __init__(self, keys: ReliableKeys, policy: Policy, services: EngineContext) -> None:
        self.keys: ReliableKeys = keys
        self.store: ReliableStore = ReliableStore(services.server, keys)
        self.policy: Policy = policy
        self.counters: Counters = Counters()
        self.settling: Acknowledger = Acknowledger(self.store, policy, services, self.counters)
        self.keeper: LeaseKeeper[Claim] = LeaseKeeper(
            keys.name, policy.lease_us, self.settling, services
        )
        self.recurrence: Recurrence = Recurrence(self, services)
        self.claims: Claims = Claims(
            self.store,
            policy,
            services,
            settled=lambda: self.settling.done + self.keeper.lost,
            recurring=self.recurrence.follow_up,
        )
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.closed: bool = False
        self.offers: ReliableOffers = ReliableOffers(
            self.store, policy, services, self.counters, self.wake
        )
        self.clock: ServerClock = services.clock
        self.hooks: Hooks = services.hooks

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def whole(self) -> str:
        return self.keys.whole

    @property
    def channels(self) -> tuple[str, ...]:
        return (self.keys.wake,)

    @property
    def kind(self) -> Literal["reliable"]:
        return "reliable"

    @property
    def wakeups(self) -> WakeupLoop:
        return self.claims.wakeups

    def resync_keys(self) -> tuple[str, ...]:
        if self.claims.taker.waiting:
            return (*self.keys.live, self.keys.schedules)
        # The re-check skips this queue now, so the next caller has to look for itself.
        self.claims.wakeups.forget()
        return ()

    def resynced(self, due_us: int, extra: int) -> None:
        if extra:
            # Every consumer keeps the recurring messages going, whichever process scheduled them.
            self.recurrence.learn()
        self.claims.wakeups.on_next_due(due_us)

    @property
    def unit_us(self) -> int:
        return 1

    def on_due(self, due_us: int) -> None:
        self.claims.announced(due_us)

    def on_notice(self, notice: TransferNotice) -> None:
        self.claims.noticed(notice)

    def wake(self) -> None:
        self.claims.wakeups.wake()

    async def depth(self) -> QueueDepth:
        """Return the number of messages in each state."""
        return await self.store.depth()

    def stats(self) -> QueueStats:
        """Return what this client has done with the queue."""
        counters = self.counters
        return QueueStats(
            name=self.whole,
            kind=self.kind,
            offered=counters.offered,
            delivered=counters.delivered,
            acked=counters.acked,
            retried=counters.retried,
            dead=counters.buried + self.claims.died,
            released=counters.released,
            expired=self.claims.expired,
            errors=self.wakeups.errors,
            waiting=self.claims.taker.waiting,
        )

    def close(self, last: LastCalls) -> None:
        self.keeper.close()
        self.recurrence.close()
        self.claims.close(last)

    async def aclose(self, grace: float) -> None:
        await asyncio.gather(
            self.offers.aclose(grace), self.settling.aclose(grace), self.claims.aclose(grace)
        )
