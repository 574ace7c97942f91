"""One partition of an open reliable queue: the part of it that lies in one cluster slot."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from delayq._engine.context import Counters
from delayq._engine.lease_keeper import LeaseKeeper
from delayq._reliable.claims import ClaimAcknowledger, Claims
from delayq._reliable.ids import follower_id, home_of
from delayq._reliable.partition_offers import PartitionOffers
from delayq._reliable.recurrence import Recurrence
from delayq._reliable.store import ReliableStore
from delayq.errors import BadInput
from delayq.stats import QueueStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._engine.dispatcher import Dispatcher
    from delayq._engine.server_clock import ServerClock
    from delayq._engine.stagger import Notice
    from delayq._engine.store import NextDue
    from delayq._engine.wakeup import WakeupLoop
    from delayq._redis.return_calls import ShutdownCalls
    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.notifications import MessageNotifications
    from delayq._reliable.replies import Claim
    from delayq._reliable.reports import Reports
    from delayq._reliable.settings_cache import SettingsCache

# Announced on the channel of the settings by cancel.lua, like each new epoch by configure.lua.
_CANCELLED = b"cancelled"
# Announced there by the scripts that end messages.
_FINISHED = b"finished"
# Announced there by progress.lua.
_PROGRESS = b"progress"


class PartitionOwner(Protocol):
    """The part of the open queue that its partitions use."""

    settings: SettingsCache
    dispatcher: Dispatcher[Claim]
    notifications: MessageNotifications
    reports: Reports

    @property
    def name(self) -> str: ...

    def probe(self, partitions: Sequence[Partition]) -> None:
        """Find out which of several partitions have something due."""
        ...

    def on_limits_changed(self, partitions: Sequence[Partition]) -> None:
        """Look for messages in these partitions again, because limits may let more run."""
        ...

    def close(self, last: ShutdownCalls) -> None:
        """Start nothing new in any partition."""
        ...

    async def on_partition_closed(self, index: int, deadline: float) -> None:
        """Report what remains, once the last calls of all partitions have ended."""
        ...


class Partition:
    """A partition: stores its messages, claims them and acknowledges them.

    Attributes:
        queue: The queue that it belongs to.
        index: Its number, from 0.
        keys: Its keys.
        store: Its data on the server.
        clock: The clock of its server.
        counters: Counts of what was done.
        claims: Claims due messages for the callers that wait.
        offers: Stores messages.
        is_listening: Whether this client listens to the queue, or has listened to it.
        closed: Whether the queue was closed.
    """

    kind: Literal["reliable"] = "reliable"
    unit_us: int = 1

    def __init__(
        self, queue: PartitionOwner, index: int, keys: ReliableKeys, services: EngineContext
    ) -> None:
        self.queue: PartitionOwner = queue
        self.index: int = index
        self.keys: ReliableKeys = keys
        self.store: ReliableStore = ReliableStore(services.server, keys)
        self.clock: ServerClock = services.clock
        self.counters: Counters = Counters()
        self._services = services
        # By the length of the leases, in microseconds.
        self._keepers: dict[int, LeaseKeeper[Claim]] = {}
        self.claims: Claims = Claims(
            self.store,
            index,
            services,
            queue.dispatcher,
            queue.settings,
            probe=lambda: queue.probe([self]),
            on_dropped=self._on_dropped,
        )
        self.offers: PartitionOffers = PartitionOffers(
            index,
            self.store,
            queue.settings,
            self.counters,
            services,
            wake=self.claims.wakeups.wake,
            report_soon=queue.reports.report_soon,
        )
        self.is_listening: bool = False
        self.closed: bool = False

    @property
    def name(self) -> str:
        """Its name on this client."""
        return self.keys.name

    @property
    def wakeups(self) -> WakeupLoop:
        """Makes its claims, when its plan says so."""
        return self.claims.wakeups

    # A client may offer to thousands of queues, and needs neither of these for that.

    @cached_property
    def acknowledger(self) -> ClaimAcknowledger:
        """Ends the leases of the messages that were handed out."""
        return ClaimAcknowledger(self.store, self._services, self.counters, self.queue.settings)

    @cached_property
    def recurrence(self) -> Recurrence:
        """Puts recurring messages in place."""
        return Recurrence(
            self.store,
            self.index,
            self._services,
            self.queue.dispatcher,
            free_slots=self.acknowledger.free_slots,
            clients=lambda: self.wakeups.plan.stagger.clients,
        )

    @property
    def acks_in_flight(self) -> int:
        """Number of acknowledgements in flight."""
        return self.acknowledger.in_flight if "acknowledger" in vars(self) else 0

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
    def running(self) -> int:
        """Number of messages that are being handled."""
        return sum(keeper.count for keeper in self._keepers.values())

    def oldest(self, limit: int) -> list[Claim]:
        """Return messages that are being handled, among them the ``limit`` oldest ones."""
        return [claim for keeper in self._keepers.values() for claim in keeper.oldest(limit)]

    def check_home(self, follower: OptionsMessage) -> None:
        """Check that a message that follows from one of this partition, and those that follow from
        it in turn, lie here.

        Raises:
            BadInput: The id or the group of one belongs to another partition.
        """
        partitions = self.queue.settings.stored.partitions
        if any(home_of(name, partitions) != self.index for name in follower.all_names):
            raise BadInput(
                "what follows from a message must lie in its partition: leave group and id out, and"
                " it does"
            )

    def with_ids(
        self, predecessor: bytes, followers: Iterable[OptionsMessage]
    ) -> list[OptionsMessage]:
        """Return all messages that follow from one of this partition, each with an id."""
        partitions = self.queue.settings.stored.partitions
        return [
            follower
            if follower.id
            else follower.with_id(follower_id(predecessor, number, self.index, partitions))
            for number, follower in enumerate(followers)
        ]

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
        if not self.is_listening and not self.closed:
            self.is_listening = True
            self._services.listen("notifications")

    def begin_recheck(self) -> tuple[str, ...]:
        self.queue.notifications.wake_all()
        if not self.index:
            self.queue.reports.report()
        if self.queue.dispatcher.caller_queue.has_patient_callers:
            return self.keys.recheck_keys
        self.wakeups.on_no_callers()
        return ()

    def on_recheck(self, due_us: int, next_due: NextDue) -> None:
        self.queue.settings.on_epoch(self.index, next_due.epoch.decode(errors="replace"))
        if next_due.ready_or_schedules:
            # Every consumer keeps the recurring messages going, whichever process scheduled them.
            self.recurrence.start_checks()
        self.wakeups.on_recheck(due_us, next_due)

    def on_due(self, due_us: int) -> None:
        if self.claims.source.is_wanted:
            self.wakeups.on_due(due_us)
        else:
            self.wakeups.plan.invalidate()

    def on_notice(self, notice: Notice) -> None:
        if self.claims.source.is_wanted:
            self.wakeups.on_notice(notice)
        elif notice.client != self.wakeups.plan.stagger.client:
            self.wakeups.plan.invalidate()

    def on_summons(self, number: int) -> None:
        self.wakeups.on_summons(number)

    def on_notification(self, content: bytes) -> None:
        kind, _, details = content.partition(b" ")
        if kind == _CANCELLED:
            token, _, id = details.partition(b" ")  # noqa: A001
            self.queue.notifications.on_cancelled((id, token))
            for keeper in self._keepers.values():
                keeper.lose(lambda claim: claim.lease_id == (id, token))
            self.claims.on_cancelled((id, token))
        elif kind in (_FINISHED, _PROGRESS):
            self.queue.notifications.on_changed(details)
        elif self.index:
            self.queue.on_limits_changed([self])
        else:
            # The settings of the first partition decide.
            self.queue.settings.on_change()

    def wake(self) -> None:
        self.wakeups.wake()

    def _on_dropped(self, occurrences: Sequence[bytes]) -> None:
        self.recurrence.on_dropped(occurrences)

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
            waiting=self.queue.dispatcher.caller_queue.has_patient_callers,
            in_flight=self.running,
            slots=counters.slots,
            free_slots=sum(free() for free in counters.free_slots),
        )

    def close(self, last: ShutdownCalls) -> None:
        self.queue.close(last)
        for keeper in self._keepers.values():
            keeper.close()
        if "recurrence" in vars(self):
            self.recurrence.close()

    async def aclose(self, grace: float) -> None:
        deadline = asyncio.get_running_loop().time() + grace
        await asyncio.gather(
            self.offers.aclose(grace), self.acknowledger.aclose(grace), self.claims.aclose(grace)
        )
        await self.queue.on_partition_closed(self.index, deadline)
