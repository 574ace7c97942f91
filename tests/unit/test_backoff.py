"""Retry delays, without a server."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq import Backoff
from tests.support.cases import naming

CENTURY = 100 * 365.25 * 86_400


def delays(backoff: Backoff, count: int = 6) -> list[float]:
    return [round(backoff.delay(attempt, lambda: 0.5), 9) for attempt in range(1, count + 1)]


def test_every_kind_of_backoff_has_its_delays() -> None:
    cases: list[Any] = [
        (Backoff.fixed(2.5), [2.5] * 6),
        (Backoff.exponential(base=1, factor=2, max=10), [1, 2, 4, 8, 10, 10]),
        (Backoff.exponential(base=0.5, factor=3, max=1000), [0.5, 1.5, 4.5, 13.5, 40.5, 121.5]),
        (Backoff.exponential(base=8, factor=0.5), [8, 4, 2, 1, 0.5, 0.25]),
        (Backoff.exponential(base=8, factor=0), [8, 0, 0]),
        (Backoff.fibonacci(), [1, 1, 2, 3, 5, 8, 13, 21]),
        (Backoff.fibonacci(base=0.5, max=2), [0.5, 0.5, 1, 1.5, 2, 2]),
        (Backoff.explicit([5, 1, 30]), [5, 1, 30, 30, 30, 30]),
        (Backoff.explicit(iter([1])), [1, 1]),
        (Backoff.explicit([timedelta(minutes=1), 2]), [60, 2, 2]),
        (Backoff.fixed(timedelta(seconds=3)), [3, 3]),
        (Backoff.exponential(timedelta(seconds=1), max=timedelta(seconds=3)), [1, 2, 3]),
        (Backoff.fibonacci(timedelta(seconds=1), max=timedelta(seconds=2)), [1, 1, 2, 2]),
        (Backoff((1, 10), factor=2), [1, 10, 20, 40, 80, 160]),
        *((backoff, [0] * 6) for backoff in (Backoff.fixed(0), Backoff.explicit([0]))),
        *((Backoff.exponential(**limit), [0] * 6) for limit in ({"base": 0}, {"max": 0})),
    ]
    for backoff, expected in cases:
        with naming(backoff, expected):
            assert delays(backoff, len(expected)) == expected


def test_huge_attempts_stay_finite() -> None:
    for attempt in [100, 10_000, 10**9, 10**300]:
        with naming(attempt):
            middle = lambda: 0.5
            assert Backoff.exponential(max=300).delay(attempt, middle) == 300
            assert Backoff.exponential(base=8, factor=0.5).delay(attempt, middle) < 1e-9
            assert Backoff.fibonacci(max=3600).delay(attempt, middle) == 3600
            assert Backoff((1.0,), factor=2.0).delay(attempt, middle) == pytest.approx(CENTURY)
            assert Backoff.fixed(1e300).delay(attempt, middle) <= CENTURY
    for attempt in (0, -1):  # as the first one
        assert Backoff.explicit([1, 2]).delay(attempt) == 1


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


BAD: dict[str, list[Any]] = {
    "delays": [(), (-1,), (math.nan,), (math.inf,), ("1",), (True,)],
    "factor": [-1, math.inf],
    "max": [-1, math.nan, None],
    "jitter": [-0.1, 1.1, math.nan, "much"],
}


def test_bad_arguments_are_refused() -> None:
    for bad in [{name: value} for name in BAD for value in BAD[name]]:
        with naming(bad), pytest.raises(delayq.BadInput):
            Backoff(**{"delays": (1,), **bad})
    ways: list[Any] = [Backoff.fixed, Backoff.exponential, Backoff.fibonacci]
    for how in ways:
        for value, jitter in ((-1, 0), (1, 2)):
            with naming(how, value), pytest.raises(delayq.BadInput):
                how(value, jitter=jitter)
    with pytest.raises(delayq.BadInput):
        Backoff.explicit([])
