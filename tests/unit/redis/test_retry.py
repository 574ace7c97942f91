"""The delay before a call is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delayq._redis.retry import retry_delay


@given(st.integers(1, 10_000))
def test_it_doubles_up_to_its_bound_with_jitter(attempt: int) -> None:
    assert 0.01 <= retry_delay(attempt) <= 5.0
    assert retry_delay(attempt, most=0.5) <= 0.5
    assert retry_delay(1) <= 0.02
    assert retry_delay(50) >= 2.5
