"""Examples of calls to every script: the state of the server before it, and the arguments.

For most scripts of a reliable queue, they follow from the names of the arguments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq import Offer
from delayq._delayed import store as delayed
from delayq._delayed.keys import DelayedKeys
from delayq._engine.store import DUE_COUNTS, RESYNC
from delayq._reliable import store as reliable
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.settings import LAYOUT
from tests.support.lua import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayq import Client, Receipt
    from delayq._redis.scripts import Script

NAME = "orders"
DELAYED, RELIABLE = DelayedKeys.of(NAME), ReliableKeys.of(NAME)
TOKEN = "0123456789ab-00000001"
# The epoch of the queue's settings.
EPOCH = "7"
HOUR_US = 3_600_000_000
SECOND_US = 1_000_000


@dataclass
class Prepared:
    """A client and a plain connection that may prepare anything."""

    client: Client
    raw: Any


def keys_of(script: Script) -> list[str]:
    """Return the keys of a call, looked up by the names that the script gives them."""
    if script.name.startswith("reliable/"):
        call = [RELIABLE.call("0123456789ab-0")] if "call" in script.keys else []
        return [*RELIABLE.of_script(script), *call]
    if script is RESYNC:
        return [DELAYED.timeout, DELAYED.leases, DELAYED.ready, DELAYED.turns, DELAYED.summons]
    special = {
        "fence": DELAYED.fence(TOKEN),
        "destination": DELAYED.ready,
        "key...": DELAYED.timeout,
        "set...": DELAYED.timeout,
    }
    return [special.get(key) or getattr(DELAYED, key) for key in script.keys]


async def receipts(at: Prepared, *delays: float) -> list[Receipt[Any]]:
    found = await at.client.delayed_queue(NAME).offer_many(
        [(n, delay) for n, delay in enumerate(delays)]
    )
    # Close the queue, so that this client transfers nothing.
    await at.client.delayed_queue(NAME).aclose()
    return found


def offer(*args: Any) -> Any:
    async def prepare(at: Prepared) -> Any:
        await receipts(at, 60)
        return [1, *args]

    return prepare


async def offer_unlisted(at: Prepared) -> Any:
    return [0, SECOND_US, b"new"]


async def what_is_due(at: Prepared) -> None:
    """Prepare due messages in every place, an unreadable one, and one with an ended lease."""
    found = await receipts(at, *[60.0] * 12)
    for place in (0, 5, 11):
        await at.raw.zadd(DELAYED.timeout, {found[place]._record(): 1000 + place})
    await at.raw.zadd(DELAYED.timeout, {b"junk": 2})
    await at.raw.rpush(DELAYED.ready, b"ready 1", b"ready 2")
    await at.raw.zadd(DELAYED.leases, {b"old:001": 1})
    await at.raw.hset(DELAYED.leased, b"old:001", b"leased")


def transfer(take: int, each: int) -> Any:
    async def prepare(at: Prepared) -> Any:
        await what_is_due(at)
        return [100, take, 100_000, HOUR_US, each, TOKEN, "client 1"]

    return prepare


async def transfer_the_only_one(at: Prepared) -> Any:
    await receipts(at, 0)
    return [100, 1, 100_000, HOUR_US, 0, TOKEN, "client 1"]


async def cancel_three(at: Prepared) -> Any:
    found = await receipts(at, *[60.0] * 12)
    return [1, *(found[place]._record() for place in (0, 5, 11))]


def reschedule(delay_us: int) -> Any:
    async def prepare(at: Prepared) -> Any:
        found = await receipts(at, 60, 120)
        return [found[1]._record(), delay_us]

    return prepare


def pending(*args: Any) -> Any:
    async def prepare(at: Prepared) -> Any:
        await receipts(at, 60, 61, 62, 63)
        await at.raw.zadd(DELAYED.timeout, {b"junk": 1e15})
        await at.raw.lpush(DELAYED.ordered, b"junk")
        await at.raw.rpush(DELAYED.ready, b"ready")
        return [*args]

    return prepare


def last(listed: int) -> Any:
    async def prepare(at: Prepared) -> Any:
        await receipts(at, 60, 61, 62, 63)
        return [listed, 10]

    return prepare


def leased(*args: Any) -> Any:
    async def prepare(at: Prepared) -> Any:
        await receipts(at, 60)
        await at.raw.zadd(DELAYED.leases, {b"a:001": 1e14, b"a:002": 1e14})
        await at.raw.hset(DELAYED.leased, mapping={b"a:001": b"1", b"a:002": b"2"})
        await at.raw.rpush(DELAYED.ready, b"ready")
        return [*args]

    return prepare


async def polled(at: Prepared) -> Any:
    (receipt,) = await receipts(at, 60)
    await at.raw.zadd(DELAYED.leases, {b"a:pending": 1e14})
    parts = [b"1", b"%d" % (10**14), receipt._record()]
    await at.raw.hset(
        DELAYED.leased, b"a:pending", b"".join(b"%d:%s" % (len(part), part) for part in parts)
    )
    await at.raw.unlink(DELAYED.timeout, DELAYED.ordered)
    return [60_000, "a:pending", 0]


async def outdated(at: Prepared) -> Any:
    old = [b"%08d" % n + (1).to_bytes(8, "little") + b"1" for n in range(3)]
    await at.raw.zadd(DELAYED.timeout, dict.fromkeys(old, 1e14))
    await at.raw.rpush(DELAYED.ordered, *old[:2])
    return [1, 100, 100, old[2]]


async def messages(at: Prepared) -> dict[str, tuple[str, str]]:
    """Put two messages into each state. Return id and token of the leased ones, by id."""
    queue = at.client.reliable_queue(NAME, lease=3600, dedup_window=3600)
    for n, priority in enumerate((0, 3)):
        first = [f"{what}{n}" for what in ("again", "taken", "dead", "handled")]
        await queue.offer_many([Offer(1, id=name, priority=priority, ttl=3600) for name in first])
        for message in await queue.claim(4):
            if message.id.startswith("again"):
                await message.nack(0, "an error")
            elif message.id.startswith("dead"):
                await message.bury("why")
            elif message.id.startswith("handled"):
                await message.ack()
        await queue.offer(1, 60, id=f"later{n}", priority=priority, ttl=3600)
        await queue.offer(1, id=f"expired{n}", ttl=1)
        await at.raw.hset(RELIABLE.named("expiries"), f"expired{n}", "1.00")
        await at.raw.hset(RELIABLE.named("errors"), f"taken{n}", "an error")
        await at.raw.hset(RELIABLE.named("attempts"), f"taken{n}", "1-0:")
        (again,) = await queue.claim(1)
        assert again.id == f"again{n}", again.id
        await again.nack(0, "an error")
    settings = {"epoch": EPOCH, "expired": "dead"}
    await at.raw.hset(RELIABLE.settings, mapping=settings)
    ends = await at.raw.zrange(RELIABLE.leased, 0, -1, withscores=True)
    return {name.decode(): (name.decode(), f"{end:.0f}") for name, end in ends}


def some(*args: Any) -> Any:
    async def prepare(at: Prepared) -> Any:
        await messages(at)
        return [*args]

    return prepare


# The ids that messages() prepares, by state.
WAITING = ("later0", "later1", "again0")
TAKEN = ("taken0", "taken1")
DEAD = ("dead0", "dead1")
# The values of arguments that do not name a message. There is a call for each of them.
VALUES: dict[str, tuple[Any, ...]] = {
    "again": (0, 1),
    "attempt": ("{}",),
    "for_us": (HOUR_US,),
    "offered": ("17634859251912340",),
    "result": ("=1", ""),
    "after": ("",),
    "first": ("",),
    "group": ("tenant",),
    "what": ("pause", "limit", "resume", "own"),
    "counts": ("o=1 l3=2",),
    "worker": ("0123456789ab",),
    "counts_us": (HOUR_US, 0),
    "facts": ("{}",),
    "unit": ("m", "h"),
    "span": (3,),
    "brief": (0, 1),
    "delay_us": (0, HOUR_US),
    "epoch": ("8",),
    "error": ("an error",),
    "expected": ("0",),
    "field": ("max_size",),
    "lease_us": (HOUR_US, SECOND_US),
    "left": (0,),
    "limit": (100,),
    "number": (1,),
    "offset": (0,),
    "share": (1,),
    "spent": (1, 0),
    "remember_us": (0, HOUR_US),
    "state": ("delayed", "ready", "all", "leased"),
    "ttl_us": (HOUR_US, SECOND_US),
    "unique_us": (0, HOUR_US),
    "value": ("1000",),
    "with_leased": (0, 1),
    "why": ('{"reason":"why","error":""}',),
}


def about(id: str, token: str) -> dict[str, Any]:  # noqa: A002
    """Return the values of the arguments that name one of the messages that messages() prepares."""
    return {"id": id, "name": id, "token": token}


def calls(script: Script, some_messages: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the arguments of calls to a script of a reliable queue, made from their names.

    It gets a call for each message (see :func:`about`), and for each value of other arguments.
    """
    plain = [name for name in script.args if not name.endswith("...")]
    runs = " ".join(f"1:{message['token']}" for message in some_messages if "token" in message)
    columns = [name.removesuffix("...") for name in script.args if name.endswith("...")]

    def value(name: str, message: Mapping[str, Any], call: int) -> Any:
        if name in message:
            return message[name]
        if name == "runs":
            return runs
        if name in VALUES:
            return VALUES[name][call % len(VALUES[name])]
        raise LookupError(
            f"{script.name}.lua has an argument {name!r}: in tests/support/rights_cases.py, add"
            " examples of its value to VALUES, or a case for the script to _CASES"
        )

    count = max([1, *(len(VALUES.get(name, ())) for name in (*plain, *columns))])
    if "id" in plain:
        count = max(count, len(some_messages))
    made = []
    for call in range(count):
        one = some_messages[call % len(some_messages)]
        made.append([value(name, one, call) for name in plain])
        for message in some_messages:
            made[-1] += [value(name, message, call) for name in columns]
    return made


def cases_of(script: Script) -> list[tuple[Script, str, Any]]:
    """Return the cases of a script that has none of its own."""
    names = {name.removesuffix("...") for name in script.args}
    ids: tuple[str, ...]
    if names & {"token", "runs"}:
        ids = TAKEN
    elif "name" in names:
        ids = DEAD
    else:
        # A call about several messages also gets some that workers have.
        ids = WAITING if "id" in script.args else (*WAITING, *TAKEN)

    def prepared(call: int) -> Any:
        async def prepare(at: Prepared) -> Any:
            held = await messages(at)
            return calls(script, [about(id, held[id][1] if id in held else "") for id in ids])[call]  # noqa: A001

        return prepare

    count = len(calls(script, [about(id, "") for id in ids]))  # noqa: A001
    return [(script, str(call), prepared(call)) for call in range(count)]


def ack(*, remembers: bool) -> Any:
    async def prepare(at: Prepared) -> Any:
        held = await messages(at)
        if not remembers:
            await at.raw.hdel(RELIABLE.settings, "dedup_window")
        return calls(reliable.ACK, [about(id, held[id][1]) for id in TAKEN])[0]  # noqa: A001

    return prepare


async def limits_changed(at: Prepared) -> Any:
    """Return a claim that gives groups their turns anew: a limit has kept them from running."""
    await at.client.reliable_queue(NAME).offer_many([Offer(1, group=each) for each in "ab"])
    await at.raw.zadd(RELIABLE.named("turns"), {"a": 4e15, "": 4e15})
    await at.raw.zrem(RELIABLE.named("turns"), "b")
    await at.raw.hset(RELIABLE.settings, mapping={"epoch": EPOCH, "settled_to": ""})
    return [EPOCH, 1, 100, HOUR_US, 0, "client 1", 1, "", "", 0]


def with_settings(prepare: Any, **settings: Any) -> Any:
    """Return a case in a queue with these settings."""

    async def prepared(at: Prepared) -> Any:
        made = await prepare(at)
        await at.raw.hset(RELIABLE.settings, mapping=settings)
        return made

    return prepared


def taken(script: Script) -> Any:
    """Return a case about the messages that workers have."""

    async def prepare(at: Prepared) -> Any:
        held = await messages(at)
        await at.raw.zadd(RELIABLE.awaited, dict.fromkeys(TAKEN, 9e15))
        return calls(script, [about(id, held[id][1]) for id in TAKEN])[0]  # noqa: A001

    return prepare


def one(script: Script) -> Any:
    """Return a case about one message that waits."""

    async def prepare(at: Prepared) -> Any:
        await messages(at)
        await at.raw.zadd(RELIABLE.awaited, {b"long ago": 1})
        return calls(script, [about(WAITING[0], "")])[0]

    return prepare


async def configure(at: Prepared) -> Any:
    await at.raw.hset(RELIABLE.settings, mapping={"layout": LAYOUT, "epoch": EPOCH})
    return [EPOCH, "8", "max_size", "1000", "expired", "dead"]


async def full_offer(at: Prepared) -> Any:
    await messages(at)
    await at.raw.zadd(RELIABLE.done, {b"long ago": 1})
    await at.raw.hset(RELIABLE.settings, "max_size", 1000)
    made: list[Any] = [7, EPOCH]
    for id, on_duplicate in (  # noqa: A001
        ("new", "raise"),
        ("later1", "replace"),
        ("handled0", "ignore"),
        ("later0", "ignore"),
    ):
        made += [id, 4, SECOND_US, HOUR_US, HOUR_US, on_duplicate, b"\nvalue"]
    return made


async def offer_one(at: Prepared) -> Any:
    return [7, "0", "new", 0, 0, 0, 0, "raise", b"\nvalue"]


async def offer_new(at: Prepared) -> Any:
    await messages(at)
    return [7, EPOCH, "new", 0, b"\nvalue", "another", HOUR_US, b"\nvalue"]


async def scheduled(at: Prepared, every: float = 0.001) -> None:
    queue = at.client.reliable_queue(NAME, lease=3600)
    await queue.schedule("often", every=every, value=1, priority=2, ttl=3600)


def definition(value: bytes = b"\n2") -> list[Any]:
    return ["0", "often", "every 3600000000", 9, HOUR_US, 1, HOUR_US, value]


async def schedule_anew(at: Prepared) -> Any:
    return definition()


async def schedule_otherwise(at: Prepared) -> Any:
    await scheduled(at, 3600)
    return definition()


async def unschedule(at: Prepared) -> Any:
    await scheduled(at, 3600)
    return ["often"]


async def schedule_paused(at: Prepared) -> Any:
    await scheduled(at, 3600)
    await at.client.reliable_queue(NAME, lease=3600).pause_schedule("often")
    return ["often"]


async def occur(at: Prepared) -> Any:
    await scheduled(at, 3600)
    (id,) = await at.raw.zrange(RELIABLE.waiting[2], 0, -1)  # noqa: A001
    await at.raw.zrem(RELIABLE.waiting[2], id)
    await at.raw.zadd(RELIABLE.leased, {id: "3000000000000002"})
    return [id, "3000000000000002"]


async def recur(at: Prepared) -> Any:
    await scheduled(at, 3600)
    await at.client.reliable_queue(NAME, lease=3600).purge()
    return ["often"]


async def refill(at: Prepared) -> Any:
    now, _ = await at.raw.time()
    queue = at.client.reliable_queue(NAME, lease=3600)
    await queue.schedule("cron", cron="0 0 * * *", value=1)
    await queue.purge()
    # Pretend that the planned occurrences have run out.
    stored, content = (await at.raw.hget(RELIABLE.schedules, "cron")).split(b"\n", 1)
    # An empty Lua table becomes an object in JSON.
    facts = {**json.loads(stored), "next": "", "upcoming": {}}
    await at.raw.hset(RELIABLE.schedules, "cron", json.dumps(facts).encode() + b"\n" + content)
    moments = (str((now + days * 86400) * 1_000_000) for days in (1, 2))
    return ["cron", facts["timing"], *moments]


def group_settings(what: str, limit: str = "") -> Any:
    async def prepare(at: Prepared) -> Any:
        queue = at.client.reliable_queue(NAME)
        await queue.offer(1, group="tenant")
        if what == "resume":
            await queue.groups.pause("tenant")
        return ["", "tenant", what, limit]

    return prepare


def register(counts_us: int) -> Any:
    async def prepare(at: Prepared) -> Any:
        await at.raw.zadd(RELIABLE.workers, {"here": 4e15, "long ago": 1})
        await at.raw.hset(RELIABLE.worker_facts, mapping={"here": "{}", "long ago": "{}"})
        return ["here", counts_us, '{"pid":1}']

    return prepare


async def paused(at: Prepared) -> Any:
    await at.raw.set(RELIABLE.paused, 1)
    return []


_CASES: list[tuple[Script, str, Any]] = [
    (delayed.OFFER, "head", offer(SECOND_US, b"new")),
    (delayed.OFFER, "behind", offer(HOUR_US, b"new")),
    (delayed.OFFER, "several", offer(HOUR_US, b"a", SECOND_US, b"b", 2 * SECOND_US, b"c")),
    (delayed.OFFER, "unlisted", offer_unlisted),
    (delayed.TRANSFER, "take", transfer(2, 0)),
    (delayed.TRANSFER, "take all", transfer(100, 0)),
    (delayed.TRANSFER, "move", transfer(0, 0)),
    (delayed.TRANSFER, "lease", transfer(2, 1)),
    (delayed.TRANSFER, "only one", transfer_the_only_one),
    (delayed.CANCEL, "three", cancel_three),
    (delayed.RESCHEDULE, "to the head", reschedule(SECOND_US)),
    (delayed.RESCHEDULE, "behind", reschedule(HOUR_US)),
    (delayed.PURGE, "all", pending("all")),
    (delayed.PURGE, "delayed", pending("delayed")),
    (delayed.PURGE, "ready", pending("ready")),
    (delayed.POLL_PENDING, "listed", pending(3, 100_000, 1, HOUR_US, f"{TOKEN}:pending")),
    (delayed.POLL_PENDING, "unlisted", pending(9, 100_000, 0, HOUR_US, f"{TOKEN}:pending")),
    (delayed.POLL_LAST, "listed", last(1)),
    (delayed.POLL_LAST, "unlisted", last(0)),
    (delayed.EXPIRE, "", pending(3_600_000)),
    (delayed.ACK, "", leased("a:001", "a:002")),
    (delayed.NACK, "head", leased("a:001", SECOND_US, 1)),
    (delayed.NACK, "behind", leased("a:001", HOUR_US, 1)),
    (delayed.EXTEND, "", leased(HOUR_US, "a:001")),
    (delayed.RELEASE, "", leased("a:001", "a:002")),
    (delayed.SUMMON, "", leased(1, 0)),
    (delayed.GIVE_BACK, "by value", leased(60_000, "none", 0, b"x", b"y")),
    (delayed.GIVE_BACK, "by name", leased(60_000, "a", 2)),
    (delayed.GIVE_BACK, "pending", polled),
    (delayed.SET_ASIDE, "", leased(60_000, "", b"x")),
    (delayed.SET_ASIDE, "leased", leased(60_000, "a:001", b"1")),
    (RESYNC, "", leased("delayed")),
    (DUE_COUNTS, "", leased("0", "1e15")),
    (delayed.MIGRATE, "", outdated),
    (reliable.OFFER, "full", full_offer),
    (reliable.OFFER, "one", offer_one),
    (reliable.OFFER_NEW, "", offer_new),
    (reliable.CLAIM, "hand out", some(EPOCH, 1, 100, HOUR_US, 0, "client 1", 1, "", "", 0)),
    (reliable.CLAIM, "new limits", limits_changed),
    (reliable.CLAIM, "die", some(EPOCH, 1, 100, HOUR_US, 1, "client 1", 1, "", "", 0)),
    (
        reliable.CLAIM,
        "trim",
        with_settings(some(EPOCH, 1, 100, HOUR_US, 1, "client 1", 1, "", "", 0), max_dead=1),
    ),
    (reliable.BURY, "", taken(reliable.BURY)),
    (reliable.BURY, "keep", with_settings(taken(reliable.BURY), keep=HOUR_US, max_kept=1)),
    (reliable.BURY, "trim", with_settings(taken(reliable.BURY), keep_dead=HOUR_US, max_dead=2)),
    (reliable.NACK, "", taken(reliable.NACK)),
    (reliable.NACK, "keep", with_settings(taken(reliable.NACK), keep=HOUR_US, max_kept=1)),
    (reliable.FINISH, "", taken(reliable.FINISH)),
    (reliable.FINISH, "keep", with_settings(taken(reliable.FINISH), keep=HOUR_US, max_kept=1)),
    (reliable.AWAIT, "", with_settings(one(reliable.AWAIT), keep=HOUR_US)),
    (reliable.OUTCOME, "", one(reliable.OUTCOME)),
    (reliable.TRIM_DEAD, "", with_settings(some(), keep_dead=HOUR_US, max_dead=1)),
    (reliable.ACK, "forget", ack(remembers=False)),
    (reliable.ACK, "remember", ack(remembers=True)),
    (reliable.RESUME, "", paused),
    (reliable.SCHEDULE, "anew", schedule_anew),
    (reliable.SCHEDULE, "otherwise", schedule_otherwise),
    (reliable.UNSCHEDULE, "", unschedule),
    (reliable.PAUSE_SCHEDULE, "", unschedule),
    (reliable.RESUME_SCHEDULE, "", schedule_paused),
    (reliable.OCCUR, "", occur),
    (reliable.RECUR, "", recur),
    (reliable.REFILL, "", refill),
    (reliable.CONFIGURE, "", configure),
    (reliable.REGISTER, "stay", register(HOUR_US)),
    (reliable.REGISTER, "leave", register(0)),
    (reliable.SET_GROUP, "pause", group_settings("pause")),
    (reliable.SET_GROUP, "limit", group_settings("limit", "c1")),
    (reliable.SET_GROUP, "resume", group_settings("resume")),
    (reliable.SET_GROUP, "own", group_settings("own", "z=c1")),
]
_WITH_CASES = {script for script, _, _ in _CASES}
CASES = [
    *_CASES,
    *(case for script in SCRIPTS if script not in _WITH_CASES for case in cases_of(script)),
]
"""A script, the name of the case, and a function that prepares the server and returns arguments."""
