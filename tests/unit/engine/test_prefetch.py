"""How many messages a loop asks for next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._engine.prefetch import MOST, next_batch


@pytest.mark.parametrize(
    ("batch", "got", "took", "following"),
    [
        *((1, 1, 0.0, 2), (64, 64, 0.001, MOST)),  # quick handling fetches more
        *((100, 100, 60.0, 1), (1, 1, 1.0, 1)),  # slow handling fetches one
        (4, 1, 0.0, 4),  # a trickle does not grow
    ],
)
def test_it_follows_the_pace(batch: int, got: int, took: float, following: int) -> None:
    assert next_batch(batch, got, took) == following


@given(st.integers(1, MOST), st.integers(1, MOST), st.floats(0, 1e6))
def test_it_stays_in_bounds(batch: int, got: int, took: float) -> None:
    assert 1 <= next_batch(batch, min(got, batch), took) <= MOST
