"""Every script's declaration and header match its body."""

from __future__ import annotations

import re
from importlib.resources import files
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from delayq._delayed import scripts
from delayq._engine.scripts import RESYNC
from delayq._reliable import scripts as reliable_scripts
from delayq._reliable.scripts import MESSAGES
from tests import lua

if TYPE_CHECKING:
    from delayq._redis.scripts import Script
    from tests.servers import PrivateServer

FOLDER = files("delayq").joinpath("lua")
ALL = (RESYNC, *scripts.ALL, *reliable_scripts.ALL)
by_name = pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)


def header(script: Script) -> str:
    text = FOLDER.joinpath(*f"{script.name}.lua".split("/")).read_text("utf-8")
    return "\n".join(line for line in text.splitlines() if line.startswith("--"))


def has_messages(script: Script) -> bool:
    """Return whether a script begins with the keys of every script that touches a reliable queue's messages."""
    return script.keys[: len(MESSAGES)] == MESSAGES


def declared(script: Script, kind: str) -> list[tuple[str, str]]:
    """Return index and names from each KEYS or ARGV line of the header."""
    return re.findall(rf"^-- {kind}\[(\d+|\.\.\.)\]  ([\w, ]+?)(?:  |$)", header(script), re.MULTILINE)


def test_every_file_is_declared() -> None:
    found = {
        f"{folder}{file.name}"
        for folder in ("", "delayed/", "reliable/")
        for file in FOLDER.joinpath(*folder.split("/")[:-1]).iterdir()
        if file.is_file()
    }
    assert {f"{script.name}.lua" for script in ALL} == found


@by_name
def test_the_header_names_what_the_declaration_names(script: Script) -> None:
    shared = len(MESSAGES) if has_messages(script) else 0
    assert not shared or f"-- KEYS[1-{shared}]  messages  see include/queue.lua" in header(script)
    for kind, names, first in (("KEYS", script.keys[shared:], shared + 1), ("ARGV", script.args, 1)):
        plain = [name for name in names if not name.endswith("...")]
        repeated = [name.removesuffix("...") for name in names if name.endswith("...")]
        lines = declared(script, kind)
        assert [name for index, name in lines if index != "..."] == plain
        assert [int(index) for index, _ in lines if index != "..."] == list(range(first, first + len(plain)))
        assert [name for index, found in lines if index == "..." for name in found.split(", ")] == repeated
    assert "-- Returns" in header(script)


@by_name
def test_the_body_uses_every_key_and_argument_that_is_declared_and_no_other(script: Script) -> None:
    body = re.sub(r"--.*", "", script.text)
    for kind, names in (("KEYS", script.keys), ("ARGV", script.args)):
        plain = [name for name in names if not name.endswith("...")]
        used = {int(index) for index in re.findall(rf"\b{kind}\[(\d+)\]", body)}
        if kind == "KEYS" and has_messages(script):
            assert used - set(range(1, len(MESSAGES) + 1)) == set(range(len(MESSAGES) + 1, len(names) + 1))
        elif len(plain) == len(names):
            assert used == set(range(1, len(plain) + 1))
        else:
            assert re.search(rf"\b{kind}\[i|#{kind}|{kind}\[at|\b{kind}\)", body)


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
    # A function of that name is our own.
    forbidden = {"load", "loadstring", "dofile", "require", "setfenv", "getfenv", "rawset", "rawget", "setmetatable", "_G"}
    forbidden -= set(lua.parameters(body))
    assert not forbidden & set(re.findall(r"(?<![.\w])(\w+)\b", body))
    assert not re.findall(r"\b(?:os|io|debug|package|coroutine)\.|string\.dump|redis\.(?!p?call\b|error_reply\b)\w+", body)
    # The script contains nothing that looks like a key: keys are made in keys.py.
    assert not re.findall(r"'(?:redisson|delayq)_[^']*'|'delayq:\{", script.text)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("redis.call('GET', 'a')", ["'a'"]),
        ("redis.call('GET', ARGV[1])", ["ARGV[1]"]),
        ("redis.call('GET', KEYS[1] .. 'x')", ["KEYS[1] .. 'x'"]),
        ("local function f(key)\n  redis.call('GET', key)\nend\nf(ARGV[1])", ["ARGV[1]"]),
        ("local key = 'a'\nredis.call('GET', key)", ["key"]),
        ("local function f(key)\n  redis.call('GET', key)\nend\nf(KEYS[1])", []),
    ],
)
def test_a_key_from_elsewhere_is_found(text: str, wrong: list[str]) -> None:
    assert lua.unknown_keys(planted(text)) == wrong


@pytest.mark.parametrize("text", ["x = 1", "local y\nif y then x = 1 end", "function x() end", "local y\ny, x = 1, 2"])
def test_a_global_is_found(text: str) -> None:
    assert lua.global_writes(planted(text)) == {"x"}


def planted(text: str) -> Any:
    return SimpleNamespace(text=text)


async def test_every_server_compiles_every_script(server: PrivateServer) -> None:
    async with Redis.from_url(server.url) as redis:
        for script in ALL:
            sha: Any = await redis.script_load(script.text)
            assert sha in (script.sha, script.sha.encode())
