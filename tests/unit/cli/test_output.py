"""Durations and moments on the command line, and what is documented of it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
