"""The counts of a queue's history: durations in buckets, and the text that the server keeps."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from delayq._reliable.process_report import Blocking
from delayq._reliable.report_format import (
    Sampler,
    Work,
    activity_of,
    checked_span,
    facts_of,
    packed,
    worker_of,
)
from delayq.errors import BadInput
from delayq.stats import Activity, Spread, WorkerInfo, bucket_of

DAY = 86_400.0


def test_a_quantile_is_off_by_a_fifth_at_most() -> None:
    for seconds in (0.0002, 0.003, 0.05, 0.7, 4.0, 90.0, 3600.0, DAY / 2):
        median = Spread({bucket_of(seconds): 3}).p50
        assert median is not None
        assert 1 / 1.2 <= median / seconds <= 1.2, seconds
    assert bucket_of(-1.0) == bucket_of(0.0) == bucket_of(0.0001) == 0
    assert Spread({0: 1}).p99 == 0.0001
    assert bucket_of(100 * DAY) == bucket_of(1000 * DAY) == 59
    assert Spread({}).p50 is None


def test_quantiles_count_from_the_shortest_duration() -> None:
    spread = Spread({bucket_of(1.0): 1, bucket_of(0.001): 98, bucket_of(0.01): 1})
    assert spread.count == 100
    assert spread.p50 == spread.quantile(0.98)
    assert spread.p99 == Spread({bucket_of(0.01): 1}).p50
    assert spread.quantile(1.0) == Spread({bucket_of(1.0): 1}).p50


def measure(sampler: Sampler, messages: int, seconds: float) -> int:
    """Let messages end, and return how many of them were measured."""
    measured = 0
    for _ in range(messages):
        sampler.skip -= 1
        if sampler.skip < 0:
            sampler.add(seconds)
            measured += 1
    return measured


def test_the_durations_of_many_messages_are_sampled() -> None:
    sampler = Sampler()
    assert measure(sampler, 256, 0.5) == 256, "few are all measured"
    assert sampler.drain() == {bucket_of(0.5): 256}
    assert measure(sampler, 300_000, 0.5) < 4000
    assert sum(sampler.drain().values()) == pytest.approx(300_000, rel=0.01)
    # The next report begins anew.
    assert measure(sampler, 256, 0.5) == 256


def test_a_written_report_is_read_back() -> None:
    counts = {"o": 7, "h": 5, "f": 0, "d": 2, "e": 1}
    text = packed(counts, {3: 4}, {0: 2, 59: 1})
    assert "f=" not in text
    assert activity_of("m", f"29924245 {text}".encode()) == Activity(
        start=datetime(2026, 11, 23, 17, 25, tzinfo=UTC),
        seconds=60,
        offered=7,
        handled=5,
        failed=0,
        dead=2,
        expired=1,
        lateness=Spread({3: 4}),
        handling=Spread({0: 2, 59: 1}),
    )


def test_a_report_of_a_worker_is_read_within_bounds() -> None:
    blocking = Blocking("f (x.py, line 1)", 2.0, 2.0, 9.0)
    facts = json.loads(facts_of(Work(1, 1, [], {}, 1, blocking), 10.0, 5.0, 60_000_000))

    def read(**forged: Any) -> WorkerInfo | None:
        return worker_of("jobs", b"1700000000000000", json.dumps(facts | forged).encode())

    for seconds, age in ((float("inf"), 0), (float("nan"), 0), (1e300, 0), (-5, 0), (1, -9e8)):
        assert read(blocked=["f", seconds, 0, age]) is None
    info = read(blocked=["\ud800" * 999, 2, 2, 1], messages=[["\ud800", 1, 1.0, 0]])
    assert info is not None
    assert info.blocked is not None
    assert (info.blocked.code, info.messages[0].id) == ("?" * 200, "?")


def test_an_unreadable_report_counts_as_nothing() -> None:
    far = b"498737 l99999=1 l2300=5 l60=1 o=" + b"9" * 5000
    for stored in (b"498737", b"498737 ", b"498737 \xff=1 z=9 o=x =3 q7=1", far):
        activity = activity_of("h", stored)
        assert (activity.seconds, activity.start) == (3600, datetime(2026, 11, 23, 17, tzinfo=UTC))
        assert (activity.offered, activity.lateness.count) == (0, 0), stored


def test_activities_add_up() -> None:
    parts = [activity_of("m", b"10 o=1 h=2 l3=4"), activity_of("m", b"11 o=5 l3=1 t2=2")]
    whole = Activity.total(parts)
    assert (whole.start, whole.seconds) == (parts[0].start, 120)
    assert (whole.offered, whole.handled) == (6, 2)
    assert (whole.lateness, whole.handling) == (Spread({3: 5}), Spread({2: 2}))


def test_an_impossible_span_is_refused() -> None:
    for name, number in (("minutes", 0), ("minutes", 1441), ("hours", 721), ("hours", True)):
        asked: dict[str, Any] = {"minutes": None, "hours": None, name: number}
        with pytest.raises(BadInput, match=rf"{name} must be an int from 1 to"):
            checked_span(**asked)
    with pytest.raises(BadInput, match="not both"):
        checked_span(1, 1)
