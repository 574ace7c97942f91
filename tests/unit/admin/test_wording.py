"""Durations and limits as people write them."""

from __future__ import annotations

import pytest

from delayq import Limit
from delayq.admin.wording import read_duration, read_limit, write_limit
from delayq.errors import BadInput


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("1h30m", 5400), ("1d 12h", 129_600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert read_duration(text, "delay") == seconds


@pytest.mark.parametrize("text", ["", "soon", "1 fortnight", "1_000", "nan", "-NaN"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(BadInput, match="delay must be a duration"):
        read_duration(text, "delay")


@pytest.mark.parametrize(
    "limit",
    [
        None,
        Limit(5),
        Limit(rate=100),
        Limit(5, 100, 600),
        Limit(ordered=True),
        Limit(rate=3, per=0.25, ordered=True),
        Limit(rate=10**9, per=86_400.5),
    ],
)
def test_a_limit_is_written_as_it_is_read(limit: Limit | None) -> None:
    assert read_limit(write_limit(limit), "limit") == limit


def test_a_limit_of_nothing_is_none() -> None:
    assert write_limit(Limit()) == "none"


@pytest.mark.parametrize("text", ["{}", "{}/s", "5,{}/s"])
def test_a_limit_of_thousands_of_digits_is_too_large(text: str) -> None:
    with pytest.raises(BadInput, match="limit is too large: it has a number of 5,000 digits"):
        read_limit(text.format("9" * 5000), "limit")
