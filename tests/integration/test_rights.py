"""Without one of its rights, a call is refused before it changes anything, or does all its work."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._redis.rights import commands, tried
from delayq.admin.acl import ROLES, acl_rules
from tests.support.lua import WRITING
from tests.support.rights_cases import CASES, NAME, Prepared, keys_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from delayq._redis.client import RedisClient
    from delayq._redis.scripts import Script
    from delayq.admin.acl import Role
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

USER, PASSWORD = "limited", "its-password"
# Commands that the caller of a script sends in addition.
BESIDES = {"UNLINK", "EVAL", "EVALSHA"}
# Scripts that write nothing but a key that expires within a moment.
FLEETING = {"delayed/summon", "reliable/summon"}
# A consumer has the rights that a transfer needs, or it would have nothing to give back.
TAKEN = {"delayed/nack", "delayed/release", "delayed/give_back", "delayed/set_aside"}


READ: dict[bytes, Any] = {
    b"string": lambda raw, key: raw.get(key),
    b"list": lambda raw, key: raw.lrange(key, 0, -1),
    b"zset": lambda raw, key: raw.zrange(key, 0, -1, withscores=True),
    b"hash": lambda raw, key: raw.hgetall(key),
}


class Bench:
    """Calls one script again and again on the same data, as a user whose rights vary."""

    def __init__(self, raw: Any, server: RedisClient, script: Script) -> None:
        self.raw = raw
        self._server = server
        self._script = script
        self._keys = keys_of(script)
        self._args: Sequence[str | bytes | int] = ()
        self._dumps: list[tuple[bytes, int, bytes]] = []
        self.before: dict[bytes, Any] = {}

    async def prepare(self, prepare: Any, url: str) -> None:
        async with delayq.connect(url) as client:
            self._args = await prepare(Prepared(client, self.raw))
        for key in await self.raw.keys("*"):
            self._dumps.append((key, max(0, await self.raw.pttl(key)), await self.raw.dump(key)))
        await self.restore()
        self.before = await self.contents()

    async def restore(self) -> None:
        async with self.raw.pipeline(transaction=False) as commands:
            commands.flushall()
            for key, ttl, dump in self._dumps:
                commands.restore(key, ttl, dump)
            await commands.execute()

    async def contents(self) -> dict[bytes, Any]:
        """Return what is stored and whether it expires, without any details of how it is stored."""
        found = {}
        for key in await self.raw.keys("*"):
            kind = await self.raw.type(key)
            value = await READ[kind](self.raw, key)
            found[key] = (kind, value, await self.raw.pttl(key) > 0)
        return found

    async def call(self, rules: Sequence[str]) -> Any:
        """Call the script, as if for the first time, and return its answer or the refusal."""
        await self.raw.execute_command(
            "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", "resetchannels", *rules
        )
        self._server.rights.forget()
        try:
            return await self._server.run(self._script, self._keys, self._args)
        except delayq.ServerRefused as refusal:
            return refusal


def shape(contents: dict[bytes, Any]) -> dict[bytes, Any]:
    """Return the part that does not depend on when the call was made."""
    return {
        key: (kind, len(value) if kind != b"string" else None, ends)
        for key, (kind, value, ends) in contents.items()
    }


@asynccontextmanager
async def bench(server: PrivateServer, script: Script, prepare: Any) -> AsyncIterator[Bench]:
    async with Redis.from_url(server.url, socket_timeout=60) as raw:
        any_raw: Any = raw
        await any_raw.execute_command(
            "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", "~*", "&*", "+@all"
        )
        async with delayq.connect(
            server.url.replace("unix://", f"unix://{USER}:{PASSWORD}@")
        ) as client:
            made = Bench(any_raw, client._open_session().server, script)
            await made.prepare(prepare, server.url)
            yield made
        await any_raw.execute_command("ACL", "DELUSER", USER)


def rights_of(script: Script) -> tuple[list[str], list[str], list[str]]:
    """Return the rules for the commands, keys and channels of a script.

    The server treats channels in KEYS as keys, too.
    """
    keys = list(dict.fromkeys(keys_of(script)))
    channels = [
        key
        for key, name in zip(keys_of(script), script.keys, strict=False)
        if name in ("channel", "turns", "wake")
    ]
    taken = {"LREM"} if script.name in TAKEN else set()
    names = sorted(commands(script) | tried(script) | BESIDES | taken)
    rules = [f"+{command}" for command in names], [f"~{key}" for key in keys]
    return (*rules, [f"&{channel}" for channel in channels])


def less_by_one(script: Script) -> Iterator[tuple[str, list[str]]]:
    """Leave out each rule in turn, and yield it with the remaining ones."""
    everything = [*itertools.chain(*rights_of(script))]
    for rule in everything:
        yield rule, [other for other in everything if other != rule]


@pytest.mark.parametrize(
    ("script", "case", "prepare"), CASES, ids=[f"{script.name}-{case}" for script, case, _ in CASES]
)
async def test_who_lacks_one_right_is_refused_before_anything_has_changed(
    server: PrivateServer, script: Script, case: str, prepare: Any
) -> None:
    async with bench(server, script, prepare) as made:
        # With all rights, the call has its whole effect.
        whole = await made.call([*itertools.chain(*rights_of(script))])
        assert not isinstance(whole, Exception), whole
        effect = await made.contents()
        if script.name not in FLEETING:
            assert (effect != made.before) == bool(commands(script) & WRITING), effect
        done = shape(effect)
        wrong = []
        refused = 0
        for missing, rules in less_by_one(script):
            await made.restore()
            answer = await made.call(rules)
            after = await made.contents()
            if isinstance(answer, Exception):
                refused += 1
                if after != made.before:
                    wrong.append(f"without {missing}: refused half way: {answer}")
            elif shape(after) != done and script.name not in FLEETING:
                wrong.append(f"without {missing}: half done, and not refused")
        assert not wrong, "\n".join(wrong)
        assert refused


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", ["delayed", "reliable"])
async def test_a_role_may_run_its_scripts(server: PrivateServer, kind: str, role: Role) -> None:
    rules = acl_rules(role, **{kind: [NAME]})  # type: ignore[arg-type]
    for script, case, prepare in CASES:
        if script.name.startswith(f"{kind}/") and role in script.roles:
            server.flush()
            async with bench(server, script, prepare) as made:
                answer = await made.call(rules)
                assert not isinstance(answer, Exception), (script.name, case, answer)
