"""Writes docs/module-map.md from the docstrings of the modules: ``python docs/modules.py``."""

from __future__ import annotations

import ast
from pathlib import Path

import delayq

ROOT = Path(__file__).parents[1]
# Tests of the built package have it elsewhere.
PACKAGE = Path(delayq.__file__).parent
PAGE = ROOT / "docs" / "module-map.md"
HEAD = """# Module map

Each package imports only from those below it, as the contracts in `pyproject.toml` require. A name
that begins with an underscore is private. The scripts that run on the server are in `lua/`, one
file each, with a comment at the head that declares keys, arguments and reply.

This page is made from the docstrings of the modules by `python docs/modules.py`.
"""
ORDER = (
    "cli",
    "_dashboard",
    "integrations",
    "testing",
    "admin",
    "worker",
    "sync",
    "outbox",
    "",
    "tasks",
    "_reliable",
    "_redisson",
    "_engine",
    "_redis",
    "_timer",
    "_embedded",
    "codecs",
)
"""The packages, from the top of the layers down. ``""`` stands for the modules beside them."""


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line, as Markdown."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    line = " ".join(text.partition("\n\n")[0].split())
    return line.replace("``", "`").replace(":class:", "").replace(":mod:", "").replace("|", "\\|")


def table(package: str) -> str:
    """Return the heading of a package and a row for each of its modules."""
    folder = PACKAGE / package
    files = sorted(folder.rglob("*.py")) if package else sorted(folder.glob("*.py"))
    rows = [
        f"| `{path.relative_to(folder)}` | {summary(path)} |"
        for path in files
        if path.name != "__init__.py"
    ]
    about = summary(folder / "__init__.py") if package else "The modules of the top level."
    heading = f"## `{package}/`" if package else "## `delayq/`"
    return "\n".join([heading, "", about, "", "| module | content |", "|---|---|", *rows, ""])


def page() -> str:
    """Return the page."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    if unknown := packages - set(ORDER):
        raise SystemExit(f"say in ORDER of {__file__} where these packages belong: {unknown}")
    tables = (table(package) for package in ORDER if not package or package in packages)
    return "\n".join([HEAD, *tables])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
