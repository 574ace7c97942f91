"""Under load, everything breaks again and again: 300 faults over 500,000 messages, in all."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import _USED, FOUND
from tests.faults import report
from tests.faults.checker import check, summary
from tests.faults.consumers import KINDS, Kind, shorten_deadlines
from tests.faults.history import Told
from tests.faults.replicated import BehindSentinels, InCluster
from tests.faults.storm import Plan, ride_out

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.replicated import Replicated
    from tests.support.servers import PrivateServer

pytestmark = [pytest.mark.storm, pytest.mark.every_server]

FAULTS = 300
MESSAGES = 500_000
STORMS = len(KINDS) * max(1, len(FOUND))


PARTITIONED: dict[str, Any] = {"partitions": 4, "processes": 1, "round_trip": 100}
DISTANT: list[tuple[Kind, int, dict[str, Any]]] = [
    *((kind, 6_000, {}) for kind in KINDS),
    ("reliable", 2_000, PARTITIONED),
    ("reliable", 700, PARTITIONED | {"groups": 7, "most": (60, 15)}),
]


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
