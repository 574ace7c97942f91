"""The checker of the crash test reports every fault, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.crash_log import (
    ACKED,
    DOWN,
    HANDLED,
    KILLED,
    LOST,
    STARTED,
    UNSETTLED,
    UP,
    Event,
    Log,
    Offers,
    check,
    read,
)

if TYPE_CHECKING:
    from pathlib import Path

LEASE = 2.0
ONE = Offers(stored={"m"})


def started(at: float, who: str, attempt: int = 1) -> Event:
    return Event(at, STARTED, who, "m", attempt)


def handled(at: float, who: str, attempt: int = 1) -> list[Event]:
    """Return the events of one message from its start to its acknowledgement, in 20 ms."""
    return [
        started(at, who, attempt),
        Event(at + 0.01, HANDLED, who, "m", attempt),
        Event(at + 0.02, ACKED, who, "m", attempt),
    ]


def unsettled(at: float, who: str) -> list[Event]:
    return [
        started(at, who),
        Event(at + 0.01, HANDLED, who, "m", 1),
        Event(at + 0.02, UNSETTLED, who, "m", 1),
    ]


def test_what_is_handled_once_is_well() -> None:
    verdict = check(handled(1, "a"), ONE, LEASE)
    assert (verdict.problems, verdict.again, verdict.handled) == ([], {}, 1)


@pytest.mark.parametrize(
    ("cause", "first", "between"),
    [
        ("died", [started(1, "a")], [Event(1.5, KILLED, "a")]),
        ("died", unsettled(1, "a"), [Event(1.5, KILLED, "a")]),
        ("server", unsettled(1, "a"), [Event(1.5, DOWN), Event(1.6, UP)]),
        # The answer to the ack was lost with the server, which is still away.
        ("server", unsettled(1, "a"), [Event(0.9, DOWN)]),
        ("overran", [started(1, "a")], []),
        ("overran", [started(1, "a"), Event(2.5, HANDLED, "a", "m", 1)], []),
        (
            "overran",
            [started(1, "a"), Event(1.01, HANDLED, "a", "m", 1), Event(1.2, LOST, "a", "m", 1)],
            [],
        ),
    ],
)
def test_what_has_a_cause_may_come_again(
    cause: str, first: list[Event], between: list[Event]
) -> None:
    events = sorted([*first, *between, *handled(4, "b", 2)], key=lambda event: event.at)
    verdict = check(events, ONE, LEASE)
    assert (verdict.problems, verdict.again, verdict.handled) == ([], {cause: 1}, 1)


@pytest.mark.parametrize(
    ("problem", "events"),
    [
        ("never handled", []),
        ("never handled", [started(1, "a"), Event(2, KILLED, "a")]),
        ("had acknowledged", [*handled(1, "a"), *handled(4, "b", 2)]),
        # Neither its death afterwards nor an outage of the server excuses it.
        ("had acknowledged", [*handled(1, "a"), Event(2, KILLED, "a"), *handled(4, "b", 2)]),
        (
            "had acknowledged",
            [*handled(1, "a"), Event(2, DOWN), Event(2.1, UP), *handled(4, "b", 2)],
        ),
        # A stale ack was accepted.
        ("had acknowledged", [started(1, "a"), *handled(4, "b", 2), Event(5, ACKED, "a", "m", 1)]),
        ("under a lease", [started(1, "a"), Event(1.1, KILLED, "a"), *handled(1.5, "b", 2)]),
        (
            "under a lease",
            [started(1, "a"), Event(1.1, DOWN), Event(1.2, UP), *handled(1.5, "b", 2)],
        ),
        ("kept to its lease", [*unsettled(1, "a"), *handled(4, "b", 2)]),
        # Another worker died, or the server was away long before.
        ("kept to its lease", [*unsettled(1, "a"), Event(2, KILLED, "c"), *handled(4, "b", 2)]),
        (
            "kept to its lease",
            [Event(-9, DOWN), Event(-8, UP), *unsettled(1, "a"), *handled(4, "b", 2)],
        ),
        # The worker died after the message had been redelivered.
        ("kept to its lease", [*unsettled(1, "a"), *handled(4, "b", 2), Event(5, KILLED, "a")]),
        ("its attempts are", [started(1, "a"), Event(1.1, KILLED, "a"), *handled(4, "b", 1)]),
        ("nobody offered it", [*handled(1, "a"), Event(2, STARTED, "a", "foreign", 1)]),
    ],
)
def test_what_has_none_is_reported(problem: str, events: list[Event]) -> None:
    assert any(problem in found for found in check(events, ONE, LEASE).problems)


def test_an_offer_that_was_refused_must_not_be_handled_and_one_that_is_unknown_may_be() -> None:
    assert check(handled(1, "a"), Offers(refused={"m"}), LEASE).problems == [
        "m: said not to be stored, and handled"
    ]
    assert check(handled(1, "a"), Offers(unknown={"m"}), LEASE).problems == []
    assert check([], Offers(unknown={"m"}, refused={"n"}), LEASE).problems == []


def test_logs_are_read_in_order_of_time_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    one, two = Log(tmp_path / "one", "a"), Log(tmp_path / "two")
    one.write(STARTED, "m", 3)
    two.write(KILLED, who="a")
    one.close()
    two.close()
    with (tmp_path / "one").open("a") as file:
        file.write("12.5\tack")
    events = read([tmp_path / "two", tmp_path / "one"])
    assert [(event.what, event.who, event.message, event.attempt) for event in events] == [
        (STARTED, "a", "m", 3),
        (KILLED, "a", "", 0),
    ]
