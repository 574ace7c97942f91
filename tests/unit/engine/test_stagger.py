"""Many clients wait for one moment: each wakes after a stagger of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._engine.stagger import (
    _ASIDE,
    _ASK_EVERY,
    LEAST,
    MOST,
    Stagger,
    TransferNotice,
    parse,
)

FROM_A_CONSUMER = TransferNotice(next_us=-1, through_us=0, client="other", demand=True)
FROM_A_PRODUCER = TransferNotice(next_us=-1, through_us=0, client="other", demand=False)


def not_first(place: float = 0.5, *, after: float = 0.0) -> Stagger:
    """Return the stagger of a client that heard a notice ``after`` seconds after the moment."""
    stagger = Stagger("us", lambda: place)
    stagger.on_notice(FROM_A_CONSUMER, after, demand=True)
    return stagger


def test_few_of_many_clients_wake_before_the_first_ones_notice_has_reached_them() -> None:
    """The notice takes 4 ms. The earliest wakes no later than it would among ten."""
    chance = random.Random(1)
    notice = TransferNotice(next_us=-1, through_us=0, client="first", demand=True, listeners=1000)
    delays = []
    for _ in range(1000):
        stagger = Stagger("us", chance.random)
        stagger.on_notice(notice, 0.0, demand=True)
        delays.append(stagger.delay(demand=True))
    earliest = min(delays)
    assert earliest < 2 * LEAST
    assert sum(delay < earliest + 0.004 for delay in delays) < 40
    assert max(delays) <= 0.25


def test_a_notice_says_how_many_clients_heard_the_last_one() -> None:
    stagger = Stagger("abc", lambda: 0.5)
    stagger.published(200, 0.0)
    notice = parse(b"1 2 " + stagger.signature(0.0, demand=True).encode())
    assert notice == TransferNotice(1, 2, "abc", demand=True, listeners=200)
    assert parse(b"1 2 abc 1") == TransferNotice(1, 2, "abc", demand=True), (
        "from a client that knows of no other"
    )


def hear(stagger: Stagger, notice: TransferNotice = FROM_A_CONSUMER) -> None:
    stagger.on_notice(notice, 0.0, demand=True)


class TestNotice:
    @given(
        next_us=st.integers(-1, 2**53),
        through_us=st.integers(0, 2**53),
        client=st.text("0123456789abcdef", min_size=1, max_size=16),
        demand=st.booleans(),
    )
    def test_a_published_notice_is_parsed(
        self, next_us: int, through_us: int, client: str, demand: bool
    ) -> None:
        signature = Stagger(client, lambda: 0.5).signature(0.0, demand=demand)
        content = f"{next_us} {through_us} {signature}".encode()
        assert parse(content) == TransferNotice(next_us, through_us, client, demand)

    @pytest.mark.parametrize("rest", [b"", b" 2", b" 2 abc", b" 2 abc 1 more"])
    def test_the_number_of_a_notification_is_no_notice(self, rest: bytes) -> None:
        for number in b"0 1700000000000 -1 1700000000000000".split():
            assert parse(number + rest) is None

    @pytest.mark.parametrize(
        "content", [b"", b"nonsense", b"x 2 abc 1", b"1 y abc 1", b"1.5 2 abc 1", b"1 2 \xff\xfe 1"]
    )
    def test_anything_else_is_no_notice(self, content: bytes) -> None:
        assert parse(content) is None


class TestStagger:
    def test_a_client_that_knows_of_no_other_wakes_at_the_due_time(self) -> None:
        stagger = Stagger("us", lambda: 0.5)
        assert stagger.delay(demand=True) == 0
        stagger.found_nothing()
        assert stagger.delay(demand=True) == 0

    def test_a_client_that_was_not_first_leaves_the_others_a_head_start(self) -> None:
        assert not_first(0.0).delay(demand=True) == pytest.approx(LEAST)
        assert not_first(1.0).delay(demand=True) == pytest.approx(2 * LEAST)

    def test_a_client_that_found_messages_wakes_at_the_due_time_from_then_on(self) -> None:
        stagger = not_first()
        stagger.transferred()
        assert stagger.delay(demand=True) == 0

    def test_a_client_that_came_too_late_steps_back_once_it_knows_of_others(self) -> None:
        stagger = Stagger("us", lambda: 0.5)
        stagger.published(2, 0.0)
        stagger.found_nothing()
        assert stagger.delay(demand=True) > 0

    def test_a_place_is_kept_until_it_is_lost_or_won(self) -> None:
        chances = iter((0.25, 0.75))
        stagger = Stagger("us", lambda: next(chances))
        for _ in range(3):
            hear(stagger)
            stagger.found_nothing()
            assert stagger.delay(demand=True) == pytest.approx(LEAST * 1.25)
        stagger.transferred()
        hear(stagger)
        assert stagger.delay(demand=True) == pytest.approx(LEAST * 1.75)

    def test_a_client_without_demand_comes_after_all_that_have_some(self) -> None:
        aside, latest = not_first(0.0), not_first(1.0)
        assert aside.delay(demand=False) > latest.delay(demand=True)

    def test_a_consumer_goes_before_a_producer_that_was_first(self) -> None:
        stagger = not_first()
        stagger.on_notice(FROM_A_PRODUCER, 0.0, demand=True)
        assert stagger.delay(demand=True) == 0

    def test_a_producer_yields_to_a_producer(self) -> None:
        stagger = Stagger("us", lambda: 0.5)
        stagger.on_notice(FROM_A_PRODUCER, 0.0, demand=False)
        assert stagger.delay(demand=False) > 0

    def test_slow_notices_widen_the_stagger_up_to_its_bound(self) -> None:
        usual = not_first().delay(demand=True)
        assert not_first(after=LEAST / 10).delay(demand=True) == usual
        slow = not_first(after=LEAST * 0.75).delay(demand=True)
        assert usual < slow
        assert not_first(0.0, after=10.0).delay(demand=True) == pytest.approx(MOST)

    def test_a_slow_notice_is_forgotten_in_time(self) -> None:
        stagger = not_first(0.0, after=LEAST)
        hear(stagger)
        assert stagger.delay(demand=True) > LEAST
        for _ in range(100):
            hear(stagger)
        assert stagger.delay(demand=True) == pytest.approx(LEAST)

    def test_a_client_that_is_alone_publishes_a_notice_once_in_a_while(self) -> None:
        stagger = Stagger("us", lambda: 0.5)
        assert stagger.signature(5.0, demand=True)
        stagger.published(1, 5.0)
        assert not stagger.signature(5.0, demand=True)
        assert not stagger.signature(5.0 + _ASK_EVERY * 0.99, demand=True)
        assert stagger.signature(5.0 + _ASK_EVERY, demand=True)

    def test_a_client_with_listeners_publishes_each_notice_until_they_have_gone(self) -> None:
        stagger = Stagger("us", lambda: 0.5)
        stagger.published(2, 5.0)
        assert stagger.signature(5.0, demand=True)
        stagger.published(1, 5.0)
        assert not stagger.signature(5.0, demand=True)

    def test_a_client_that_hears_another_knows_that_it_is_not_alone(self) -> None:
        stagger = Stagger("us", lambda: 0.5)
        stagger.published(1, 5.0)
        stagger.on_notice(FROM_A_CONSUMER, 0.0, demand=True)
        assert stagger.signature(5.0, demand=True)

    @given(
        chance=st.floats(0, 1),
        events=st.lists(
            st.one_of(
                st.just(("transferred",)),
                st.just(("nothing",)),
                st.tuples(st.just("published"), st.integers(1, 8), st.floats(0, 1e6)),
                st.tuples(st.just("notice"), st.floats(0, 1e6), st.booleans(), st.booleans()),
            ),
            max_size=30,
        ),
    )
    def test_a_delay_is_zero_or_within_its_bounds(
        self, chance: float, events: list[tuple[Any, ...]]
    ) -> None:
        stagger = Stagger("us", lambda: chance)
        for kind, *facts in events:
            if kind == "transferred":
                stagger.transferred()
            elif kind == "nothing":
                stagger.found_nothing()
            elif kind == "published":
                stagger.published(*facts)
            else:
                after, theirs, ours = facts
                stagger.on_notice(TransferNotice(-1, 0, "other", theirs), after, demand=ours)
            for demand in (True, False):
                delay = stagger.delay(demand=demand)
                assert delay == 0 or LEAST <= delay <= 2 * MOST * _ASIDE
            assert stagger.delay(demand=True) <= stagger.delay(demand=False)
