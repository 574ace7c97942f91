"""In a storm of kills and cancellations, limits are exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.faults import report
from tests.faults.checker import summary
from tests.faults.limits import Bound, judge
from tests.faults.limits_storm import Plan, blow
from tests.support.depth import nightly

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer

SMALL = Plan(processes=3, groups=10, messages=40, seconds=3, stops=1)
WHOLE = Bound(concurrency=6, rate=60)


@pytest.mark.gate
@pytest.mark.parametrize("whole", [nightly(Bound()), WHOLE], ids=["groups", "groups and queue"])
async def test_limits_are_exact_while_workers_are_killed(
    own_server: PrivateServer, tmp_path: Path, whole: Bound
) -> None:
    plan = replace(SMALL, whole=whole)
    log = await blow(own_server, plan, tmp_path)
    assert len(log.kills) > plan.processes
    violations = judge(log, plan.rules)
    assert not violations, summary(violations, show=20)


@pytest.mark.storm
@pytest.mark.every_server
async def test_limits_are_exact_in_a_storm(own_server: PrivateServer, tmp_path: Path) -> None:
    plan = Plan()
    log = await blow(own_server, plan, tmp_path)
    violations = judge(log, plan.rules)
    assert not violations, summary(violations, show=20)
    faults = Counter({"worker killed": len(log.kills), "worker stopped": len(log.paused)})
    report.tell(len(log.history.offered), len(log.history.delivered), faults)
