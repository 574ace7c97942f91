"""The live view: its order, its drawing, and its keys."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from delayq.admin.catalog import FoundQueue
from delayq.cli.top import ORDERS, Line, View
from delayq.stats import QueueDepth

LATE = Line(FoundQueue("reliable", "q-late"), QueueDepth(1, 20, 3, 0, 75.0), -4.25)
WORSE = Line(FoundQueue("reliable", "q-worse"), QueueDepth(0, 5, 0, 9, 90.0), 0.0)
LETTERS = Line(FoundQueue("reliable", "q-letters"), QueueDepth(0, 0, 0, 2, 0.0))
JUNK = Line(FoundQueue("delayed", "q-junk"), QueueDepth(7, 0, 0, 0, 0.0, quarantined=1))
PAUSED = Line(FoundQueue("reliable", "q-paused"), QueueDepth(0, 1, 0, 0, 500.0, paused=True))
BROKEN = Line(FoundQueue("reliable", "q-broken"), "a value of the wrong type")
FINE = Line(FoundQueue("reliable", "q-fine"), QueueDepth(30, 2, 1, 0, 0.5), 12.0)
LINES = (FINE, LETTERS, PAUSED, LATE, BROKEN, WORSE, JUNK)


def drawn(view: View, height: int = 40, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as written:
        console.print(view.picture(height))
    return [line.rstrip() for line in written.get().splitlines()]


def names(view: View, height: int = 40) -> list[str]:
    """Return the names in the table, from its top."""
    words = {line.queue.argument for line in LINES}
    return [word for line in drawn(view, height) for word in line.split() if word in words]


def test_queues_in_trouble_come_first() -> None:
    view = View("redis://here", LINES)
    troubles = ["q-broken", "q-worse", "q-late", "q-paused", "delayed:q-junk", "q-letters"]
    assert names(view) == [*troubles, "q-fine"]
    heading, _, titles, *rows = drawn(view)
    assert heading == "delayq top    ready 28  delayed 38  leased 4  dead 12  redis://here"
    assert titles.split() == ["state", *(title for title, _ in ORDERS[1:])]
    assert rows[0].split() == ["see", "doctor", "q-broken", *"-----"]
    assert rows[2].split() == ["1", "min", "late", "q-late", "20", "1", "3", "0", "-4.2"]
    # A problem replaces the keys, and the figures stay.
    view = View("", LINES, problem="the server does not answer")
    assert drawn(view)[-1] == "the server does not answer"
    assert len(names(view)) == len(LINES)
    assert View("").on_key("q") is False
    assert drawn(View(""))[-1] == "no queues"


def test_the_last_column_says_why_messages_are_late() -> None:
    held_back = replace(LATE, cause="at its limit of 3 at a time")
    _, _, titles, row = drawn(View("", [held_back]), width=120)[:4]
    assert titles.split()[-1] == "why"
    assert row.endswith("at its limit of 3 at a time")


def test_arrows_choose_the_order() -> None:
    first = {"queue": "q-broken", "ready": "q-late", "delayed": "q-fine"}
    first |= {"leased": "q-late", "dead": "q-worse", "change/s": "q-fine"}
    view = View("", LINES)
    for title, name in first.items():
        assert view.on_key("right")
        assert (ORDERS[view.order][0], names(view)[0]) == (title, name)
    for _ in range(view.order + 1):
        view.on_key("left")
    assert view.order == len(ORDERS) - 1


def test_a_screen_that_is_too_low_scrolls() -> None:
    view = View("", LINES)
    assert len(drawn(view, 8)) == 8
    assert names(view, 8) == ["q-broken", "q-worse", "q-late"]
    view.on_key("up")
    assert names(view, 8)[0] == "q-broken"
    for _ in range(50):
        view.on_key("down")
    assert names(view, 8) == ["delayed:q-junk", "q-letters", "q-fine"]
    assert drawn(view, 8)[-1].startswith("5-7 of 7 queues")
    view.on_key("up")
    assert names(view, 8)[0] == "q-paused"


def test_no_line_is_wider_than_the_terminal() -> None:
    long = Line(FoundQueue("reliable", "q" * 200), QueueDepth(10**9, 10**9, 0, 0, 9e6), 1e6)
    view = View("redis://" + "h" * 200, [*LINES, long], problem="")
    for width in (40, 80, 140):
        assert len(drawn(view, width=width)) == 4 + len(LINES) + 1 + 1
        assert all(len(line) <= width for line in drawn(view, width=width))
