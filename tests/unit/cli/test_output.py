"""How the command line reads and writes durations and moments, and draws its live view."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from delayq.admin.catalog import FoundQueue
from delayq.cli.app import app
from delayq.cli.options import instant
from delayq.cli.output import (
    CommandFailed,
    duration_text,
    moment_cell,
    moment_text,
    show_table,
    span,
    sparkline,
)
from delayq.cli.top import ORDERS, Line, View
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import Iterator


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


MOMENTS = {
    "2030-01-31T12:00+01:00": "2030-01-31T11:00Z",
    "2030-01-31T12:00Z": "2030-01-31T12:00Z",
    "2030-01-31Z": "2030-01-31T00:00Z",
    "2030-01-31-0500": "2030-01-31T05:00Z",
    "2030-01-31T12:00": "2030-01-31T11:00Z",
    "2030-07-31 12:00:30.5": "2030-07-31T10:00:30.5Z",
    "20300131": "2030-01-30T23:00Z",
    "2030-01-31 12:00 America/New_York": "2030-01-31T17:00Z",
    "2030-07-31 UTC": "2030-07-31T00:00Z",
}
NO_MOMENTS = {
    "noon": "--at must be a date or a time such as",
    "": "--at must be a date or a time such as",
    "2030-02-30": "--at must be a date or a time such as",
    "2030-01-31 12:00 Europe/Atlantis": "unknown timezone: Europe/Atlantis",
    "2030-01-31 12:00+01:00 UTC": "two timezones",
    "2027-03-28T02:30": "does not exist here: the clocks are put forward",
    "2027-10-31T02:30": r"happens twice here, .* add \+0200 or \+0100 to 2027-10-31T02:30:00",
    "2027-11-07 01:30 America/New_York": "add -0400 or -0500",
    "0001-01-01": "too far away",
}


@pytest.mark.usefixtures("_in_berlin")
def test_moments_without_a_timezone_are_local() -> None:
    for text, moment in MOMENTS.items():
        at = instant(text)
        assert at == datetime.fromisoformat(moment), text
        assert at.utcoffset() is not None
    for text, words in NO_MOMENTS.items():
        with pytest.raises(CommandFailed, match=words):
            instant(text)
    assert moment_text(NOW + timedelta(days=3), NOW, zone=True) == "2026-11-24 13:00 CET (in 3 d)"


@given(st.floats(0, 1e12), st.datetimes(timezones=st.just(UTC)))
def test_durations_and_moments_are_written_in_words(seconds: float, at: datetime) -> None:
    assert len(span(seconds)) < 20
    assert len(moment_cell(at, NOW)) <= 26
    assert len(moment_text(at, NOW)) <= 40


def test_moments_are_told_by_their_distance() -> None:
    assert moment_cell(NOW + timedelta(minutes=50), NOW).endswith(" in 50m")
    assert moment_cell(NOW - timedelta(seconds=7), NOW).endswith(" 7s ago")
    assert moment_text(NOW + timedelta(hours=1, minutes=6), NOW).endswith("(in 1 h 6 min)")
    assert moment_text(None, NOW) == moment_cell(None, NOW) == "-"
    seconds = (None, 0.0001, 0.0123, 0.48, 1.5)
    assert [duration_text(second) for second in seconds] == [
        "-",
        "0.1 ms",
        "12 ms",
        "480 ms",
        "1.5 s",
    ]


def test_every_command_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    functions = [(command.name, command.callback) for command in app.registered_commands]
    commands = [name or getattr(function, "__name__", "") for name, function in functions]
    assert len(commands) > 15
    for name in [*commands, "dead list", "dead redrive", "dead purge"]:
        assert f"delayq {name}" in page


def test_tables_and_sparklines(capsys: pytest.CaptureFixture[str]) -> None:
    # Titles like markup are shown as they are.
    show_table(["[/red]"], [["[bold]"]])
    assert capsys.readouterr().out == "[/red]\n[bold]\n"
    for figures, shown in (([0, 1, 500, 1000], " ▁▄█"), ([0, 0], "  "), ([], "")):
        assert sparkline(figures) == shown
    assert len(sparkline([1] * 1440)) == 60


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
    assert rows[0].split() == ["unreadable", "q-broken", *"-----"]
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
