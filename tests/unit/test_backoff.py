"""Retry delays, without a server."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq import Backoff

CENTURY = 100 * 365.25 * 86_400


def delays(backoff: Backoff, count: int = 6) -> list[float]:
    return [round(backoff.delay(attempt, lambda: 0.5), 9) for attempt in range(1, count + 1)]


def test_fixed_stays() -> None:
    assert delays(Backoff.fixed(2.5)) == [2.5] * 6


def test_exponential_grows_up_to_its_maximum() -> None:
    assert delays(Backoff.exponential(base=1, factor=2, max=10)) == [1, 2, 4, 8, 10, 10]
    assert delays(Backoff.exponential(base=0.5, factor=3, max=1000)) == [
        0.5,
        1.5,
        4.5,
        13.5,
        40.5,
        121.5,
    ]


def test_exponential_may_shrink() -> None:
    assert delays(Backoff.exponential(base=8, factor=0.5)) == [8, 4, 2, 1, 0.5, 0.25]
    assert delays(Backoff.exponential(base=8, factor=0), 3) == [8, 0, 0]


def test_fibonacci_grows_so() -> None:
    assert delays(Backoff.fibonacci(), 8) == [1, 1, 2, 3, 5, 8, 13, 21]
    assert delays(Backoff.fibonacci(base=0.5, max=2)) == [0.5, 0.5, 1, 1.5, 2, 2]


def test_explicit_goes_down_its_list_and_stays_at_its_end() -> None:
    assert delays(Backoff.explicit([5, 1, 30])) == [5, 1, 30, 30, 30, 30]
    assert delays(Backoff.explicit(iter([1])), 2) == [1, 1]


def test_after_a_list_a_factor_goes_on_from_its_end() -> None:
    assert delays(Backoff((1, 10), factor=2)) == [1, 10, 20, 40, 80, 160]


def test_no_delay_is_no_delay() -> None:
    for backoff in (
        Backoff.fixed(0),
        Backoff.exponential(base=0),
        Backoff.explicit([0]),
        Backoff.exponential(max=0),
    ):
        assert delays(backoff) == [0] * 6


@pytest.mark.parametrize("attempt", [0, -1])
def test_before_the_first_attempt_is_as_after_it(attempt: int) -> None:
    assert Backoff.explicit([1, 2]).delay(attempt) == 1


@pytest.mark.parametrize("attempt", [100, 10_000, 10**9, 10**300])
def test_huge_attempts_stay_finite(attempt: int) -> None:
    middle = lambda: 0.5
    assert Backoff.exponential(max=300).delay(attempt, middle) == 300
    assert Backoff.exponential(base=8, factor=0.5).delay(attempt, middle) < 1e-9
    assert Backoff.fibonacci(max=3600).delay(attempt, middle) == 3600
    assert Backoff((1.0,), factor=2.0).delay(attempt, middle) == pytest.approx(CENTURY)
    assert Backoff.fixed(1e300).delay(attempt, middle) <= CENTURY


@given(
    st.floats(0, 1e6),
    st.floats(0, 10),
    st.floats(0, 1e6),
    st.floats(0, 1),
    st.integers(1, 10**6),
    st.floats(0, 1),
)
def test_jitter_stays_within_its_part_and_the_maximum(
    base: float, factor: float, most: float, jitter: float, attempt: int, chance: float
) -> None:
    exact = Backoff.exponential(base, factor, most, jitter=0).delay(attempt)
    delay = Backoff.exponential(base, factor, most, jitter).delay(attempt, lambda: chance)
    assert 0 <= delay <= most
    assert exact * (1 - jitter) * (1 - 1e-9) <= delay <= exact * (1 + jitter) * (1 + 1e-9)


def test_jitter_spreads_to_both_ends() -> None:
    backoff = Backoff.fixed(10, jitter=0.2)
    assert backoff.delay(1, lambda: 0.0) == pytest.approx(8)
    assert backoff.delay(1, lambda: 1.0) == pytest.approx(12)
    assert len({backoff.delay(1) for _ in range(100)}) > 90


@pytest.mark.parametrize(
    "bad",
    [
        {"delays": ()},
        {"delays": (-1,)},
        {"delays": (math.nan,)},
        {"delays": (math.inf,)},
        {"delays": ("1",)},
        {"delays": (True,)},
        {"delays": (1,), "factor": -1},
        {"delays": (1,), "factor": math.inf},
        {"delays": (1,), "max": -1},
        {"delays": (1,), "max": math.nan},
        {"delays": (1,), "max": None},
        {"delays": (1,), "jitter": -0.1},
        {"delays": (1,), "jitter": 1.1},
        {"delays": (1,), "jitter": math.nan},
        {"delays": (1,), "jitter": "much"},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(delayq.BadInput):
        Backoff(**bad)


@pytest.mark.parametrize("how", [Backoff.fixed, Backoff.exponential, Backoff.fibonacci])
def test_every_way_checks_its_arguments(how: Any) -> None:
    with pytest.raises(delayq.BadInput):
        how(-1)
    with pytest.raises(delayq.BadInput):
        how(1, jitter=2)
    with pytest.raises(delayq.BadInput):
        Backoff.explicit([])
