"""A reliable queue that is open on this client, shared by all handles of its name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from delayq._engine.counters import Counters
from delayq._engine.lease_keeper import LeaseKeeper
from delayq._reliable.acks import Acknowledger
from delayq._reliable.claims import Claims
from delayq._reliable.known_settings import KnownSettings
from delayq._reliable.offers import ReliableOffers
from delayq._reliable.recurrence import Recurrence
from delayq._reliable.settings import DEFAULTS
from delayq._reliable.store import ReliableStore
from delayq.stats import QueueStats

if TYPE_CHECKING:
    from delayq._engine.context import EngineContext
    from delayq._engine.server_clock import ServerClock
    from delayq._engine.stagger import TransferNotice
    from delayq._engine.store import NextDue
    from delayq._engine.wakeup import WakeupLoop
    from delayq._redis.hand_back import LastCalls
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings import Policy, Settings, StoredSettings
    from delayq.codecs import Codec
    from delayq.instrumentation import Hooks
    from delayq.stats import QueueDepth


class OpenReliableQueue:
    """An open reliable queue: stores its messages, claims them and settles them.

    Attributes:
        keys: The queue's keys.
        store: The queue's data on the server.
        offers: Stores messages.
        settings: The queue's settings on the server, as far as this client knows them.
        given: The settings that handles on this client were given, each by the first that has it.
        codec: The first codec that a handle on this client was given.
        policy: The settings with which this client claims messages.
        claims: Claims due messages and hands them out.
        settling: Settles the messages that were handed out.
        keeper: Renews the leases of messages that are being handled.
        recurrence: Puts recurring messages in place.
        loop: The client's event loop.
        clock: The clock of the queue's server.
        counters: Counts of what was done.
        hooks: The observers to notify.
        closed: Whether the queue was closed.
        closing: A future that is done from then on.
        retry_most: Longest wait before a failed call is tried again, in seconds.
    """

    def __init__(self, keys: ReliableKeys, given: Settings, services: EngineContext) -> None:
        self.keys: ReliableKeys = keys
        self.store: ReliableStore = ReliableStore(services.server, keys)
        self.settings: KnownSettings = KnownSettings(
            keys.name, lambda _: self.store, services, self._settings_changed
        )
        self.given: Settings = given
        self.codec: Codec[Any] | None = None
        self.policy: Policy = given.inherit(DEFAULTS).policy()
        policy = self.policy
        self.counters: Counters = Counters()
        self.settling: Acknowledger = Acknowledger(self.store, policy, services, self.counters)
        self.keeper: LeaseKeeper[Claim] = LeaseKeeper(
            keys.name, policy.lease_us, self.settling, services
        )
        self.recurrence: Recurrence = Recurrence(self, services)
        self.claims: Claims = Claims(
            self.store,
            policy,
            self.settings,
            services,
            settled=lambda: self.settling.done + self.keeper.lost,
            recurring=self.recurrence.follow_up,
        )
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.closed: bool = False
        self.closing: asyncio.Future[None] = self.loop.create_future()
        self.retry_most: float = services.retry_most
        self.offers: ReliableOffers = ReliableOffers(
            self.store, self.settings, services, self.counters, self.wake
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
            return self.keys.re_checked
        # The re-check skips this queue now, so the next caller has to look for itself.
        self.claims.wakeups.forget()
        return ()

    def resynced(self, due_us: int, found: NextDue) -> None:
        self.settings.on_epoch(found.epoch.decode(errors="replace"))
        if found.extra:
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

    def on_settings(self) -> None:
        self.settings.on_change()

    def wake(self) -> None:
        self.claims.wakeups.wake()

    def _settings_changed(self, _: StoredSettings) -> None:
        if self.claims.taker.waiting:
            self.wake()

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
        self.closing.set_result(None)
        self.keeper.close()
        self.recurrence.close()
        self.claims.close(last)

    async def aclose(self, grace: float) -> None:
        await asyncio.gather(
            self.offers.aclose(grace), self.settling.aclose(grace), self.claims.aclose(grace)
        )
