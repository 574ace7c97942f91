"""Every script says truly what it takes."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from delayq._redis import reliable_scripts, scripts
from delayq._redis.reliable_scripts import MESSAGES

if TYPE_CHECKING:
    from delayq._redis.scripts import Script
    from tests.servers import PrivateServer

FOLDER = files("delayq").joinpath("lua")
ALL = (*scripts.ALL, *reliable_scripts.ALL)
by_name = pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)


def header(script: Script) -> str:
    text = FOLDER.joinpath(*f"{script.name}.lua".split("/")).read_text("utf-8")
    return "\n".join(line for line in text.splitlines() if line.startswith("--"))


def has_messages(script: Script) -> bool:
    """Whether its first keys are those of every script that touches a reliable queue's messages."""
    return script.keys[: len(MESSAGES)] == MESSAGES


def declared(script: Script, kind: str) -> list[tuple[str, str]]:
    """Index and names of each KEYS or ARGV line of the header."""
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


async def test_every_server_compiles_every_script(server: PrivateServer) -> None:
    async with Redis.from_url(server.url) as redis:
        for script in ALL:
            sha: Any = await redis.script_load(script.text)
            assert sha in (script.sha, script.sha.encode())
