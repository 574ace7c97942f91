"""Decides when a client acts, by one subscription, one safety re-check, and each open queue's own
wake-ups.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from delayq._engine.server_clock import ServerClock
from delayq._engine.stagger import parse_notice, parse_number
from delayq._engine.store import recheck
from delayq._engine.subscriber import Subscriber
from delayq._engine.wakeup_plan import moment_after
from delayq._logging import log
from delayq._redis.return_calls import ShutdownCalls
from delayq.errors import ServerError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from delayq._engine.context import Channels, EngineContext
    from delayq._engine.stagger import Notice
    from delayq._engine.store import NextDue
    from delayq._redis.pool import ConnectionPool

_log = logging.getLogger("delayq")

# Maximum number of queues examined per script call, so that the script stays short.
_PARTS_AT_ONCE = 200
# After how many queues other tasks of the event loop have their turn.
_PARTS_PER_TURN = 50
# In a cluster, how long a server that hangs holds up the others, in seconds.
_SERVER_TIMEOUT = 1.0
# Grace period for calls in flight when a queue closes, in seconds. Two round trips are added to it.
_GRACE = 0.7
# Closing ends after this time in any case, in seconds.
_CLOSE_WITHIN = 8.0


class QueuePart(Protocol):
    """A delayed queue that is open on this client, or one partition of a reliable queue. The
    scheduler wakes each by itself, and both are called queues here.

    Attributes:
        closed: Whether it was closed.
        name: The queue's name on this client.
        channels: The channels that carry its announcements and notices. No other queue has the
            first one.
        summons: The channel on which dormant clients are called.
        notification_channels: The channels that carry notifications of changed settings, and of
            single messages. Dormant clients listen to them as well.
        kind: The name that ``recheck.lua`` has for this kind of queue.
        unit_us: The unit of the moments on its channels, in microseconds.
    """

    closed: bool

    @property
    def name(self) -> str: ...
    @property
    def channels(self) -> tuple[str, ...]: ...
    @property
    def summons(self) -> str: ...
    @property
    def notification_channels(self) -> tuple[str, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def unit_us(self) -> int: ...

    def begin_recheck(self) -> tuple[str, ...]:
        """Do what is due at each re-check, and return the keys to examine; none if this client does
        not need to know when the next message is due.

        This is called from the first time that the client listens to the queue.
        """
        ...

    def on_recheck(self, due_us: int, reply: NextDue) -> None:
        """Act on the reply to the re-check.

        The next message is due at ``due_us``, as in :mod:`delayq._engine.wakeup_plan`.
        """
        ...

    def on_due(self, due_us: int) -> None:
        """Act on an announcement: a message is due at ``due_us`` microseconds."""
        ...

    def on_notice(self, notice: Notice) -> None: ...
    def on_summons(self, number: int) -> None:
        """Act on a call for this number of the dormant clients."""
        ...

    def on_notification(self, content: bytes) -> None:
        """Act on a notification."""
        ...

    def wake(self) -> None: ...

    @property
    def is_dormant(self) -> bool:
        """Whether it needs no announcements and notices for now."""
        ...

    def close(self, last: ShutdownCalls) -> None:
        """Start nothing new, and write the calls that give back what reached no caller."""
        ...

    async def aclose(self, grace: float) -> None:
        """Wait for calls in flight, for at most ``grace`` seconds, after :meth:`close`."""
        ...


class _Pace:
    """When the queues are checked.

    Attributes:
        check_now: Set when some queues are to be checked now.
        recheck_at: When the next re-check of all queues is due, on the loop's clock.
        is_checking: Whether a check is under way.
    """

    def __init__(self) -> None:
        self.check_now = asyncio.Event()
        self.recheck_at = math.inf
        self.is_checking = False


Q = TypeVar("Q", bound=QueuePart)
T = TypeVar("T")


class Scheduler:
    """Wakes the queues of one client.

    Wake-ups come from four sources: each queue's timer, the channel, every (re)subscription, and
    the re-check. The re-check examines all queues in one call every ``resync_interval`` seconds,
    which limits the delay that a lost announcement can cause. After a subscription, it examines the
    queues that are subscribed.

    A queue to which the client only offers is neither subscribed nor checked, so a client may
    have as many as it has users.
    """

    def __init__(self, services: EngineContext) -> None:
        self.services: EngineContext = services
        self._parts: dict[str, QueuePart] = {}
        self._clocks: dict[QueuePart, ServerClock] = {}
        # Queues that the client listens to, or has listened to, and those to check soon.
        self._attended: dict[QueuePart, None] = {}
        self._unchecked: dict[QueuePart, None] = {}
        # Called at the next re-check, on behalf of queues.
        self._at_recheck: dict[Callable[[], bool], None] = {}
        self._acting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._acting.set_result(None)
        self._failing = False
        # Queues that were woken because the server refused to check them.
        self._woken: set[QueuePart] = set()
        self._pace = _Pace()
        self._recheck_task: asyncio.Task[Any] | None = None
        self.subscriber: Subscriber = Subscriber(
            services.nodes,
            services.background,
            self._on_message,
            self._on_subscribed,
            services.resync_interval,
            services.retry_most,
        )

    @property
    def parts(self) -> list[QueuePart]:
        """The open queues."""
        return list(dict.fromkeys(self._parts.values()))

    @property
    def overdue(self) -> float:
        """How long the next re-check has been overdue, in seconds. Other threads may read this.

        It is 0 while a check is under way, however long the server takes to answer.
        """
        if self._pace.is_checking:
            return 0.0
        return max(0.0, self.services.clock.local() - self._pace.recheck_at)

    def open(self, channel: str, make: Callable[[EngineContext], Q]) -> Q:
        """Open the queue whose announcements arrive on ``channel``, unless it is open already."""
        part = self._parts.get(channel)
        if part is not None:
            return part  # type: ignore[return-value]  # each kind of queue has its own channels
        services = replace(
            self.services,
            listen=lambda to: self._listen(new_part, to),
            at_recheck=self._at_recheck.setdefault,
        )
        if services.nodes.spread:
            # Each server has its own clock.
            services = replace(services, clock=ServerClock(services.clock.local))
        new_part = make(services)
        self._clocks[new_part] = services.clock
        for name in _every_channel(new_part):
            self._parts[name] = new_part
        if not new_part.is_dormant:
            self._listen(new_part, "notices")
        if self._recheck_task is None:
            self._recheck_task = self.services.background.spawn(self._run(), "recheck")
        return new_part

    def _listen(self, part: QueuePart, to: Channels) -> None:
        if (to == "nothing" and part not in self._attended) or (
            to == "notifications" and part in self._attended
        ):
            return
        if not part.closed:
            self._attended[part] = None
        if to != "notifications":
            channels = {"notices": part.channels, "summons": (part.summons,), "nothing": ()}[to]
            for channel in {*part.channels, part.summons}.difference(channels):
                self.subscriber.remove(channel)
            for channel in channels:
                self.subscriber.add(channel)
        for channel in part.notification_channels:
            self.subscriber.add(channel)

    def close(self, parts: Sequence[QueuePart]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Close queues that are still open.

        All messages that reached no caller are on their way back to the server before this returns.
        Await the function that it returns until they have arrived, or closing takes too long.
        """
        closing = [part for part in parts if not part.closed]
        round_trip = max(
            (connections.round_trip for connections in self.services.nodes.masters()), default=0.0
        )
        last, grace = ShutdownCalls(self.services.server, round_trip), _GRACE + 2 * round_trip
        for part in closing:
            part.closed = True
            for channel in _every_channel(part):
                del self._parts[channel]
                self.subscriber.remove(channel)
            del self._clocks[part]
            self._attended.pop(part, None)
            self._unchecked.pop(part, None)
            self._woken.discard(part)
            part.close(last)

        async def end() -> None:
            # Not gathered: a cancelled caller is not a closing that takes too long.
            ending = [
                self.services.background.spawn(part.aclose(grace), f"close {part.name}")
                for part in closing
            ]
            if ending:
                _, late = await asyncio.wait(ending, timeout=_CLOSE_WITHIN)
                for task in late:
                    task.cancel()

        return end

    async def recheck(self, parts: Sequence[QueuePart] | None = None) -> None:
        """Re-check queues, by default all that the client listens to, and wake those that need it.

        Raises:
            ServerError: The server could not be queried.
        """
        servers: dict[ConnectionPool | None, list[tuple[QueuePart, tuple[str, ...]]]] = {}
        async for part in _in_slices([*self._attended] if parts is None else parts):
            if not part.closed and (keys := part.begin_recheck()):
                servers.setdefault(self._server_of(keys[0]), []).append((part, keys))
        # A server that does not answer must not hold up the queues of the others.
        checks = (
            self.check(same_server, lambda part, due_us, reply: part.on_recheck(due_us, reply))
            for same_server in servers.values()
        )
        outcomes = await asyncio.gather(
            self.services.nodes.refresh(), *checks, return_exceptions=True
        )
        for error in outcomes:
            if error is not None:
                raise error

    async def check(
        self,
        parts: Sequence[tuple[Q, tuple[str, ...]]],
        on_reply: Callable[[Q, int, NextDue], object],
    ) -> None:
        """Check queues of one server, each with the keys to examine.

        Calls ``on_reply`` with each queue that is still open, and what :meth:`QueuePart.on_recheck`
        takes.

        Raises:
            ServerError: Some of the queues could not be checked.
        """
        batch_size = 1 if self.services.nodes.spread else _PARTS_AT_ONCE
        batches = [parts[start : start + batch_size] for start in range(0, len(parts), batch_size)]
        calls = [[(part.kind, keys) for part, keys in batch] for batch in batches]
        asked_at = self.services.clock.local()
        errors = []
        replies = zip(batches, await recheck(self.services.server, calls), strict=True)
        for number, (batch, reply) in enumerate(replies):
            if number:
                # Thousands of queues must not hold up the other tasks of the event loop.
                await asyncio.sleep(0)
            if isinstance(reply, BaseException):
                # A failed call must not keep the other queues from their results.
                errors.append(reply)
                continue
            for (part, _), next_due in zip(batch, reply.queues, strict=True):
                # The queue may have been closed in the meantime.
                if (clock := self._clocks.get(part)) is not None:
                    clock.observe(reply.now_us, asked_at)
                    on_reply(part, moment_after(reply.now_us, next_due.wait_us), next_due)
        if errors:
            raise errors[0]

    def _server_of(self, key: str) -> ConnectionPool | None:
        try:
            return self.services.nodes.pool_of(key)
        except ServerError:
            return None

    async def _run(self) -> None:
        timeout = _SERVER_TIMEOUT if self.services.nodes.spread else None
        now = asyncio.get_running_loop().time
        interval = self.services.resync_interval
        self._pace.recheck_at = now() + interval
        while True:
            try:
                async with asyncio.timeout_at(self._pace.recheck_at):
                    await self._pace.check_now.wait()
                # Confirmations for many queues arrive together, and one check serves them all.
                self._pace.check_now.clear()
            except TimeoutError:
                self._unchecked = dict(self._attended)
                # The interval runs from the start of a re-check, however long that takes.
                self._pace.recheck_at = now() + interval
                is_recheck = True
                if self._at_recheck and self._acting.done():
                    self._acting = self.services.background.spawn(self._act(), "reports")
            else:
                if is_recheck := len(self._unchecked) == len(self._attended):
                    # Clients that have subscribed together do not re-check together from then on.
                    self._pace.recheck_at = now() + random.random() * interval
            parts, self._unchecked = [*self._unchecked], {}
            check = self.services.background.spawn(self._check(parts, is_recheck), "check queues")
            self._pace.is_checking = True
            try:
                await asyncio.wait({check}, timeout=timeout)
            finally:
                self._pace.is_checking = False

    async def _act(self) -> None:
        """Do what queues have to do at a re-check, and spread it if there are many."""
        async for act in _in_slices([*self._at_recheck], pause=0.02):
            if not act():
                self._at_recheck.pop(act, None)

    def _on_subscribed(self, channel: str) -> None:
        if (part := self._parts.get(channel)) is not None:
            self._unchecked[part] = None
            self._pace.check_now.set()

    async def _check(self, parts: Sequence[QueuePart], is_recheck: bool) -> None:
        try:
            await self.recheck(None if is_recheck else parts)
            if is_recheck:
                self.services.nodes.prune()
        except Exception as error:  # noqa: BLE001 - the next check comes, whatever fails
            asleep = [part for part in parts if part not in self._woken]
            if isinstance(error, ServerRefused) and asleep:
                # We may lack the right to move one of the queues: its own call finds that out.
                self._woken.update(asleep)
                for part in asleep:
                    part.wake()
            elif not self._failing:
                self._failing = True
                unexpected = None if isinstance(error, ServerError) else error
                _log.warning(
                    "re-checking %d queues failed: %s", len(parts), error, exc_info=unexpected
                )
            await asyncio.sleep(min(1.0, self.services.retry_most))
            self._unchecked |= dict.fromkeys(part for part in parts if not part.closed)
            self._pace.check_now.set()
        else:
            self._failing = False
            self._woken.difference_update(parts)

    def _on_message(self, channel: str, content: bytes) -> None:
        part = self._parts.get(channel)
        if part is None:
            return
        if channel == part.summons:
            part.on_summons(parse_number(content) or 0)
            return
        if channel in part.notification_channels:
            part.on_notification(content)
            return
        if (notice := parse_notice(content)) is not None:
            part.on_notice(notice)
            return
        if (moment := parse_number(content)) is None:
            log(logging.WARNING, part.name, "received an announcement that is not a number")
            part.wake()
        else:
            part.on_due(moment * part.unit_us)


async def _in_slices(items: Sequence[T], pause: float = 0.0) -> AsyncIterator[T]:
    """Yield items, and let the event loop go on now and then, for ``pause`` seconds."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _PARTS_PER_TURN == 0:
            await asyncio.sleep(pause)


def _every_channel(part: QueuePart) -> tuple[str, ...]:
    return (*part.channels, part.summons, *part.notification_channels)
