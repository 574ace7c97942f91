"""The one subscription of a client: hears of new heads in all of its queues."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from delayq._redis.link import Link, keep_linked
from delayq.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delayq._background import Background
    from delayq._redis.nodes import Nodes

_log = logging.getLogger("delayq")

# Channels named in one SUBSCRIBE.
_AT_A_TIME = 500


class Subscriber:
    """Keeps one connection subscribed to the channels that are wanted.

    Notifications are only hints: what is published while the link is down is gone, and a half-open link looks like
    silence. So every confirmation of a subscription is reported, for somebody to look at the queues themselves, and the
    link is pinged and replaced when it does not answer. In a cluster any server will do: they tell one another.
    """

    def __init__(
        self,
        nodes: Nodes,
        background: Background,
        heard: Callable[[str, bytes], None],
        subscribed: Callable[[], None],
        ping_interval: float,
        retry_most: float,
    ) -> None:
        """Args:
        heard: Called with each message: channel and content.
        subscribed: Called when a subscription was confirmed, also after every reconnection.
        ping_interval: Seconds between pings; an answer may take as long.
        retry_most: Seconds between two tries to connect at most.
        """
        self._nodes = nodes
        self._background = background
        self._heard = heard
        self._subscribed = subscribed
        self._ping_interval = ping_interval
        self._retry_most = retry_most
        self._wanted: set[str] = set()
        self._asked: set[str] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._answered = True
        self.round_trips: int = 0

    def add(self, channel: str) -> None:
        """Subscribe to ``channel``, soon."""
        self._wanted.add(channel)
        self._changed.set()
        if self._task is None:
            self._task = self._background.spawn(self._run(), "subscriber")

    def remove(self, channel: str) -> None:
        """Hear of ``channel`` no more, soon."""
        self._wanted.discard(channel)
        self._changed.set()

    async def _run(self) -> None:
        def interrupted(error: ServerError) -> None:
            _log.warning("notifications are interrupted: %s", error)

        await keep_linked(self._nodes, None, self._listen, interrupted, self._retry_most)

    async def _listen(self, link: Link) -> None:
        self._asked.clear()
        self._answered = True
        self._changed.set()
        writer = self._background.spawn(self._write(link), "subscriber writer")
        try:
            while True:
                self._handle(await link.read())
        finally:
            writer.cancel()

    def _handle(self, answer: Any) -> None:
        self._answered = True
        kind = answer[0] if isinstance(answer, list) and answer else answer
        if kind == b"message":
            self._heard(answer[1].decode(), answer[2])
        elif kind == b"subscribe":
            self._subscribed()

    async def _write(self, link: Link) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(self._ping_interval):
                        await self._changed.wait()
                except TimeoutError:
                    if not self._answered:
                        _log.warning("notifications are interrupted: the connection does not answer")
                        link.cut()
                        return
                    self._answered = False
                    self.round_trips += 1
                    await link.send("PING")
                    continue
                self._changed.clear()
                new, old = self._wanted - self._asked, self._asked - self._wanted
                self._asked = set(self._wanted)
                await self._tell(link, "SUBSCRIBE", new)
                await self._tell(link, "UNSUBSCRIBE", old)
        except ServerError:
            link.cut()  # the reader reports it

    async def _tell(self, link: Link, command: str, channels: Iterable[str]) -> None:
        names = sorted(channels)
        for at in range(0, len(names), _AT_A_TIME):
            self.round_trips += 1
            await link.send(command, *names[at : at + _AT_A_TIME])
