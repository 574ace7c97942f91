"""Clients that leave at random moments, over long round trips, lose and duplicate nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from delayq._engine.waiters import Supply
from tests.faults.moments import Plan, run_all
from tests.support.depth import in_gate

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

MANY = 1_000
AT_ONCE = 8


@pytest.mark.timing  # how long a close takes
@pytest.mark.parametrize("count", [2, in_gate(12)])
async def test_clients_that_go_at_random_moments_lose_nothing(
    own_server: PrivateServer, count: int
) -> None:
    plans = [plan for plan in map(Plan.of, range(36)) if len(plan.queues) <= 10][:count]
    assert await run_all(own_server, plans, AT_ONCE) == [[]] * count


@pytest.mark.nightly
async def test_the_trials_name_a_client_that_hands_nothing_back(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise trials without flaws would prove nothing."""
    monkeypatch.setattr("tests.faults.moments.COMES_WITHIN", 2.0)
    monkeypatch.setattr("tests.faults.moments.REST_WITHIN", 0.5)
    monkeypatch.setattr(Supply, "put", lambda *_args, **_options: None)
    leaving: dict[str, Any] = {"round_trip": 20, "ending": "block ends", "after": 0.2}
    plans = [
        replace(plan, queues=("loop",) * len(plan.queues), **leaving)
        for plan in map(Plan.of, range(6))
        if len(plan.queues) <= 20
    ]
    trials = await run_all(own_server, plans, AT_ONCE)
    assert any(flaw.startswith("lost") for flaws in trials for flaw in flaws)


@pytest.mark.storm
@pytest.mark.timeout(1200)
async def test_a_thousand_clients_going_at_random_lose_nothing(own_server: PrivateServer) -> None:
    assert await run_all(own_server, map(Plan.of, range(MANY)), AT_ONCE) == [[]] * MANY
