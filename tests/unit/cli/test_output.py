"""Durations and moments on the command line, and what is documented of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq.cli.app import app
from delayq.cli.errors import CommandFailed
from delayq.cli.options import duration, instant
from delayq.cli.output import moment_cell, moment_text, show_table, span

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DURATIONS = {"90": 90, "1.5": 1.5, "1.5s": 1.5, "250ms": 0.25, "30m": 1800, "2h30m": 9000}
DURATIONS |= {"1d 12h": 129_600, "0": 0}


@pytest.mark.parametrize("text", DURATIONS)
def test_durations(text: str) -> None:
    assert duration(text) == pytest.approx(DURATIONS[text])


@pytest.mark.parametrize("text", ["", "soon", "1y", "1h x", "m", "1h-2m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(CommandFailed):
        duration(text)


def test_moments_need_a_timezone() -> None:
    assert instant("2030-01-31T12:00+01:00") == datetime(2030, 1, 31, 11, tzinfo=UTC)
    for text in ("2030-01-31T12:00", "noon", ""):
        with pytest.raises(CommandFailed):
            instant(text)


@given(st.floats(0, 1e12))
def test_each_duration_has_words(seconds: float) -> None:
    assert len(span(seconds)) < 20


@given(st.datetimes(timezones=st.just(UTC)))
def test_each_moment_has_words(at: datetime) -> None:
    assert len(moment_cell(at, NOW)) <= 26
    assert len(moment_text(at, NOW)) <= 40


def test_moments_are_told_by_their_distance() -> None:
    assert moment_cell(NOW + timedelta(minutes=50), NOW).endswith(" in 50m")
    assert moment_cell(NOW - timedelta(seconds=7), NOW).endswith(" 7s ago")
    assert moment_text(NOW + timedelta(hours=1, minutes=6), NOW).endswith("(in 1 h 6 min)")
    assert moment_text(None, NOW) == moment_cell(None, NOW) == "-"


def test_each_command_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    functions = [(one.name, one.callback) for one in app.registered_commands]
    commands = [name or getattr(function, "__name__", "") for name, function in functions]
    assert len(commands) > 15
    for name in [*commands, "dead list", "dead redrive", "dead purge"]:
        assert f"delayq {name}" in page


def test_a_title_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["[/red]"], [["[bold]"]])
    assert capsys.readouterr().out == "[/red]\n[bold]\n"
