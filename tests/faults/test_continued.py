"""Chains, batches and resumable messages end while workers and the server are killed: nothing is
missing, doubled, or done again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.checker import summary
from tests.faults.continued import Plan, Storm, judge

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("round_trip", [0, 50])
async def test_what_continues_ends_under_kills(
    own_server: PrivateServer, tmp_path: Path, round_trip: int
) -> None:
    plan = Plan(500, 20, 100, 50, round_trip=round_trip)
    storm = Storm(own_server, plan, tmp_path)
    await storm.blow()
    violations = judge(plan, storm.seen(), storm.doubtful)
    assert not violations, summary(violations)
    assert len(storm.doubtful) <= 2
