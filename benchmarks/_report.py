"""Helpers for all benchmarks: the line that describes the machine, tables, and the style of
plots.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

# Okabe and Ito's colours, which colour-blind readers can tell apart. For print, lines also differ
# in dashes and markers.
BLUE, SKY, GREEN, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"


def machine(server: Any = None) -> str:
    """Return the source of the figures: the machine, the interpreter, and the server if there is
    one.
    """
    line = (
        f"{platform.system()} {platform.release().split('-')[0]}, {platform.machine()},"
        f" {os.cpu_count()} processors"
    )
    line += f", {platform.python_implementation()} {platform.python_version()}"
    if server is None:
        return line
    about = server.info("server")
    name = "Valkey" if "valkey_version" in about else "Redis"
    return f"{line}, {name} {about.get('valkey_version') or about['redis_version']}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also plot the results to FILE (.svg or .png); needs matplotlib",
    )


class Table:
    """Rows in columns, printed as they are added, or as JSON, all at the end."""

    def __init__(self, about: dict[str, Any], columns: Sequence[str], *, as_json: bool) -> None:
        """Print the head.

        A column's name begins with the row's key, and the column is as wide as its name.
        """
        self.rows: list[dict[str, Any]] = []
        self._about = about
        self._columns = columns
        self._as_json = as_json
        if not as_json:
            print(
                "\n".join(map(str, about.values())) + "\n\n" + "  ".join(columns).rstrip(),
                flush=True,
            )

    def add(self, row: dict[str, Any], *cells: str) -> None:
        """Add a row: its data, and the cells that show it."""
        self.rows.append(row)
        if not self._as_json:
            # Text is aligned to the left and figures to the right, like the column's name.
            pairs = zip(cells, self._columns, strict=True)
            aligned = [
                cell.rjust(len(name)) if name.startswith(" ") else cell.ljust(len(name))
                for cell, name in pairs
            ]
            print("  ".join(aligned).rstrip(), flush=True)

    def end(self, **extra: Any) -> None:
        if self._as_json:
            print(json.dumps(self._about | {"rows": self.rows} | extra, indent=1))


def plotter() -> Any:
    """Return matplotlib.pyplot, set up for small files that are identical for identical figures."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("agg")
    looks = {
        "svg.fonttype": "none",
        "svg.hashsalt": "delayq",
        "font.family": ["sans-serif"],
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }
    matplotlib.rcParams.update(looks)
    return import_module("matplotlib.pyplot")


def save(figure: Any, file: str, footer: str) -> None:
    figure.text(0.01, 0.008, footer, fontsize=7, color="#555555")
    figure.savefig(
        file, dpi=150, facecolor="white", metadata={"Date": None} if file.endswith(".svg") else None
    )
