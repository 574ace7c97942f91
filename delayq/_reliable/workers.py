"""The entry of a client in the list of those that work on a queue. Pure."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from delayq._durations import moment_us
from delayq._reliable.replies import parse_us
from delayq.stats import RunningMessage, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayq._reliable.replies import Claim

SHOWN = 20
"""How many of the messages that it handles a client reports: those that have run longest."""


class Work(NamedTuple):
    """The work of a client on a queue at some moment.

    Attributes:
        slots: How many messages its workers handle at a time, at most; 0 for other code.
        running: How many messages it handles.
        claims: The messages that have run longest.
        declared: The settings that its code declares and of which the server has another value, as
            the server would store them.
    """

    slots: int
    running: int
    claims: Sequence[Claim]
    declared: Mapping[str, str] = MappingProxyType({})


@cache
def _about(pid: int) -> dict[str, object]:
    # It loads much that no client needs before its first report.
    from importlib import metadata  # noqa: PLC0415

    try:
        version = metadata.version("delayq")
    except metadata.PackageNotFoundError:
        # The application is frozen, and has no metadata of its packages.
        version = "unknown"
    return {"host": socket.gethostname(), "pid": pid, "version": version}


def facts_of(work: Work, now: float, opened_at: float, counts_us: int) -> str:
    """Write what a client reports of itself, without anything that is in its messages.

    ``now`` and ``opened_at`` are in loop time, ``counts_us`` as in ``register.lua``.
    """
    facts = {
        **_about(os.getpid()),
        **({"declared": {**work.declared}} if work.declared else {}),
        "slots": work.slots,
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


def worker_of(queue: str, until: bytes, facts: bytes) -> WorkerInfo | None:
    """Read an entry; return None if it is unreadable."""
    try:
        given = json.loads(facts)
        seen_at = moment_us(parse_us(until) - int(given["counts_us"]))
        return WorkerInfo(
            queue=queue,
            host=str(given["host"]),
            pid=int(given["pid"]),
            version=str(given["version"]),
            slots=int(given["slots"]),
            running=int(given["running"]),
            messages=tuple(
                RunningMessage(
                    str(id), int(attempt), seen_at - timedelta(seconds=float(age)), int(partition)
                )
                for id, attempt, age, partition in given["messages"]  # noqa: A001
            ),
            started_at=seen_at - timedelta(seconds=float(given["up"])),
            seen_at=seen_at,
            declared={str(name): str(text) for name, text in given.get("declared", {}).items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
