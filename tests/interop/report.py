"""What the live tests found, told at the end of the run."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

RAN: dict[str, str] = {}
"""By version of Redisson: the server it ran against."""
NOT_RUN: set[str] = set()
MESSAGES: dict[tuple[str, str], int] = defaultdict(int)
"""Messages that arrived, each once and none early, by version of Redisson and way."""
LATENESS_MS: dict[tuple[str, str], list[float]] = defaultdict(list)
"""How long after its due time a message came, by version of Redisson and who moved it."""

NOTES: list[str] = []


def lines() -> list[str]:
    """One line for each version of Redisson, and the notes."""
    found = []
    for version, server in RAN.items():
        parts = [f"Redisson {version} against {server}"]
        parts += [f"{count:,} messages {way}" for (which, way), count in MESSAGES.items() if which == version]
        parts += [
            f"{what} after {median(late):.1f} ms (median of {len(late)}; at most {max(late):.1f})"
            for (which, what), late in LATENESS_MS.items()
            if which == version
        ]
        found.append("; ".join(parts))
    return [*found, *NOTES]
