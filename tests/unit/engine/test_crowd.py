"""Many clients on one queue, in virtual time: whatever happens to them, no message stays behind."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._virtual_queue import EPOCH_US, Costs, Server, VirtualClient, Worker, World
from delayq._engine import stagger
from tests.support.depth import examples

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
