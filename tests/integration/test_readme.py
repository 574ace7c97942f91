"""The examples in the documentation run as shown.

Blocks that are not whole programs are marked ``notest`` there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

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


def test_the_first_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    readme = PAGES[0].read_text("utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (program := tmp_path / "block.py").write_text(str(BLOCKS[0].values[0]), "utf-8")
    assert run_program(program, tmp_path / "output") == 0
    assert (tmp_path / "output").read_text("utf-8") == shown


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as repositories' pages have them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    words = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in words}


def test_every_local_link_leads_somewhere() -> None:
    folders = (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "benchmarks")
    missing = []
    for page in [path for folder in folders for path in folder.glob("*.md")]:
        for target, anchor in re.findall(
            r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")
        ):
            to = page.parent / target if target else page
            if not to.exists() or (anchor and anchor not in headings(to)):
                missing.append(f"{page.name}: {target}#{anchor}")
    assert missing == []


@pytest.mark.parametrize("program", ["diagrams.py", "plots.py"])
def test_the_pictures_are_as_they_are_drawn(program: str, tmp_path: Path) -> None:
    images = ROOT / "docs" / "images"
    subprocess.run([sys.executable, images / program, tmp_path], check=True, timeout=60)
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert drawn
    assert drawn == {name: (images / name).read_text("utf-8") for name in drawn}


def test_the_tables_of_other_libraries_have_the_measured_figures(tmp_path: Path) -> None:
    program = ROOT / "docs" / "tables.py"
    subprocess.run([sys.executable, program, tmp_path], check=True, timeout=60)
    for page in ("README.md", "docs/performance.md"):
        filled = (tmp_path / page).read_text("utf-8")
        assert (ROOT / page).read_text("utf-8") == filled, f"fill them again: python {program}"
        assert filled.count("| BullMQ Node") == 1


def test_the_recording_moves_by_itself_and_loads_nothing() -> None:
    """Pages that show it as an image run no scripts and fetch no fonts."""
    text = (ROOT / "docs" / "images" / "demo.svg").read_text("utf-8")
    assert len(text.encode()) < 100_000
    picture = ET.fromstring(text)
    names = {each.tag.rpartition("}")[2] for each in picture.iter()}
    assert names == {"svg", "title", "style", "defs", "g", "use", "text", "path", "rect"}
    assert not re.search(r"url\(|@import|@font-face|href=\"(?!#)", text)
    # It shows its end where nothing moves.
    (moves,) = re.findall(r"@keyframes run \{(.*)\}", text)
    last = re.findall(r"translateY\((-\d+)px\)", moves)[-1]
    assert f'transform="translate(0 {last})"' in text
    assert "lost: 0" in text
