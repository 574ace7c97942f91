"""Whose turn it is: many clients wait for the same moment, and one call is enough. Pure.

Nobody is elected, and nobody is waited for. Each client that wants what comes due wakes at the due time plus a stagger of its
own. Whoever finds something wakes without a stagger from then on, and its script publishes a *notice*: all that was due is
handed out, and the next one is due then. Whoever hears another's notice before its own stagger is over need not call at all,
and staggers from then on, if it did not. So one client is first, again and again, while it is there and quick enough. When it
dies, has no room, or is slow, the one with the next stagger is first instead, a few milliseconds late, and stays it.

The more clients listen, the wider their staggers are spread, so that few of them wake before the first one's notice has reached
them. The earliest of many is early all the same. A notice says how many clients have heard the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A stagger is so many times what notices take to come, between these bounds, seconds; and up to twice that, by chance: apart from
# one another, so that the second one's notice stops the third.
_TIMES = 2.0
LEAST, MOST = 0.0025, 0.0045
# Clients for which the range of staggers suffices; it is wider where there are more. And the longest stagger, seconds.
_CROWD = 8
_LONGEST = 0.25
# Numbers of more digits are nonsense: 2**53 ms in microseconds has 19.
_DIGITS = 19
# Who moves what is due and wants none of it leaves it to those who do.
_ASIDE = 3.0
# How fast a notice that took long is forgotten: so much of it counts after the next one.
_FORGETS = 0.95
# Who thinks itself alone asks so often whether it is, seconds.
_ASK_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Notice:
    """What a client's script publishes for the others.

    Attributes:
        next_us: When the next message is due, microseconds by the server's clock; -1: there is none.
        through_us: All that was due by then is handed out.
        client: Who says so.
        wanted: Whether it wanted what was due, or only moved it.
        listeners: How many clients have heard its last notice; 0: it does not say.
    """

    next_us: int
    through_us: int
    client: str
    wanted: bool
    listeners: int = 0


def signature(client: str, *, wanted: bool, listeners: int = 0) -> str:
    """What a client tells its script, to be put at the end of the notice."""
    return f"{client}{f'.{listeners}' if listeners > 1 else ''} {int(wanted)}"


def parse(content: bytes) -> Notice | None:
    """The notice, if it is one; scripts write four words: two numbers, and the signature."""
    words = content.split()
    try:
        next_us, through_us, name, wanted = words
        client, _, listeners = name.decode().partition(".")
        return Notice(_number(next_us), _number(through_us), client, wanted == b"1", _number(listeners.encode() or b"0"))
    except ValueError:
        return None


def parse_moment(content: bytes) -> int | None:
    """The number of a notification: when a message is due; None if it makes no sense."""
    try:
        return _number(content)
    except ValueError:
        return None


def _number(word: bytes) -> int:
    if len(word) > _DIGITS + 1:
        raise ValueError("too long")
    return int(word)


class Turns:
    """One client's part of it, for one queue."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """Args:
        chance: Random numbers from 0 to 1.
        """
        self._chance = chance
        # Our place among those who are not first, from 0 to 1; None: we are.
        self._place: float | None = None
        self._slowest = 0.0
        # How many clients heard the last notice, ourselves included, and when we last gave one.
        self._listeners = 1
        self._given_at = float("-inf")

    def stagger(self, *, wanted: bool) -> float:
        """How long after the due time to wake, seconds; ``wanted``: whether we want what comes due."""
        if self._place is None:
            return 0.0
        least = min(max(LEAST, _TIMES * self._slowest), MOST)
        spread = max(1.0, self._listeners / _CROWD)
        return min(least * (1 + spread * self._place), _LONGEST) * (1 if wanted else _ASIDE)

    @property
    def listeners(self) -> int:
        """How many clients there are, ourselves included, as far as we know."""
        return self._listeners

    def gives_notice(self, now: float) -> bool:
        """Whether our next call shall publish a notice: not where nobody else listens, as far as we know."""
        return self._listeners > 1 or now - self._given_at >= _ASK_EVERY

    def won(self) -> None:
        """Our call found something: we go first."""
        self._place = None

    def given(self, listeners: int, now: float) -> None:
        """Our call has published a notice, which so many have heard."""
        self._listeners, self._given_at = listeners, now

    def found_nothing(self) -> None:
        """Our call came too late, if there is anybody else."""
        if self._listeners > 1:
            self._step_back()

    def heard(self, notice: Notice, after: float, *, wanted: bool) -> None:
        """Somebody else was first. Its notice came ``after`` seconds after what we waited for was due."""
        self._listeners = notice.listeners if notice.listeners > 1 else max(self._listeners, 2)
        self._slowest = max(after, self._slowest * _FORGETS)
        if wanted and not notice.wanted:
            # What it moves makes a detour to us.
            self._place = None
        else:
            self._step_back()

    def _step_back(self) -> None:
        if self._place is None:
            self._place = self._chance()
