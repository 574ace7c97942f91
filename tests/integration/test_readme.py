"""The examples in the documentation run as shown.

Blocks that are not whole programs are marked ``notest`` there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.depth import in_gate
from tests.support.forks import run_program

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, of: str = "python") -> list[str]:
    return re.findall(rf"^```{of}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [PAGES[0], *map(in_gate, filter(blocks, PAGES[1:]))], ids=lambda page: page.name
)
def test_every_code_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page), 1):
        (program := tmp_path / "block.py").write_text(block, "utf-8")
        status = run_program(program, output := tmp_path / f"output-{number}")
        assert status == 0, f"block {number}: {output.read_text('utf-8')}"
    if page.name == "README.md":
        # The first program prints what the page shows.
        (shown,) = blocks(page, "text")
        assert (tmp_path / "output-1").read_text("utf-8") == shown


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as repositories' pages have them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    words = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", word.lower()).strip().replace(" ", "-") for word in words}


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


@pytest.mark.gate
def test_the_pictures_and_tables_are_as_they_are_drawn(tmp_path: Path) -> None:
    images = ROOT / "docs" / "images"
    for program in ("diagrams.py", "plots.py"):
        (to := tmp_path / program).mkdir()
        subprocess.run([sys.executable, images / program, to], check=True, timeout=60)
        drawn = {path.name: path.read_text("utf-8") for path in to.iterdir()}
        assert drawn
        assert drawn == {name: (images / name).read_text("utf-8") for name in drawn}
    # The tables of other libraries have the measured figures.
    fill = ROOT / "docs" / "tables.py"
    subprocess.run([sys.executable, fill, tmp_path], check=True, timeout=60)
    for page, tables in (("README.md", 1), ("docs/performance.md", 3)):
        filled = (tmp_path / page).read_text("utf-8")
        assert (ROOT / page).read_text("utf-8") == filled, f"fill them again: python {fill}"
        assert filled.count("| BullMQ Node") == tables
