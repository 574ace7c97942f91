"""Fills the tables of other libraries in README.md and docs/performance.md from the output of
``python -m benchmarks peers --json benchmarks/figures/peers.json``: ``python docs/tables.py``.

A table is between ``<!-- NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "figures" / "peers.json"
PAGES = ("README.md", "docs/performance.md")
# The same work without a library.
BY_HAND = "raw redis-py"
# The libraries in the short table: those that most readers come from.
WELL_KNOWN = ("delayq Worker", "arq", "SAQ", "Dramatiq", "Celery", "RQ", "BullMQ Node")


def cells(row: dict[str, Any], figure: str) -> tuple[str, str]:
    """Return a figure by default and at best, as text."""
    shown = [SHOWN[figure](row[name]) if figure in row[name] else "-" for name in SETTINGS]
    return shown[0], shown[1]


def late(row: dict[str, Any]) -> tuple[str, str]:
    """Return the lateness by default, with the number of messages that were early, and at best."""
    default, best = cells(row, "p50")
    early = row["default"]["early"]
    return f"{default} ({early} early)" if early else default, best


def _late(of: dict[str, Any]) -> str:
    p50, p99 = (f"{of[name]:,.{1 if of[name] < 20 else 0}f}" for name in ("p50", "p99"))
    return f"{p50} / {p99}"


SETTINGS = ("default", "best")
SHOWN = {
    "one": lambda of: f"{of['one']:,.0f}",
    "bulk": lambda of: f"{of['bulk']:,.0f}",
    "delivered": lambda of: f"{of['delivered']:,.0f}",
    "p50": _late,
    "idle": lambda of: f"{of['idle']:,.1f}",
    "memory": lambda of: f"{of['memory']:,.0f}",
}


def peers(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the long table."""
    found = []
    for row in [{"best": {}} | row for row in rows]:
        name = f"{row['peer']} {row['version']}".strip()
        if row["peer"] == BY_HAND:
            name = f"*by hand*, redis-py {row['version']}"
        one, bulk, idle, memory = (
            cells(row, each)[0] for each in ("one", "bulk", "idle", "memory")
        )
        line = (name, one, bulk, *cells(row, "delivered"), *late(row), idle, memory)
        found.append(f"| {' | '.join(line)} |")
    return found


def short(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the short table."""
    found = []
    for row in [{"best": {}} | row for row in rows]:
        if row["peer"] in WELL_KNOWN:
            rates, lateness = cells(row, "delivered"), late(row)
            line = (rates[0], lateness[0], rates[1], lateness[1], cells(row, "idle")[0])
            name = f"{row['peer']} {row['version']}".strip()
            found.append(f"| {' | '.join((name, *line))} |")
    return found


TABLES = {"peers": peers, "short": short}


def filled(text: str) -> str:
    """Return a page with the rows of its tables, whose heads stay."""
    rows = json.loads(FIGURES.read_text("utf-8"))["rows"]
    for name, table in TABLES.items():
        text = re.sub(
            rf"(<!-- {name} -->\n.*?\n\|[-|: ]+\|\n).*?(?=<!-- end -->)",
            lambda found, table=table: found[1] + "\n".join(table(rows)) + "\n\n",
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    for page in PAGES:
        text = filled((ROOT / page).read_text("utf-8"))
        (directory / page).parent.mkdir(exist_ok=True)
        (directory / page).write_text(text, "utf-8")
