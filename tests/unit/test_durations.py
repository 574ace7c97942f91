"""Durations and moments in the forms that users write."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._durations import MAX_MS, estimated_delay, microseconds, moment_us, seconds, when_due
from delayq.errors import BadDelay
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
    assert moment_us(0) == datetime(1970, 1, 1, tzinfo=UTC)
    moment = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert moment_us(1_700_000_000_123_000) == moment
    assert moment_us(MAX_MS * 1000) == datetime.max.replace(tzinfo=UTC)
