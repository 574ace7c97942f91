"""Many clients wait for one moment: each wakes after a stagger of its own, and no message stays
behind.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._virtual_queue import EPOCH_US, Costs, Server, VirtualClient, Worker, World
from delayq._engine import stagger
from delayq._engine.stagger import (
    _ASK_EVERY,
    _MOVER_DELAY,
    _MOVER_FACTOR,
    MAX_STAGGER,
    MIN_STAGGER,
    Notice,
    Stagger,
    parse_notice,
)
from tests.support.depth import examples

FROM_A_CONSUMER = Notice(next_us=-1, through_us=0, client="other", wants_messages=True)


def not_first(place: float = 0.5, *, after: float = 0.0) -> Stagger:
    """Return the stagger of a client that heard a notice ``after`` seconds after the moment."""
    stagger = Stagger("us", lambda: place)
    stagger.on_notice(FROM_A_CONSUMER, after, wants_messages=True)
    return stagger


def hear(stagger: Stagger, notice: Notice = FROM_A_CONSUMER) -> None:
    stagger.on_notice(notice, 0.0, wants_messages=True)


class TestNotice:
    @given(
        next_us=st.integers(-1, 2**53),
        through_us=st.integers(0, 2**53),
        client=st.text("0123456789abcdef", min_size=1, max_size=16),
        wants_messages=st.booleans(),
        listeners=st.sampled_from([0, 2, 200]),
    )
    def test_a_published_notice_is_parsed(
        self, next_us: int, through_us: int, client: str, wants_messages: bool, listeners: int
    ) -> None:
        stagger = Stagger(client, lambda: 0.5)
        if listeners:
            stagger.took_messages(listeners, 0.0)
        signature = stagger.signature(0.0, wants_messages=wants_messages)
        assert parse_notice(f"{next_us} {through_us} {signature}".encode()) == Notice(
            next_us, through_us, client, wants_messages, listeners
        )


class TestStagger:
    def test_slow_notices_widen_the_stagger_up_to_its_bound_until_they_are_forgotten(self) -> None:
        usual = not_first().delay(wants_messages=True)
        assert not_first(after=MIN_STAGGER / 10).delay(wants_messages=True) == usual
        assert usual < not_first(after=MIN_STAGGER * 0.75).delay(wants_messages=True)
        stagger = not_first(0.0, after=10.0)
        assert stagger.delay(wants_messages=True) == pytest.approx(MAX_STAGGER)
        for _ in range(1000):
            hear(stagger)
        assert stagger.delay(wants_messages=True) == pytest.approx(MIN_STAGGER)

    def test_a_client_that_is_alone_publishes_a_notice_once_in_a_while(self) -> None:
        stagger = Stagger("us", lambda: 0.5)
        assert stagger.signature(5.0, wants_messages=True)
        stagger.took_messages(2, 5.0)
        assert stagger.signature(5.0, wants_messages=True)
        stagger.took_messages(1, 5.0)
        assert not stagger.signature(5.0, wants_messages=True)
        assert not stagger.signature(5.0 + _ASK_EVERY * 0.99, wants_messages=True)
        assert stagger.signature(5.0 + _ASK_EVERY, wants_messages=True)
        stagger.took_messages(1, 5.0)
        hear(stagger)
        assert stagger.signature(5.0, wants_messages=True), "it has heard another"

    @given(
        chance=st.floats(0, 1),
        events=st.lists(
            st.one_of(
                st.just(("took_messages",)),
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
            if kind == "took_messages":
                stagger.took_messages(0, 0.0)
            elif kind == "nothing":
                stagger.came_too_late()
            elif kind == "published":
                stagger.took_messages(*facts)
            else:
                after, theirs, ours = facts
                stagger.on_notice(Notice(-1, 0, "other", theirs), after, wants_messages=ours)
            for wants_messages in (True, False):
                delay = stagger.delay(wants_messages=wants_messages)
                assert (
                    delay in (0, 0 if wants_messages else _MOVER_DELAY)
                    or MIN_STAGGER <= delay <= 2 * MAX_STAGGER * _MOVER_FACTOR
                )
            assert stagger.delay(wants_messages=True) <= stagger.delay(wants_messages=False)


class TestCrowd:
    """With a re-check every 5 s, more than 132 clients are a crowd."""

    @staticmethod
    def client(
        chance: float = 0.9, *, goes_first: bool = False, servers: int = 1, resync: float = 5.0
    ) -> Stagger:
        stagger = Stagger("us", lambda: chance, lambda: servers, resync)
        if goes_first:
            stagger.took_messages(0, 0.0)
        else:
            hear(stagger)
        return stagger

    def test_clients_are_dormant_if_their_re_checks_are_close_together(self) -> None:
        for listeners, servers, resync, is_dormant in (
            (132, 1, 5.0, False),  # too few
            (133, 1, 5.0, True),
            (133, 1, 6.0, False),  # a crowd that seldom looks
            (45, 3, 5.0, True),  # each server counts a part
            (1, 1000, 5.0, False),  # this server counts none
            (-1, 1, 5.0, False),  # we may not know
        ):
            stagger = self.client(servers=servers, resync=resync)
            stagger.on_recheck(listeners, 0, wants_messages=True)
            assert stagger.is_dormant == is_dormant, (listeners, servers, resync)

    def test_a_client_listens_again_once_others_have_gone(self) -> None:
        for listeners, dormant, is_dormant in (
            (32, 100, True),
            (15, 1985, False),  # too few of a crowd listen
            (16, 1984, True),
            (20, 46, False),  # the crowd has gone
            (20, 47, True),
            (0, 1, False),  # we alone are left
        ):
            stagger = self.client()
            stagger.on_recheck(2000, 0, wants_messages=True)
            assert stagger.is_dormant
            stagger.on_recheck(listeners, dormant, wants_messages=True)
            assert stagger.is_dormant == is_dormant, (listeners, dormant)

    def test_a_new_client_leaves_the_others_a_head_start_if_they_are_many(self) -> None:
        for listeners, steps_back in ((8, False), (9, True)):
            stagger = Stagger("us", lambda: 0.5)
            stagger.on_recheck(listeners, 0, wants_messages=True)
            assert (stagger.delay(wants_messages=True) > 0) == steps_back
            stagger.took_messages(0, 0.0)
            stagger.on_recheck(listeners, 0, wants_messages=True)
            assert stagger.delay(wants_messages=True) == 0


RESYNC_S, LAST_S = 0.5, 4.0


def crowd(
    clients: int, *, hold: float = 0.0, seed: int = 1, masters: int = 1
) -> tuple[World, Server, list[VirtualClient]]:
    """Let clients join within a second."""
    world, chance = World(), random.Random(seed)
    server = Server(world, Costs(), masters)
    made = [
        VirtualClient(server, Worker(world), number, chance, resync_interval=RESYNC_S, hold=hold)
        for number in range(clients)
    ]
    for client in made:
        world.at(chance.random(), client.start)
    return world, server, made


def offer(world: World, server: Server, moments: list[float]) -> None:
    for moment in sorted(moments):
        world.at(moment - 0.3, lambda moment=moment: server.offer(EPOCH_US + int(moment * 1e6)))  # type: ignore[misc]


@given(
    clients=st.integers(1, 12),
    hold=st.sampled_from([0.0, 0.05, 0.7]),
    moments=st.lists(st.floats(0.5, LAST_S), max_size=20),
    deaths=st.lists(st.floats(0.5, LAST_S), max_size=11),
    away=st.none() | st.floats(0.5, LAST_S),
    seed=st.integers(0, 1000),
    masters=st.sampled_from([1, 3]),
)
@settings(max_examples=examples(600))
def test_no_message_stays_behind(
    clients: int,
    hold: float,
    moments: list[float],
    deaths: list[float],
    away: float | None,
    seed: int,
    masters: int,
) -> None:
    """Clients die, all but one, and the server is away for a second."""
    with pytest.MonkeyPatch.context() as patch:
        # More than four clients are a crowd, of which two listen.
        for name, value in (
            ("ENOUGH_LISTENERS", 2),
            ("_FEW_CLIENTS", 2),
            ("_RECHECK_SPACING", 0.25),
        ):
            patch.setattr(stagger, name, value)
        world, server, made = crowd(clients, hold=hold, seed=seed, masters=masters)
        offer(world, server, moments)
        for client, moment in zip(made[1:], deaths, strict=False):
            world.at(moment, client.die)
        if away is not None:

            def be_away(down: bool) -> None:
                server.down = down

            world.at(away, lambda: be_away(True))
            world.at(away + 1.0, lambda: be_away(False))
        world.run(LAST_S + 40)
    assert server.remaining == 0
    assert all(late >= 0 for client in made for late in client.late)
