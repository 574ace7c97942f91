"""Fills the tables of other libraries in README.md and docs/performance.md from the output of
``python -m benchmarks peers --json benchmarks/figures/peers.json``: ``python docs/tables.py``.

A table is between ``<!-- NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "figures" / "peers.json"
PAGES = ("README.md", "docs/performance.md")
# The same work without a library.
BY_HAND = "raw redis-py"
# The libraries in the short table: those that most readers come from.
WELL_KNOWN = ("delayq Worker", "arq", "SAQ", "Dramatiq", "Celery", "RQ", "BullMQ Node")
SETTINGS = ("default", "best")
SCENARIOS = ("queue-add", "queue-add-bulk", "worker-generic", "worker-concurrent")

Row = dict[str, Any]
Figures = dict[str, list[Row]]


def name_of(row: Row) -> str:
    if row["peer"] == BY_HAND:
        return f"*by hand*, redis-py {row['version']}"
    return f"{row['peer']} {row.get('version', '')}".strip()


def cell(row: Row, figure: str, setting: str = "default", digits: int = 0) -> str:
    figures = row.get(setting, {})
    return f"{figures[figure]:,.{digits}f}" if figure in figures else "-"


def lateness(row: Row, setting: str) -> str:
    """Return the median and the 99th percentile in ms, and how many messages were early."""
    figures = row.get(setting, {})
    if "p50" not in figures:
        return "-"
    p50, p99 = (f"{figures[name]:,.{1 if figures[name] < 20 else 0}f}" for name in ("p50", "p99"))
    early = f" ({figures['early']} early)" if figures["early"] and setting == "default" else ""
    return f"{p50} / {p99}{early}"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def offers(figures: Figures) -> list[str]:
    """Return the rows of offers a second."""
    columns = ("one", "ten", "hundred", "bulk", "memory")
    return [
        line(name_of(row), *(cell(row, figure) for figure in columns)) for row in figures["rows"]
    ]


def handling(figures: Figures) -> list[str]:
    """Return the rows of messages handled, and how late."""
    return [
        line(
            name_of(row),
            *(cell(row, "delivered", setting) for setting in SETTINGS),
            *(lateness(row, setting) for setting in SETTINGS),
            cell(row, "idle", digits=1),
        )
        for row in figures["rows"]
    ]


def short(figures: Figures) -> list[str]:
    """Return the rows of the README."""
    return [
        line(
            name_of(row),
            cell(row, "delivered"),
            lateness(row, "default"),
            cell(row, "delivered", "best"),
            lateness(row, "best"),
            cell(row, "idle", digits=1),
        )
        for row in figures["rows"]
        if row["peer"] in WELL_KNOWN
    ]


def scenarios(figures: Figures) -> list[str]:
    """Return the rows of bullmq-bench's scenarios, jobs a second."""
    return [
        line(row["peer"], *(f"{row['rates'][name]:,.0f}" for name in SCENARIOS))
        for row in figures["scenarios"]
    ]


TABLES: dict[str, Callable[[Figures], Sequence[str]]] = {
    "offers": offers,
    "handling": handling,
    "short": short,
    "scenarios": scenarios,
}


def filled(text: str) -> str:
    """Return a page with the rows of its tables. Their heads stay."""
    figures = json.loads(FIGURES.read_text("utf-8"))
    for name, rows in TABLES.items():
        text = re.sub(
            rf"(<!-- {name} -->\n.*?\n\|[-|: ]+\|\n).*?(?=<!-- end -->)",
            lambda match, rows=rows: match[1] + "\n".join(rows(figures)) + "\n\n",
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
