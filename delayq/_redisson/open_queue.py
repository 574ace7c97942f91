"""A delayed queue that is open on this client, shared by all handles of its name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from delayq._engine.batcher import Batcher
from delayq._engine.durability import DurableBatchers
from delayq._redisson.records import UNIT_US
from delayq._redisson.store import DelayedStore
from delayq._redisson.transfer import TransferTask
from delayq.stats import QueueDepth, QueueStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import Counters, EngineContext
    from delayq._engine.durability import Results
    from delayq._engine.stagger import Notice
    from delayq._engine.store import NextDue
    from delayq._engine.wakeup import WakeupLoop
    from delayq._redis.client import RedisClient
    from delayq._redis.pipeline import WaitingServer
    from delayq._redis.return_calls import ShutdownCalls
    from delayq._redis.scripts import Request
    from delayq._redisson.keys import DelayedKeys
    from delayq._redisson.records import Offer, Stored
    from delayq.errors import OutcomeUnknown
    from delayq.instrumentation import Hooks

# Most messages, and bytes, in one script call, which blocks the whole server while it runs.
MESSAGES_AT_A_TIME = 200
_BYTES_AT_A_TIME = 256 * 1024


class OpenDelayedQueue:
    """An open delayed queue: stores its messages and delivers them."""

    kind: Literal["delayed"] = "delayed"
    notification_channels: tuple[str, ...] = ()
    unit_us: int = UNIT_US

    def __init__(self, keys: DelayedKeys, services: EngineContext, *, listed: bool) -> None:
        self.keys: DelayedKeys = keys
        self.name: str = keys.name
        self.channels: tuple[str, ...] = (keys.channel, keys.turns)
        self.store: DelayedStore = DelayedStore(services.server, keys, listed=listed)
        self.transfer: TransferTask = TransferTask(self.store, services)
        self.wakeups: WakeupLoop = self.transfer.wakeups
        self.counts: Counters = self.transfer.counts
        self.offers: DurableBatchers[Offer, Stored] = _batched_offers(
            self.store, services, self.wakeups.on_due, self.counts
        )
        self.hooks: Hooks = services.hooks
        self._clock = services.clock
        self.closed: bool = False

    @property
    def summons(self) -> str:
        return self.keys.summons

    @property
    def is_dormant(self) -> bool:
        return self.wakeups.plan.stagger.is_dormant

    def begin_recheck(self) -> tuple[str, ...]:
        if self.transfer.watches:
            return self.store.recheck_keys
        self.wakeups.on_no_callers()
        return ()

    def on_recheck(self, due_us: int, next_due: NextDue) -> None:
        self.transfer.on_recheck(due_us, next_due)

    def on_due(self, due_us: int) -> None:
        self.wakeups.on_due(due_us)

    def on_notice(self, notice: Notice) -> None:
        self.wakeups.on_notice(notice)

    def on_summons(self, number: int) -> None:
        self.wakeups.on_summons(number)

    def on_notification(self, _content: bytes) -> None:
        """Do nothing: only a reliable queue has settings on the server."""

    def wake(self) -> None:
        self.wakeups.wake()

    async def depth(self) -> QueueDepth:
        """Return the number of messages in each state. The age is that of pending messages only."""
        depth = await self.store.depth()
        return depth.of_queue(-self._clock.seconds_from_now(0) * 1_000_000, quarantined=None)

    def stats(self) -> QueueStats:
        """Return what this client has done with the queue."""
        counts, transfer = self.counts, self.transfer
        return QueueStats(
            name=self.name,
            kind=self.kind,
            offered=counts.offered,
            delivered=counts.delivered,
            acked=counts.acked,
            retried=counts.retried,
            lease_ended=counts.lease_ended,
            quarantined=counts.quarantined,
            errors=self.wakeups.errors,
            waiting=transfer.has_patient_callers,
            in_flight=transfer.lease_count,
        )

    async def count_due(self) -> int:
        """Return how many messages are due now and not taken, including those still pending."""
        now_us = -self._clock.seconds_from_now(0) * 1_000_000
        ready, due = await asyncio.gather(
            self.store.count_ready(), self.store.count_due(None, now_us)
        )
        return ready + due

    def close(self, last: ShutdownCalls) -> None:
        self.transfer.close(last)

    async def aclose(self, grace: float) -> None:
        await asyncio.gather(self.offers.aclose(grace), self.transfer.aclose(grace))


def _batched_offers(
    store: DelayedStore, services: EngineContext, on_due: Callable[[int], None], counts: Counters
) -> DurableBatchers[Offer, Stored]:
    """Return what stores the messages of one queue; an item is as large as its payload.

    ``on_due`` is called with the earliest due time of stored messages, in microseconds.
    """

    def results(offers: Sequence[Offer], reply: list[Any]) -> list[Stored]:
        first_us, stored = store.parse_offered(offers, reply)
        counts.offered += len(stored)
        # Our own subscription reports this as well, unless it is interrupted at the moment.
        on_due(first_us)
        return stored

    def new(
        server: RedisClient | WaitingServer, reading: Callable[[Results], Results]
    ) -> Batcher[Offer, Any]:
        async def repeat(
            request: Request, _offers: Sequence[Offer], error: OutcomeUnknown | None
        ) -> Any:
            if error is not None:
                # If the first try was carried out, a repetition stores everything twice.
                raise error
            return await server.run(*request)

        return Batcher(
            server,
            services.background,
            request=lambda offers, _: store.offer_request(offers),
            repeat=repeat,
            results=reading(results),
            max_items=MESSAGES_AT_A_TIME,
            max_size=_BYTES_AT_A_TIME,
            expires=True,
        )

    return DurableBatchers(services.server, store.keys.timeout, new)
