"""Benchmarks can be started, and are listed. Their results are for the people who run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import output_of

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")
)


def test_the_readme_lists_each_of_them_and_no_other() -> None:
    table = (
        (ROOT / "benchmarks" / "README.md")
        .read_text()
        .partition("| name |")[2]
        .partition("\n\n")[0]
    )
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_says_how_it_is_called(name: str) -> None:
    printed = output_of("-W", "error", "-m", "benchmarks", name, "--help")
    assert printed.startswith("usage: ")
