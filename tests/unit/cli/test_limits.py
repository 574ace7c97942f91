"""Limits as the command line reads and shows them."""

from __future__ import annotations

import pytest

from delayq import Limit
from delayq.cli.errors import CommandFailed
from delayq.cli.limits import limit_of, limit_shown

WRITTEN = {
    "none": (None, "none"),
    "5": (Limit(5), "5 at a time"),
    "100/s": (Limit(rate=100), "100 in 1.0 s"),
    "100/10m": (Limit(rate=100, per=600), "100 in 10 min"),
    "100/0.5": (Limit(rate=100, per=0.5), "100 in 0.5 s"),
    "5, 1000/h": (Limit(5, 1000, 3600), "5 at a time, 1,000 in 1 h 0 min"),
    "ordered": (Limit(ordered=True), "in order"),
    "ordered,2/d": (Limit(rate=2, per=86_400, ordered=True), "in order, 2 in 24 h 0 min"),
}


def test_a_limit_is_read_and_shown() -> None:
    for text, (limit, shown) in WRITTEN.items():
        assert limit_of(text, "--limit") == limit, text
        assert limit_shown(limit) == shown, text


def test_a_limit_that_means_nothing_is_refused_with_its_option() -> None:
    for text in (*("", "0", "-1", "five", "5,6", "1/s,2/s", "1/", "/s", "1/0"), "5,", "2,ordered"):
        with pytest.raises(CommandFailed, match="--group-limit"):
            limit_of(text, "--group-limit")
