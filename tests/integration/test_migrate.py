"""Old records become current ones; the messages, their order and their due times stay."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import random
import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import payload_of
from delayq._redisson.store import MIGRATE
from delayq.admin import migrate as migration
from delayq.admin.migrate import FORMS, Migration, migrate
from delayq.cli.app import run as command
from tests.support.depth import examples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delayq._redis.client import RedisClient
    from tests.support.servers import PrivateServer

KEYS = DelayedKeys.of("orders")
Z, L = KEYS.timeout, KEYS.ordered
CURRENT, CURRENT_4, OLD, OLD_4, MALFORMED = FORMS
READABLE = (CURRENT, CURRENT_4, OLD, OLD_4)

# Records, packed and read without delayq


def packed(form: str, record_id: bytes, payload: bytes) -> bytes:
    marker = b"\x08" if form in (CURRENT, CURRENT_4) else b""
    return (
        marker
        + record_id
        + struct.pack("<Q" if form in (CURRENT, OLD) else "<I", len(payload))
        + payload
    )


def current(record: bytes) -> bytes:
    """Return the current form of a readable record, derived from its first and last bytes alone."""
    payload = payload_of(record)
    assert payload is not None
    record_id = record[1:9] if (len(record) - len(payload)) % 4 == 1 else record[:8]
    return packed(CURRENT, record_id, payload)


def some_records(count: int, forms: tuple[str, ...] = READABLE, seed: int = 1) -> list[bytes]:
    chance = random.Random(seed)
    # Use few payloads, so that many are equal.
    return [
        packed(chance.choice(forms), chance.randbytes(8), b"%d" % chance.randrange(9))
        for _ in range(count)
    ]


class Raw:
    """Direct access to the keys of a queue."""

    def __init__(self, connection: Any) -> None:
        self.redis = connection

    def put(self, *records: bytes, due: float = 1.9e12, where: str = "both") -> None:
        if where != "set":
            self.redis.rpush(L, *records)
        if where != "list":
            self.redis.zadd(Z, {record: due + place for place, record in enumerate(records)})

    def ordered(self) -> list[bytes]:
        return list(self.redis.lrange(L, 0, -1))

    def dues(self) -> dict[bytes, float]:
        return dict(self.redis.zrange(Z, 0, -1, withscores=True))

    def dump(self) -> dict[bytes, bytes]:
        return {key: self.redis.dump(key) for key in self.redis.scan_iter()}

    def move(self, record: bytes) -> None:
        """Remove one record, as a Redisson transfer does."""
        self.redis.zrem(Z, record)
        self.redis.lrem(L, 1, record)


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[Raw]:
    with redis.Redis.from_url(server.url, socket_timeout=60) as connection:
        yield Raw(connection)


async def followed(
    client: delayq.Client, act: Callable[[Migration], Any] = lambda _: None, **options: Any
) -> Migration:
    """Migrate, with ``act`` after each step, and return the last step."""
    seen = []
    async for step in migrate(client, "orders", **options):
        seen.append(step)
        if inspect.isawaitable(acted := act(step)):
            await acted
    assert [step.finished for step in seen] == [False] * (len(seen) - 1) + [True]
    return seen[-1]


async def done(client: delayq.Client, **options: Any) -> Migration:
    return await followed(client, **options)


def all_current(records: Iterable[bytes]) -> bool:
    return all(record == current(record) for record in records)


# How records are rewritten


@pytest.mark.every_server
@pytest.mark.parametrize("form", READABLE)
async def test_each_old_record_form_is_migrated(client: delayq.Client, raw: Raw, form: str) -> None:
    # One id begins with the first byte of the current form; the payload has every byte value.
    payload = bytes(range(256))
    for record_id, where in itertools.product(
        (b"ABCDEFGH", b"\x08BCDEFGH"), ("both", "list", "set")
    ):
        raw.redis.flushall()
        raw.put(packed(form, record_id, payload), where=where)
        result = await done(client)
        wanted = b"\x08" + record_id + b"\0\x01\0\0\0\0\0\0" + payload
        assert raw.ordered() == ([wanted] if where != "set" else []), where
        assert raw.dues() == ({wanted: 1.9e12} if where != "list" else {}), where
        assert result.complete
        assert result.records == {form: 1}
        assert result.rewritten == (form != CURRENT)


async def test_a_malformed_record_is_not_migrated(client: delayq.Client, raw: Raw) -> None:
    good = some_records(4, (OLD,))
    in_both, listed, in_set = b"noise", b"\x08" + b"\xff" * 20, good[0][:-1]
    raw.put(in_both, good[0], listed, *good[1:])
    raw.redis.zrem(Z, listed)
    raw.put(in_set, b"", where="set")
    result = await done(client)
    assert raw.ordered() == [in_both, current(good[0]), listed, *map(current, good[1:])]
    assert set(raw.dues()) == {in_both, in_set, b"", *map(current, good)}
    assert (result.examined, result.rewritten, result.malformed) == (8, 4, 4)
    assert result.complete


@pytest.mark.every_server
@pytest.mark.parametrize("listed", ["old", "current", "neither"])
async def test_a_record_stored_in_both_forms_becomes_one_message(
    client: delayq.Client, raw: Raw, listed: str
) -> None:
    old = packed(OLD, b"ABCDEFGH", b"5")
    new = current(old)
    others = some_records(3, (OLD,))
    raw.put(others[0], *{"old": [old], "current": [new], "neither": []}[listed], *others[1:])
    # The current record is the one that was rescheduled: no reschedule ever touches the other.
    raw.redis.zadd(Z, {old: 1000, new: 2000})
    result = await done(client)
    kept = [] if listed == "neither" else [new]
    assert raw.ordered() == [current(others[0]), *kept, *map(current, others[1:])]
    assert raw.dues()[new] == 2000
    assert len(raw.dues()) == 4
    assert (result.merged, result.complete) == (1, True)
    assert result.examined == 5


async def test_only_this_queues_records_are_touched(server: PrivateServer, raw: Raw) -> None:
    mapped = DelayedKeys.of("prod:orders")
    # A ready list holds bare payloads, so one that looks like a record is not a record.
    for key in (mapped.ordered, L, mapped.ready, mapped.quarantine):
        raw.redis.rpush(key, *some_records(3, (OLD,)))
    before = raw.dump()
    async with delayq.connect(server.url, name_mapper="prod:{}".format) as client:
        assert (await done(client)).rewritten == 3
    after = raw.dump()
    assert [key for key in before if before[key] != after[key]] == [mapped.ordered.encode()]
    assert before.keys() == after.keys()


# Concurrent changes


async def test_a_record_offered_while_the_set_is_read_keeps_both_its_places(
    client: delayq.Client, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such a record is seen only in the set, because the list was read earlier.
    monkeypatch.setattr(migration, "_MAX_BUFFER", 0)
    # Slow steps would shrink, and there would be a thousand of them.
    monkeypatch.setattr(migration, "_SLOW", math.inf)
    raw.put(*some_records(1200, (OLD,)), where="set")
    listed: list[bytes] = []

    def act(step: Migration) -> None:
        if step.passes == 1 and step.phase == "sorted set" and len(listed) < 60:
            foreign = some_records(6, (OLD,), seed=2000 + len(listed))
            raw.put(*foreign)
            listed.extend(foreign)
        # At no moment may the set hold one of them in a form that the list does not have.
        assert set(raw.ordered()) <= set(raw.dues())

    assert (await followed(client, act)).complete
    assert raw.ordered() == [current(record) for record in listed]


@pytest.mark.every_server
async def test_a_step_is_repeatable(client: delayq.Client, raw: Raw) -> None:
    # A step is repeated after a lost reply; the list may have changed in the meantime.
    records = some_records(50)
    raw.put(*records)
    caller: RedisClient = client.session.server
    reply = await caller.run(MIGRATE, (Z, L), (1, 40, 20))
    assert reply[:3] == [8, 50, 20]
    expected = [
        current(record) if 20 <= place < 40 else record for place, record in enumerate(records)
    ]
    assert raw.ordered() == expected
    reply = await caller.run(MIGRATE, (Z, L), (1, 40, 20))
    assert reply[4:] == [20, 20, *[0] * 13]
    assert raw.ordered() == expected
    raw.move(expected.pop(0))
    await caller.run(MIGRATE, (Z, L), (1, 40, 20))
    expected[39] = current(expected[39])
    assert raw.ordered() == expected
    assert set(raw.dues()) == set(expected)
    assert MIGRATE.repeatable


SCORES = st.sampled_from([0.0, 5.0, 1e12, 1.9e12, 1.9e12 + 1, 0.5, -1.0, math.inf])
MESSAGES = st.tuples(
    st.sampled_from(READABLE),
    st.binary(max_size=6),
    SCORES,
    st.sampled_from(["both"] * 6 + ["list", "set"]),
)
CHANGES = st.one_of(
    st.tuples(st.just("offer"), MESSAGES),
    st.tuples(st.sampled_from(["transfer", "cancel", "poll"]), st.integers(0, 1000)),
    st.none(),
)


@pytest.mark.every_server
@given(
    st.lists(MESSAGES, max_size=40),
    st.lists(CHANGES, max_size=40),
    st.integers(1, 9),
    st.integers(0, 2**32),
)
@settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_migration_changes_nothing_but_the_form(
    server: PrivateServer, messages: list[Any], changes: list[Any], batch: int, seed: int
) -> None:
    server.flush()
    chance = random.Random(seed)
    # The model: messages in offer order, and their due times, by their current record.
    listed: list[bytes] = []
    dues: dict[bytes, float] = {}

    def put(raw: Raw, message: tuple[str, bytes, float, str]) -> bytes:
        form, payload, due, where = message
        record = packed(form, chance.choice((b"\x08", b"\0", b"x")) + chance.randbytes(7), payload)
        assume(payload_of(record) == payload)
        final = current(record)
        if where != "set":
            raw.redis.rpush(L, record)
            listed.append(final)
        if where != "list":
            raw.redis.zadd(Z, {record: due})
            dues[final] = due
        return final

    def change(raw: Raw, what: str, place: int) -> None:
        source = raw.redis.zrange(Z, 0, 0) if what == "transfer" else raw.ordered()
        if source:
            record = source[0 if what != "cancel" else place % len(source)]
            raw.move(record)
            dues.pop(current(record), None)
            if current(record) in listed:
                listed.remove(current(record))

    async def interleaved(raw: Raw) -> None:
        started = {put(raw, message) for message in messages}
        todo = iter(changes)
        async with delayq.connect(server.url) as client:
            async for _ in migrate(client, "orders", batch=batch):
                match next(todo, None):
                    case ("offer", message):
                        put(raw, (*message[:3], "both"))
                    case (what, place):
                        change(raw, what, place)
            # Every record that was there at first is current, whatever happened in the meantime.
            assert all_current(
                record for record in [*raw.ordered(), *raw.dues()] if current(record) in started
            )
            assert (await done(client)).complete

    with redis.Redis.from_url(server.url, socket_timeout=60) as connection:
        raw = Raw(connection)
        asyncio.run(interleaved(raw))
        assert raw.ordered() == listed
        assert raw.dues() == dues


# Failures


@pytest.mark.every_server
async def test_a_queue_that_cannot_be_migrated_is_refused(client: delayq.Client, raw: Raw) -> None:
    for key in (Z, L):
        raw.redis.flushall()
        raw.put(*some_records(5, (OLD,)))
        raw.redis.set(key, "x")
        before = raw.dump()
        with pytest.raises(delayq.ServerRefused, match="wrong type"):
            await done(client)
        assert raw.dump() == before, key
    for batch in (0, 1001):
        with pytest.raises(delayq.BadInput):
            await done(client, batch=batch)


@pytest.mark.every_server
async def test_a_full_server_lets_a_migration_finish(own_server: PrivateServer) -> None:
    with redis.Redis.from_url(own_server.url, socket_timeout=60) as connection:
        raw = Raw(connection)
        raw.put(*some_records(50, (OLD,)))
        connection.config_set("maxmemory", 1)
        async with delayq.connect(own_server.url) as client:
            assert (await done(client)).rewritten == 50
        assert all_current(raw.ordered())


async def test_a_broken_off_migration_can_be_continued(client: delayq.Client, raw: Raw) -> None:
    records = some_records(100, (OLD,))
    raw.put(*records)
    rewritten = 0
    async for step in migrate(client, "orders", batch=10):
        if (rewritten := step.rewritten) >= 30:
            break
    # Midway, every record has the same form in both places.
    assert set(raw.dues()) == set(raw.ordered())
    assert 0 < sum(record == current(record) for record in raw.ordered()) < 100
    result = await done(client)
    assert result.complete
    assert result.rewritten == 100 - rewritten
    assert raw.ordered() == [current(record) for record in records]


# The command


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(server: PrivateServer, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``delayq migrate`` in this process. Return the exit status, the output, the errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        # Of two addresses, the last one counts.
        return command(["migrate", "--url", server.url, *arguments]), *capsys.readouterr()

    return run


def test_the_migrate_command_prints_a_summary(raw: Raw, run: Command) -> None:
    raw.put(*some_records(1200, (OLD,)), *some_records(34, (CURRENT,), seed=2), b"noise")
    before = raw.dump()
    status, out, err = run("orders", "--dry-run")
    assert raw.dump() == before
    assert (status, err) == (0, "")
    assert "would be rewritten: 1,200\n  old, 8-byte length: 1,200\n" in out
    figures = json.loads(run("orders", "--dry-run", "--json", "--batch", "3")[1])
    counts = {"looked_at": 1235, "rewritten": 0, "current": 34, "malformed": 1, "merged": 0}
    assert counts.items() <= figures.items()
    assert (figures["queue"], figures["dry_run"], figures["complete"]) == ("orders", True, False)
    assert figures["outdated"] == {OLD: 1200}
    status, out, err = run("orders")
    assert status == 0
    # A slow machine gives it the time to tell how far it is.
    lines = [line for line in out.splitlines() if not line.startswith("ordered list: ")]
    assert lines[:5] == [
        "checked: 1,235",
        "rewritten: 1,200",
        "  old, 8-byte length: 1,200",
        "already current: 34",
        "malformed, left unchanged: 1",
    ]
    assert re.fullmatch(r"seconds: [\d.]+", lines[5])
    assert re.fullmatch(r"longest step: [\d.]+ ms", lines[6])
    assert lines[7:] == ["every readable record is current"]
    # One warning up front, on a single line.
    assert err.startswith("delayq: warning: Redisson before 3.21.1")
    assert err.count("\n") == 1


def test_the_command_says_that_nothing_is_there_or_that_something_is_left(
    raw: Raw, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = run("ordres")
    assert status == 0
    assert "queue 'ordres' has no pending messages" in out
    assert raw.redis.dbsize() == 0
    monkeypatch.setattr(migration, "_MAX_PASSES", 1)
    raw.put(*some_records(5, (OLD,)))
    status, out, _ = run("orders")
    assert status == 1
    assert "NOT FINISHED" in out
