"""Without one of its rights, a call is refused before it changes anything, or does all its work. A
user without channels loses only notifications.
"""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._redis.rights import Rights, commands, commands_tried
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import payload_of
from delayq.admin.acl import acl_rules
from tests.integration.test_acl import contents, granted
from tests.support.depth import in_gate
from tests.support.lua import WRITING
from tests.support.reliable import claim_one
from tests.support.rights_cases import CASES, DELAYED, NAME, RELIABLE, Prepared, keys_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayq._redis.client import RedisClient
    from delayq._redis.scripts import Script
    from tests.support.servers import PrivateServer


pytestmark = pytest.mark.every_server

USER, PASSWORD = "limited", "its-password"
# Commands that the caller of a script sends in addition.
BESIDES = {"UNLINK", "EVAL", "EVALSHA"}
# Scripts that write nothing but a key that expires within a moment.
FLEETING = {"redisson/summon", "reliable/summon"}
# A consumer has the rights that a transfer needs, or it would have nothing to give back.
TAKEN = {"redisson/nack", "redisson/release", "redisson/give_back", "redisson/set_aside"}

CONTENTS = """
local read = {
    string = function(key) return {redis.call('GET', key)} end,
    list = function(key) return redis.call('LRANGE', key, 0, -1) end,
    zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
    hash = function(key) return redis.call('HGETALL', key) end
}
local keys, stored, shape = redis.call('KEYS', '*'), {}, {}
table.sort(keys)
for n, key in ipairs(keys) do
    local kind, ends = redis.call('TYPE', key).ok, redis.call('PTTL', key) > 0
    local values = read[kind](key)
    -- A history gets a field more whenever a minute has passed.
    local count = string.find(key, ':history$') and 0 or #values
    stored[n], shape[n] = {key, kind, ends, values}, {key, kind, ends, count}
end
return {redis.sha1hex(cmsgpack.pack(stored)), redis.sha1hex(cmsgpack.pack(shape))}
"""
"""Returns digests of what is stored and whether it expires, without any details of how it is
stored, and of the part of that which does not depend on when a call was made.
"""


class Bench:
    """Calls one script again and again on the same data, as a user whose rights vary."""

    def __init__(self, raw: Any, server: RedisClient) -> None:
        self.raw = raw
        self._contents = raw.register_script(CONTENTS)
        self._server = server
        self._call: tuple[Script, Sequence[str], Sequence[str | bytes | int]]
        self._dumps: list[tuple[bytes, int, bytes]] = []
        self.before: tuple[bytes, ...] = ()

    async def prepare(self, script: Script, prepare: Any, url: str) -> None:
        await self.raw.flushall()
        async with delayq.connect(url) as client:
            self._call = script, keys_of(script), await prepare(Prepared(client, self.raw))
        keys = await self.raw.keys("*")
        async with self.raw.pipeline(transaction=False) as commands:
            for key in keys:
                commands.pttl(key)
                commands.dump(key)
            facts = iter(await commands.execute())
        self._dumps = [(key, max(0, next(facts)), next(facts)) for key in keys]
        await self.restore()
        self.before = await self.contents()

    async def restore(self) -> None:
        async with self.raw.pipeline(transaction=False) as commands:
            commands.flushall()
            for key, ttl, dump in self._dumps:
                commands.restore(key, ttl, dump)
            await commands.execute()

    async def put(self, key: str, kind: str) -> None:
        """Replace a key by one of this kind."""
        await self.raw.delete(key)
        await (self.raw.rpush if kind == "list" else self.raw.set)(key, "foreign")

    async def contents(self) -> tuple[bytes, ...]:
        """Return the digests of what is stored, and of its shape."""
        return tuple(await self._contents())

    async def call(self, rules: Sequence[str]) -> Any:
        """Call the script, as if for the first time, and return its answer or the refusal."""
        await self.raw.execute_command(
            "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", "resetchannels", *rules
        )
        self._server.rights.forget()
        try:
            return await self._server.run(*self._call)
        except delayq.ServerRefused as refusal:
            return refusal


@asynccontextmanager
async def bench(server: PrivateServer) -> AsyncIterator[Bench]:
    async with Redis.from_url(server.url, socket_timeout=60) as raw:
        any_raw: Any = raw
        await any_raw.execute_command(
            "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", "~*", "&*", "+@all"
        )
        async with delayq.connect(
            server.url.replace("unix://", f"unix://{USER}:{PASSWORD}@")
        ) as client:
            yield Bench(any_raw, client.session.server)
        await any_raw.execute_command("ACL", "DELUSER", USER)


def rules_for(script: Script) -> list[str]:
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
    names = sorted(commands(script) | commands_tried(script) | BESIDES | taken)
    return [
        *(f"+{command}" for command in names),
        *(f"~{key}" for key in keys),
        *(f"&{channel}" for channel in channels),
    ]


# Without a key that the call names, the server itself refuses to begin.
@pytest.mark.parametrize("kinds", ["+&", in_gate("~")])
async def test_a_call_without_one_of_its_rights_is_refused_before_anything_changes(
    server: PrivateServer, kinds: str
) -> None:
    wrong = []
    async with bench(server) as made:
        for script, case, prepare in CASES:
            called = f"{script.name}, {case}"
            await made.prepare(script, prepare, server.url)
            rules = rules_for(script)
            # With all rights, the call has its whole effect.
            whole = await made.call(rules)
            assert not isinstance(whole, Exception), (called, whole)
            effect = await made.contents()
            if script.name not in FLEETING:
                writes = bool(commands(script) & WRITING)
                assert (effect != made.before) == writes, called
            after, refused = effect, 0
            for missing in (rule for rule in rules if rule[0] in kinds):
                if after != made.before:
                    await made.restore()
                answer = await made.call([rule for rule in rules if rule != missing])
                after = await made.contents()
                if isinstance(answer, Exception):
                    refused += 1
                    if after != made.before:
                        wrong.append(f"{called} without {missing}: refused half way: {answer}")
                elif after[1] != effect[1] and script.name not in FLEETING:
                    wrong.append(f"{called} without {missing}: half done, and not refused")
            assert refused, called
    assert not wrong, "\n".join(wrong)


# Without the bodies nothing is left of any message: acknowledgements do not pay for a look.
LOST = {("reliable/ack", "bodies"), ("reliable/finish", "bodies")}
# What these were to take away is gone if they are refused half way, or comes again; and a migration
# that is repeated goes on where it stopped.
REMOVING = {
    *("redisson/ack", "reliable/ack", "reliable/finish", "reliable/ack_then"),
    *("reliable/cancel", "reliable/purge", "reliable/drop_dead", "reliable/trim_dead"),
    "reliable/cancel_members",
}
GOES_ON = {"redisson/migrate"}
# Refused, these have stored nothing.
STORING = {"reliable/offer", "reliable/offer_new", "reliable/schedule"}
# Scripts read these as strings; the others are not read, but published to.
STRINGS, CHANNELS = {"call", "fence", "paused"}, {"channel", "wake", "summons"}


async def test_a_check_of_rights_touches_no_key(server: PrivateServer) -> None:
    async with (
        Redis.from_url(server.url, socket_timeout=60, decode_responses=True) as raw,
        raw.pubsub(ignore_subscribe_messages=True) as events,
        delayq.connect(server.url) as client,
    ):
        if not await raw.eval("return redis.acl_check_cmd and 1 or 0", 0):
            pytest.skip("Redis 6.2 cannot tell without a try")
        before = str((await raw.config_get("notify-keyspace-events"))["notify-keyspace-events"])
        await raw.config_set("notify-keyspace-events", "KEA")
        try:
            await events.psubscribe("__keyevent@*__:*")
            # Each script's first call on a connection is preceded by the check.
            queue: delayq.DelayedQueue[int] = client.delayed_queue(NAME)
            assert await queue.poll() is None
            assert await queue.drain() == []
            await raw.set("last", "1")
            heard: list[str] = []
            while not heard or heard[-1] != "last":
                if (event := await events.get_message(timeout=60)) is not None:
                    heard.append(event["data"])
            assert heard == ["last"]
        finally:
            await raw.config_set("notify-keyspace-events", str(before))


async def test_a_foreign_key_is_refused_before_anything_changes(server: PrivateServer) -> None:
    wrong = []
    async with bench(server) as made:
        for script, case, prepare in CASES:
            await made.prepare(script, prepare, server.url)
            rules, keys = rules_for(script), dict(zip(keys_of(script), script.keys, strict=False))
            for key, name in keys.items():
                is_channel = name in CHANNELS or (name == "turns" and "delayed" in script.name)
                if is_channel or (script.name, name) in LOST:
                    continue
                await made.restore()
                await made.put(key, "list" if name in STRINGS else "string")
                before = await made.contents()
                answer = await made.call(rules)
                if isinstance(answer, Exception) and await made.contents() != before:
                    wrong.append(f"{script.name}, {case}: {name} of a foreign type: {answer}")
    assert not wrong, "\n".join(wrong)


async def places(raw: Any) -> Counter[bytes]:
    """Return how often each message is somewhere from where it will come: by payload, or by id.

    Also the messages of a delayed queue that are only in its ordered list, where nothing finds
    them, below a name of their own.
    """
    counts: Counter[bytes] = Counter()
    pending = await raw.zrange(DELAYED.timeout, 0, -1)
    counts.update(payload_of(record) or record for record in pending)
    counts.update(await raw.lrange(DELAYED.ready, 0, -1))
    counts.update(payload_of(each) or each for each in await raw.lrange(DELAYED.quarantine, 0, -1))
    stray = Counter(await raw.lrange(DELAYED.ordered, 0, -1)) - Counter(pending)
    counts.update(b"stray " + record for record in stray.elements())
    for token in await raw.zrange(DELAYED.leases, 0, -1):
        content = await raw.hget(DELAYED.leased, token)
        parts = [content] if token[-4:-3] == b":" else unpacked(content or b"")
        if token.endswith(b":pending"):
            parts = [payload_of(record) or record for record in parts[2::2]]
        counts.update(part for part in parts if part is not None)
    bodies = await raw.hkeys(RELIABLE.named("bodies"))
    for key in (*RELIABLE.waiting, RELIABLE.leased, RELIABLE.named("group_waiting")):
        # Any other is dropped by the next claim.
        counts.update(each for each in await raw.zrange(key, 0, -1) if each in bodies)
    counts.update(each for each in await raw.zrange(RELIABLE.dead, 0, -1))
    return counts


def unpacked(content: bytes) -> list[bytes]:
    """Split what ``lease.lua`` has packed."""
    parts = []
    while content:
        length, _, content = content.partition(b":")
        parts.append(content[: int(length)])
        content = content[int(length) :]
    return parts


async def test_a_right_that_is_taken_away_between_two_checks_loses_no_message(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever command of a script is refused, each message is in one place."""
    monkeypatch.setattr(Rights, "form", lambda _self, _wire, script, _key: script)
    wrong = []
    async with bench(server) as made:
        for script, case, prepare in CASES:
            await made.prepare(script, prepare, server.url)
            rules, before = rules_for(script), await places(made.raw)
            for missing in (rule for rule in rules if rule[0] == "+"):
                await made.restore()
                answer = await made.call([rule for rule in rules if rule != missing])
                after = await places(made.raw)
                lost = before - after if script.name not in REMOVING else Counter[bytes]()
                # What else of a reliable queue is in two places is in one after its next claim.
                doubled = None
                is_plain = script.name.startswith("redisson/") and script.name not in GOES_ON
                if is_plain or script.name in STORING:
                    doubled = after - before
                if isinstance(answer, Exception) and (lost or doubled):
                    wrong.append(f"{script.name}, {case} without {missing}: {lost}, {doubled}")
    assert not wrong, "\n".join(wrong)


WITHOUT_CHANNELS = ("~*", "resetchannels", "+@all")

KEYS = DelayedKeys.of(NAME)


@pytest.fixture
async def silent(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    """Open a client as that user."""
    async with (
        granted(server, WITHOUT_CHANNELS) as url,
        delayq.connect(url, resync_interval=0.1) as client,
    ):
        yield client


async def test_a_user_without_channels_takes_due_messages(
    silent: delayq.Client, client: delayq.Client, raw: Any
) -> None:
    await client.delayed_queue(NAME).offer_many([(n, 0.05) for n in range(30)])
    await client.delayed_queue(NAME).aclose()
    queue = silent.delayed_queue(NAME)
    assert [await queue.take() for _ in range(30)] == [*range(30)]
    await until(lambda: nothing_left(raw))


async def test_the_key_of_a_channel_is_necessary_to_take(
    server: PrivateServer, client: delayq.Client
) -> None:
    # The server takes a channel that is passed to a script for a key, too.
    await client.delayed_queue(NAME).offer("due")
    await client.delayed_queue(NAME).aclose()
    rules = acl_rules("consumer", delayed=[NAME])
    async with (
        granted(server, [rule for rule in rules if rule != f"~{KEYS.turns}"]) as url,
        delayq.connect(url) as other,
    ):
        with pytest.raises(delayq.ServerRefused):
            await other.delayed_queue(NAME).take()
    assert await client.delayed_queue(NAME).take() == "due"


async def nothing_left(raw: Any) -> bool:
    # A fence remains for a minute, and keeps a late repetition from taking effect twice.
    return all(key.startswith(b"delayq_fence:") for key in await raw.keys("*"))


async def test_a_new_head_for_redisson_is_refused_and_nothing_changed(
    silent: delayq.Client, client: delayq.Client, raw: Any
) -> None:
    theirs = client.delayed_queue(NAME)
    receipt = await theirs.offer("pending", 60)
    await theirs.aclose()
    queue: delayq.DelayedQueue[Any] = silent.delayed_queue(NAME)
    mine = delayq.Receipt(queue, receipt._payload, receipt._stored)
    before = await contents(raw)
    for change in (lambda: queue.offer("sooner", 30), lambda: mine.reschedule(30)):
        with pytest.raises(delayq.ServerRefused):
            await change()
    assert await contents(raw) == before
    # A message due after the head needs no announcement.
    await queue.offer("later", 90)
    assert await queue.pending.size() == 2


async def test_rescheduling_the_head_is_announced(client: delayq.Client, raw: Any) -> None:
    queue = client.delayed_queue(NAME)
    first, second = await queue.offer_many([("a", 60), ("b", 7000)])
    async with raw.pubsub() as listener:
        await listener.subscribe(KEYS.channel)
        assert (await listener.get_message(timeout=20))["type"] == "subscribe"
        await first.reschedule(65)
        # No longer the head: the others wake up at 65 s, and learn of the next one.
        await first.reschedule(8000)
        await first.reschedule(9000)
        await second.reschedule(10)
        heard = [int((await listener.get_message(timeout=20))["data"]) for _ in range(2)]
        assert heard[1] == round(second.due_at.timestamp() * 1000)
        assert heard[1] < heard[0] < round(first.due_at.timestamp() * 1000)
        assert await listener.get_message(timeout=0.2) is None


async def test_a_nack_for_redisson_is_refused_and_the_message_stays_under_its_lease(
    silent: delayq.Client, client: delayq.Client, raw: Any
) -> None:
    await raw.rpush(KEYS.ready, b'"work"')
    queue = silent.delayed_queue(NAME)
    async with aclosing(queue.deliveries(lease=60)) as deliveries:  # type: ignore[type-var]
        delivery = await anext(deliveries)
        with pytest.raises(delayq.ServerRefused):
            await delivery.nack(30)
        assert await raw.hvals(KEYS.leased) == [b'"work"']
        assert await raw.zcard(KEYS.leases) == 1
        await delivery.ack()
    assert await nothing_left(raw)


async def test_a_reliable_queue_does_all_its_work(
    silent: delayq.Client, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue = silent.reliable_queue(NAME, lease=60, max_attempts=3)
    await queue.offer_many([delayq.Offer(n, id=str(n), priority=n % 2) for n in range(4)])
    await queue.offer("instead", id="3", on_duplicate="replace")
    assert await queue.reschedule("0", 30)
    assert await queue.reschedule("0", 0)
    messages = {message.id: message for message in await queue.claim(10)}
    assert sorted(messages) == ["0", "1", "2", "3"]
    await messages["0"].nack(0)
    await messages["1"].release()
    await messages["2"].bury("why")
    await messages["3"].ack()
    assert await queue.dead.redrive() == 1
    await queue.pause()
    assert await queue.resume()
    again = await queue.claim(10, wait=5)
    assert {message.id: message.attempt for message in again} == {"0": 2, "1": 1, "2": 1}
    for message in again:
        await message.ack()
    await queue.schedule("often", every=0.02, value=1)
    await (await claim_one(queue, wait=5)).ack()
    assert await queue.unschedule("often")
    warnings = [line for line in caplog.messages if "no permission to PUBLISH" in line]
    # Once by the call that offers, once by the call that claims.
    assert len(warnings) <= 2
    assert any(repr(NAME) in line for line in warnings)
