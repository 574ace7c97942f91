"""The plain functions that make decisions."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delayq._engine.line import shares
from delayq._engine.prefetch import MOST, begun_soon, moving_mean, next_batch
from delayq._engine.server_clock import ServerClock
from delayq._engine.wakeup_plan import Armed, LastTimeout, gives_way
from delayq._redis.retry import retry_delay


class TestShares:
    def test_all_get_alike_and_the_first_ones_the_rest(self) -> None:
        assert shares(5, [10, 10, 10]) == [2, 2, 1]
        assert shares(2, [1, 1, 1]) == [1, 1, 0]
        assert shares(9, [1, 10]) == [1, 8]
        assert shares(3, []) == []

    @given(st.integers(0, 300), st.lists(st.integers(1, 100), max_size=20))
    def test_no_share_is_too_large_and_none_is_withheld(self, count: int, wants: list[int]) -> None:
        result = shares(count, wants)
        assert all(0 <= share <= want for share, want in zip(result, wants, strict=True))
        assert sum(result) <= count
        if wants and max(wants) == min(wants):
            assert sum(result) == min(count, sum(wants))
            assert max(result) - min(result) <= 1


class TestPrefetch:
    @pytest.mark.parametrize(
        ("handlers", "took", "messages"),
        [
            (1, 60.0, 0),
            (100, 60.0, 0),
            (100, 1.0, 5),  # 100 handlers begin five messages within 50 ms
            (1, 0.01, 5),
            (10, 0.1, 5),
            (100, 0.0001, MOST),
            (1, 0.0, MOST),
        ],
    )
    def test_only_what_is_begun_within_a_moment_is_fetched_ahead(
        self, handlers: int, took: float, messages: int
    ) -> None:
        assert begun_soon(handlers, took) == messages

    def test_the_mean_follows_the_last_messages(self) -> None:
        took = moving_mean(None, 1.0)
        assert took == 1.0
        for _ in range(100):
            before, took = took, moving_mean(took, 0.0)
            assert took < before
        assert took < 0.01

    def test_quick_handling_fetches_more(self) -> None:
        assert next_batch(1, 1, 0.0) == 2
        assert next_batch(64, 64, 0.001) == MOST

    def test_slow_handling_fetches_one(self) -> None:
        assert next_batch(100, 100, 60.0) == 1
        assert next_batch(1, 1, 1.0) == 1

    def test_a_trickle_does_not_grow(self) -> None:
        assert next_batch(4, 1, 0.0) == 4

    @given(st.integers(1, MOST), st.integers(1, MOST), st.floats(0, 1e6))
    def test_it_stays_in_bounds(self, batch: int, got: int, took: float) -> None:
        assert 1 <= next_batch(batch, min(got, batch), took) <= MOST


class TestRetryDelay:
    @given(st.integers(1, 10_000))
    def test_it_doubles_up_to_its_bound_with_jitter(self, attempt: int) -> None:
        assert 0.01 <= retry_delay(attempt) <= 5.0
        assert retry_delay(attempt, most=0.5) <= 0.5
        assert retry_delay(1) <= 0.02
        assert retry_delay(50) >= 2.5


class TestLastTimeout:
    """Redisson replaces an earlier wake-up with a later one when a stale reply comes last."""

    def test_a_wake_up_gives_way_only_to_an_earlier_one(self) -> None:
        assert [gives_way(held, 5) for held in (None, Armed(6))] == [True, True]
        assert [gives_way(held, 5) for held in (Armed(5), Armed(1))] == [False, False]

    def test_a_later_wake_up_is_covered_by_the_one_that_is_held(self) -> None:
        last = LastTimeout()
        held = last.arm(3, 3_000_000)
        assert held is not None
        assert last.arm(50, 50_000_000) is None
        assert last.held is held
        assert held.last_us == 50_000_000

    def test_an_earlier_wake_up_takes_over_and_covers_the_later_one(self) -> None:
        last = LastTimeout()
        last.arm(50, 50_000_000)
        earlier = last.arm(3, 3_000_000)
        assert earlier is not None
        assert earlier is last.held
        assert (earlier.due_us, earlier.last_us) == (3_000_000, 50_000_000)

    def test_a_wake_up_for_whatever_is_due_passes_that_on(self) -> None:
        last = LastTimeout()
        last.arm(50)
        earlier = last.arm(3, 3_000_000)
        assert earlier is not None
        assert earlier.due_us == earlier.last_us == math.inf

    def test_a_fired_wake_up_is_released_only_if_it_is_still_held(self) -> None:
        last = LastTimeout()
        old, newer = last.arm(5), last.arm(1)
        assert old is not None
        assert newer is not None
        last.release(old)
        assert last.held is newer
        last.release(newer)
        assert not last.disarm()

    def test_disarming_forgets(self) -> None:
        last = LastTimeout()
        last.arm(5)
        assert last.disarm()
        assert not last.disarm()


class TestServerClock:
    """An estimate that is never ahead, and lags by the travel time of the quickest answer."""

    def test_before_the_first_answer_everything_is_due(self) -> None:
        assert ServerClock(lambda: 0.0).seconds_until(10**15) == 0

    def test_it_counts_on_from_an_answer(self) -> None:
        now = 100.0
        clock = ServerClock(lambda: now)
        clock.observe(5_000_000, now)
        assert clock.seconds_until(7_000_000) == pytest.approx(2)
        now = 101.5
        assert clock.seconds_until(7_000_000) == pytest.approx(0.5, abs=1e-3)
        now = 103.0
        assert clock.seconds_until(7_000_000) == 0

    def test_a_slow_answer_does_not_spoil_what_a_quick_one_told(self) -> None:
        now = 0.0
        clock = ServerClock(lambda: now)
        now = 0.001
        clock.observe(1_000_000, 0.0)
        asked, now = 1.0, 1.9  # the server answered at 1.1, but the answer took long
        clock.observe(2_100_000, asked)
        assert clock.seconds_until(4_000_000) == pytest.approx(4 - 2.9, abs=2e-3)

    @given(
        offset=st.floats(-1e6, 1e9),
        answers=st.lists(
            st.tuples(st.floats(0, 10), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20
        ),
    )
    # The server's time is truncated to microseconds, which does not contradict this.
    @example(offset=0.0, answers=[(0.0, 0.0, 0.0), (0.0078125, 0.0, 0.03125)])
    def test_it_is_never_ahead_and_lags_by_the_quickest_answer(
        self, offset: float, answers: list[tuple[float, float, float]]
    ) -> None:
        now = 50.0
        clock = ServerClock(lambda: now)
        quickest = math.inf
        for pause, there, back in answers:
            now += pause
            asked = now
            server_us = int((now + there + offset + 2e6) * 1e6)
            now += there + back
            clock.observe(server_us, asked)
            quickest = min(quickest, back)
            due = server_us + 100_000_000
            left = due / 1e6 - (now + offset + 2e6)
            lag = clock.seconds_until(due) - left
            assert -1e-5 <= lag <= quickest + 1e-5 * (now - 50) + 1e-5

    @given(step=st.floats(-5000, 5000), way=st.floats(0, 0.5))
    def test_the_next_answer_corrects_a_clock_that_was_set(self, step: float, way: float) -> None:
        now = 10.0
        clock = ServerClock(lambda: now)
        clock.observe(1_000_000_000_000, now)
        asked, now = 20.0, 20.0 + way
        server_us = 1_000_010_000_000 + int(step * 1e6)
        clock.observe(server_us, asked)
        assert 9 - way - 1e-3 <= clock.seconds_until(server_us + 9_000_000) <= 9 + 1e-3
