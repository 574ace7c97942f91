"""One partition of an open reliable queue: the part of it that lies in one cluster slot."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from delayq._engine.context import Counters
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
    from delayq._engine.store import NextDue
    from delayq._engine.wakeup import WakeupLoop
    from delayq._redis.hand_back import LastCalls
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.replies import Claim

# Announced on the channel of the settings by cancel.lua, like each new epoch by configure.lua.
_CANCELLED = b"cancelled"
# Announced there by the scripts that end messages.
_FINISHED = b"finished"


class Partition:
    """A partition: stores its messages, claims them and settles them.

    Attributes:
        queue: The queue that it belongs to.
        index: Its number, from 0.
        keys: Its keys.
        store: Its data on the server.
        counters: Counts of what was done.
        claims: Claims due messages for the callers that wait.
        offers: Stores messages.
        closed: Whether the queue was closed.
    """

    def __init__(
        self, queue: OpenReliableQueue, index: int, keys: ReliableKeys, services: EngineContext
    ) -> None:
        self.queue: OpenReliableQueue = queue
        self.index: int = index
        self.keys: ReliableKeys = keys
        self.store: ReliableStore = ReliableStore(services.server, keys)
        self.counters: Counters = Counters()
        self._services = services
        # By the length of the leases, in microseconds.
        self._keepers: dict[int, LeaseKeeper[Claim]] = {}
        self.claims: Claims = Claims(self, services)
        self.offers: ReliableOffers = ReliableOffers(self, services)
        self.closed: bool = False

    # A client may offer to thousands of queues, and needs neither of these for that.

    @cached_property
    def acknowledger(self) -> Acknowledger:
        """Settles the messages that were handed out."""
        return Acknowledger(self.store, self._services, self.counters, self.queue.settings)

    @cached_property
    def recurrence(self) -> Recurrence:
        """Puts recurring messages in place."""
        return Recurrence(self, self._services)

    @property
    def acks_in_flight(self) -> int:
        """Number of acknowledgements in flight."""
        return self.acknowledger.in_flight if "acknowledger" in vars(self) else 0

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def channels(self) -> tuple[str, ...]:
        return (self.keys.wake,)

    @property
    def summons(self) -> str:
        return self.keys.summons

    @property
    def notification_channels(self) -> tuple[str, ...]:
        return (self.keys.settings,)

    @property
    def is_dormant(self) -> bool:
        return self.wakeups.plan.stagger.is_dormant

    @property
    def kind(self) -> Literal["reliable"]:
        return "reliable"

    @property
    def clock(self) -> ServerClock:
        """The clock of the partition's server."""
        return self._services.clock

    @property
    def wakeups(self) -> WakeupLoop:
        """Decides when to claim."""
        return self.claims.wakeups

    @property
    def running(self) -> int:
        """Number of messages that are being handled."""
        return sum(keeper.held for keeper in self._keepers.values())

    def oldest(self, most: int) -> list[Claim]:
        """Return messages that are being handled, among them the ``most`` oldest ones."""
        return [claim for keeper in self._keepers.values() for claim in keeper.oldest(most)]

    def keeper(self, lease_us: int) -> LeaseKeeper[Claim]:
        """Return the keeper of leases of this length."""
        self.listen()
        if lease_us not in self._keepers:
            self._keepers[lease_us] = LeaseKeeper(
                self.name, lease_us, self.acknowledger.extend, self._services
            )
        return self._keepers[lease_us]

    def listen(self) -> None:
        """Listen to the queue from now on, because this client does more than to offer to it."""
        if not self.closed:
            self._services.listen("notifications")

    def resync_keys(self) -> tuple[str, ...]:
        self.queue.notifications.look_again()
        if not self.index:
            self.queue.reports.look()
        if self.queue.dispatcher.callers.are_waiting:
            return self.keys.re_checked
        self.wakeups.on_no_callers()
        return ()

    def resynced(self, due_us: int, found: NextDue) -> None:
        self.queue.settings.on_epoch(self.index, found.epoch.decode(errors="replace"))
        if found.extra:
            # Every consumer keeps the recurring messages going, whichever process scheduled them.
            self.recurrence.attend()
        self.wakeups.on_recheck(due_us, found)

    @property
    def unit_us(self) -> int:
        return 1

    def on_due(self, due_us: int) -> None:
        self.claims.announced(due_us)

    def on_notice(self, notice: TransferNotice) -> None:
        self.claims.noticed(notice)

    def on_summons(self, number: int) -> None:
        self.wakeups.on_summons(number)

    def on_notification(self, content: bytes) -> None:
        what, _, rest = content.partition(b" ")
        if what == _CANCELLED:
            token, _, id = rest.partition(b" ")  # noqa: A001
            self.queue.notifications.on_cancelled((id, token))
            for keeper in self._keepers.values():
                keeper.lose(lambda claim: claim.name == (id, token))
            self.claims.cancelled((id, token))
        elif what == _FINISHED:
            self.queue.notifications.on_finished(rest)
        elif self.index:
            self.queue.on_limits_changed([self])
        else:
            # The settings of the first partition decide.
            self.queue.settings.on_change()

    def wake(self) -> None:
        self.wakeups.wake()

    def stats(self) -> QueueStats:
        """Return what this client has done with the partition."""
        counters = self.counters
        return QueueStats(
            name=self.queue.name,
            kind=self.kind,
            offered=counters.offered,
            delivered=counters.delivered,
            acked=counters.acked,
            retried=counters.retried,
            dead=counters.buried + self.claims.died,
            released=counters.released,
            expired=self.claims.expired,
            errors=self.wakeups.errors,
            waiting=self.queue.dispatcher.callers.are_waiting,
            in_flight=self.running,
            slots=counters.slots,
            free_slots=sum(free() for free in counters.free_slots),
        )

    def close(self, last: LastCalls) -> None:
        self.queue.close(last)
        for keeper in self._keepers.values():
            keeper.close()
        if "recurrence" in vars(self):
            self.recurrence.close()

    async def aclose(self, grace: float) -> None:
        until = self.queue.loop.time() + grace
        await asyncio.gather(
            self.offers.aclose(grace), self.acknowledger.aclose(grace), self.claims.aclose(grace)
        )
        await self.queue.reports.aclose(self.index, until)
