"""Collect the results of the live tests, to report them at the end of the run."""

from __future__ import annotations

from typing import Any

NOT_RUN: set[str] = set()
RAN: dict[str, None] = {}
"""The settings that ran, in order: a Redisson and a server."""
NOTES: list[str] = []


def told() -> dict[str, Any]:
    """Return all results, in types that can be sent to another process."""
    return {"not_run": sorted(NOT_RUN), "ran": list(RAN), "notes": NOTES}


def hear(other: dict[str, Any]) -> None:
    """Add the results that :func:`told` returned in another process."""
    NOT_RUN.update(other["not_run"])
    RAN.update(dict.fromkeys(other["ran"]))
    NOTES.extend(other["notes"])


def lines() -> list[str]:
    """Return one line for each setting, and the notes."""
    return [*RAN, *NOTES]
