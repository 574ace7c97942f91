"""Workers and the server are killed: nothing is lost, or handled twice without a cause."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.faults import poison, report
from tests.faults.checker import check, summary
from tests.faults.consumers import Habits, shorten_deadlines
from tests.faults.storm import AWAY_FOR_LONG, Plan, ride_out
from tests.support.depth import nightly

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer

# Each message takes some time, so workers are killed while they hold many.
BUSY = Habits(fails=0, releases=0, dawdles=0, pauses=1.0, resumes=0.1)
CRASHES = ("consumer killed",) * 8 + ("server killed", AWAY_FOR_LONG)


@pytest.mark.gate
@pytest.mark.parametrize(("count", "crashes"), [(3_000, 10), nightly(20_000, 60)])
async def test_crashes_lose_nothing_and_double_nothing_without_a_cause(
    own_server: PrivateServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    crashes: int,
) -> None:
    shorten_deadlines(monkeypatch.setattr)
    plan = Plan(
        "reliable", count, crashes, seed=11, processes=4, habits=BUSY, workers=True, only=CRASHES
    )
    _, history = await ride_out(own_server, plan, tmp_path)
    violations = check(history, plan.rules)
    assert not violations, summary(violations, show=20)
    assert len(history.offered) >= count
    # Without redeliveries after a death, the test would prove nothing.
    assert any(one.attempt > 1 for one in history.delivered)


@pytest.mark.storm
@pytest.mark.parametrize(("max_attempts", "crowd"), [(10, 1), (5, 1), (3, 2), (1, 1)])
async def test_messages_that_kill_their_workers_die_and_their_neighbours_do_not(
    own_server: PrivateServer, tmp_path: Path, max_attempts: int, crowd: int
) -> None:
    outcome = await poison.spread(own_server, tmp_path, max_attempts, crowd)
    violations = poison.judge(outcome, max_attempts)
    assert not violations, summary(violations, show=20)
    assert outcome.dead.keys() == {*range(poison.KILLERS)}
    faults = Counter({"killed its worker": outcome.deaths})
    report.tell(poison.KILLERS + poison.NEIGHBOURS, len(outcome.delivered), faults)
