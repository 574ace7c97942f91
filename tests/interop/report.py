"""What the live tests tell at the end of the run: a line for each release, and figures."""

from __future__ import annotations

from typing import Any

NOT_RUN: set[str] = set()
LINES: dict[str, None] = {}
"""In order."""


def told() -> dict[str, Any]:
    """Return all results, in types that can be sent to another process."""
    return {"not_run": sorted(NOT_RUN), "lines": lines()}


def hear(other: dict[str, Any]) -> None:
    """Add the results that :func:`told` returned in another process."""
    NOT_RUN.update(other["not_run"])
    LINES.update(dict.fromkeys(other["lines"]))


def lines() -> list[str]:
    return [*LINES]
