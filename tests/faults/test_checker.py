"""The checker names each bug that is planted in a history, and finds none in others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.checker import Rules, check, lateness_us, percentile, summary
from tests.faults.history import Delivered, End, Fault, History, Notes, Offered, Told, read_notes

if TYPE_CHECKING:
    from pathlib import Path

SECOND = 1_000_000
LEASE = 2 * SECOND
LEASED = Rules(lease_us=LEASE, within_us=5 * SECOND)
FOR_GOOD = Rules(lease_us=0, within_us=5 * SECOND)
DUE = 100 * SECOND


def came(key: int, after: float, end: End = End.ACKED, **facts: Any) -> Delivered:
    """Return a delivery this many seconds after the due time."""
    at = DUE + int(after * SECOND)
    usual: dict[str, Any] = {"who": "one", "copy": f"m{key}", "due_us": DUE, "claimed_us": at}
    usual |= {"ends_us": at + LEASE, "attempt": 1}
    return Delivered(key, at, end=end, **(usual | facts))


def story(*delivered: Delivered, told: Told = Told.OK, keys: int = 1, **more: Any) -> History:
    return History({key: Offered(DUE, told) for key in range(keys)}, list(delivered), **more)


def kinds(history: History, rules: Rules = LEASED) -> list[str]:
    return [violation.kind for violation in check(history, rules)]


# Histories without a violation


@pytest.mark.parametrize(
    "history",
    [
        story(came(0, 0.01)),
        story(came(0, 0), told=Told.UNKNOWN),
        story(told=Told.UNKNOWN),
        story(told=Told.FAILED),
        story(came(0, 0, End.NONE), came(0, 2, attempt=2)),
        story(came(0, 0, End.LOST), came(0, 2.5, attempt=2)),
        story(came(0, 0, End.UNKNOWN), came(0, 2, attempt=2)),
        story(came(0, 0, End.RETURNED), came(0, 0.1, attempt=2)),
        story(came(0, 0, End.NACKED), came(0, 0.1, attempt=2)),
        story(came(0, 0, End.EITHER)),
        story(came(0, 0, End.EITHER), came(0, 0.1)),
        story(came(0, 0, End.RETURNED), came(0, 0.1)),
        story(came(0, 0, End.UNATTENDED), came(0, 2, attempt=2), doubts={"m0"}),
        story(came(0, 0, End.UNATTENDED), came(0, 2, attempt=2), nameless_doubts=1),
        story(came(0, 2, attempt=2)),
        story(came(0, 0), results={"m0": [0, 1]}),
        story(came(0, 0, End.UNKNOWN), came(0, 2, attempt=2), results={"m0": [0, 1]}),
        story(came(0, 0, End.UNATTENDED), results={"m0": KeyError}),
        story(came(0, 9), faults=[Fault("away", DUE - SECOND, DUE + 8 * SECOND)]),
    ],
)
def test_a_history_without_fault_has_no_violation(history: History) -> None:
    assert check(history, LEASED) == []


# Planted bugs

AWAY = Fault("away", DUE + SECOND, DUE + 2 * SECOND)
LATER = Fault("later", DUE + 6 * SECOND, DUE + 7 * SECOND)
LONG = Fault("long", DUE, DUE + 20 * SECOND)
BOTH_TWICE = [
    each for key in range(2) for each in (came(key, 0, End.UNATTENDED), came(key, 3, attempt=2))
]
EXPIRED = {0: Offered(DUE, Told.OK, expires=True)}
EARLY = came(0, 1, due_us=DUE + 2 * SECOND, attempt=2)
PLANTED: dict[str, list[tuple[History, list[str]]]] = {
    "what was stored and never came is lost": [(story(), ["lost"])],
    "what no consumer had to the end is lost": [
        (story(came(0, 0, end)), ["lost"]) for end in (End.NONE, End.LOST, End.RETURNED, End.NACKED)
    ],
    "what nobody offered, or was refused, is unexpected": [
        (story(came(0, 0), came(7, 0)), ["unexpected"]),
        (story(came(0, 0), told=Told.FAILED), ["unexpected"]),
    ],
    "what comes before its delay has passed is early": [
        (story(came(0, -0.001, due_us=0)), ["early"])
    ],
    "what leaves the server before the queue says is early": [
        (story(came(0, 1, due_us=DUE + 2 * SECOND)), ["early"]),
        (story(came(0, 0, End.RETURNED), EARLY), ["early"]),
    ],
    "one offer that comes under two ids was stored twice": [
        (
            story(came(0, 0), came(0, 0, copy="other")),
            ["after ack", "attempts", "duplicate", "stored twice"],
        )
    ],
    "what comes again before its lease has ended is a duplicate": [
        (story(came(0, 0, end), came(0, 1.9, attempt=2)), ["duplicate"])
        for end in (End.NONE, End.UNKNOWN, End.LOST)
    ],
    "what was acknowledged has the result of that attempt": [
        (story(came(0, 0), results={"m0": found}), ["result"])
        for found in (None, KeyError, [0, 2], [1, 1])
    ],
    "no result is that of an attempt that failed": [
        (story(came(0, 0, End.LOST), came(0, 2, attempt=2), results={"m0": [0, 1]}), ["result"]),
        (story(came(0, 0, End.UNKNOWN), results={"m0": [0, 2]}), ["result"]),
    ],
    "what comes after its ack is named": [
        (story(came(0, 0), came(0, 3, attempt=2)), ["after ack"])
    ],
    "an unattended ack counts unless the log has doubts": [
        (story(*BOTH_TWICE, keys=2), ["after ack"] * 2),
        (story(*BOTH_TWICE, keys=2, doubts={"m0"}), ["after ack"]),
        (story(*BOTH_TWICE, keys=2, nameless_doubts=1), ["after ack"] * 2),
        (story(*BOTH_TWICE, keys=2, nameless_doubts=2), []),
    ],
    "what comes long after everything is healed was stuck": [
        (story(came(0, 5.1)), ["stuck"]),
        (story(came(0, 7.1), faults=[AWAY]), ["stuck"]),
    ],
    "a later fault explains nothing": [(story(came(0, 5.1), faults=[LATER]), ["stuck"])],
    "a short fault does not hide a longer one": [(story(came(0, 21), faults=[LONG, AWAY]), [])],
    "an id that is refused although its message had expired": [(story(told=Told.HELD), ["held"])],
    "what has expired need not come, and must not": [
        (History(EXPIRED), []),
        (History(EXPIRED, [came(0, 0.1)]), ["expired"]),
    ],
    "what is left on the server is named": [(story(came(0, 0), left=["a key"]), ["left"])],
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_rule_names_what_breaks_it(rule: str) -> None:
    for history, violations in PLANTED[rule]:
        assert kinds(history) == violations


def test_a_queue_without_leases_loses_nothing_and_delivers_nothing_twice() -> None:
    assert kinds(story(), FOR_GOOD) == ["lost"]
    assert kinds(story(came(0, 0), came(0, 60)), FOR_GOOD) == ["duplicate"]


@pytest.mark.parametrize(
    "delivered",
    [
        [came(0, 0, attempt=2)],
        [came(0, 0, End.NONE), came(0, 2, attempt=1)],
        [came(0, 0, End.NONE, attempt=1), came(0, 2, attempt=3)],
        [came(0, 2, End.RETURNED, attempt=2), came(0, 3, attempt=1)],
        [came(0, 0, End.RETURNED), came(0, 1, attempt=3)],
        [came(0, 0, End.NACKED), came(0, 1, attempt=1)],
    ],
)
def test_attempts_that_fall_stand_still_or_jump_are_named(delivered: list[Delivered]) -> None:
    assert kinds(story(*delivered)) == ["attempts"]


def test_the_summary_counts_and_shows_the_first() -> None:
    violations = check(story(came(7, 0), keys=3), LEASED)
    assert (
        summary(violations, show=1)
        == "3 lost; 1 unexpected; lost: message 0 was stored and never came"
    )
    assert summary([]) == "none"


# Reports


def test_lateness_is_told_of_what_no_fault_has_delayed() -> None:
    history = story(
        came(0, 0.5),
        came(1, 3),
        came(2, 0.1),
        keys=3,
        faults=[Fault("away", DUE + 2 * SECOND, DUE + 3 * SECOND)],
    )
    assert lateness_us(history) == [SECOND // 10, SECOND // 2]
    assert percentile(list(range(100)), 0.99) == 99
    assert percentile([], 0.5) == 0


def test_notes_of_a_process_that_was_killed_are_read_but_for_the_last_line(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "one", "one")
    first, second = came(0, 0, End.NONE), came(1, 0, End.NONE)
    notes.began(first)
    notes.began(second)
    first.end, first.ended_us = End.ACKED, DUE + SECOND
    first.ends_us += SECOND
    notes.ended(first)
    notes.close()
    with (tmp_path / "one").open("a") as cut:
        cut.write("one\tended\t1\t5")
    assert read_notes([tmp_path / "one"]) == [first, second]
