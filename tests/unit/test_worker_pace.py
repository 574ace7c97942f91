"""The number of messages that a listener claims before it has free slots for them."""

from __future__ import annotations

import pytest

from delayq.worker._pace import MOST, ahead, mean


@pytest.mark.parametrize(
    ("slots", "took", "messages"),
    [
        (100, None, 0),  # nothing is known yet
        (1, 60.0, 0),
        (100, 60.0, 0),
        (100, 1.0, 5),  # 100 slots start five messages within 50 ms
        (1, 0.01, 5),
        (10, 0.1, 5),
        (100, 0.0001, MOST),
        (1, 0.0, MOST),
    ],
)
def test_only_what_is_begun_within_a_moment_is_claimed_ahead(
    slots: int, took: float | None, messages: int
) -> None:
    assert ahead(slots, took) == messages


def test_the_mean_follows_the_last_messages() -> None:
    took = mean(None, 1.0)
    assert took == 1.0
    for _ in range(100):
        before, took = took, mean(took, 0.0)
        assert took < before
    assert took < 0.01
