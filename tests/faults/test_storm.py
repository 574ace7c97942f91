"""Under load, everything breaks again and again, processes are killed, and clients leave: nothing
is lost, doubled, early or left behind, and limits are exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import _USED, FOUND
from tests.faults import continued, limits_storm, moments, poison, report
from tests.faults.checker import check, summary
from tests.faults.consumers import KINDS, Habits, Kind, shorten_deadlines
from tests.faults.history import Told
from tests.faults.limits import Bound, judge
from tests.faults.replicated import BehindSentinels, InCluster
from tests.faults.storm import AWAY_FOR_LONG, Plan, ride_out
from tests.support.depth import in_gate, nightly

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.replicated import Replicated
    from tests.support.servers import PrivateServer

FAULTS = 300
"""Of all storms of the last kind, over this many messages:"""
MESSAGES = 500_000
STORMS = len(KINDS) * max(1, len(FOUND))


PARTITIONED: dict[str, Any] = {"partitions": 4, "processes": 1, "round_trip": 100}
DISTANT: list[tuple[Kind, int, dict[str, Any]]] = [
    *((kind, 6_000, {}) for kind in KINDS),
    ("reliable", 2_000, PARTITIONED),
    ("reliable", 700, PARTITIONED | {"groups": 7, "most": (60, 15)}),
]


@pytest.mark.storm
@pytest.mark.every_server
@pytest.mark.parametrize(("kind", "messages", "shape"), DISTANT)
async def test_a_storm_over_distant_links_loses_nothing_and_doubles_nothing(
    own_server: PrivateServer,
    kind: Kind,
    messages: int,
    shape: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With partitions, their number changes meanwhile."""
    shorten_deadlines(monkeypatch.setattr)
    usual = {"processes": 0, "round_trip": 60, "mbit": 40, "keeps": kind == "reliable"}
    plan = Plan(*(kind, messages, 20), seed=KINDS.index(kind), **(usual | shape))
    storm, history = await ride_out(own_server, plan, tmp_path)
    violations = plan.judge(history)
    assert not violations, summary(violations, show=20)
    assert ("repartition" in storm.injected) == ("partitions" in shape)


@pytest.mark.storm
@pytest.mark.every_server
@pytest.mark.parametrize("several", [BehindSentinels, InCluster])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_storm_in_which_masters_change_loses_nothing_and_doubles_nothing(
    several: type[Replicated], kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a different server version for each kind of queue: the storms on one server cover all
    combinations.
    """
    # Redis 6.2 has no ADDSLOTSRANGE, and its clusters reply like those of Redis 7.
    names = [name for name in FOUND if several is BehindSentinels or name != "redis-6.2"]
    if not names:
        pytest.skip("no server found on this machine")
    name = names[KINDS.index(kind) % len(names)]
    _USED.add(name)
    shorten_deadlines(monkeypatch.setattr)
    processes = 0 if kind == "plain" else 1
    plan = Plan(kind, 6_000, 20, seed=KINDS.index(kind), processes=processes)
    with several(FOUND[name]) as servers:
        storm, history = await ride_out(servers, plan, tmp_path)
    violations = check(history, plan.rules)
    assert not violations, summary(violations, show=20)
    assert storm.injected["planned failover"] >= 1
    assert storm.injected["server killed"] >= 1
    report.tell(len(history.offered), len(history.delivered), storm.injected)


@pytest.mark.storm
@pytest.mark.every_server
@pytest.mark.parametrize("kind", KINDS)
async def test_a_storm_loses_nothing_doubles_nothing_and_leaves_nothing(
    own_server: PrivateServer, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_deadlines(monkeypatch.setattr)
    # A message that a killed process has taken for good is gone by contract, so plain queues have
    # no such processes.
    plan = Plan(
        kind,
        messages=-(-MESSAGES // STORMS),
        faults=-(-FAULTS // STORMS),
        seed=KINDS.index(kind) + 10 * list(FOUND).index(own_server.kind.name),
        processes=0 if kind == "plain" else 1,
        tcp=kind != "deliveries",
        # On every other server.
        keeps=kind == "reliable" and list(FOUND).index(own_server.kind.name) % 2 == 0,
    )
    storm, history = await ride_out(own_server, plan, tmp_path)
    outcomes = Counter(offered.told for offered in history.offered.values())
    healed = max(fault.to_us for fault in history.faults)
    after = [one.seen_us for one in history.delivered if one.seen_us > healed]
    violations = check(history, plan.rules)

    assert not violations, summary(violations, show=20)
    assert len(history.offered) >= MESSAGES / STORMS
    assert sum(storm.injected.values()) >= FAULTS / STORMS
    # Otherwise it would prove little: nothing was at stake, or the faults hit no client.
    assert outcomes[Told.OK] >= len(history.offered) / 2
    assert kind == "reliable" or outcomes[Told.UNKNOWN] > 0
    assert len(after) < len(history.delivered) / 2
    report.tell(len(history.offered), len(history.delivered), storm.injected)


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


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("round_trip", [0, 50])
async def test_what_continues_ends_under_kills(
    own_server: PrivateServer, tmp_path: Path, round_trip: int
) -> None:
    plan = continued.Plan(500, 20, 100, 50, round_trip=round_trip)
    storm = continued.Storm(own_server, plan, tmp_path)
    await storm.blow()
    violations = continued.judge(plan, storm.seen(), storm.doubtful)
    assert not violations, summary(violations)
    assert len(storm.doubtful) <= 2


MANY = 1_000
AT_ONCE = 8


@pytest.mark.timing  # how long a close takes
@pytest.mark.parametrize("count", [2, in_gate(12)])
async def test_clients_going_at_random_lose_nothing(own_server: PrivateServer, count: int) -> None:
    plans = [plan for plan in map(moments.Plan.of, range(36)) if len(plan.queues) <= 10][:count]
    assert await moments.run_all(own_server, plans, AT_ONCE) == [[]] * count


@pytest.mark.storm
@pytest.mark.timeout(1200)
async def test_a_thousand_clients_going_at_random_lose_nothing(own_server: PrivateServer) -> None:
    plans = map(moments.Plan.of, range(MANY))
    assert await moments.run_all(own_server, plans, AT_ONCE) == [[]] * MANY


SMALL = limits_storm.Plan(processes=3, groups=10, messages=40, seconds=3, stops=1)
WHOLE = Bound(concurrency=6, rate=60)


@pytest.mark.gate
@pytest.mark.parametrize("whole", [nightly(Bound()), WHOLE], ids=["groups", "groups and queue"])
async def test_limits_are_exact_while_workers_are_killed(
    own_server: PrivateServer, tmp_path: Path, whole: Bound
) -> None:
    plan = replace(SMALL, whole=whole)
    log = await limits_storm.blow(own_server, plan, tmp_path)
    assert len(log.kills) > plan.processes
    violations = judge(log, plan.rules)
    assert not violations, summary(violations, show=20)


@pytest.mark.storm
@pytest.mark.every_server
async def test_limits_are_exact_in_a_storm(own_server: PrivateServer, tmp_path: Path) -> None:
    plan = limits_storm.Plan()
    log = await limits_storm.blow(own_server, plan, tmp_path)
    violations = judge(log, plan.rules)
    assert not violations, summary(violations, show=20)
    faults = Counter({"worker killed": len(log.kills), "worker stopped": len(log.paused)})
    report.tell(len(log.history.offered), len(log.history.delivered), faults)
