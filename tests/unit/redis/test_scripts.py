"""Every script's declaration and header match its body."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq._delayed.store
import delayq._engine.store
import delayq._reliable.store
import delayq.testing.time_travel
from delayq._redis.scripts import (
    Script,
    names_in,
    scripts_in,
    variables_of,
    without_unused_functions,
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
    delayq._delayed.store,
    delayq._engine.store,
    delayq._reliable.store,
    delayq.testing.time_travel,
)
by_name = pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)


def keys_of_messages(script: Script) -> tuple[str, ...]:
    """Return the keys of messages that a script has: all, those beside the places, or none."""
    groups = (MESSAGES, MESSAGES[PRIORITIES:])
    return next((keys for keys in groups if script.keys[: len(keys)] == keys), ())


def test_every_file_is_a_script() -> None:
    bodies = {file for file in FILES if file.parent.name != "include"}
    assert {LUA / f"{script.name}.lua" for script in ALL} == bodies


def test_every_script_is_run_by_a_store() -> None:
    values = [value for module in STORES for value in vars(module).values()]
    assert {value for value in values if isinstance(value, Script)} == {*ALL}


@by_name
def test_a_head_declares_the_script_and_nothing_unknown(script: Script) -> None:
    titles = re.findall(r"^-- ([A-Z][a-z ]+):(?: .*)?$", script.head, re.MULTILINE)
    known = ("Keys", "Arguments", "Roles", "Repeatable", "Undone by")
    assert titles == [title for title in known if title in titles]
    assert script.keys
    if not script.name.startswith("delayed/"):
        # New messages need only one of them, and one of the places under another name.
        assert {*script.keys} & {*MESSAGES} in ({*keys_of_messages(script)}, {"bodies"})
    assert re.findall(r"^-- Repeatable: (.*)$", script.head, re.MULTILINE) in (["yes"], ["no"])
    assert script.roles <= {*ROLES}
    assert bool(script.roles) == (script in lua.SCRIPTS), "Roles: the users whose rights include it"
    assert script.undone_by is None or script.undone_by in ALL
    assert "\n-- Returns " in (LUA / f"{script.name}.lua").read_text("utf-8")


@by_name
def test_a_script_uses_every_name_that_is_declared_and_no_other(script: Script) -> None:
    shared = {*variables_of(keys_of_messages(script), ())}
    optional = {"FIRST", "STRIDE", "COUNT"}
    assert {*script.variables} - shared - optional <= names_in(script.text.partition("\n")[2])
    assert not lua.global_reads(script)


@by_name
def test_nothing_else_has_the_name_of_a_key(script: Script) -> None:
    keys = variables_of(script.keys, ())
    assert not {*keys} & {*lua.declared(lua.without_comments(script.text.partition("\n")[2]))}


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-2:]))
def test_no_file_knows_the_position_of_a_key_or_an_argument(file: Path) -> None:
    text = lua.without_comments(file.read_text("utf-8"))
    assert "KEYS" not in text
    assert {*re.findall(r".?\bARGV\b(?:\[.*?\])?", text)} <= {"#ARGV", " ARGV"} | {
        *re.findall(r"[ (]ARGV\[at \+ [A-Z_]+\]", text)
    }


def test_names_are_made_from_the_declaration() -> None:
    assert variables_of(("waiting_0", "waiting_1", "wake"), ("limit", "id...", "delay_us...")) == {
        "wake": "KEYS[3]",
        "waiting": "{[0] = KEYS[1], KEYS[2]}",
        "limit": "ARGV[1]",
        "FIRST": "2",
        "STRIDE": "2",
        "COUNT": "(#ARGV - 1) / 2",
        "ID": "0",
        "DELAY_US": "1",
    }
    assert variables_of(("key...",), ("limit", "name...")) == {
        "keys": "KEYS",
        "limit": "ARGV[1]",
        "names": "{unpack(ARGV, 2)}",
    }


def test_functions_that_are_not_called_are_left_out() -> None:
    one = "local function one() return 1 end\n"
    two = "-- Returns two.\nlocal function two()\n  return one() + one()\nend\n"
    three = "-- Calls two, not three().\nlocal function three() return two() end\n"
    both = one + two + "return pcall(two)"
    assert without_unused_functions(one + two + three + "return pcall(two)") == both


@by_name
def test_commands_are_literal_and_keys_are_passed(script: Script) -> None:
    body = re.sub(r"--.*", "", script.text)
    calls = re.findall(r"redis\.p?call\(([^,)]*)", body)
    assert calls or "redis" not in body
    assert all(re.fullmatch(r"'[A-Z]+'", command) for command in calls)


@by_name
def test_every_key_is_one_of_keys(script: Script) -> None:
    assert not lua.unknown_keys(script)


@by_name
def test_nothing_is_built_run_or_left_behind(script: Script) -> None:
    body = re.sub(r"'[^'\n]*'", "''", lua.without_comments(script.text))
    assert not lua.global_writes(script)
    assert not re.findall(
        r"\b(?:os|io|debug|package|coroutine)\.|string\.dump|redis\.(?!p?call\b|error_reply\b)\w+",
        body,
    )
    # The script contains nothing that looks like a key: keys are made in keys.py.
    assert not re.findall(r"'(?:redisson|delayq)_[^']*'|'delayq:\{", script.text)


LIVE = "local live = {[0] = KEYS[1], KEYS[2]}"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("redis.call('GET', 'a')", ["'a'"]),
        ("redis.call('GET', ARGV[1])", ["ARGV"]),
        ("redis.call('GET', KEYS[1] .. 'x')", ["KEYS[1] .. 'x'"]),
        ("local function f(key)\n  redis.call('GET', key)\nend\nf(ARGV[1])", ["ARGV"]),
        ("local key = 'a'\nredis.call('GET', key)", ["'a'"]),
        ("local function f(key)\n  redis.call('GET', key)\nend\nf(KEYS[1])", []),
        ("local key, id = KEYS[1], ARGV[1]\nredis.call('GET', key)", []),
        ("local key, id = KEYS[1], ARGV[1]\nredis.call('GET', id)", ["ARGV"]),
        (f"{LIVE}\nredis.call('GET', live[1])\nredis.call('DEL', unpack(live))", []),
        ("local live = {}\nredis.call('GET', live[1])", ["{}"]),
        ("local function both() return KEYS[1], KEYS[2] end\nredis.call('DEL', both())", []),
        ("local function both() return KEYS[1], 'a' end\nredis.call('DEL', both())", ["'a'"]),
        ("for _, key in ipairs({KEYS[1], 'a'}) do\n  redis.call('GET', key)\nend", ["'a'"]),
    ],
)
def test_a_key_from_elsewhere_is_found(text: str, wrong: list[str]) -> None:
    assert lua.unknown_keys(planted(text)) == wrong


def test_a_global_is_found() -> None:
    for text in (
        "x = 1",
        "local y\nif y then x = 1 end",
        "function x() end",
        "local y\ny, x = 1, 2",
    ):
        assert lua.global_writes(planted(text)) == {"x"}
    for text in ("return x", "local y = x", "local function f() return x.y end\nf()"):
        assert lua.global_reads(planted(text)) == {"x"}


def planted(text: str) -> Any:
    return SimpleNamespace(text=text)


@pytest.mark.every_server
async def test_every_server_compiles_every_script(server: PrivateServer) -> None:
    async with Redis.from_url(server.url, socket_timeout=60) as redis:
        for script in ALL:
            sha: Any = await redis.script_load(script.text)
            assert sha in (script.sha, script.sha.encode())
