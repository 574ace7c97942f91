"""Every script's declaration and header match its body."""

from __future__ import annotations

import re
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
from delayq._redis.scripts import (
    Script,
    names_in,
    scripts_in,
    variables_of,
)
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
            # New messages need only one of them, and one of the places under another name.
            used = {*script.keys} & {*MESSAGES}
            assert used in ({*keys_of_messages(script)}, {"bodies"}), name
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
