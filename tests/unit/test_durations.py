"""Durations, moments, limits and retry delays in the forms that users write."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq import Backoff, Limit
from delayq._durations import MAX_MS, datetime_at, estimated_delay, microseconds, seconds, when_due
from delayq._reliable.limits import write_limit
from delayq.admin.wording import read_duration, read_limit, read_setting, write_setting
from delayq.errors import BadDelay, BadInput
from tests.support.cases import naming

NOW = datetime(2026, 1, 2, 3, 4, 5, 600_000, tzinfo=UTC)


DURATIONS: dict[float | timedelta, int] = {0: 0, 1: 1_000_000, 0.3: 300_000, 2.5: 2_500_000}
DURATIONS |= {1e-6: 1, 1e-7: 1, timedelta(milliseconds=1): 1_000}


def test_a_duration_is_seconds_or_a_timedelta() -> None:
    for duration, expected in DURATIONS.items():
        with naming(duration, expected):
            assert microseconds(duration) == expected
            assert seconds(duration, "delay") == expected / 1_000_000


@given(st.floats(min_value=0, max_value=1e9))
def test_a_duration_is_never_shortened(duration: float) -> None:
    # Allow for less than a nanosecond, the distance between neighbouring floats of this size.
    assert microseconds(duration) >= duration * 1_000_000 - 0.001
    assert microseconds(duration) <= duration * 1_000_000 + 1


def test_a_value_that_is_no_duration_is_refused() -> None:
    cases: list[Any] = [
        *(-1, -1e-6, math.nan, math.inf, -math.inf, MAX_MS, 1e303, 10**400, timedelta(-1)),
        *(True, "1", None, [1], 1j),
    ]
    for bad in cases:
        with naming(bad), pytest.raises(BadDelay):
            microseconds(bad)
    with pytest.raises(BadDelay, match="timeout must not be negative, but is -1"):
        seconds(-1, "timeout")


def test_a_moment_travels_as_it_is() -> None:
    assert when_due(None, None) == 0
    for moment in (NOW, NOW.astimezone(timezone(timedelta(hours=9)))):
        assert when_due(None, moment) == "@1767323045600000"
    assert when_due(None, datetime(1969, 1, 1, tzinfo=UTC)) == "@0"
    # Who looks on gets an estimate.
    assert estimated_delay(None, datetime.max.replace(tzinfo=UTC)) > 1e11
    assert estimated_delay(None, datetime(2020, 1, 1, tzinfo=UTC)) == 0
    assert estimated_delay(2, None) == 2


def test_a_moment_past_the_calendar_is_its_last_one() -> None:
    assert datetime_at(0) == datetime(1970, 1, 1, tzinfo=UTC)
    moment = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert datetime_at(1_700_000_000_123_000) == moment
    assert datetime_at(MAX_MS * 1000) == datetime.max.replace(tzinfo=UTC)


def test_durations_have_units() -> None:
    written = {"90": 90, "1.5s": 1.5, "250ms": 0.25, "1h30m": 5400, "1d 12h": 129_600, "0": 0}
    for text, duration in written.items():
        assert read_duration(text, "delay") == duration, text
    wrong = ("", "soon", "1y", "1h x", "m", "1h-2m", "1_000", "0x10", "\u0661", "nan", "-NaN")
    for text in wrong:
        with pytest.raises(BadInput, match="delay must be a duration"):
            read_duration(text, "delay")


def test_a_limit_is_written_as_it_is_read() -> None:
    limits = (Limit(5, 100, 600), Limit(rate=3, per=0.25, ordered=True), Limit(rate=10**9, per=2.5))
    for limit in (None, Limit(5), Limit(rate=100, per=1e-6), Limit(ordered=True), *limits):
        assert read_limit(write_limit(limit), "limit") == limit
    assert write_limit(Limit()) == "none"
    assert read_limit("5, 1000/h", "limit") == Limit(5, 1000, 3600)
    for text in (*("", "0", "-1", "five", "5,6", "1/s,2/s", "1/", "/s", "1/0"), "5,", "2,ordered"):
        with pytest.raises(BadInput, match="limit"):
            read_limit(text, "limit")
    with pytest.raises(BadInput, match="limit is too large: it has a number of 5,000 digits"):
        read_limit(f"5,{'9' * 5000}/s", "limit")


def test_the_duration_of_a_setting_is_written_as_it_is_read() -> None:
    for keep in (0.0, 1e-6, 0.5, 90.0, 5400.0, 1e9):
        assert read_setting("keep", write_setting("keep", keep), "keep") == keep


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
