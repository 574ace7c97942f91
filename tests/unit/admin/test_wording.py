"""Durations and limits as people write them."""

from __future__ import annotations

import pytest

from delayq import Limit
from delayq._reliable.limits import write_limit
from delayq.admin.wording import read_duration, read_limit
from delayq.errors import BadInput


def test_durations_have_units() -> None:
    written = {"90": 90, "1.5s": 1.5, "250ms": 0.25, "1h30m": 5400, "1d 12h": 129_600, "0": 0}
    for text, seconds in written.items():
        assert read_duration(text, "delay") == seconds, text
    wrong = ("", "soon", "1y", "1h x", "m", "1h-2m", "1_000", "0x10", "\u0661", "nan", "-NaN")
    for text in wrong:
        with pytest.raises(BadInput, match="delay must be a duration"):
            read_duration(text, "delay")


def test_a_limit_is_written_as_it_is_read() -> None:
    limits = (Limit(5, 100, 600), Limit(rate=3, per=0.25, ordered=True), Limit(rate=10**9, per=2.5))
    for limit in (None, Limit(5), Limit(rate=100), Limit(ordered=True), *limits):
        assert read_limit(write_limit(limit), "limit") == limit
    assert write_limit(Limit()) == "none"
    assert read_limit("5, 1000/h", "limit") == Limit(5, 1000, 3600)
    for text in (*("", "0", "-1", "five", "5,6", "1/s,2/s", "1/", "/s", "1/0"), "5,", "2,ordered"):
        with pytest.raises(BadInput, match="limit"):
            read_limit(text, "limit")
    with pytest.raises(BadInput, match="limit is too large: it has a number of 5,000 digits"):
        read_limit(f"5,{'9' * 5000}/s", "limit")
