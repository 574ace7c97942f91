"""Collect the results of the live tests, to report them at the end of the run."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

NOT_RUN: set[str] = set()
RAN: dict[str, None] = {}
"""The settings that ran, in order: a Redisson and a server."""
MESSAGES: dict[str, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
"""The number of messages that arrived, each once and none early, by setting, way and codec."""
LATENESS_MS: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
"""The lateness of messages, ms, by setting and way."""
MOVED_BY_JAVA: dict[str, list[float]] = defaultdict(list)
"""The fraction of messages that Java moved where both sides move, by setting."""
NOTES: list[str] = []


def told() -> dict[str, Any]:
    """Return all results, in types that can be sent to another process."""
    return {
        "not_run": sorted(NOT_RUN),
        "ran": list(RAN),
        "messages": {setting: dict(counts) for setting, counts in MESSAGES.items()},
        "lateness_ms": {setting: dict(by_way) for setting, by_way in LATENESS_MS.items()},
        "moved_by_java": dict(MOVED_BY_JAVA),
        "notes": NOTES,
    }


def hear(other: dict[str, Any]) -> None:
    """Add the results that :func:`told` returned in another process."""
    NOT_RUN.update(other["not_run"])
    RAN.update(dict.fromkeys(other["ran"]))
    for setting, counts in other["messages"].items():
        for what, count in counts.items():
            MESSAGES[setting][what] += count
    for setting, by_way in other["lateness_ms"].items():
        for way, late in by_way.items():
            LATENESS_MS[setting][way] += late
    for setting, shares in other["moved_by_java"].items():
        MOVED_BY_JAVA[setting] += shares
    NOTES.extend(other["notes"])


def lines() -> list[str]:
    """Return one line for each setting, and the notes."""
    return [*map(_line, RAN), *NOTES]


def _line(setting: str) -> str:
    counts: dict[tuple[str, int], list[str]] = defaultdict(list)
    for (way, codec), count in MESSAGES[setting].items():
        counts[way, count].append(codec)
    parts = [
        f"{count:,} messages {way} with"
        f" {f'each of {len(codecs)} codecs' if len(codecs) > 1 else codecs[0]}"
        for (way, count), codecs in counts.items()
    ]
    parts += [
        f"{way} after {median(late):.1f} ms (median of {len(late)}; at most {max(late):.1f})"
        for way, late in LATENESS_MS[setting].items()
    ]
    if shares := MOVED_BY_JAVA[setting]:
        parts.append(f"between all, Java moved {min(shares):.0%} to {max(shares):.0%}")
    return f"{setting}: {'; '.join(parts) or 'nothing to tell'}"
