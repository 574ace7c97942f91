"""The checker names each bug that is planted in a history, and finds none in others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.checker import Rules, check, summary
from tests.faults.history import Delivered, End, Fault, History, Offered, Told
from tests.faults.test_planted import PLANTS
from tests.faults.test_simulation import SAFEGUARDS

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
