"""A summary of all storms, printed at the end of the run."""

from __future__ import annotations

from collections import Counter

COUNTS: Counter[str] = Counter()
"""Storms, messages and deliveries, and faults by name."""

_NOT_FAULTS = ("storms", "messages", "deliveries")


def tell(messages: int, deliveries: int, faults: Counter[str]) -> None:
    """Add the figures of a storm."""
    COUNTS.update({"storms": 1, "messages": messages, "deliveries": deliveries})
    COUNTS.update(faults)


def lines() -> list[str]:
    """Return the summary, one line, if there was a storm."""
    if not COUNTS["storms"]:
        return []
    faults = {name: count for name, count in COUNTS.items() if name not in _NOT_FAULTS}
    each = ", ".join(f"{count} {name}" for name, count in sorted(faults.items()))
    so_many = (
        f"{sum(faults.values()):,} faults over {COUNTS['messages']:,} messages"
        f" ({COUNTS['deliveries']:,} deliveries)"
    )
    return [f"{COUNTS['storms']} storms: {so_many}: {each}"]
