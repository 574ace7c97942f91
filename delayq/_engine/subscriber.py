"""The client's one subscription, through which it receives all that its queues publish."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from delayq._engine.subscription_plan import SubscriptionPlan
from delayq._redis.dedicated import DedicatedConnection, keep_linked
from delayq.errors import ServerError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._background import Background
    from delayq._redis.topology import Topology

_log = logging.getLogger("delayq")

# Maximum number of channels that a warning names.
_NAMED = 20


class Subscriber:
    """Keeps one connection subscribed to all channels of the client's queues.

    Publications are only hints: anything published while the link is down is lost. Every
    confirmation of a subscription is therefore reported, so that the queues can be checked, and a
    link that does not answer pings is replaced. In a cluster any server will do.
    """

    def __init__(
        self,
        nodes: Topology,
        background: Background,
        on_message: Callable[[str, bytes], None],
        on_subscribed: Callable[[str], None],
        ping_interval: float,
        retry_most: float,
    ) -> None:
        """Args:
        on_message: Called with the channel and the content of each message.
        on_subscribed: Called with each channel whose subscription is confirmed, also after every
            reconnection.
        ping_interval: Seconds between pings.
        retry_most: Maximum seconds between two attempts to connect.
        """
        self._nodes = nodes
        self._background = background
        self._on_message = on_message
        self._on_subscribed = on_subscribed
        self._ping_interval = ping_interval
        self._retry_most = retry_most
        self._plan = SubscriptionPlan()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        # When the connection was lost, in loop time.
        self._lost_at: float | None = None
        self.round_trips: int = 0

    def add(self, channel: str) -> None:
        """Subscribe to ``channel`` soon."""
        self._plan.add(channel)
        self._changed.set()
        if self._task is None:
            self._task = self._background.spawn(self._run(), "subscriber")

    def remove(self, channel: str) -> None:
        """Unsubscribe from ``channel`` soon."""
        self._plan.remove(channel)
        self._changed.set()

    async def _run(self) -> None:
        def interrupted(error: Exception) -> None:
            if self._lost_at is None:
                self._lost_at = asyncio.get_running_loop().time()
            _log.warning("notifications are interrupted: %s", error)

        await keep_linked(self._nodes, None, self._listen, interrupted, self._retry_most)

    async def _listen(self, link: DedicatedConnection) -> None:
        self._plan.begin()
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

    def _handle(self, reply: Any) -> None:
        kind, *parts = reply if isinstance(reply, list) and reply else [reply]
        if kind == b"message":
            try:
                self._on_message(parts[0].decode(), parts[1])
            except Exception:  # noqa: BLE001 - anyone may publish anything
                _log.exception("handling a notification failed")
        elif kind in (b"subscribe", b"unsubscribe"):
            self._plan.on_confirmation(parts[0].decode())
            self._warn()
            if self._lost_at is not None:
                away = asyncio.get_running_loop().time() - self._lost_at
                self._lost_at = None
                _log.info("connected again after %.1f s: notifications arrive", away)
            if kind == b"subscribe":
                self._on_subscribed(parts[0].decode())
        else:
            self._plan.on_pong()

    def _refusal(self, error: ServerRefused) -> None:
        if not self._plan.on_refusal(str(error), asyncio.get_running_loop().time()):
            raise error
        self._warn()
        # The writer may have something to request, or may have to wait for a shorter time.
        self._changed.set()

    def _warn(self) -> None:
        """Warn of the forbidden channels, if any were found that were not known yet."""
        new = self._plan.report_forbidden()
        if not new:
            return
        suffix = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        _log.warning(
            "no permission to subscribe to the channels %s%s: messages that other clients offer to"
            " these queues may be noticed %g s late. Grant it with: ACL SETUSER <user> +subscribe"
            " %s",
            ", ".join(new[:_NAMED]),
            suffix,
            self._ping_interval,
            " ".join(f"&{channel}" for channel in new[:_NAMED]),
        )

    async def _write(self, link: DedicatedConnection) -> None:
        now = asyncio.get_running_loop().time
        # Halfway between two re-checks, which find out about dead connections, too.
        ping_at = now() + self._ping_interval / 2
        try:
            while True:
                try:
                    async with asyncio.timeout_at(min(ping_at, self._plan.retry_at)):
                        await self._changed.wait()
                except TimeoutError:
                    if now() >= ping_at:
                        ping_at += self._ping_interval
                        self.round_trips += 1
                        self._plan.ping()
                        link.ping()
                self._changed.clear()
                for kind, channels in self._plan.commands(now()):
                    self.round_trips += 1
                    await (link.subscribe if kind == "subscribe" else link.unsubscribe)(channels)
        except ServerError:
            pass  # the reader reports it
        finally:
            link.cut()
