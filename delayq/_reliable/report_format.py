"""The text in which clients report their work, and the server keeps it: the counts of a queue's
history, and the entries of the list of workers.
"""

from __future__ import annotations

import json
import os
import re
import socket
from datetime import UTC, datetime, timedelta
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from delayq._durations import datetime_at
from delayq._reliable.replies import parse_us
from delayq.errors import BadInput
from delayq.stats import (
    LAST_BUCKET,
    Activity,
    BlockedLoop,
    RunningMessage,
    Spread,
    WorkerInfo,
    bucket_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayq._reliable.process_report import Blocking
    from delayq._reliable.replies import Claim
    from delayq.stats import QueueStats

Unit = Literal["m", "h"]
"""Minutes or hours."""

SECONDS: Mapping[Unit, int] = {"m": 60, "h": 3600}
MAX_SPAN: Mapping[Unit, int] = {"m": 1440, "h": 720}
"""How many minutes and hours ``lua/reliable/include/history.lua`` keeps."""
# How the server names the counts.
_NAMES = {"offered": "o", "handled": "h", "failed": "f", "dead": "d", "expired": "e"}
NO_COUNTS: Mapping[str, int] = dict.fromkeys(_NAMES.values(), 0)
"""The counts of a client that has done nothing."""
_LATENESS, _HANDLING = "l", "t"
# Longer numbers are damage.
_COUNT = re.compile(r"([a-z])([0-9]{0,3})=([0-9]{1,18})(?![0-9])")
# After this many measurements, only half as many of the messages that follow are measured.
_MEASURED_IN_FULL = 256
REPORTS_MISSED = 3
"""A client stays listed until so many of its reports are missing."""
SHOWN_MESSAGES = 20
"""How many of the messages that it handles a client reports: those that have run longest."""

# The longest that an event loop can have been blocked, in seconds, and the most characters of its
# code that are read.
_LONGEST = 1_000_000_000
_MOST_CODE = 200


# The history


class Sampler:
    """Measures durations: of all messages while there are few, otherwise of every second, every
    fourth, and so on, each of which then counts for the others. So busy queues lose no time to it.

    Callers take 1 from ``skip`` for each message, and measure it if that makes it negative.
    """

    __slots__ = ("_buckets", "_samples", "_stride", "skip")

    def __init__(self) -> None:
        self.skip: int = 0
        # The durations measured for one message each of a stride, and those of earlier strides.
        self._samples: list[float] = []
        self._stride = 1
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self._samples.append(seconds)
        if len(self._samples) == _MEASURED_IN_FULL:
            self._sort_samples()
            self._stride *= 2
        self.skip = self._stride - 1

    def drain(self) -> dict[int, int]:
        """Return what was counted, by bucket, and begin anew."""
        self._sort_samples()
        buckets, self._buckets = self._buckets, {}
        self.skip, self._stride = 0, 1
        return buckets

    def put_back(self, buckets: Mapping[int, int]) -> None:
        """Add what :meth:`drain` has returned again."""
        for bucket, count in buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def _sort_samples(self) -> None:
        """Count the samples in their buckets, which takes longer than to collect them."""
        for seconds in self._samples:
            bucket = bucket_of(seconds)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + self._stride
        self._samples.clear()


def checked_span(minutes: int | None, hours: int | None) -> tuple[Unit, int]:
    """Return the unit and number of what a caller asks for. Raise BadInput if that is invalid."""
    if minutes is not None and hours is not None:
        raise BadInput("pass minutes or hours, not both")
    unit: Unit = "m" if hours is None else "h"
    name, span = (
        ("minutes", 60 if minutes is None else minutes) if hours is None else ("hours", hours)
    )
    longest = MAX_SPAN[unit]
    if isinstance(span, bool) or not isinstance(span, int) or not 1 <= span <= longest:
        raise BadInput(f"{name} must be an int from 1 to {longest:,}, not {span!r}")
    return unit, span


def counts_of(stats: QueueStats) -> dict[str, int]:
    """Return the counts that go into the history, by the names that the server has for them."""
    counts = (stats.offered, stats.acked, stats.retried, stats.dead, stats.expired)
    return dict(zip(_NAMES.values(), counts, strict=True))


def packed(counts: Mapping[str, int], late: Mapping[int, int], handling: Mapping[int, int]) -> str:
    """Write counts and measurements as ``tally.lua`` takes them, without zeros."""
    fields = [
        *counts.items(),
        *((f"{_LATENESS}{bucket}", count) for bucket, count in late.items()),
        *((f"{_HANDLING}{bucket}", count) for bucket, count in handling.items()),
    ]
    return " ".join(f"{name}={count}" for name, count in fields if count)


def activity_of(unit: Unit, stored: bytes) -> Activity:
    """Read the counts of one minute or hour. Skip anything unreadable."""
    number, _, text = stored.decode(errors="replace").partition(" ")
    counts: dict[str, int] = {}
    spreads: dict[str, dict[int, int]] = {_LATENESS: {}, _HANDLING: {}}
    for name, bucket, count in _COUNT.findall(text):
        if name in spreads and bucket:
            if int(bucket) <= LAST_BUCKET:
                spreads[name][int(bucket)] = int(count)
        elif not bucket:
            counts[name] = int(count)
    return Activity(
        start=datetime.fromtimestamp(int(number) * SECONDS[unit], UTC),
        seconds=SECONDS[unit],
        **{field: counts.get(name, 0) for field, name in _NAMES.items()},
        lateness=Spread(spreads[_LATENESS]),
        handling=Spread(spreads[_HANDLING]),
    )


# The workers


class Work(NamedTuple):
    """The work of a client on a queue at some moment.

    Attributes:
        slots: How many messages its workers handle at a time, at most; 0 for other code.
        running: How many messages it handles.
        claims: The messages that have run longest.
        declared: The settings that its code declares and of which the server has another value, as
            the server would store them.
        process_slots: How many messages the workers of its process handle at a time, at most.
        blocking: The code that blocked an event loop of its process last, if any did lately.
    """

    slots: int
    running: int
    claims: Sequence[Claim]
    declared: Mapping[str, str] = MappingProxyType({})
    process_slots: int = 0
    blocking: Blocking | None = None


@cache
def _process_facts(pid: int) -> dict[str, object]:
    # It loads much that no client needs before its first report.
    from importlib import metadata  # noqa: PLC0415

    try:
        version = metadata.version("delayq")
    except metadata.PackageNotFoundError:
        # The application is frozen, and has no metadata of its packages.
        version = "unknown"
    return {"host": socket.gethostname(), "pid": pid, "version": version}


def facts_of(work: Work, now: float, opened_at: float, counts_us: int, free: int = 0) -> str:
    """Write what a client reports of itself, without anything that is in its messages.

    Args:
        work: The work of the client.
        now: The time, in loop time.
        opened_at: When the queue was opened, in loop time.
        counts_us: How long the report counts, as in ``register.lua``.
        free: How many more messages of the queue its workers could begin now.
    """
    blocking = work.blocking
    facts = {
        **_process_facts(os.getpid()),
        **({"declared": {**work.declared}} if work.declared else {}),
        **(
            {
                "blocked": (
                    blocking.code,
                    round(blocking.seconds, 3),
                    round(blocking.recent, 3),
                    # Event loops use the clock of time.monotonic().
                    round(max(0.0, now - blocking.ended_at), 3),
                )
            }
            if blocking
            else {}
        ),
        "slots": work.slots,
        "free": free,
        "process_slots": work.process_slots,
        "running": work.running,
        "up": round(now - opened_at, 3),
        "counts_us": counts_us,
        "messages": [
            (
                claim.id.decode(errors="replace"),
                claim.attempt,
                round(now - claim.begun_at, 3),
                claim.partition,
            )
            for claim in work.claims
        ],
    }
    return json.dumps(facts, separators=(",", ":"))


def _text(value: object) -> str:
    """Return a fact as text. A lone surrogate is valid in JSON, but cannot be sent on."""
    return str(value).encode(errors="replace").decode()


def _blocked_of(
    seen_at: datetime, code: object, seconds: float, recent: float, age: float
) -> BlockedLoop:
    if not all(0 <= value <= _LONGEST for value in (seconds, recent, age)):
        raise ValueError("an event loop cannot have been blocked for so long")
    until = seen_at - timedelta(seconds=age)
    return BlockedLoop(_text(code)[:_MOST_CODE], float(seconds), float(recent), until)


def worker_of(queue: str, counts_until: bytes, text: bytes) -> WorkerInfo | None:
    """Read an entry; return None if it is unreadable."""
    try:
        facts = json.loads(text)
        seen_at = datetime_at(parse_us(counts_until) - int(facts["counts_us"]))
        return WorkerInfo(
            queue=queue,
            host=_text(facts["host"]),
            pid=int(facts["pid"]),
            version=_text(facts["version"]),
            slots=int(facts["slots"]),
            running=int(facts["running"]),
            messages=tuple(
                RunningMessage(
                    _text(id), int(attempt), seen_at - timedelta(seconds=float(age)), int(partition)
                )
                for id, attempt, age, partition in facts["messages"]  # noqa: A001
            ),
            started_at=seen_at - timedelta(seconds=float(facts["up"])),
            seen_at=seen_at,
            declared={
                _text(name): _text(value) for name, value in facts.get("declared", {}).items()
            },
            free=int(facts["free"]),
            process_slots=int(facts["process_slots"]),
            interval=int(facts["counts_us"]) / 1_000_000 / REPORTS_MISSED,
            blocked=_blocked_of(seen_at, *facts["blocked"]) if "blocked" in facts else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
