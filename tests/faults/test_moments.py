"""Clients that leave at random moments, over long round trips, lose and duplicate nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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


@pytest.mark.storm
@pytest.mark.timeout(1200)
async def test_a_thousand_clients_going_at_random_lose_nothing(own_server: PrivateServer) -> None:
    assert await run_all(own_server, map(Plan.of, range(MANY)), AT_ONCE) == [[]] * MANY
