"""Decides which client calls first when many wait for the same moment and one call is enough. Pure.

No client waits for another: each wakes at the due time plus a stagger of its own. A client that
finds messages wakes without a stagger from then on, and its script publishes a *notice*, which says
that everything due has been handed out, and when the next message is due. A client that receives
another's notice before its own stagger is over need not call at all. If it had no stagger, it has
one from then on. The same client is thus first again and again. When it dies, has no room, or is
slow, the client with the next stagger is first instead, a few milliseconds late, and stays first.

The more clients listen, the wider their staggers are spread, so that few of them wake before the
first one's notice has reached them. The earliest of many is early all the same. A notice says how
many clients listen, as far as its publisher knows.

A notice costs as many deliveries as clients listen, so in a *crowd* most of them are
*dormant*: they unsubscribe, and no longer wake for due times. At each re-check, a client learns how
many listen, and decides anew. All the dormant clients together re-check many times a second. One
that finds a message that the listeners have left lying takes it, and listens from then on. When
more is due than the listeners can take, a client *summons* as many dormant ones as that may need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A stagger is this multiple of the time that notices take to arrive, within these bounds, in
# seconds, and up to twice that at random, so that the second client's notice stops the third.
_NOTICE_TIMES = 2.0
MIN_STAGGER, MAX_STAGGER = 0.0025, 0.02
# More clients than these few widen the range of staggers, up to the longest one, in seconds.
_FEW_CLIENTS = 8
_MAX_SPREAD = 0.25
# Listeners that suffice for a queue. The clients beyond these are dormant only if they are so many
# that their re-checks come this close together on average, in seconds.
ENOUGH_LISTENERS = 32
_RECHECK_SPACING = 0.05
# Of the listeners that suffice, the part that may want no messages while dormant clients do.
_IDLE_PART = 0.25
# Longer numbers make no sense: 2**53 ms in microseconds has 19 digits.
_DIGITS = 19
# A client that moves due messages but wants none staggers this many times as long.
_MOVER_FACTOR = 3.0
# One that moves them and goes first waits this long, in seconds, so that a client that wants them
# comes before it, and goes first from then on.
_MOVER_DELAY = 0.001
# How fast a slow notice is forgotten: this much of it still counts after the next one.
_SLOWEST_DECAY = 0.95
# How often a client may summon others, in seconds, and how many for each one needed.
_SUMMON_EVERY = 0.05
_SUMMON_SPARE = 1.5
# How often a client that believes itself alone asks whether it is, in seconds.
_ASK_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that a client's script publishes for the other clients.

    Attributes:
        next_us: When the next message is due, in microseconds by the server's clock; -1 if there is
            none.
        through_us: The moment by which everything due has been handed out.
        client: The client that published the notice.
        wants_messages: Whether that client wanted the due messages, or only moved them.
        listeners: How many clients listen, as far as it knows; 0 if it does not say.
    """

    next_us: int
    through_us: int
    client: str
    wants_messages: bool
    listeners: int = 0


def parse_notice(content: bytes) -> Notice | None:
    """Parse a notice, or return None: scripts write two numbers and the signature's two words."""
    words = content.split()
    try:
        next_us, through_us, name, wants_messages = words
        client, _, listeners = name.decode().partition(".")
        return Notice(
            _number(next_us),
            _number(through_us),
            client,
            wants_messages == b"1",
            _number(listeners.encode() or b"0"),
        )
    except ValueError:
        return None


def parse_number(content: bytes) -> int | None:
    """Parse an announcement or a summons: a number, or None if it makes no sense."""
    try:
        return _number(content)
    except ValueError:
        return None


def _number(word: bytes) -> int:
    if len(word) > _DIGITS + 1:
        raise ValueError("too long")
    return int(word)


class _Standing(Enum):
    """Whether we go first, and why."""

    NEW = auto()
    """We have neither found messages nor heard of others so far."""
    FIRST = auto()
    """We found messages."""
    BYPASSED = auto()
    """A client that wants no messages has just moved some that we want, which is a detour."""
    BEHIND = auto()
    """Another client goes first."""


class Stagger:
    """One client's stagger for one queue.

    Attributes:
        client: Identifies the client in notices.
        is_dormant: Whether we neither receive notices nor wake for due times.
    """

    def __init__(
        self,
        client: str,
        chance: Callable[[], float],
        servers: Callable[[], int] = lambda: 1,
        resync_interval: float = math.inf,
    ) -> None:
        """Args:
        client: Identifies the client in notices.
        chance: Returns random numbers from 0 to 1.
        servers: Returns the number of servers, each of which has a part of the listeners.
        resync_interval: Seconds between two re-checks of a client.
        """
        self.client: str = client
        self.is_dormant: bool = False
        self._chance = chance
        self._servers = servers
        # More clients than this are a crowd.
        self._crowd = ENOUGH_LISTENERS + resync_interval / _RECHECK_SPACING
        self._standing = _Standing.NEW
        # Our place among the clients that do not go first, from 0 to 1.
        self._position = 0.0
        self._slowest = 0.0
        # How many clients listen, ourselves included; when we last published a notice.
        self._listeners = 1
        self._published_at = float("-inf")
        # How many dormant clients want messages; when we last summoned some.
        self._dormant = 0
        self._summoned_at = float("-inf")

    @property
    def clients(self) -> int:
        """How many clients listen or want messages, ourselves included, as far as we know."""
        return self._listeners + self._dormant

    def delay(self, *, wants_messages: bool) -> float:
        """Return how long after the due time to wake, in seconds."""
        if self._standing is not _Standing.BEHIND:
            return _MOVER_DELAY if self._listeners > 1 and not wants_messages else 0.0
        base = min(max(MIN_STAGGER, _NOTICE_TIMES * self._slowest), MAX_STAGGER)
        spread = min(base * max(1.0, self._listeners / _FEW_CLIENTS), _MAX_SPREAD - base)
        return (base + spread * self._position) * (1 if wants_messages else _MOVER_FACTOR)

    def signature(self, now: float, *, wants_messages: bool) -> str:
        """Return our name, how many clients listen, and whether we want messages: the script of our
        next call appends them to its notice.

        It is empty, for no notice, where no other client listens, as far as we know: one server of
        several cannot tell.
        """
        alone = self._listeners <= 1 and self._servers() == 1
        if alone and now - self._published_at < _ASK_EVERY:
            return ""
        listeners = f".{self._listeners}" if self._listeners > 1 else ""
        return f"{self.client}{listeners} {int(wants_messages)}"

    def took_messages(self, listeners: int, now: float) -> None:
        """Go first from now on, because our call took messages.

        ``listeners`` clients received its notice from the same server; 0 if it gave none.
        """
        self._standing = _Standing.FIRST
        if listeners:
            self._published_at = now
            if listeners > 1 or self._servers() == 1:
                self._listeners = listeners * self._servers()

    def came_too_late(self) -> None:
        """Step back if there are other clients, because our call came too late.

        We do not step back for a client that wants no messages if its notice came before the reply.
        """
        if self._standing is _Standing.BYPASSED:
            self._standing = _Standing.FIRST
        elif self._listeners > 1:
            self._step_back()

    def on_notice(self, notice: Notice, after: float, *, wants_messages: bool) -> None:
        """Act on another client's notice, ``after`` seconds after the moment we waited for."""
        self._listeners = notice.listeners if notice.listeners > 1 else max(self._listeners, 2)
        self._slowest = max(after, self._slowest * _SLOWEST_DECAY)
        if wants_messages and not notice.wants_messages:
            self._standing = _Standing.BYPASSED
        else:
            self._step_back()

    def on_recheck(self, listeners: int, dormant: int, *, wants_messages: bool) -> None:
        """Decide whether to be dormant, by the numbers of clients that one server counts; -1 if
        unknown.

        ``dormant`` is the number of dormant ones that want messages. A client that goes first is
        never dormant as long as it wants messages.
        """
        if listeners < 0:
            self.is_dormant = False
            return
        servers = self._servers()
        if listeners > 1 or servers == 1 or self.is_dormant:
            self._listeners = max(1, listeners * servers)
        else:
            # A few may listen on other servers, but not a crowd.
            self._listeners = min(self._listeners, servers)
        self._dormant = dormant * servers
        if self._standing is _Standing.NEW and self._listeners > _FEW_CLIENTS:
            # Others go first already. Of few, we may be the only one that wants messages.
            self._step_back()
        listeners_needed = self._listeners_needed(wants_messages=wants_messages)
        if self.is_dormant:
            has_room = self.has_room(wants_messages=wants_messages, part=0.5)
            self.is_dormant = self._listeners >= listeners_needed / 2 and not has_room
        elif not (self._goes_first and wants_messages) and not self.has_room(
            wants_messages=wants_messages
        ):
            self.is_dormant = self._chance() * self._listeners >= listeners_needed

    def has_room(self, *, wants_messages: bool, part: float = 1.0) -> bool:
        """Return whether all clients that want messages may listen, or would if only this part of
        them might.
        """
        limit = self._crowd if wants_messages else self._listeners_needed(wants_messages=False)
        return self._listeners + self._dormant <= limit * part

    def clients_at_hand(self, now: float) -> int | None:
        """Begin to summon dormant clients. Return how many others can take what is due without
        that: those that listen, or 0 if we are dormant ourselves: then the listeners have left
        messages lying, so they are busy.

        None if we do not summon: none is dormant, we do not go first, or we did it just now.
        """
        may_summon = self._dormant > 0 and (self._goes_first or self.is_dormant)
        if not may_summon or now - self._summoned_at < _SUMMON_EVERY:
            return None
        self._summoned_at = now
        return 0 if self.is_dormant else self._listeners

    def answers(self, number: int) -> bool:
        """Return whether we are one of this number of clients that are summoned."""
        return self.is_dormant and self._chance() * self._dormant < number * _SUMMON_SPARE

    def _listeners_needed(self, *, wants_messages: bool) -> float:
        # Clients that want nothing make way for dormant ones that want messages.
        return (
            ENOUGH_LISTENERS
            if wants_messages or not self._dormant
            else ENOUGH_LISTENERS * _IDLE_PART
        )

    @property
    def _goes_first(self) -> bool:
        return self._standing is not _Standing.BEHIND

    def _step_back(self) -> None:
        if self._goes_first:
            self._standing, self._position = _Standing.BEHIND, self._chance()
