"""Record what workers, their killer and a producer do while everything crashes, and prove that
nothing went wrong.

Each process appends lines to a file of its own, one write per line, so everything that a process
did before it was killed is on record. Moments are ``time.monotonic()``, which all processes of one
machine share and no server sets.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

# Events that a worker records about a message.
STARTED, HANDLED, ACKED, LOST, UNSETTLED = "started", "handled", "acked", "lost", "unsettled"
# Events that the driver records about a worker or the server.
KILLED, DOWN, UP = "killed", "down", "up"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log.

    Attributes:
        at: The moment, seconds.
        what: One of the words above.
        who: The worker that did it, or that was killed. Names of workers are never reused.
        message: The message's id.
        attempt: The number of the attempt.
    """

    at: float
    what: str
    who: str = ""
    message: str = ""
    attempt: int = 0


class Log:
    """A file of events, written by one process."""

    def __init__(self, path: Path, who: str = "") -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._who = who

    def write(self, what: str, message: str = "", attempt: int = 0, *, who: str = "") -> None:
        os.write(
            self._file,
            f"{time.monotonic()!r}\t{what}\t{who or self._who}\t{message}\t{attempt}\n".encode(),
        )

    def close(self) -> None:
        os.close(self._file)


def read(paths: Iterable[Path]) -> list[Event]:
    """Return all events of these files, ordered by time.

    The last line of a process that was killed may be cut off.
    """
    events = []
    for path in paths:
        lines = path.read_text("utf-8").split("\n")
        for line in lines[:-1]:
            at, what, who, message, attempt = line.split("\t")
            events.append(Event(float(at), what, who, message, int(attempt)))
    return sorted(events, key=lambda event: event.at)


@dataclass
class Offers:
    """The ids that the producer offered, by outcome: stored, unknown, or refused."""

    stored: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


@dataclass
class Verdict:
    """The conclusions that the log allows.

    Attributes:
        problems: Descriptions of everything that must not happen; empty if all is well.
        again: How often a message was started again, by cause: the holder ``died``, the ``server``
            was away, or the holder ``overran`` its lease.
        handled: The number of messages that were handled.
    """

    problems: list[str]
    again: Counter[str]
    handled: int


def check(events: Sequence[Event], offers: Offers, lease: float) -> Verdict:
    """Check that every message that was stored was handled, and that none was started twice without
    a cause.

    Args:
        events: The events, ordered by time.
        offers: The outcomes that the producer knows.
        lease: The lease of each message, seconds. At least half of it is left when a worker starts
            the message.
    """
    killed = {event.who: event.at for event in events if event.what == KILLED}
    outages = _outages(events)
    of_message: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.message:
            of_message[event.message].append(event)

    problems: list[str] = []
    again: Counter[str] = Counter()
    handled = {
        message
        for message, known in of_message.items()
        if any(event.what == HANDLED for event in known)
    }
    problems += [
        f"{message}: stored, and never handled" for message in sorted(offers.stored - handled)
    ]
    problems += [
        f"{message}: said not to be stored, and handled"
        for message in sorted(offers.refused & handled)
    ]
    known_ids = offers.stored | offers.unknown | offers.refused
    problems += [f"{message}: nobody offered it" for message in sorted(set(of_message) - known_ids)]

    for message, known in of_message.items():
        starts = [event for event in known if event.what == STARTED]
        if [start.attempt for start in starts] != sorted({start.attempt for start in starts}):
            problems.append(f"{message}: its attempts are {[start.attempt for start in starts]}")
        for first, second in itertools.pairwise(starts):
            cause = _cause(first, second, known, killed, outages, lease)
            if cause in ("died", "server", "overran"):
                again[cause] += 1
            else:
                problems.append(f"{message}: attempt {second.attempt} by {second.who} {cause}")
    return Verdict(problems, again, len(handled))


def _cause(
    first: Event,
    second: Event,
    known: Sequence[Event],
    killed: dict[str, float],
    outages: Sequence[tuple[float, float]],
    lease: float,
) -> str:
    """Return why a message was started again, or describe why it should not have been."""
    own = [event for event in known if event.who == first.who and event.attempt == first.attempt]
    if any(event.what == ACKED for event in own):
        return f"although {first.who} had acknowledged attempt {first.attempt}"
    if second.at - first.at < lease / 2:
        return f"although {first.who} had it under a lease"
    if killed.get(first.who, second.at) < second.at:
        return "died"
    if any(down < second.at and first.at - lease < up for down, up in outages):
        return "server"
    # At least half of the lease was left at the start. The holder overran it if it took longer than
    # that, or found the lease lost.
    ended = next((event.at for event in own if event.what in (HANDLED, UNSETTLED)), second.at)
    if ended - first.at >= lease / 2 or any(event.what == LOST for event in own):
        return "overran"
    return f"although {first.who} lived, had its connection and kept to its lease"


def _outages(events: Sequence[Event]) -> list[tuple[float, float]]:
    outages = []
    down: float | None = None
    for event in events:
        if event.what == DOWN:
            down = event.at
        elif event.what == UP and down is not None:
            outages.append((down, event.at))
            down = None
    return outages if down is None else [*outages, (down, float("inf"))]
