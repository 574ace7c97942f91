"""Decides which client calls first when many wait for the same moment and one call is enough. Pure.

No client waits for another: each wakes at the due time plus a stagger of its own. A client that
finds messages wakes without a stagger from then on, and its script publishes a *notice*, which says
that everything due has been handed out, and when the next message is due. A client that hears
another's notice before its own stagger is over need not call at all. If it had no stagger, it has
one from then on. The same client is thus first again and again. When it dies, has no room, or is
slow, the client with the next stagger is first instead, a few milliseconds late, and stays first.

The more clients listen, the wider their staggers are spread, so that few of them wake before the
first one's notice has reached them. The earliest of many is early all the same. A notice says how
many clients heard the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A stagger is this multiple of the time that notices take to arrive, within these bounds, in
# seconds, and up to twice that at random, so that the second client's notice stops the third.
_TIMES = 2.0
LEAST, MOST = 0.0025, 0.0045
# More clients than this widen the range of staggers, up to the longest one, in seconds.
_CROWD = 8
_LONGEST = 0.25
# Longer numbers make no sense: 2**53 ms in microseconds has 19 digits.
_DIGITS = 19
# A client that moves due messages but wants none staggers this many times as long.
_ASIDE = 3.0
# How fast a slow notice is forgotten: this much of it still counts after the next one.
_FORGETS = 0.95
# How often a client that believes itself alone asks whether it is, in seconds.
_ASK_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class TransferNotice:
    """A message that a client's script publishes for the other clients.

    Attributes:
        next_us: When the next message is due, in microseconds by the server's clock; -1 if there is
            none.
        through_us: The moment by which everything due has been handed out.
        client: The client that published the notice.
        demand: Whether that client wanted the due messages, or only moved them.
        listeners: How many clients heard its last notice; 0 if it does not say.
    """

    next_us: int
    through_us: int
    client: str
    demand: bool
    listeners: int = 0


def parse(content: bytes) -> TransferNotice | None:
    """Parse a notice, or return None: scripts write two numbers and the signature's two words."""
    words = content.split()
    try:
        next_us, through_us, name, demand = words
        client, _, listeners = name.decode().partition(".")
        return TransferNotice(
            _number(next_us),
            _number(through_us),
            client,
            demand == b"1",
            _number(listeners.encode() or b"0"),
        )
    except ValueError:
        return None


def parse_moment(content: bytes) -> int | None:
    """Parse an announcement: when a message is due, or None if it makes no sense."""
    try:
        return _number(content)
    except ValueError:
        return None


def _number(word: bytes) -> int:
    if len(word) > _DIGITS + 1:
        raise ValueError("too long")
    return int(word)


class Stagger:
    """One client's stagger for one queue.

    Attributes:
        client: Identifies the client in notices.
    """

    def __init__(self, client: str, chance: Callable[[], float]) -> None:
        """Create a stagger; ``chance`` returns random numbers from 0 to 1."""
        self.client: str = client
        self._chance = chance
        # Our place among the clients that do not go first, from 0 to 1; None if we go first.
        self._place: float | None = None
        self._slowest = 0.0
        # How many clients, including ourselves, heard the last notice; when we last published one.
        self._listeners = 1
        self._published_at = float("-inf")

    def delay(self, *, demand: bool) -> float:
        """Return how long after the due time to wake, in seconds, with or without demand."""
        if self._place is None:
            return 0.0
        least = min(max(LEAST, _TIMES * self._slowest), MOST)
        spread = max(1.0, self._listeners / _CROWD)
        return min(least * (1 + spread * self._place), _LONGEST) * (1 if demand else _ASIDE)

    def signature(self, now: float, *, demand: bool) -> str:
        """Return what our next call tells its script, to be appended to the notice.

        It is empty, for no notice, where no other client listens, as far as we know.
        """
        if self._listeners <= 1 and now - self._published_at < _ASK_EVERY:
            return ""
        listeners = f".{self._listeners}" if self._listeners > 1 else ""
        return f"{self.client}{listeners} {int(demand)}"

    def transferred(self) -> None:
        """Go first from now on, because our call found messages."""
        self._place = None

    def published(self, listeners: int, now: float) -> None:
        """Record that ``listeners`` clients heard the notice of our call."""
        self._listeners, self._published_at = listeners, now

    def found_nothing(self) -> None:
        """Step back if there are other clients, because our call came too late."""
        if self._listeners > 1:
            self._step_back()

    def on_notice(self, notice: TransferNotice, after: float, *, demand: bool) -> None:
        """Act on another client's notice, ``after`` seconds after the moment we waited for."""
        self._listeners = notice.listeners if notice.listeners > 1 else max(self._listeners, 2)
        self._slowest = max(after, self._slowest * _FORGETS)
        if demand and not notice.demand:
            # Messages that it moves reach us by a detour.
            self._place = None
        else:
            self._step_back()

    def _step_back(self) -> None:
        if self._place is None:
            self._place = self._chance()
