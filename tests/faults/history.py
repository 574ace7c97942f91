"""Everything that producers, consumers and faults have seen and done: the checker's input.

All times are microseconds of the server's clock. The test servers run on this machine, so the
tests read the same one, which :func:`demand_one_clock` makes sure of.
A message is known by its key, a number that is also its value, so a message stored a second time
under another id is detected.
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

    from tests.support.servers import PrivateServer


REUSED = "reused"
"""Ids of messages in the other queue of a storm begin with this."""


class Told(StrEnum):
    """The outcome that a call reported to its caller."""

    OK = "ok"
    FAILED = "failed"
    """Certainly failed: nothing was changed."""
    UNKNOWN = "unknown"
    HELD = "held"
    """The id was refused although the message that had it has expired."""


class End(StrEnum):
    """How a consumer finished with a message."""

    NONE = "none"
    """The consumer never finished: it died, or the outcome is not known."""
    ACKED = "acked"
    """The server confirmed the acknowledgement."""
    UNATTENDED = "unattended"
    """Handled; the acknowledgement was not waited for. The log tells if it failed."""
    UNKNOWN = "unknown"
    """Handled, but the reply was lost."""
    LOST = "lost"
    """The consumer was told that the lease had ended."""
    RETURNED = "returned"
    """Given back untouched, or at least that was tried: it may be redelivered at once."""
    EITHER = "either"
    """Given back, which may have failed, and then acknowledged: one of the two took effect."""
    NACKED = "nacked"
    """Its handler failed: it may be redelivered, as the next attempt."""


@dataclass(slots=True)
class Offered:
    """A message that was offered."""

    due_us: int
    """When its offer began, plus the delay."""
    told: Told = Told.UNKNOWN
    expires: bool = False
    """Whether its time to live ends before it can be taken, so that it never arrives."""


@dataclass(slots=True)
class Delivered:
    """A message that a consumer received."""

    key: int
    seen_us: int
    who: str = ""
    copy: str = ""
    """The queue's own id for it, which differs if the message was stored twice."""
    due_us: int = 0
    """According to the queue; 0 if it does not say. So is ``attempt``."""
    claimed_us: int = 0
    """When it left the server, or later. Without leases, when it was seen."""
    ends_us: int = 0
    """The end of its lease, as far as the consumer knew; 0 without leases."""
    attempt: int = 0
    end: End = End.NONE
    ended_us: int = 0
    """When the consumer finished with it, before it told the queue; 0 if that was not noted."""
    loaded: int = -1
    """The state that it began with; -1 if it did not ask."""
    saved: int = 0
    """The state that it has saved, as the server confirmed; 0 if it has not. The next is higher."""
    step: int = 0
    """The result of its step; 0 if there is none."""


@dataclass(slots=True)
class Fault:
    """A disturbance of the system, and when it began and ended."""

    name: str
    from_us: int
    to_us: int


@dataclass
class History:
    """The record of a whole storm."""

    offered: dict[int, Offered] = field(default_factory=dict)
    delivered: list[Delivered] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    doubts: set[str] = field(default_factory=set)
    """Copies whose acknowledgement failed or may have failed, according to the log."""
    nameless_doubts: int = 0
    """How many more of these the log does not name."""
    results: dict[str, object] = field(default_factory=dict)
    """The results of some messages at the end, by copy; the class of the error if there is none."""
    groups: int = 0
    """Into how many groups the messages are divided; 0: they have none."""
    kills: dict[str, int] = field(default_factory=dict)
    """When each killed consumer was certainly dead."""
    left: list[str] = field(default_factory=list)
    """What is still on the server at the end, in words."""

    def group_of(self, key: int) -> str | None:
        return f"group {key % self.groups}" if self.groups else None


def now_us() -> int:
    """Return the time of this machine's clock, which the servers that it runs read as well."""
    return time.time_ns() // 1000


def demand_one_clock(server: PrivateServer) -> None:
    """Fail if a server does not read the clock that :func:`now_us` reads."""
    before = now_us()
    # The first line of the reply is its length; the script's reply holds the time.
    told = int(
        server.call("EVAL", "local t = redis.call('TIME') return t[1] * 1000000 + t[2]", "0")[1:]
    )
    # Some servers read the clock when they wake up, which may be just before the call arrives.
    assert before - 1000 <= told <= now_us() + 1000, "the server has a clock of its own"


class Notes:
    """A record of deliveries in a file, which a kill at any moment leaves readable."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def began(self, delivered: Delivered) -> None:
        facts = [str(getattr(delivered, name)) for name in Delivered.__slots__]
        os.write(self._file, ("\t".join(facts) + "\n").encode())

    # The last line about a delivery counts.
    ended = began


def read_notes(paths: Iterable[Path]) -> list[Delivered]:
    """Return the deliveries in these notes. The last line of a killed process may be cut off."""
    read: dict[tuple[str, int, int], Delivered] = {}
    for path in paths:
        for line in path.read_text("utf-8").split("\n")[:-1]:
            key, seen, who, copy, *numbers, end, ended, loaded, saved, step = line.split("\t")
            due, claimed, ends, attempt = map(int, numbers)
            read[who, int(key), claimed] = Delivered(
                *(int(key), int(seen), who, copy, due, claimed, ends, attempt),
                *(End(end), int(ended), int(loaded), int(saved), int(step)),
            )
    return [*read.values()]
