"""Declaration and header of each script match its body, as do the commands that need rights."""

from __future__ import annotations

import re
from collections import OrderedDict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq._engine.store
import delayq._redisson.store
import delayq._reliable.moved_partition
import delayq._reliable.scripts
import delayq.testing.time_travel
from delayq._redis.rights import Rights, checked, commands, commands_tried, is_refusal
from delayq._redis.scripts import Script, names_in, scripts_in, variables_of
from delayq._redisson import store as delayed
from delayq._reliable import scripts as reliable
from delayq._reliable.keys import MESSAGES, PRIORITIES
from delayq.admin.acl import ROLES
from tests.support import lua

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer


LUA = Path(str(files("delayq"))) / "lua"
ALL = (*lua.SCRIPTS, *scripts_in("testing"))
FILES = sorted(LUA.rglob("*.lua"))
# The modules that run them.
STORES = (
    delayq._redisson.store,
    delayq._engine.store,
    delayq._reliable.moved_partition,
    delayq._reliable.scripts,
    delayq.testing.time_travel,
)


def keys_of_messages(script: Script) -> tuple[str, ...]:
    """Return the keys of messages that a script has: all, those beside the places, or none."""
    groups = (MESSAGES, MESSAGES[PRIORITIES:])
    return next((keys for keys in groups if script.keys[: len(keys)] == keys), ())


def test_every_file_is_a_script_that_a_store_runs() -> None:
    bodies = {file for file in FILES if file.parent.name != "include"}
    assert {LUA / f"{script.name}.lua" for script in ALL} == bodies
    values = [value for module in STORES for value in vars(module).values()]
    assert {value for value in values if isinstance(value, Script)} == {*ALL}


def test_a_head_declares_the_script_and_nothing_unknown() -> None:
    known = ("Keys", "Arguments", "Roles", "Repeatable", "Stores", "Undone by")
    for script in ALL:
        name, head = script.name, script.head
        titles = re.findall(r"^-- ([A-Z][a-z ]+):(?: .*)?$", head, re.MULTILINE)
        assert titles == [title for title in known if title in titles], name
        assert script.keys, name
        if not name.startswith("redisson/"):
            # New messages need only two of them.
            used = {*script.keys} & {*MESSAGES}
            assert used in ({*keys_of_messages(script)}, {"waiting_0", "bodies"}), name
        assert re.findall(r"^-- Repeatable: (.*)$", head, re.MULTILINE) in (["yes"], ["no"]), name
        # Roles are the users whose rights include the script.
        assert script.roles <= {*ROLES}, name
        assert bool(script.roles) == (script in lua.SCRIPTS), name
        assert script.undone_by is None or script.undone_by in ALL, name
        assert "\n-- Returns " in (LUA / f"{name}.lua").read_text("utf-8"), name


def test_a_script_uses_every_name_that_is_declared_and_no_other() -> None:
    optional = {"FIRST", "STRIDE", "COUNT"}
    for script in ALL:
        body = script.text.partition("\n")[2]
        shared = {*variables_of(keys_of_messages(script), ())}
        assert {*script.variables} - shared - optional <= names_in(body), script.name
        assert not lua.unknown_names(script), script.name
        keys = {*variables_of(script.keys, ())}
        assert not keys & {*lua.declared(lua.without_comments(body))}, script.name


def test_no_file_knows_the_position_of_a_key_or_an_argument() -> None:
    for file in FILES:
        text = lua.without_comments(file.read_text("utf-8"))
        assert "KEYS" not in text, file
        assert {*re.findall(r".?\bARGV\b(?:\[.*?\])?", text)} <= {"#ARGV", " ARGV"} | {
            *re.findall(r"[ (]ARGV\[at \+ [A-Z_]+\]", text)
        }, file


def test_commands_are_literal_keys_are_passed_and_nothing_is_left_behind() -> None:
    elsewhere = (
        r"\b(?:os|io|debug|package|coroutine)\.|string\.dump|redis\.(?!p?call\b|error_reply\b)\w+"
    )
    for script in ALL:
        body = lua.without_comments(script.text)
        calls = re.findall(r"redis\.p?call\(([^,)]*)", body)
        assert calls or "redis" not in body, script.name
        assert all(re.fullmatch(r"'[A-Z]+'", command) for command in calls), script.name
        assert not lua.unknown_keys(script), script.name
        assert not re.findall(elsewhere, re.sub(r"'[^'\n]*'", "''", body)), script.name
        # The script contains nothing that looks like a key: keys are made in keys.py.
        assert not re.findall(r"'(?:redisson|delayq)_[^']*'|'delayq:\{", script.text), script.name


@pytest.mark.every_server
async def test_every_server_compiles_every_script(server: PrivateServer) -> None:
    async with Redis.from_url(server.url, socket_timeout=60) as redis:
        for script in ALL:
            sha: Any = await redis.script_load(script.text)
            assert sha in (script.sha, script.sha.encode())


def test_a_script_that_writes_tries_all_of_its_commands_first() -> None:
    for script in lua.SCRIPTS:
        used, form = commands(script), checked(script)
        if used & lua.WRITING <= {"UNLINK", "DEL", "RENAME"}:
            # The script only reads, or nothing follows its one write.
            assert form is None, script.name
            continue
        assert commands_tried(script) >= used - {"PUBLISH", "PUBSUB"}, script.name
        assert form is not None
        assert form.text.endswith(script.text), script.name
        assert all(f"redis.pcall('{command}'" in form.text for command in commands_tried(script))


def test_a_script_that_takes_also_tries_the_commands_that_give_back() -> None:
    for taking in (delayed.TRANSFER, delayed.POLL_PENDING):
        for following in (delayed.GIVE_BACK, delayed.SET_ASIDE):
            assert commands_tried(taking) >= commands(following) - {"PUBLISH"}
    assert commands_tried(reliable.CLAIM) >= commands(reliable.RELEASE) - {"PUBLISH"}


MISSING = """
NOPERM this user has no permissions to run the 'lpop' command
NOPERM No permissions to access a key
ACL failure in script: No permissions to access a channel script: on @user_script:97.
@user_script: 1: The user executing the script can't run this command or subcommand
The user executing the script can't access at least one of the keys mentioned in the arguments
"""


def test_a_missing_right_is_told_from_other_errors() -> None:
    for text in MISSING.strip().splitlines():
        assert is_refusal(text), text
    assert not is_refusal("WRONGTYPE Operation against a key holding the wrong kind of value")


class Wire:
    """Stands for a connection, which rights are remembered for."""

    def __init__(self) -> None:
        self.permits: OrderedDict[tuple[str, str], float] = OrderedDict()


def test_checks_are_forgotten_when_they_no_longer_count() -> None:
    now = 0.0
    rights, wire, script = Rights(lambda: now), Wire(), reliable.CLAIM
    form = checked(script)
    assert form is not None
    for queue in range(1000):
        now += 0.1
        rights.permitted(wire, script, "first", form)  # type: ignore[arg-type]
        rights.permitted(wire, script, f"queue {queue}", form)  # type: ignore[arg-type]
    assert rights.form(wire, script, "first") is script  # type: ignore[arg-type]
    assert rights.form(wire, script, "queue 999") is script  # type: ignore[arg-type]
    assert rights.form(wire, script, "queue 900") is form  # type: ignore[arg-type]
    assert len(wire.permits) <= 52
