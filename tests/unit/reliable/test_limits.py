"""Limits are checked when they are made, and survive the way through the server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq import Limit
from delayq._reliable.limits import limit_text, parse_limit

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"concurrency": 0}, "concurrency"),
    ({"concurrency": True}, "concurrency"),
    ({"concurrency": 1.5}, "concurrency"),
    ({"rate": 0}, "rate"),
    ({"rate": "5"}, "rate"),
    ({"rate": 5, "per": 0}, "per"),
    ({"rate": 5, "per": -1}, "per"),
    ({"rate": 5, "per": float("nan")}, "per"),
    ({"ordered": 1}, "ordered"),
    ({"ordered": True, "concurrency": 2}, "one message at a time"),
]


def test_an_invalid_limit_is_refused() -> None:
    for wrong, name in WRONG:
        with pytest.raises(delayq.BadInput, match=name):
            Limit(**wrong)


def test_a_period_is_kept_in_seconds_and_cannot_be_changed() -> None:
    limit = Limit(rate=5, per=timedelta(minutes=1))
    assert limit == Limit(rate=5, per=60.0)
    with pytest.raises(AttributeError):
        limit.rate = 6  # type: ignore[misc]


@given(
    st.none() | st.integers(1, 10**9),
    st.none() | st.integers(1, 10**9),
    st.integers(1, 10**13),
    st.booleans(),
)
def test_a_limit_is_read_as_it_was_stored(
    concurrency: int | None, rate: int | None, per_us: int, ordered: bool
) -> None:
    per = per_us / 1_000_000 if rate else 1.0
    limit = Limit(1 if ordered and concurrency else concurrency, rate, per, ordered)
    text = limit_text(limit, "group_limit", of_groups=True)
    read = parse_limit(text)
    assert (read or Limit()) == limit
    assert limit_text(read, "group_limit", of_groups=True) == text


def test_no_limit_is_read_from_anything_else() -> None:
    for text in (None, "", "0", "c", "c0", "c1o2", "nonsense"):
        assert parse_limit(text) is None, text
