"""Simulated storms pass and replay exactly; without a safeguard, some fail and name it. The checker
names each bug that is planted in a history, and finds none in others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from delayq._engine.return_queue import ReturnQueue
from delayq._engine.scheduler import Scheduler
from delayq._engine.wakeup_plan import NextWakeup
from delayq._redisson import store as delayed_store
from delayq._redisson.take_calls import TakeCalls
from delayq._reliable import scripts as reliable_scripts
from delayq._reliable.claims import Claims
from tests.faults import consumers
from tests.faults.checker import Rules, check, summary
from tests.faults.consumers import KINDS, Habits, Kind
from tests.faults.history import Delivered, End, Fault, History, Offered, Told
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

REPLIES = ("reply lost", "cut")


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
    async def idle(*_: Any) -> None:
        pass

    monkeypatch.setattr(Scheduler, "recheck", idle)


def arms_no_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = NextWakeup.arm
    monkeypatch.setattr(
        NextWakeup, "arm", lambda last, *wakeup: arm(last, *wakeup) if last.armed is None else None
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
        {"only": REPLIES, **OFTEN},
    ),
    "a first try that comes after its repetition is refused": Case(
        altered(reliable_scripts.OFFER_NEW, LATE),
        ("after ack", "stored twice"),
        "reliable",
        {"only": ("requests stalled",), **OFTEN},
        # One seed in eight fails.
        within=100,
    ),
    "a claim whose reply was lost is given back": Case(
        claims_recover_nothing,
        ("stuck",),
        "reliable",
        {"only": REPLIES, "habits": Habits(fails=0, releases=0)},
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
    "what was taken, and whose reply was lost, is handed out": Case(
        recovers_nothing, ("lost",), "plain", {"only": REPLIES}
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
        {"only": REPLIES, "habits": Habits(leaves=0.3), **OFTEN},
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


SECOND = 1_000_000
LEASE = 2 * SECOND
DUE = 100 * SECOND


def came(key: int, after: float, end: End = End.ACKED, **facts: Any) -> Delivered:
    """Return a delivery this many seconds after the due time."""
    at = DUE + int(after * SECOND)
    usual: dict[str, Any] = {"who": "one", "copy": f"m{key}", "due_us": DUE, "claimed_us": at}
    usual |= {"ends_us": at + LEASE, "attempt": 1}
    return Delivered(key, at, end=end, **(usual | facts))


def story(*delivered: Delivered, told: Told = Told.OK, keys: int = 1, **more: Any) -> History:
    return History({key: Offered(DUE, told) for key in range(keys)}, list(delivered), **more)


AWAY = Fault("away", DUE + SECOND, DUE + 2 * SECOND)
BOTH_TWICE = [
    each for key in range(2) for each in (came(key, 0, End.UNATTENDED), came(key, 3, attempt=2))
]
EXPIRED = {0: Offered(DUE, Told.OK, expires=True)}
EARLY: dict[str, Any] = {"due_us": DUE + 2 * SECOND}
CHECKPOINTS: list[list[dict[str, Any]]] = [
    [{"saved": 2}, {"loaded": 1}],
    [{"step": 2}, {"step": 1}],
]
SOUND = [
    story(came(0, 0.01)),
    story(told=Told.UNKNOWN),
    story(told=Told.FAILED),
    story(came(0, 0, End.NONE), came(0, 2, attempt=2)),
    story(came(0, 0, End.LOST), came(0, 2.5, attempt=2)),
    story(came(0, 0, End.UNKNOWN), came(0, 2, attempt=2), results={"m0": [0, 1]}),
    story(came(0, 0, End.NACKED), came(0, 0.1, attempt=2)),
    story(came(0, 0, End.EITHER), came(0, 0.1)),
    story(came(0, 0, End.RETURNED), came(0, 0.1)),
    story(came(0, 0, End.UNATTENDED), came(0, 2, attempt=2), doubts={"m0"}),
    story(*BOTH_TWICE, keys=2, nameless_doubts=2),
    story(came(0, 2, attempt=2)),
    story(came(0, 0), results={"m0": [0, 1]}),
    story(came(0, 0, End.UNATTENDED), results={"m0": KeyError}),
    story(
        came(0, 0, End.NACKED, loaded=0, saved=DUE, step=5),
        came(0, 0.1, End.NACKED, attempt=2, saved=DUE + 1, step=5),
        came(0, 0.2, attempt=3, loaded=DUE + 1),
    ),
    # A short fault does not hide a longer one.
    story(came(0, 21), faults=[Fault("long", DUE, DUE + 20 * SECOND), AWAY]),
    History(EXPIRED),
]
PLANTED = {
    "lost": [
        story(),
        *(story(came(0, 0, end)) for end in (End.NONE, End.LOST, End.RETURNED, End.NACKED)),
    ],
    "unexpected": [story(came(0, 0), came(7, 0)), story(came(0, 0), told=Told.FAILED)],
    "early": [
        story(came(0, -0.001, due_us=0)),
        story(came(0, 1, **EARLY)),
        story(came(0, 0, End.RETURNED), came(0, 1, attempt=2, **EARLY)),
    ],
    "duplicate": [
        story(came(0, 0, end), came(0, 1.9, attempt=2)) for end in (End.NONE, End.UNKNOWN, End.LOST)
    ],
    "result": [
        *(story(came(0, 0), results={"m0": found}) for found in (None, KeyError, [0, 2], [1, 1])),
        story(came(0, 0, End.LOST), came(0, 2, attempt=2), results={"m0": [0, 1]}),
    ],
    "after ack": [
        story(came(0, 0), came(0, 3, attempt=2)),
        story(*BOTH_TWICE, keys=2, doubts={"m0"}),
    ],
    "stuck": [
        story(came(0, 5.1)),
        story(came(0, 7.1), faults=[AWAY]),
        # A later fault explains nothing.
        story(came(0, 5.1), faults=[Fault("later", DUE + 6 * SECOND, DUE + 7 * SECOND)]),
    ],
    "checkpoint": [
        story(came(0, 0, End.NACKED, **before), came(0, 0.1, attempt=2, **after))
        for before, after in CHECKPOINTS
    ],
    "held": [story(told=Told.HELD)],
    "expired": [History(EXPIRED, [came(0, 0.1)])],
    "left": [story(came(0, 0), left=["a key"])],
    "attempts": [
        story(came(0, 0, attempt=2)),
        story(came(0, 0, End.NONE), came(0, 2, attempt=1)),
        story(came(0, 0, End.NONE, attempt=1), came(0, 2, attempt=3)),
        story(came(0, 2, End.RETURNED, attempt=2), came(0, 3, attempt=1)),
        story(came(0, 0, End.RETURNED), came(0, 1, attempt=3)),
    ],
}


def test_the_checker_names_what_breaks_a_rule_and_nothing_else() -> None:
    leased, for_good = (Rules(lease_us, within_us=5 * SECOND) for lease_us in (LEASE, 0))
    for number, history in enumerate(SOUND):
        assert check(history, leased) == [], f"sound history {number}"
    for rule, histories in PLANTED.items():
        for number, history in enumerate(histories):
            kinds = [violation.kind for violation in check(history, leased)]
            assert kinds == [rule], f"{rule} {number}"
    twice = check(story(came(0, 0), came(0, 0, copy="other")), leased)
    assert "stored twice" in {violation.kind for violation in twice}
    unleased = [check(story(*some), for_good) for some in ((), (came(0, 0), came(0, 60)))]
    assert summary(unleased[0]) == "1 lost; lost: message 0 was stored and never came"
    assert [violation.kind for violation in unleased[1]] == ["duplicate"]


BUGS = {bug: plant for bug, (_, _, plant) in PLANTS.items()}
BUGS |= {name: case.plant for name, case in SAFEGUARDS.items()}


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_that_storms_and_simulations_are_to_name_can_still_be_planted(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They run at night. The place for a bug may move by day.
    BUGS[bug](monkeypatch)
