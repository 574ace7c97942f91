"""The examples in the documentation run as shown.

Blocks that are not whole programs are marked ``notest`` there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import run_program

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name} block {number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE), 1
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_runs(block: str, tmp_path: Path) -> None:
    (program := tmp_path / "block.py").write_text(block, "utf-8")
    status = run_program(program, tmp_path / "output")
    assert status == 0, (tmp_path / "output").read_text("utf-8")


def test_the_quick_start_shows_the_first_order(tmp_path: Path) -> None:
    (program := tmp_path / "block.py").write_text(str(BLOCKS[0].values[0]), "utf-8")
    assert run_program(program, tmp_path / "output") == 0
    shown = (tmp_path / "output").read_text("utf-8")
    assert "{'order': 42}" in shown
    assert "still pending: {'order': 43}" in shown


def test_every_local_link_leads_somewhere() -> None:
    missing = [
        f"{page.name}: {target}"
        for page in {*PAGES, *ROOT.glob("*.md")}
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        if not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("program", ["diagrams.py", "plots.py"])
def test_the_pictures_are_as_they_are_drawn(program: str, tmp_path: Path) -> None:
    images = ROOT / "docs" / "images"
    subprocess.run([sys.executable, images / program, tmp_path], check=True, timeout=60)
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert drawn
    assert drawn == {name: (images / name).read_text("utf-8") for name in drawn}
