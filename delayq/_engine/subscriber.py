"""The client's one subscription, which reports new heads in all of its queues."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from delayq._redis.dedicated import DedicatedConnection, keep_linked
from delayq.errors import ServerError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from delayq._background import Background
    from delayq._redis.topology import Topology

_log = logging.getLogger("delayq")

# Maximum number of channels in one SUBSCRIBE.
_AT_A_TIME = 500
# Time until a forbidden channel is tried again, in seconds.
_REFUSED_FOR = 60.0
# Maximum number of channels that a warning names.
_NAMED = 20


class _Sent:
    """A command in flight, and the channels that its answers have not named yet."""

    __slots__ = ("channels", "command")

    def __init__(self, command: str, channels: Collection[str] = ()) -> None:
        self.command = command
        self.channels = set(channels)


class Subscriber:
    """Keeps one connection subscribed to all channels that are wanted.

    Notifications are only hints: anything published while the link is down is lost, and a half-open
    link looks like silence. Every confirmation of a subscription is therefore reported, so that the
    queues themselves can be checked, and the link is pinged and replaced when it does not answer.
    In a cluster any server will do, because the servers pass notifications on to one another.

    If the user may not subscribe to one channel of a command, the server refuses all of them. Each
    half is then requested separately, until the forbidden channels are found. Those are left out,
    and tried again every minute.
    """

    def __init__(
        self,
        nodes: Topology,
        background: Background,
        heard: Callable[[str, bytes], None],
        subscribed: Callable[[], None],
        ping_interval: float,
        retry_most: float,
    ) -> None:
        """Args:
        heard: Called with the channel and the content of each message.
        subscribed: Called when a subscription is confirmed, including after every reconnection.
        ping_interval: Seconds between pings.
        retry_most: Maximum seconds between two attempts to connect.
        """
        self._nodes = nodes
        self._background = background
        self._heard = heard
        self._subscribed = subscribed
        self._ping_interval = ping_interval
        self._retry_most = retry_most
        self._wanted: set[str] = set()
        self._asked: set[str] = set()
        # In the order in which their answers arrive.
        self._sent: deque[_Sent] = deque()
        # Channels to request again, in parts.
        self._parts: list[list[str]] = []
        self._refused: set[str] = set()
        self._warned_of: set[str] = set()
        self._ask_refused_at = 0.0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self.round_trips: int = 0

    def add(self, channel: str) -> None:
        """Subscribe to ``channel`` soon."""
        self._wanted.add(channel)
        self._changed.set()
        if self._task is None:
            self._task = self._background.spawn(self._run(), "subscriber")

    def remove(self, channel: str) -> None:
        """Unsubscribe from ``channel`` soon."""
        self._wanted.discard(channel)
        self._refused.discard(channel)
        self._warned_of.discard(channel)
        self._changed.set()

    async def _run(self) -> None:
        def interrupted(error: Exception) -> None:
            _log.warning("notifications are interrupted: %s", error)

        await keep_linked(self._nodes, None, self._listen, interrupted, self._retry_most)

    async def _listen(self, link: DedicatedConnection) -> None:
        self._asked.clear()
        self._sent.clear()
        self._parts.clear()
        self._changed.set()
        writer = self._background.spawn(self._write(link), "subscriber writer")
        try:
            while True:
                try:
                    self._handle(await link.read())
                except ServerRefused as error:
                    self._refusal(error)
        finally:
            writer.cancel()

    def _handle(self, answer: Any) -> None:
        kind, *rest = answer if isinstance(answer, list) and answer else [answer]
        if kind == b"message":
            try:
                self._heard(rest[0].decode(), rest[1])
            except Exception:  # noqa: BLE001 - anyone may publish anything
                _log.exception("handling a notification failed")
        elif kind in (b"subscribe", b"unsubscribe"):
            self._confirmed(rest[0].decode())
            if kind == b"subscribe":
                self._subscribed()
        elif self._sent and self._sent[0].command == "PING":
            self._sent.popleft()

    def _confirmed(self, channel: str) -> None:
        if self._sent:
            self._sent[0].channels.discard(channel)
            if not self._sent[0].channels:
                self._sent.popleft()
                self._warn()

    def _refusal(self, error: ServerRefused) -> None:
        """Handle an error, which answers the oldest command in flight."""
        sent = self._sent.popleft() if self._sent else None
        if sent is None or (sent.command != "PING" and not str(error).startswith("NOPERM")):
            raise error
        if sent.command != "SUBSCRIBE":
            return
        channels = sorted(sent.channels)
        if len(channels) > 1 and "channel" in str(error):
            middle = len(channels) // 2
            self._parts += [channels[:middle], channels[middle:]]
            self._changed.set()
            return
        if not self._refused:
            self._ask_refused_at = asyncio.get_running_loop().time() + _REFUSED_FOR
        self._refused.update(channels)
        self._asked.difference_update(channels)
        self._warn()
        # The wait may be shorter now: let the writer know when to try again.
        self._changed.set()

    def _warn(self) -> None:
        """Warn of the forbidden channels, naming each once, when all of them are known."""
        new = sorted((self._refused & self._wanted) - self._warned_of)
        if not new or self._parts or any(sent.command == "SUBSCRIBE" for sent in self._sent):
            return
        self._warned_of.update(new)
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        _log.warning(
            "no permission to subscribe to the channels %s%s: messages that other clients offer to"
            " these queues may be noticed %g s late. Grant it with: ACL SETUSER <user>"
            " +subscribe %s",
            ", ".join(new[:_NAMED]),
            more,
            self._ping_interval,
            " ".join(f"&{channel}" for channel in new[:_NAMED]),
        )

    async def _write(self, link: DedicatedConnection) -> None:
        now = asyncio.get_running_loop().time
        # The safety re-check has the same interval and starts at the same time. A ping halfway
        # between two of them halves the time until we find out that all connections are dead.
        ping_at = now() + self._ping_interval / 2
        try:
            while True:
                try:
                    async with asyncio.timeout_at(
                        min(ping_at, self._ask_refused_at) if self._refused else ping_at
                    ):
                        await self._changed.wait()
                except TimeoutError:
                    if now() >= ping_at:
                        ping_at += self._ping_interval
                        self._note("PING")
                        link.ping()
                self._changed.clear()
                parts, self._parts = self._parts, []
                for part in parts:
                    await self._tell(link, "SUBSCRIBE", self._wanted.intersection(part))
                if self._refused and now() >= self._ask_refused_at:
                    again, self._refused = self._refused & self._wanted, set()
                    self._asked |= again
                    for channel in again:
                        await self._tell(link, "SUBSCRIBE", [channel])
                new, old = self._wanted - self._asked - self._refused, self._asked - self._wanted
                self._asked = (self._asked | new) - old
                await self._tell(link, "SUBSCRIBE", new)
                await self._tell(link, "UNSUBSCRIBE", old)
        except ServerError:
            pass  # the reader reports it
        finally:
            link.cut()

    def _note(self, command: str, channels: Collection[str] = ()) -> None:
        self.round_trips += 1
        self._sent.append(_Sent(command, channels))

    async def _tell(self, link: DedicatedConnection, command: str, channels: Iterable[str]) -> None:
        names = sorted(channels)
        for at in range(0, len(names), _AT_A_TIME):
            some = names[at : at + _AT_A_TIME]
            self._note(command, some)
            await link.send(command, *some)
