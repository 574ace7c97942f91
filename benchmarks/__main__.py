"""Run a benchmark by name: ``python -m benchmarks [NAME ...]``.

Without a name, list all benchmarks.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def about(module: Path) -> str:
    """Return the first sentence of a module's docstring, without its command."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return text.partition("\n")[0].partition(": ``")[0].rstrip(".")


def main() -> None:
    modules = {
        path.stem: path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")
    }
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in modules:
        print(
            "usage: python -m benchmarks NAME [options]; add --help after the name for its"
            " options\n"
        )
        for benchmark, path in modules.items():
            print(f"{benchmark.ljust(max(map(len, modules)))}  {about(path)}")
        sys.exit(0 if name in ("", "-h", "--help") else f"\nthere is no benchmark {name!r}")
    sys.argv[:] = [str(modules[name]), *sys.argv[2:]]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
