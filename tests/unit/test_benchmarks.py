"""Benchmarks can be started, and are listed. Their results are for the people who run them, but the
sums in them are right.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import floor
from benchmarks._profile import KERNEL, Share, client_us, server_us
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


def test_a_ratio_is_that_of_the_runs_and_not_that_of_the_medians() -> None:
    runs = [{"ours": {"rate": ours}, "theirs": {"rate": 10.0}} for ours in (5.0, 8.0, 9.0)]
    runs[1]["theirs"]["rate"] = 20.0
    found = floor.Row("it", ("ours", "rate"), ("theirs", "rate"), at_least=0.5).judge(runs)
    assert (found["delayq"], found["by_hand"]) == (8, 10)
    assert (found["ratio"], found["least"], found["most"]) == (0.5, 0.4, 0.9)
    assert (found["goal"], found["met"]) == (">= 0.5", True)
    # It can be how many times as fast.
    row = floor.Row("it", ("ours", "ns"), ("theirs", "ns"), at_least=6, inverse=True)
    found = row.judge([{"ours": {"ns": 2.0}, "theirs": {"ns": 9.0}}])
    assert (found["ratio"], found["met"]) == (4.5, False)
    # Without a counterpart, the goal is for the figure.
    found = floor.Row("it", ("ours", "p99"), at_most=4).judge([{"ours": {"p99": 4.5}}])
    assert (found["delayq"], found["least"], found["met"]) == (4.5, 4.5, False)


def test_the_time_of_the_profiler_is_subtracted_and_the_rest_of_a_script_is_lua() -> None:
    profile = {"delayq.client": Share(12.0, 4), "asyncio": Share(6.0, 0)}
    profiled = {"client_us": 20.0, "kernel_us": 2.0}
    found = client_us(profile, profiled, plain_us=11, kernel_us=1)
    assert found == {"delayq.client": 4, "asyncio": 6, KERNEL: 1}
    found = server_us({"zadd": 2.0, "get": 0.0, "hset": 1.5}, script_us=5.0, whole_us=7.0)
    assert list(found.values()) == [2.0, 1.5, 2.0, 1.5]
