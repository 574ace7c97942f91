"""A delayed queue that is open on this client, shared by all handles of its name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from delayq._delayed.offers import Offers
from delayq._delayed.transfer import TransferTask
from delayq._engine.counters import Counts, Depth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._delayed.keys import DelayedKeys
    from delayq._engine.context import EngineContext
    from delayq._engine.stagger import TransferNotice
    from delayq._engine.wakeup import WakeupLoop
    from delayq._redis.hand_back import LastCalls
    from delayq.instrumentation import Hooks


class OpenDelayedQueue:
    """An open delayed queue: stores its messages and delivers them.

    Attributes:
        keys: The queue's keys.
        listed: Whether messages offered here are added to the ordered list.
        transfer: Moves due messages and hands them out.
        offers: Stores messages.
        counts: Counters of what was done.
        hooks: The observers to notify.
        closed: Whether the queue was closed.
    """

    def __init__(self, keys: DelayedKeys, services: EngineContext, *, listed: bool) -> None:
        self.keys: DelayedKeys = keys
        self.listed: bool = listed
        self.transfer: TransferTask = TransferTask(keys, services, listed=listed)
        self.counts: Counts = self.transfer.counts
        self.offers: Offers = Offers(keys, services, self.transfer.announced, self.counts, listed=listed)
        self.hooks: Hooks = services.hooks
        self._clock = services.clock
        self._server = services.server
        self.closed: bool = False

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def whole(self) -> str:
        return self.keys.name

    @property
    def channels(self) -> tuple[str, ...]:
        return (self.keys.channel, self.keys.turns)

    @property
    def kind(self) -> Literal["delayed"]:
        return "delayed"

    @property
    def pushes(self) -> WakeupLoop:
        return self.transfer.pushes

    def resync_keys(self) -> tuple[str, ...]:
        return (self.keys.timeout, self.keys.leases, self.keys.ready) if self.transfer.watches else ()

    def resynced(self, due_us: int, ready: int) -> None:
        self.transfer.resynced(due_us, ready)

    def heard(self, moment: int) -> None:
        self.transfer.announced(moment)

    def noticed(self, notice: TransferNotice) -> None:
        self.transfer.pushes.noticed(notice)

    def push(self) -> None:
        self.transfer.pushes.push()

    async def depth(self) -> Depth:
        """Return the number of messages in each state. The age covers only due messages that are still pending."""
        keys = self.keys
        pending, ready, leased, first = await asyncio.gather(
            self._server.command("ZCARD", keys.timeout),
            self._server.command("LLEN", keys.ready),
            self._server.command("ZCARD", keys.leases),
            self._server.command("ZRANGE", keys.timeout, 0, 0, "WITHSCORES"),
        )
        late = -self._clock.seconds_from_now(_score(first) * 1000) if first else 0.0
        return Depth(int(pending), int(ready), int(leased), 0, max(0.0, late), paused=False)

    async def count_due(self) -> int:
        """Return how many messages are due now and not taken, including those that are still pending."""
        now_ms = f"{-self._clock.seconds_from_now(0) * 1000:.0f}"
        ready, due = await asyncio.gather(
            self._server.command("LLEN", self.keys.ready), self._server.command("ZCOUNT", self.keys.timeout, "-inf", now_ms)
        )
        return int(ready) + int(due)

    def close(self, last: LastCalls) -> None:
        self.transfer.close(last)

    async def aclose(self, grace: float) -> None:
        await asyncio.gather(self.offers.aclose(grace), self.transfer.aclose(grace))


def _score(reply: Sequence[Any]) -> float:
    """Return the score in a ZRANGE reply, which is flat, or in pairs under RESP3."""
    return float(reply[0][1] if isinstance(reply[0], list | tuple) else reply[1])
