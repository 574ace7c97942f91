"""What a foreign writer has left in a queue's keys blocks no other message: each well-formed one
comes once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest
import redis.exceptions

import delayq
from delayq import Offer
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack, payload_of
from delayq._reliable.store import ReliableStore
from delayq.admin.reliable import ReliableInspector
from delayq.codecs import BytesCodec
from tests.support.depth import nightly
from tests.support.reliable import claim_one, leased
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client
    from tests.support.reliable import Jobs
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer


pytestmark = pytest.mark.every_server

GARBAGE = ("", "garbage", "nan", "1e999", "-", "1:2", "1-0", "1-1:x:s", "0-0:9e999:r", "9" * 20)


@pytest.mark.parametrize(
    "field", ["tokens", "attempts", "expiries", "priorities", "errors", "checkpoints"]
)
async def test_garbage_beside_a_message_harms_no_message(jobs: Jobs, raw: Any, field: str) -> None:
    for garbage in GARBAGE:
        await jobs.offer_many([Offer(name, id=name) for name in ("first", "damaged", "last")])
        await raw.hset(f"delayq:{{jobs}}:{field}", "damaged", garbage)
        assert (await jobs.stats()).ready == 3, garbage
        assert len(await jobs.list("ready")) == 3
        messages = await jobs.claim(10)
        assert [message.id for message in messages] == ["first", "damaged", "last"], garbage
        await messages[0].ack()
        await messages[1].nack(0)
        await messages[2].bury("no good")
        assert await jobs.dead.redrive() == 1
        assert sorted([message.id for message in await jobs.claim(10)]) == ["damaged", "last"]
        assert await jobs.purge() == 2


async def test_a_score_that_is_no_moment_harms_neither_its_message_nor_others(
    jobs: Jobs, store: Store, raw: Any
) -> None:
    ends: dict[str, tuple[Any, ...]] = {"ack": (), "nack": (0,), "release": (), "bury": ("why",)}
    for score, how in itertools.product(["-inf", "-5", "-1e300", "0"], ends):
        await jobs.offer_many([Offer(name, id=name) for name in ("damaged", "other")])
        await raw.zadd("delayq:{jobs}:waiting", {"damaged": score})
        assert await jobs.get("damaged") is not None
        assert (await jobs.stats()).ready == 2
        messages = await jobs.claim(10)
        assert sorted(message.id for message in messages) == ["damaged", "other"], (score, how)
        for message in messages:
            await getattr(message, how)(*ends[how])
        (await store.look()).demand_no_orphans()
        await jobs.purge()


async def test_an_incomplete_message_does_not_hold_its_id(jobs: Jobs, raw: Any) -> None:
    await raw.hset("delayq:{jobs}:bodies", "no place", "1 \nnull")
    await raw.zadd("delayq:{jobs}:waiting", {"no body": 1})
    assert await jobs.get("no place") is None
    assert not await jobs.cancel("no body")
    await jobs.offer("new", id="no place")
    await jobs.offer("new", id="no body")
    assert sorted([message.id for message in await jobs.claim(10)]) == ["no body", "no place"]


@pytest.mark.parametrize("limit", [1, 3])
async def test_messages_without_bodies_double_no_other(jobs: Jobs, raw: Any, limit: int) -> None:
    ids = [f"m{number}" for number in range(2 * limit)]
    await jobs.offer_many([Offer(name, id=name) for name in ids])
    await raw.hdel("delayq:{jobs}:bodies", *ids[:limit])
    messages = await jobs.claim(limit)
    assert [message.id for message in messages] == ids[limit:]
    assert await raw.zcard("delayq:{jobs}:leased") == limit
    assert await raw.zcard("delayq:{jobs}:waiting") == 0
    assert await jobs.claim(100) == []


FOREIGN = (
    *("tokens", "attempts", "expiries", "errors", "priorities", "checkpoints"),
    *("dead", "dead:messages", "remembered", "waiting:5"),
)


@pytest.mark.parametrize("how", ["claim", "ack", "nack", "release", "bury", "purge"])
async def test_a_key_of_a_foreign_type_loses_no_message(client: Client, raw: Any, how: str) -> None:
    """The call fails before its first write, or does all of its work."""
    arguments: dict[str, tuple[Any, ...]] = {"nack": (0, "why"), "bury": ("no",)}
    for key in FOREIGN:
        prefix = f"delayq:{{for {key}}}:"
        jobs = client.reliable_queue(f"for {key}", max_attempts=1, expired="dead", dedup_window=60)
        await jobs.offer_many([Offer(name, id=name) for name in ("first", "second")])
        await jobs.offer("third", id="third", ttl=0.01)
        await asyncio.sleep(0.02)
        message = (await jobs.claim(1))[0] if how not in {"claim", "purge"} else None
        foreign = f"{prefix}{key}"
        kept = await raw.dump(foreign)
        await raw.delete(foreign)
        await raw.set(foreign, "foreign")
        gone = {"ack": 1, "purge": 3}.get(how, 0)
        try:
            await getattr(message or jobs, how)(*arguments.get(how, ()))
        except delayq.DelayqError:
            gone = 0
        await raw.delete(foreign)
        if kept is not None:
            await raw.restore(foreign, 0, kept)
        # Each message that has a body has a place, too.
        bodies = await raw.hkeys(f"{prefix}bodies")
        places = await raw.zrange(f"{prefix}waiting", 0, -1)
        places += await raw.zrange(f"{prefix}leased", 0, -1)
        assert sorted(bodies) == sorted(places), key
        assert len(bodies) + await raw.zcard(f"{prefix}dead") + gone == 3, key


async def test_a_damaged_dead_letter_is_shown(jobs: Jobs, raw: Any) -> None:
    for letter in (
        b"",
        b"garbage",
        b"{}\n",
        b"[]\n1 \n2",
        b'{"priority":"high"}\nno body',
        b"{\xff\n\xff",
    ):
        await (await leased(jobs, id="good")).bury("a reason")
        await raw.hset("delayq:{jobs}:dead:messages", "damaged", letter)
        await raw.zadd("delayq:{jobs}:dead", {"damaged": 1, "nothing at all": 2})
        reasons = {letter.id: letter.reason for letter in await jobs.dead.list()}
        assert reasons == {"damaged": "unreadable", "good": "a reason"}, letter
        lives_again = letter.endswith(b"1 \n2")
        assert await jobs.dead.redrive(["damaged", "good"]) == 1 + lives_again
        alive = await jobs.claim(10)
        assert [message.id for message in alive] == ["damaged", "good"][not lives_again :]
        for each in await jobs.dead.list():
            with pytest.raises(delayq.DecodeError):
                _ = each.value
        assert await jobs.dead.redrive() == 0
        assert await jobs.dead.purge(["damaged"]) == (not lives_again)
        for message in alive:
            await message.ack()


async def test_an_unreadable_body_can_die_and_be_listed(jobs: Jobs, raw: Any) -> None:
    await raw.hset("delayq:{jobs}:bodies", "damaged", "no newline here")
    await raw.zadd("delayq:{jobs}:waiting", {"damaged": 1})
    message = await claim_one(jobs)
    with pytest.raises(delayq.DecodeError):
        _ = message.value
    await message.bury("undecodable")
    (letter,) = await jobs.dead.list()
    assert (letter.id, letter.reason) == ("damaged", "undecodable")
    assert await jobs.dead.redrive() == 0


EVICTED = (
    "group_turns",
    "group_members",
    "positions",
    "group_members positions",
    "group_turns positions",
)


async def test_a_worker_puts_back_what_waits_after_an_eviction(client: Client, raw: Any) -> None:
    for evicted in EVICTED:
        queue = client.reliable_queue(f"jobs {evicted}", lease=3600)
        grouped = [Offer(n, id=f"{n}", group=f"g{n % 3}", priority=n % 2) for n in range(9)]
        await queue.offer_many([*grouped, Offer(9, id="9"), Offer(10, delay=3600, id="10")])
        # One that runs, one that was retried, and a group that waits until it is resumed.
        begun, retried = await queue.claim(2)
        await retried.nack(0)
        await queue.groups.pause("g2")
        assert not await missing_keys(client, queue.name)
        await raw.delete(*(f"delayq:{{{queue.name}}}:{key}" for key in evicted.split()))
        assert await missing_keys(client, queue.name), evicted
        handled: list[int] = []
        worker = delayq.Worker(client)

        @worker.listener(queue.name)
        async def handle(value: int) -> None:
            handled.append(value)  # noqa: B023

        async with running(worker.run()):
            # All but those of the paused group, the running one, and the one that is not due.
            wanted = {n for n in range(10) if n % 3 != 2} - {begun.value}
            await until(lambda: {*handled} >= wanted)  # noqa: B023
        assert len(handled) == len({*handled}), evicted
        await begun.ack()
        assert (await queue.stats()).delayed == 1
        assert not await missing_keys(client, queue.name), evicted


async def test_nothing_is_missing_of_a_cancelled_message_and_of_a_queue_that_is_moved(
    client: Client, raw: Any
) -> None:
    jobs = client.reliable_queue("jobs", group_limit=delayq.Limit(concurrency=1))
    await leased(jobs, id="a", group="g")
    await jobs.cancel("a", running=True)
    await jobs.offer(2, delay=3600)
    assert not await missing_keys(client, "jobs")
    await jobs.offer(3, group="h")
    await raw.delete("delayq:{jobs}:group_members")
    await raw.hset("delayq:{jobs}:settings", "partitions", "1?")
    assert not await missing_keys(client, "jobs")
    (store,) = await ReliableInspector.of(client, "jobs").all_stores()
    await store.mend()
    assert not await raw.exists("delayq:{jobs}:group_members")
    await raw.hset("delayq:{jobs}:settings", "partitions", "1")
    assert await missing_keys(client, "jobs")


async def test_settings_that_the_server_has_evicted_come_back_from_a_copy(
    client: Client, server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = client.reliable_queue("jobs", partitions=4, max_size=100)
    await jobs.offer_many([Offer(n) for n in range(40)])
    settings = await jobs.settings()
    await client.aclose()
    for is_producer in (False, True):
        await raw.delete("delayq:{jobs}:settings")
        async with delayq.connect(server.url) as other:
            jobs = other.reliable_queue("jobs")
            if is_producer:
                await jobs.offer(40)
            else:
                # A worker that starts sees all that waits.
                assert (await jobs.stats()).ready == 40
            assert await jobs.settings() == settings
    assert "queue 'jobs': the server has lost its settings" in caplog.text


async def missing_keys(client: Client, name: str) -> str:
    (store,) = await ReliableInspector.of(client, name).all_stores()
    return await store.missing_keys()


async def test_a_worker_warns_of_a_server_that_may_evict_keys_and_goes_on_when_it_has(
    jobs: Jobs,
    client: Client,
    raw: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq.worker._run._EVICTION_CHECK_INTERVAL", 0.02)
    mend = create_autospec(ReliableStore.mend, side_effect=ReliableStore.mend)
    monkeypatch.setattr(ReliableStore, "mend", mend)
    worker = delayq.Worker(client)
    worker.listener("jobs")(lambda value: value)
    await raw.config_set("maxmemory-policy", "volatile-ttl")
    try:
        async with running(worker.run()):
            await until(lambda: "its maxmemory-policy is volatile-ttl" in caplog.text)
            await jobs.offer(2, group="b", delay=3600)
            await raw.delete("delayq:{jobs}:group_turns")
            await raw.set("other", "x", ex=3600)
            await raw.config_set("maxmemory", 1)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                await raw.set("more", "x")
            # It is refused, too, as long as there is no memory.
            await until(lambda: mend.call_count > 1)
            await raw.config_set("maxmemory", 0)
            await until(lambda: "has evicted keys. What waits was put back" in caplog.text)
            assert await raw.zrange("delayq:{jobs}:group_turns", 0, -1) == [b"b"]
    finally:
        await raw.config_set("maxmemory", 0)
        await raw.config_set("maxmemory-policy", "noeviction")


KEYS = DelayedKeys.of("orders")


def hostile(chance: random.Random, number: int) -> bytes:
    """Make a record that another program may have left: of any form, cut, longer, or noise."""
    payload, record_id = b"%d" % number, chance.randbytes(8)
    old = [record_id + len(payload).to_bytes(size, "little") + payload for size in (8, 4)]
    record = chance.choice([pack(record_id, payload, 8), pack(record_id, payload, 4), *old])
    noise = chance.randbytes(chance.randrange(40))
    cut, lengthened = record[: chance.randrange(len(record))], record + chance.randbytes(3)
    endless = b"\x08" + record_id + b"\xff" * 8 + payload
    return chance.choice([record, record, cut, lengthened, noise, endless, b""])


@pytest.mark.parametrize("seed", [0, *map(nightly, range(1, 5))])
async def test_hostile_records_do_no_harm(server: PrivateServer, raw: Any, seed: int) -> None:
    chance = random.Random(seed)
    records = list(dict.fromkeys(hostile(chance, number) for number in range(400)))
    scores = [-math.inf, -1e300, -5.0, 0.0, 0.5, 1.0, 1e3, 1e12, 1.7e12]
    good = Counter(payload for record in records if (payload := payload_of(record)) is not None)
    got: Counter[bytes] = Counter()
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        await raw.zadd(KEYS.timeout, {record: chance.choice(scores) for record in records})
        # The list has some of the records, in another order, some twice, and one that the sorted
        # set does not have.
        listed = [chance.choice(records) for _ in range(300)] + [b"stray"]
        await raw.rpush(KEYS.ordered, *listed)
        never = pack(b"ABCDEFGH", b"never", 8)
        await raw.zadd(KEYS.timeout, {never: math.inf})
        queue = client.delayed_queue("orders", codec=BytesCodec())

        async def consume() -> None:
            async for payload in queue:
                got[payload] += 1

        async with running(consume()):
            await until(lambda: got.total() >= good.total())
            await until(lambda: raw.zcard(KEYS.timeout), equals=1)
            assert got == good
            bad = [record for record in records if payload_of(record) is None]
            assert Counter(await raw.lrange(KEYS.quarantine, 0, -1)) == Counter(bad)
            assert client.statistics().quarantined == len(bad)
            assert await raw.zrange(KEYS.timeout, 0, -1) == [never]

            before, started = client.statistics().round_trips, time.monotonic()
            await asyncio.sleep(0.3)
            # The re-check and the ping, each ten times a second.
            most = 20 + 30 * (time.monotonic() - started)
            assert client.statistics().round_trips - before <= most
            assert got == good
