"""Writes docs/module-map.md from the docstrings of the modules: ``python docs/modules.py``."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import delayq

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
# Tests of the built package have it elsewhere.
PACKAGE = Path(delayq.__file__).parent
PAGE = ROOT / "docs" / "module-map.md"
HEAD = """# Module map

From top to bottom, each package imports only from those below it. Packages on one line of the
contracts in `pyproject.toml`, such as `admin`, `sync` and `worker`, do not import each other. A
name that begins with an underscore is private. Modules marked "Pure" do no I/O and read no clock.
The scripts that run on the server are in `lua/`, one file each, with a comment at the head that
declares keys, arguments and reply.

This page is made from these contracts and the docstrings of the modules, by
`python docs/modules.py`.
"""


def layers() -> list[str]:
    """Return the packages and the modules beside them, from the top of the layers down."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = configuration["tool"]["importlinter"]["contracts"]
    layered = next(contract for contract in contracts if contract["type"] == "layers")
    return [name for layer in layered["layers"] for name in layer.split(" | ")]


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line, as Markdown."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    line = " ".join(text.partition("\n\n")[0].split())
    return line.replace("``", "`").replace(":class:", "").replace(":mod:", "").replace("|", "\\|")


def section(name: str, about: str, folder: Path, modules: Iterable[Path]) -> str:
    """Return a heading, and a row for each of the modules."""
    rows = [
        f"| `{path.relative_to(folder)}` | {summary(path)} |"
        for path in sorted(modules)
        if path.name != "__init__.py"
    ]
    head = [f"## `{name}/`", "", about, "", "| module | content |", "|---|---|"]
    return "\n".join([*head, *rows, ""])


def page() -> str:
    """Return the page."""
    names = layers()
    lowest_package = [name for name in names if (PACKAGE / name).is_dir()][-1]
    split = names.index(lowest_package) + 1
    sections = []
    for name in names[:split]:
        if (folder := PACKAGE / name).is_dir():
            about = summary(folder / "__init__.py")
            sections.append(section(name, about, folder, folder.rglob("*.py")))
        else:
            sections.append(f"## `{name}.py`\n\n{summary(PACKAGE / f'{name}.py')}\n")
    # No layer has it, because nothing imports it.
    modules = [PACKAGE / f"{name}.py" for name in (*names[split:], "__main__")]
    sections.append(section("delayq", "The modules that all packages use.", PACKAGE, modules))
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
