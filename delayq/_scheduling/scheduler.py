"""All that decides when a client acts: one subscription, one safety re-check, one transfer task per queue."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._redis.scripts import RESYNC
from delayq._scheduling.offers import Offers
from delayq._scheduling.server_clock import ServerClock
from delayq._scheduling.subscriber import Subscriber
from delayq._scheduling.transfer import TransferTask
from delayq.errors import ConfigurationError, ServerError

if TYPE_CHECKING:
    from delayq._background import Background
    from delayq._redis.connections import Connections
    from delayq._redis.keys import DelayedKeys
    from delayq._redis.server import Server
    from delayq.timer import HashedWheelTimer

_log = logging.getLogger("delayq")

# Queues looked at in one script, so that it stays short.
_AT_A_TIME = 200


@dataclass(eq=False, slots=True)
class OpenQueue:
    """A queue that is open on this client, for every handle of that name."""

    keys: DelayedKeys
    listed: bool
    transfer: TransferTask
    offers: Offers
    closed: bool = False


class Scheduler:
    """Runs the transfer tasks of one client's queues.

    Wake-ups come from four sides: each queue's timer, the channel, every (re)subscription, and the re-check, which looks
    at all queues in one call every ``resync_interval`` seconds and so bounds what a lost notification can do.
    """

    def __init__(
        self,
        server: Server,
        connections: Connections,
        timer: HashedWheelTimer,
        background: Background,
        resync_interval: float,
    ) -> None:
        self._server = server
        self._connections = connections
        self._timer = timer
        self._background = background
        self._interval = resync_interval
        # Nobody shall wait longer for a retry than for the re-check.
        self._retry_most = min(5.0, resync_interval)
        self._clock = ServerClock(asyncio.get_running_loop().time)
        self._queues: dict[str, OpenQueue] = {}
        self._check_now = asyncio.Event()
        self._resync: asyncio.Task[Any] | None = None
        self.subscriber: Subscriber = Subscriber(
            connections, background, self._heard, self._check_now.set, resync_interval, self._retry_most
        )

    @property
    def queues(self) -> list[OpenQueue]:
        """The open queues."""
        return list(self._queues.values())

    def open(self, keys: DelayedKeys, *, listed: bool) -> OpenQueue:
        """Open a queue, or find it open.

        Args:
            keys: Its keys.
            listed: Whether what is offered here goes into the ordered list.

        Raises:
            ConfigurationError: It is open with another ``listed``.
        """
        queue = self._queues.get(keys.channel)
        if queue is None:
            transfer = TransferTask(
                keys,
                self._server,
                self._connections,
                self._timer,
                self._clock,
                self._background,
                self._retry_most,
                listed=listed,
            )
            offers = Offers(keys, self._server, self._background, transfer.announced, listed=listed)
            queue = OpenQueue(keys, listed, transfer, offers)
            self._queues[keys.channel] = queue
            self.subscriber.add(keys.channel)
            if self._resync is None:
                self._resync = self._background.spawn(self._run(), "resync")
        elif queue.listed != listed:
            raise ConfigurationError(f"queue {keys.name!r} is open on this client with ordered_list={queue.listed}")
        return queue

    async def close(self, queue: OpenQueue, grace: float) -> None:
        """Close a queue: what is on its way has ``grace`` seconds. Closing twice does nothing."""
        if not queue.closed:
            queue.closed = True
            del self._queues[queue.keys.channel]
            self.subscriber.remove(queue.keys.channel)
            await asyncio.gather(queue.offers.aclose(grace), queue.transfer.aclose(grace))

    async def run_once(self) -> None:
        """The re-check: look at every queue, and wake those that need it.

        Raises:
            ServerError: The server could not be asked.
        """
        queues = self.queues
        for at in range(0, len(queues), _AT_A_TIME):
            some = queues[at : at + _AT_A_TIME]
            keys = [key for queue in some for key in (queue.keys.timeout, queue.keys.leases, queue.keys.ready)]
            now, *facts = await self._server.run(RESYNC, keys)
            self._clock.observe(now)
            for queue, wait_us, ready in zip(some, facts[::2], facts[1::2], strict=True):
                queue.transfer.resynced(wait_us, ready)

    async def _run(self) -> None:
        failing = False
        while True:
            try:
                async with asyncio.timeout(self._interval):
                    await self._check_now.wait()
                # Confirmations of many queues arrive together: one look serves them all.
                self._check_now.clear()
            except TimeoutError:
                pass
            try:
                await self.run_once()
                await self._connections.prune()
            except ServerError as error:
                if not failing:
                    _log.warning("the re-check of %d queues failed: %s", len(self._queues), error)
                failing = True
                # A call that could not be sent has been tried for a while itself; one that was refused comes back at once.
                await asyncio.sleep(min(1.0, self._retry_most))
                self._check_now.set()
            else:
                failing = False

    def _heard(self, channel: str, content: bytes) -> None:
        queue = self._queues.get(channel)
        if queue is None:
            return
        try:
            due_ms = int(content)
        except ValueError:
            _log.warning("queue %r: a notification is no number", queue.keys.name)
            queue.transfer.push()
        else:
            queue.transfer.announced(due_ms)
