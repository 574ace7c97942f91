"""Simulated storms pass and replay exactly; without a safeguard, some fail and name it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from delayq._engine.return_queue import ReturnQueue
from delayq._engine.scheduler import Scheduler
from delayq._engine.wakeup_plan import LastTimeout
from delayq._redisson import store as delayed_store
from delayq._redisson.take_calls import TakeCalls
from delayq._reliable import scripts as reliable_scripts
from delayq._reliable.claims import Claims
from tests.faults import consumers
from tests.faults.checker import summary
from tests.faults.consumers import KINDS, Habits, Kind
from tests.faults.history import Told
from tests.faults.simulation import Plan, simulate
from tests.faults.test_planted import PLANTS, altered
from tests.support.depth import in_gate, nightly

if TYPE_CHECKING:
    from collections.abc import Callable

    Plant = Callable[[pytest.MonkeyPatch], None]

SEEDS = {"reliable": 80, "deliveries": 60, "plain": 60}
"""``python -m tests.faults.simulation --seeds 5000 --first 80`` runs more."""
AT_A_TIME = 10
RUNS = [
    *((kind, range(1)) for kind in KINDS),
    # A first try is stalled; the second is carried out, and its message handled. Then the client
    # closes, and the first arrives.
    in_gate("reliable", range(305, 306)),
    *(in_gate(kind, range(1, AT_A_TIME)) for kind in KINDS),
    *(
        nightly(kind, range(first, first + AT_A_TIME))
        for kind in KINDS
        for first in range(AT_A_TIME, SEEDS[kind], AT_A_TIME)
    ),
]

ANSWERS = ("reply lost", "cut")


def recovers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(calls: Any) -> None:
        calls._lost.clear()

    monkeypatch.setattr(TakeCalls, "recover", forget)


def gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReturnQueue, "add", lambda _queue, _items: None)


def claims_recover_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(claims: Any) -> None:
        claims._is_unsure = False

    monkeypatch.setattr(Claims, "_recover", forget)


def checks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def idle(_: Any) -> None:
        pass

    monkeypatch.setattr(Scheduler, "run_once", idle)


def arms_no_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = LastTimeout.arm
    monkeypatch.setattr(
        LastTimeout, "arm", lambda last, *wakeup: arm(last, *wakeup) if last.armed is None else None
    )


@dataclass(frozen=True)
class Case:
    """A safeguard to switch off, and the storms of which one must fail."""

    plant: Plant
    names: tuple[str, ...]  # of violations: the checker finds at least one of these
    kind: Kind
    options: dict[str, Any] = field(default_factory=dict)
    lease: float = consumers.LEASE
    within: int = 25  # seeds


# Whatever else goes wrong, the end of a lease wakes up every waiter. Long leases keep that from
# hiding the failure.
LONG = 90.0

OFTEN = {"messages": 100, "faults": 25, "pause": 0.5}
REPEATED = ("if last_number == number then", "if false then")
LATE = ("if (tonumber(last_number) or 0) > tonumber(number) then", "if false then")
LEASED = ("(stored_tokens[i] or ends[i]) ~= token", "false")
GIVEN_UP = ("if last_number >= tonumber(number)", "if false")
ONCE = ("if redis.call('EXISTS', fence) == 1 then return 0 end", "")
MUTE = {"only": ("notifications lost",), "messages": 12, "faults": 10, "pause": 0.05}
SHAPED: dict[str, Any] = {"partitions": 2, "groups": 3, "most": (8, 3)}
MOVED = SHAPED | {"only": ("repartition", "consumer killed"), "faults": 4}
BUSY: dict[str, Any] = {"most": (1, None), "habits": Habits(dawdles=0.5), **OFTEN}
SLOW = {"messages": 12, "faults": 0, "resync": 60.0, "within": 5.0}
SAFEGUARDS = {
    "an offer that is repeated is known": Case(
        altered(reliable_scripts.OFFER_NEW, REPEATED),
        ("unexpected", "stored twice", "after ack"),
        "reliable",
        {"only": ANSWERS, **OFTEN},
    ),
    "a first try that comes after its repetition is refused": Case(
        altered(reliable_scripts.OFFER_NEW, LATE),
        ("after ack", "stored twice"),
        "reliable",
        {"only": ("requests stalled",), **OFTEN},
        # One seed in eight fails.
        within=100,
    ),
    "a claim whose answer was lost is given back": Case(
        claims_recover_nothing,
        ("stuck",),
        "reliable",
        {"only": ANSWERS, "habits": Habits(fails=0, releases=0)},
        LONG,
    ),
    "a claim that comes after it was given up hands out nothing": Case(
        altered(reliable_scripts.CLAIM, GIVEN_UP),
        ("stuck",),
        "reliable",
        {"only": ("requests stalled",), "habits": Habits(fails=0, releases=0), **OFTEN},
        LONG,
        within=200,
    ),
    "what was taken, and whose answer was lost, is handed out": Case(
        recovers_nothing, ("lost",), "plain", {"only": ANSWERS}
    ),
    "only who has the lease acknowledges": Case(
        altered(reliable_scripts.ACK, LEASED),
        ("after ack",),
        "reliable",
        {"habits": Habits(dawdles=0.3), "only": ("process stopped",), **OFTEN},
    ),
    "a give-back is carried out once": Case(
        altered(delayed_store.GIVE_BACK, ONCE),
        ("duplicate",),
        "plain",
        {"only": ANSWERS, "habits": Habits(leaves=0.3), **OFTEN},
    ),
    "what a cancelled loop has is given back": Case(
        gives_nothing_back, ("lost",), "plain", {"only": ("loop cancelled",), "faults": 20}
    ),
    "a move takes along what waits": Case(
        PLANTS["a move leaves out what waits"][2],
        ("lost",),
        "reliable",
        {"partitions": 2, "only": ("repartition",)},
    ),
    "a claim keeps to the limit": Case(
        PLANTS["a claim exceeds the limit"][2], ("too many",), "reliable", BUSY
    ),
    "the re-check finds what was not announced": Case(
        checks_nothing_again, ("lost", "stuck"), "reliable", MUTE, LONG
    ),
    "the timer is armed anew for what is due earlier": Case(
        arms_no_earlier, ("stuck",), "reliable", SLOW, LONG
    ),
}


@pytest.mark.parametrize("shape", [MOVED, nightly(SHAPED)])
def test_simulated_storms_of_partitions_groups_and_limits(shape: dict[str, Any]) -> None:
    for seed in range(2 if shape is MOVED else 2 * AT_A_TIME):
        outcome = simulate(Plan("reliable", seed, **shape))
        assert not outcome.violations, f"seed {seed}: {summary(outcome.violations)}"


@pytest.mark.parametrize(("kind", "seeds"), RUNS, ids=str)
def test_simulated_storms_lose_double_and_leave_nothing(kind: Kind, seeds: range) -> None:
    outcomes: Counter[Told] = Counter()
    faults = 0
    for seed in seeds:
        outcome = simulate(Plan(kind, seed))
        assert not outcome.violations, (
            f"python -m tests.faults.simulation --kind {kind} --seed {seed}:"
            f" {summary(outcome.violations)}"
        )
        outcomes.update(offered.told for offered in outcome.history.offered.values())
        faults += len(outcome.history.faults)
    # Otherwise it would prove little.
    assert outcomes[Told.OK] > 30 * len(seeds)
    assert outcomes[Told.UNKNOWN] > 0 or len(seeds) < AT_A_TIME
    assert faults >= 5 * len(seeds)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("reliable", {"messages": 10, "faults": 3, "pause": 0.5}),
        *(nightly(kind, {}) for kind in KINDS),
    ],
)
def test_a_seed_replays_exactly(kind: Kind, size: dict[str, Any]) -> None:
    first, second = (simulate(Plan(kind, 7, **size)) for _ in range(2))
    assert first.lines() == second.lines()
    assert first.trace == second.trace
    assert simulate(Plan(kind, 8, **size)).trace != first.trace


IN_MAKE_TEST = "what a cancelled loop has is given back"


@pytest.mark.parametrize(
    "safeguard", [name if name == IN_MAKE_TEST else nightly(name) for name in SAFEGUARDS]
)
def test_without_a_safeguard_a_seed_fails_and_names_what_it_prevents(
    safeguard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SAFEGUARDS[safeguard]
    monkeypatch.setattr(consumers, "LEASE", case.lease)
    case.plant(monkeypatch)
    for seed in range(case.within):
        names = {
            violation.kind
            for violation in simulate(Plan(case.kind, seed, **case.options)).violations
        }
        print(f"seed {seed}: {sorted(names)}")
        if names.intersection(case.names):
            return
    pytest.fail(f"{case.within} seeds passed")
