"""The pure wheel: unless a test says otherwise, of eight ticks, each a second.

What random operations show is in test_wheel_model.py.
"""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from delayq._timer.wheel import Timeout, Wheel
from tests.support.wheels import check

if TYPE_CHECKING:
    from collections.abc import Iterable

WHEEL = 8
WHEELS = WHEEL * WHEEL  # the far level ends after one or two of these


def nothing(_timeout: Timeout) -> None:
    pass


def fill(wheel: Wheel, deadlines: Iterable[float], now: float = 0.0) -> list[Timeout]:
    return [wheel.add(nothing, deadline, now) for deadline in deadlines]


def expire(wheel: Wheel, now: float, budget: int = 10**9) -> list[Timeout]:
    expired = list(wheel.expire(now, budget))
    check(wheel)
    return expired


@pytest.fixture
def wheel() -> Wheel:
    return Wheel(1.0, WHEEL)


def test_spreading_a_coarse_bucket_is_work_that_is_done_before_its_first_timer_is_due(
    wheel: Wheel,
) -> None:
    timeout, *_ = fill(wheel, [24.0] * 100, 6)
    tick = wheel.next_tick()
    assert tick is not None
    assert tick <= 24 - WHEEL
    assert expire(wheel, wheel.time_of(tick), budget=10) == []
    assert wheel.next_tick() == tick  # the rest is due now
    expire(wheel, wheel.time_of(tick))
    assert wheel.next_tick() == 25
    assert expire(wheel, 25.0)[0] is timeout


def test_rounding_makes_nobody_early_at_any_length_of_tick() -> None:
    for length in (0.00025, 0.1, 1 / 3, 7e-5, 1e-9):
        chance = random.Random(2)
        start = chance.uniform(0, 1e7)
        wheel = Wheel(length, 512, start)
        for tick in [*range(500), 10**9 + 7, 2**40 + 1]:
            assert wheel.tick_of(wheel.time_of(tick)) == tick
        fill(wheel, [start + chance.uniform(0, 3000 * length) for _ in range(200)], start)
        fired = 0
        while (number := wheel.next_tick()) is not None:
            now = wheel.time_of(number)
            for timeout in wheel.expire(now):
                assert timeout.deadline < now
                fired += 1
        check(wheel)
        assert fired == 200


def test_memory_is_free_as_soon_as_timers_are_cancelled() -> None:
    wheel = Wheel(0.001, 512)
    chance = random.Random(3)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        timeouts = fill(wheel, [chance.uniform(60, 3600) for _ in range(10_000)])
        held = tracemalloc.get_traced_memory()[0] - before
        while timeouts:
            timeouts.pop().cancel()
        gc.collect(0)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 10_000 * 150
    assert kept < held / 4  # empty buckets: a few hundred, however many timers there were


def test_empty_buckets_do_not_pile_up_and_live_timers_survive_their_sweeping() -> None:
    for spacing in (1, WHEEL, WHEELS):
        wheel, kept = Wheel(1.0, WHEEL), []
        for number in range(3000):
            (timeout,) = fill(wheel, [number * spacing])
            if number % 100:
                timeout.cancel()
            else:
                kept.append(timeout)
        buckets = len(wheel.near.buckets) + len(wheel.far.buckets) + len(wheel.very_far.buckets)
        assert buckets <= 1000, spacing
        assert expire(wheel, 1e9) == kept, spacing


def test_clearing_ends_the_expiry_and_abandoning_it_loses_nothing(wheel: Wheel) -> None:
    first, *rest = fill(wheel, [5, 5, 6, 600])
    for _ in wheel.expire(1000):
        break
    check(wheel)
    assert first.expired
    seen = []
    for timeout in wheel.expire(1000):
        seen.append(timeout)
        assert wheel.clear() == rest[1:]
    assert seen == rest[:1]
    check(wheel)


def test_a_wheel_has_a_sensible_size() -> None:
    ticks: list[Any] = [0, -1, 2**30 + 1, 10**100, 1.5, 512.0, "512", None]
    for length, number, wrong in (
        *((length, 512, "tick_duration") for length in (0, -0.001, math.nan, math.inf, 1e-12)),
        *((0.001, number, "ticks_per_wheel") for number in ticks),
        (1e8, 512, "292 years"),
    ):
        with pytest.raises(ValueError, match=wrong):
            Wheel(length, number)
    for number, rounded in ((1, 1), (2, 2), (3, 4), (511, 512), (512, 512), (513, 1024)):
        assert Wheel(1.0, number).near_end == 2 * rounded
    for number in (1, 2**30):
        wheel = Wheel(0.001, number)
        (timeout,) = fill(wheel, [1e5])
        assert expire(wheel, 1e5) == []
        assert expire(wheel, 1e5 + 0.002) == [timeout]
