"""Plans which channels to ask the server for. Pure.

:class:`delayq._engine.subscriber.Subscriber` sends the commands, and reports the replies. Methods
that depend on the time take ``now``, in local seconds.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Maximum number of channels in one command.
_CHANNELS_AT_ONCE = 500
# Time until a forbidden channel is tried again, in seconds.
_RETRY_FORBIDDEN_AFTER = 60.0

Kind = Literal["subscribe", "unsubscribe", "ping"]
# A command and its channels.
Command = tuple[Kind, list[str]]


class SubscriptionPlan:
    """Decides which commands lead from the channels that are subscribed to those that are desired.

    The server refuses a command if one of its channels is forbidden. Each half is then requested
    separately, until the forbidden ones are found. They are tried again every minute.
    """

    def __init__(self) -> None:
        self._desired: set[str] = set()
        # Those that may have to be requested, or given up: there may be many others.
        self._touched: set[str] = set()
        # Those that are subscribed on this connection, or will be once its replies have come.
        self._requested: set[str] = set()
        # The commands in flight, in the order in which their replies arrive, each with the channels
        # that these have not named yet.
        self._sent: deque[tuple[Kind, set[str]]] = deque()
        # Channels to request again, in parts.
        self._parts: list[list[str]] = []
        self._forbidden: set[str] = set()
        self._reported: set[str] = set()
        self._retry_at = math.inf

    @property
    def retry_at(self) -> float:
        """When forbidden channels are tried again, local seconds; infinite if there are none."""
        return self._retry_at if self._forbidden else math.inf

    def add(self, channel: str) -> None:
        """Add a channel to those that are desired."""
        self._desired.add(channel)
        self._touched.add(channel)

    def remove(self, channel: str) -> None:
        """Remove a channel from those that are wanted."""
        self._desired.discard(channel)
        self._touched.add(channel)
        self._forbidden.discard(channel)
        self._reported.discard(channel)

    def begin(self) -> None:
        """Start again: the connection is new, and nothing has been requested on it."""
        self._requested.clear()
        self._touched |= self._desired
        self._sent.clear()
        self._parts.clear()

    def commands(self, now: float) -> list[Command]:
        """Return the commands to send now, in order. They count as sent."""
        parts, self._parts = self._parts, []
        commands = [
            command
            for part in parts
            for command in self._send("subscribe", self._desired & {*part})
        ]
        if self.retry_at <= now:
            again, self._forbidden = self._forbidden & self._desired, set()
            self._requested |= again
            commands += [
                command
                for channel in sorted(again)
                for command in self._send("subscribe", [channel])
            ]
        touched, self._touched = self._touched, set()
        new = (touched & self._desired) - self._requested - self._forbidden
        old = (touched & self._requested) - self._desired
        self._requested |= new
        self._requested -= old
        return [*commands, *self._send("subscribe", new), *self._send("unsubscribe", old)]

    def ping(self) -> None:
        """Record that a ping is sent."""
        self._sent.append(("ping", set()))

    def on_pong(self) -> None:
        """Record a reply to a ping."""
        if self._sent and self._sent[0][0] == "ping":
            self._sent.popleft()

    def on_confirmation(self, channel: str) -> None:
        """Record that a channel is subscribed, or no longer is."""
        if self._sent:
            _, channels = self._sent[0]
            channels.discard(channel)
            if not channels:
                self._sent.popleft()

    def on_refusal(self, error: str, now: float) -> bool:
        """Handle an error, the oldest command's. Return whether the connection still works."""
        if not self._sent:
            return False
        kind, unnamed = self._sent.popleft()
        if kind != "ping" and not error.startswith("NOPERM"):
            return False
        if kind != "subscribe":
            return True
        channels = sorted(unnamed)
        if len(channels) > 1 and "channel" in error:
            middle = len(channels) // 2
            self._parts += [channels[:middle], channels[middle:]]
            return True
        if not self._forbidden:
            self._retry_at = now + _RETRY_FORBIDDEN_AFTER
        self._forbidden.update(channels)
        self._requested.difference_update(channels)
        return True

    def report_forbidden(self) -> Sequence[str]:
        """Return the forbidden channels that were not reported yet, once all of them are known."""
        if self._parts or any(kind == "subscribe" for kind, _ in self._sent):
            return ()
        new = (self._forbidden & self._desired) - self._reported
        self._reported |= new
        return sorted(new)

    def _send(self, kind: Kind, channels: Iterable[str]) -> Iterator[Command]:
        names = sorted(channels)
        for start in range(0, len(names), _CHANNELS_AT_ONCE):
            batch = names[start : start + _CHANNELS_AT_ONCE]
            self._sent.append((kind, {*batch}))
            yield kind, batch
