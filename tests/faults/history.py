"""What producers, consumers and whoever disturbs them have seen: the material of :mod:`tests.faults.checker`.

All moments are microseconds of one clock, the server's. The servers of the tests run on this machine and read the machine's
clock, so we read it too, without asking: :func:`now_us`. :func:`demand_one_clock` makes sure of that. What scripts return (when
a message was due, when its lease ends) is of that clock anyway.

A message is known by its key, a number that is also its value. So whoever stores it a second time under another id is found out.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.servers import PrivateServer


class Told(StrEnum):
    """What a caller was told of its call."""

    OK = "ok"
    FAILED = "failed"
    """For sure: nothing was changed."""
    UNKNOWN = "unknown"
    HELD = "held"
    """Its id was refused, although the message that had it has expired."""


class End(StrEnum):
    """How a consumer was done with what it had been given."""

    NONE = "none"
    """It was never done: it died, or nobody knows."""
    ACKED = "acked"
    """The server said so."""
    UNATTENDED = "unattended"
    """It was handled, and the acknowledgement left without waiting for the answer. The log tells if that was no."""
    UNKNOWN = "unknown"
    """It was handled, and the answer lost."""
    LOST = "lost"
    """The consumer was told that the lease had ended."""
    RETURNED = "returned"
    """It was given back untouched, or that was tried: it may come again at once."""
    EITHER = "either"
    """It was given back, and when nobody could tell whether that was carried out, acknowledged: one of the two it is."""
    NACKED = "nacked"
    """Its handler failed: it may come again, with the next attempt."""


@dataclass(slots=True)
class Offered:
    """One message that somebody offered.

    Attributes:
        due_us: The earliest moment at which it may be delivered: when offering began, and the delay.
        told: What became of it.
        expires: Whether its time to live ends before anybody takes it, so that it never comes.
    """

    due_us: int
    told: Told = Told.UNKNOWN
    expires: bool = False


@dataclass(slots=True)
class Delivered:
    """One message in a consumer's hands.

    Attributes:
        key: Which.
        seen_us: When the consumer had it.
        who: The consumer.
        copy: What the queue calls it: the same each time it comes, unless it was stored twice.
        due_us: When it was due, as the queue says; 0 where it does not.
        claimed_us: When it left the server, or later. Of what is not leased, when it was seen.
        ends_us: The end of its lease, as far as the consumer knew; 0 where it has none.
        attempt: The number of the attempt, as the queue says; 0 where it does not.
        end: What became of it.
    """

    key: int
    seen_us: int
    who: str = ""
    copy: str = ""
    due_us: int = 0
    claimed_us: int = 0
    ends_us: int = 0
    attempt: int = 0
    end: End = End.NONE


@dataclass(slots=True)
class Fault:
    """What was done to the system, and from when to when."""

    name: str
    from_us: int
    to_us: int


@dataclass
class History:
    """All that happened.

    Attributes:
        offered: By key.
        delivered: In any order.
        faults: In any order.
        doubts: Copies whose unattended acknowledgement failed, or may have, as the log says.
        nameless_doubts: So many more, of which the log gives no name.
        left: What is still on the server when all is over, in words.
    """

    offered: dict[int, Offered] = field(default_factory=dict)
    delivered: list[Delivered] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    doubts: set[str] = field(default_factory=set)
    nameless_doubts: int = 0
    left: list[str] = field(default_factory=list)


def now_us() -> int:
    """This machine's clock, which is also that of the servers that it runs."""
    return time.time_ns() // 1000


def demand_one_clock(server: PrivateServer) -> None:
    """Fail if a server does not read the clock that :func:`now_us` reads."""
    before = now_us()
    # The first line of the answer is its length: the moment stands in a script's.
    told = int(server.call("EVAL", "local t = redis.call('TIME') return t[1] * 1000000 + t[2]", "0")[1:])
    # Some servers read it when they wake up, which may be just before the call has come.
    assert before - 1000 <= told <= now_us() + 1000, "the server has a clock of its own"


class Notes:
    """A history of deliveries in a file, for a process that may be killed at any moment: each line is one write."""

    def __init__(self, path: Path, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._who = who

    def began(self, delivered: Delivered) -> None:
        d = delivered
        words = (d.key, d.seen_us, d.copy, d.due_us, d.claimed_us, d.ends_us, d.attempt)
        self._write("began", *words)

    def ended(self, delivered: Delivered) -> None:
        self._write("ended", delivered.key, delivered.claimed_us, delivered.end.value)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, *words: object) -> None:
        os.write(self._file, ("\t".join((self._who, *map(str, words))) + "\n").encode())


def read_notes(paths: Iterable[Path]) -> list[Delivered]:
    """What :class:`Notes` of several processes hold. The last line of one that was killed may be cut off."""
    read: list[Delivered] = []
    open_ones: dict[tuple[str, int, int], Delivered] = {}
    for path in paths:
        for line in path.read_text("utf-8").split("\n")[:-1]:
            who, what, *words = line.split("\t")
            if what == "began":
                key, seen, copy, due, claimed, ends, attempt = words
                one = Delivered(int(key), int(seen), who, copy, int(due), int(claimed), int(ends), int(attempt))
                read.append(one)
                open_ones[who, one.key, one.claimed_us] = one
            else:
                open_ones[who, int(words[0]), int(words[1])].end = End(words[2])
    return read
