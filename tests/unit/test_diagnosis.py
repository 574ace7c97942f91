"""The doctor's conclusions from a server's answers, and the queue to which a key belongs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from delayq import BadName
from delayq._delayed.keys import DelayedKeys
from delayq._redis import server_info
from delayq._reliable.keys import ReliableKeys
from delayq.admin import doctor as diagnosis
from delayq.admin.catalog import QUEUE_KEYS, queue_of
from delayq.cli.app import app
from delayq.cli.errors import CommandFailed
from delayq.cli.options import duration, instant
from delayq.cli.output import moment_cell, moment_text, show_table, span
from tests.support.names import names

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("look", "info", "level"),
    [
        (diagnosis._version, "redis_version=6.2.14", "ok"),
        (diagnosis._version, "redis_version=7.2.4 valkey_version=9.1.2", "ok"),
        (diagnosis._version, "redis_version=6.0.9", "wrong"),
        (diagnosis._role, "role=master connected_slaves=2", "ok"),
        (diagnosis._role, "role=slave master_host=a master_port=1", "wrong"),
        (diagnosis._persistence, "aof_enabled=1", "ok"),
        (diagnosis._persistence, "aof_enabled=1 aof_last_write_status=err", "wrong"),
        (diagnosis._persistence, "aof_enabled=0", "note"),
        (diagnosis._persistence, "aof_enabled=0 rdb_last_bgsave_status=err", "wrong"),
        (diagnosis._persistence, "loading=1", "wrong"),
        (diagnosis._memory, "used_memory=5000000 maxmemory=0", "ok"),
        (diagnosis._memory, "used_memory=95 maxmemory=100", "wrong"),
        (diagnosis._memory, "maxmemory=100 maxmemory_policy=volatile-lru", "wrong"),
        (diagnosis._memory, "maxmemory=0 maxmemory_policy=allkeys-lru", "note"),
    ],
)
def test_what_a_server_says(look: Callable[[Any], Any], info: str, level: str) -> None:
    found = look(dict(each.split("=") for each in info.split()))
    assert found.level == level
    assert bool(found.advice) == (level != "ok")


def test_info_is_read_by_name() -> None:
    assert server_info.read_info(b"# Server\r\nredis_version:7.0\r\nexecutable:/a:b\r\n\r\n") == {
        "redis_version": "7.0",
        "executable": "/a:b",
    }


def matches(key: str) -> bool:
    """Return whether a key matches the pattern, as the server reads it."""
    return re.match(QUEUE_KEYS.replace("*", ".*"), key, re.DOTALL) is not None


@given(names, st.integers(0, 1023))
def test_each_key_of_a_reliable_queue_names_it(name: str, partition: int) -> None:
    try:
        keys = ReliableKeys.of(name, None, partition)
    except BadName:
        assume(False)
    # A name that ends like the continuation of a key cannot be told from a longer name.
    assume("}:" not in name and not name.startswith(("part:", "}")))
    others = (keys.done, keys.dead, keys.dead_messages, keys.paused, keys.schedules)
    for key in (*keys.messages, *others):
        assert queue_of(key) == ("reliable", name, partition)
        assert matches(key)


@given(names)
@example("{a}}")
def test_each_key_of_a_delayed_queue_names_it(name: str) -> None:
    try:
        keys = DelayedKeys.of(name)
    except BadName:
        assume(False)
    for key in (keys.timeout, keys.ordered, keys.quarantine, keys.leases):
        found = queue_of(key)
        assert found is not None
        kind, told, partition = found
        assert (kind, partition) == ("delayed", 0)
        # "a" and "{a}" have the same keys.
        assert DelayedKeys.of(told).timeout == keys.timeout
        assert matches(key)


@given(st.text(max_size=40))
def test_any_other_key_is_nobodys_or_whole(key: str) -> None:
    found = queue_of(key)
    assert found is None or found[1]


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
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")
    functions = [(one.name, one.callback) for one in app.registered_commands]
    commands = [name or getattr(function, "__name__", "") for name, function in functions]
    assert len(commands) > 15
    for name in [*commands, "dead list", "dead redrive", "dead purge"]:
        assert f"delayq {name}" in page


def test_a_title_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["[/red]"], [["[bold]"]])
    assert capsys.readouterr().out == "[/red]\n[bold]\n"
