"""In a storm of kills, limits are exact. The judge names each bug that is planted in a log."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults import report
from tests.faults.checker import Rules, summary
from tests.faults.history import Delivered, End, History, Offered, Told
from tests.faults.limits import Bound, Log, judge
from tests.faults.limits_storm import Plan, blow
from tests.support.depth import nightly

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer

MS = 1_000
SECOND = 1_000 * MS
LEASE = 2 * SECOND
RULES = Rules(lease_us=LEASE, within_us=60 * SECOND)
T0 = 100 * SECOND
ONE = Bound(concurrency=1)
ONE_A_SECOND, FIVE_A_SECOND = Bound(rate=1), Bound(rate=5)
DEAD = {"killed": T0 + 500 * MS}
FAILED: dict[str, Any] = {"end": End.NACKED}
KILLED: dict[str, Any] = {"who": "killed", "ended_us": 0, "end": End.NONE}
STOPPED: dict[str, Any] = {"who": "stopped"}
AGAIN: dict[str, Any] = {"attempt": 2}


def ran(key: int, start_ms: float, for_ms: float, **facts: Any) -> Delivered:
    """Return a delivery that was claimed that long after the start, and how long it ran."""
    at = T0 + int(start_ms * MS)
    usual: dict[str, Any] = {"who": "one", "copy": f"m{key}", "claimed_us": at, "attempt": 1}
    usual |= {"ends_us": at + LEASE, "ended_us": at + int(for_ms * MS), "end": End.UNKNOWN}
    return Delivered(key, at + MS, **(usual | facts))


def log(*delivered: Delivered, bound: Bound = ONE, keys: int = 0, **more: Any) -> Log:
    """Return a log in which everything was due at the start and is of one group."""
    keys = keys or max(one.key for one in delivered) + 1
    history = History({key: Offered(T0, Told.OK) for key in range(keys)}, list(delivered))
    groups: dict[int, str] = more.pop("groups", dict.fromkeys(range(keys), "a"))
    bounds = dict.fromkeys([*groups.values(), "a"], bound)
    return Log(history, groups, bounds, **more)


EARLY = [ran(key, 300 + key, 1) for key in range(5)]
BY_TWO = {0: "a", 1: "b"}
LATE = ran(1, 50, 100)
LATE.seen_us = T0 + 120 * MS
PLANTED = {
    "too many": [
        log(ran(0, 0, 100), ran(1, 99.99, 100)),
        # A message runs from its claim, not from the start of its handler.
        log(ran(0, 0, 100), LATE),
        log(ran(0, 0, 100), ran(1, 50, 100), groups=BY_TWO, whole=ONE),
        # Its process is yet to be killed.
        log(ran(0, 0, 0, **KILLED), ran(0, 2000, 10, **AGAIN), ran(1, 499, 10), kills=DEAD),
        # Its process was stopped, and its lease has not ended.
        log(
            *(ran(0, 0, 3000, **STOPPED), ran(1, 1900, 10), ran(0, 2300, 10, **AGAIN)),
            paused={"stopped"},
        ),
        log(ran(0, 0, 3000, ends_us=T0 + 4 * SECOND), ran(1, 2500, 10)),
    ],
    "too fast": [
        log(*EARLY, ran(5, 1299.9, 1), bound=FIVE_A_SECOND),
        # A second attempt is a start too, and so is one that was not noted.
        log(ran(0, 0, 10, **FAILED), ran(0, 500, 10, **AGAIN), bound=ONE_A_SECOND),
        log(
            *(ran(0, 500, 10), ran(1, 2700, 1, **AGAIN)),
            bound=ONE_A_SECOND,
            leases={(1, T0 + 2700 * MS)},
        ),
    ],
    "again": [log(ran(0, 0, 100), ran(0, 2000, 10, **AGAIN))],
    "lost": [log(ran(0, 0, 1), keys=2)],
    "duplicate": [log(ran(0, 0, 0, **KILLED), ran(0, 1000, 10, **AGAIN), kills=DEAD)],
}


@pytest.mark.nightly
def test_the_judge_names_what_breaks_a_limit() -> None:
    """That it names nothing else is shown by the storms."""
    for rule, logs in PLANTED.items():
        for number, planted in enumerate(logs):
            assert [each.kind for each in judge(planted, RULES)] == [rule], f"{rule} {number}"


# Storms

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
