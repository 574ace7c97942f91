"""The benchmark of the goals runs from beginning to end."""

from __future__ import annotations

import json

import pytest

from tests.support.programs import output_of


@pytest.mark.nightly
def test_the_floor_measures_the_rows_that_it_is_asked_for() -> None:
    printed = output_of(
        "-m", "benchmarks", "floor", "--quick", "--json", "--rows", "offer_many", "import"
    )
    found = json.loads(printed)
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
