"""Plans which channels to ask the server for. Pure.

:class:`SubscriptionPlan` takes events and returns commands. It reads no clock: methods that depend
on the time take ``now``, in local seconds. :class:`delayq._engine.subscriber.Subscriber` sends the
commands over a connection, and reports the replies.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

# Maximum number of channels in one SUBSCRIBE.
_AT_A_TIME = 500
# Time until a forbidden channel is tried again, in seconds.
_RETRY_FORBIDDEN_AFTER = 60.0

# A command: its name, and the channels.
Command = tuple[str, ...]


class _Sent:
    """A command in flight, and the channels that its replies have not named yet."""

    __slots__ = ("channels", "command")

    def __init__(self, command: str, channels: Collection[str] = ()) -> None:
        self.command = command
        self.channels = set(channels)


class SubscriptionPlan:
    """Decides which commands lead from the channels that are subscribed to those that are wanted.

    If the user may not subscribe to one channel of a command, the server refuses all of them. Each
    half is then requested separately, until the forbidden channels are found. Those are left out,
    and tried again every minute.
    """

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        # Those that are subscribed on this connection, or will be once its replies have come.
        self._requested: set[str] = set()
        # In the order in which their replies arrive.
        self._sent: deque[_Sent] = deque()
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
        """Add a channel to those that are wanted."""
        self._wanted.add(channel)

    def remove(self, channel: str) -> None:
        """Remove a channel from those that are wanted."""
        self._wanted.discard(channel)
        self._forbidden.discard(channel)
        self._reported.discard(channel)

    def begin(self) -> None:
        """Start again: the connection is new, and nothing has been requested on it."""
        self._requested.clear()
        self._sent.clear()
        self._parts.clear()

    def commands(self, now: float) -> list[Command]:
        """Return the commands to send now, in order. They count as sent."""
        parts, self._parts = self._parts, []
        commands = [
            each for part in parts for each in self._send("SUBSCRIBE", self._wanted & {*part})
        ]
        if self.retry_at <= now:
            again, self._forbidden = self._forbidden & self._wanted, set()
            self._requested |= again
            commands += [
                each for channel in sorted(again) for each in self._send("SUBSCRIBE", [channel])
            ]
        new = self._wanted - self._requested - self._forbidden
        old = self._requested - self._wanted
        self._requested = (self._requested | new) - old
        return [*commands, *self._send("SUBSCRIBE", new), *self._send("UNSUBSCRIBE", old)]

    def ping(self) -> None:
        """Record that a PING is sent."""
        self._sent.append(_Sent("PING"))

    def on_pong(self) -> None:
        """Record a reply to a PING."""
        if self._sent and self._sent[0].command == "PING":
            self._sent.popleft()

    def on_confirmation(self, channel: str) -> None:
        """Record that a channel is subscribed, or no longer is."""
        if self._sent:
            self._sent[0].channels.discard(channel)
            if not self._sent[0].channels:
                self._sent.popleft()

    def on_refusal(self, error: str, now: float) -> bool:
        """Handle an error, which answers the oldest command in flight.

        Returns:
            Whether the connection can still be used.
        """
        sent = self._sent.popleft() if self._sent else None
        if sent is None or (sent.command != "PING" and not error.startswith("NOPERM")):
            return False
        if sent.command != "SUBSCRIBE":
            return True
        channels = sorted(sent.channels)
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
        if self._parts or any(sent.command == "SUBSCRIBE" for sent in self._sent):
            return ()
        new = (self._forbidden & self._wanted) - self._reported
        self._reported |= new
        return sorted(new)

    def _send(self, command: str, channels: Iterable[str]) -> Iterator[Command]:
        names = sorted(channels)
        for at in range(0, len(names), _AT_A_TIME):
            some = names[at : at + _AT_A_TIME]
            self._sent.append(_Sent(command, some))
            yield (command, *some)
