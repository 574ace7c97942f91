"""Benchmarks can be started, and are listed. Their results are for the people who run them, but the
sums in them are right.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import floor
from tests.support.programs import output_of

ROOT = Path(__file__).parents[2]


def test_the_readme_lists_each_of_them_and_no_other() -> None:
    benchmarks = ROOT / "benchmarks"
    names = {path.stem for path in benchmarks.glob("*.py") if not path.stem.startswith("_")}
    _, _, text = (benchmarks / "README.md").read_text().partition("| name |")
    table = text.partition("\n\n")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} == names
    for row in floor.all_rows(200):
        assert row.samples() <= floor.SAMPLES.keys(), row.what
    assert {plain for _, plain, _ in floor.PROFILES.values()} <= floor.SAMPLES.keys()


@pytest.mark.nightly
def test_the_floor_measures_the_rows_that_it_is_asked_for() -> None:
    rows = ("--rows", "offer_many", "import")
    found = json.loads(output_of("-m", "benchmarks", "floor", "--quick", "--json", *rows))
    assert [row["what"] for row in found["rows"]] == [
        "offer_many(1,000), DelayedQueue, /s",
        "offer_many(1,000), ReliableQueue, /s",
        "import delayq, to asyncio, ms",
    ]
    for row in found["rows"]:
        assert row["delayq"] > 0 < row["by_hand"]
        assert row["least"] <= row["ratio"] <= row["most"]
    assert list(found["causes"]) == ["offer, hand", "many D", "many R"]
    for parts in found["causes"].values():
        assert "system calls" in parts["client"]
        assert parts["server"]["zadd"] > 0
