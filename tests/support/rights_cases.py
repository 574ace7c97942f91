"""Examples of calls to every script: the state of the server before it, and the arguments.

For most scripts of a reliable queue, they follow from the names of the arguments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from delayq import Limit, Offer
from delayq._durations import datetime_at
from delayq._engine.store import DUE_COUNTS, RECHECK
from delayq._redisson import store as delayed
from delayq._redisson.keys import DelayedKeys
from delayq._reliable import scripts as reliable
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.moved_partition import (
    DISCARD,
    DROP,
    PAUSE_FOR_MOVE,
    RECEIVE,
    RECEIVE_LETTERS,
    SET_ASIDE,
)
from delayq._reliable.settings import LAYOUT
from tests.support.lua import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayq import Client, Receipt, ReliableQueue
    from delayq._redis.scripts import Script

NAME = "orders"
DELAYED, RELIABLE = DelayedKeys.of(NAME), ReliableKeys.of(NAME)
TOKEN = "0123456789ab-00000001"
# The settings of the queue, as far as offers depend on them.
SETTINGS = {"layout": LAYOUT, "epoch": "7", "partitions": "1"}
HOUR_US = 3_600_000_000
SECOND_US = 1_000_000
# The arguments of a claim before and after the number of attempts.
CLAIM, REST = (1, 100, HOUR_US), ("client 1", 1, "", "")


@dataclass
class Prepared:
    """A client and a plain connection that may prepare anything."""

    client: Client
    raw: Any


def keys_of(script: Script) -> list[str]:
    """Return the keys of a call, looked up by the names that the script gives them."""
    if script.name.startswith("reliable/"):
        # These get keys that their caller chooses.
        if script in (RECEIVE, DROP, DISCARD):
            return [RELIABLE.settings, RELIABLE.remembered]
        if script is SET_ASIDE:
            common_keys = [RELIABLE.leased, RELIABLE.kept_slots, RELIABLE.settings]
            return [*common_keys, RELIABLE.remembered, RELIABLE.aside("remembered")]
        call = [RELIABLE.call("0123456789ab-0")] if "call" in script.keys else []
        return [*RELIABLE.of_script(script), *call]
    if script is RECHECK:
        return [DELAYED.timeout, DELAYED.leases, DELAYED.ready, DELAYED.turns, DELAYED.summons]
    special = {
        "fence": DELAYED.fence(TOKEN),
        "destination": DELAYED.ready,
        "key...": DELAYED.timeout,
        "set...": DELAYED.timeout,
    }
    return [special.get(key) or getattr(DELAYED, key) for key in script.keys]


async def receipts(at: Prepared, *delays: float) -> list[Receipt[Any]]:
    stored_receipts = await at.client.delayed_queue(NAME).offer_many(
        [(n, delay) for n, delay in enumerate(delays)]
    )
    # Close the queue, so that this client transfers nothing.
    await at.client.delayed_queue(NAME).aclose()
    return stored_receipts


def given(state: Any, *args: Any) -> Any:
    """Return a case with this state; arguments that are functions get what ``state`` returns."""

    async def prepare(at: Prepared) -> Any:
        result = await state(at)
        return [arg(result) if callable(arg) else arg for arg in args]

    return prepare


def after(*delays: float) -> Any:
    """Return a state with pending messages of these delays."""
    return lambda at: receipts(at, *delays)


def record_of(place: int) -> Any:
    """Return an argument: the record of the pending message at this place."""
    return lambda pending: pending[place]._record()


async def nothing(at: Prepared) -> None:
    """Prepare nothing."""


async def what_is_due(at: Prepared) -> None:
    """Prepare due messages in every place, an unreadable one, and one with an ended lease."""
    twelve_receipts = await receipts(at, *[60.0] * 12)
    for place in (0, 5, 11):
        await at.raw.zadd(DELAYED.timeout, {twelve_receipts[place]._record(): 1000 + place})
    await at.raw.zadd(DELAYED.timeout, {b"junk": 2})
    await at.raw.rpush(DELAYED.ready, b"ready 1", b"ready 2")
    await at.raw.zadd(DELAYED.leases, {b"old:001": 1})
    await at.raw.hset(DELAYED.leased, b"old:001", b"leased")


def transfer(take: int, each: int, state: Any = what_is_due) -> Any:
    return given(state, 100, take, 100_000, HOUR_US, each, TOKEN, "client 1")


async def unusual(at: Prepared) -> None:
    await receipts(at, 60, 61, 62, 63)
    await at.raw.zadd(DELAYED.timeout, {b"junk": 1e15})
    await at.raw.lpush(DELAYED.ordered, b"junk")
    await at.raw.rpush(DELAYED.ready, b"ready")


async def leased(at: Prepared) -> None:
    await receipts(at, 60)
    await at.raw.zadd(DELAYED.leases, {b"a:001": 1e14, b"a:002": 1e14})
    await at.raw.hset(DELAYED.leased, mapping={b"a:001": b"1", b"a:002": b"2"})
    await at.raw.rpush(DELAYED.ready, b"ready")


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
        await at.raw.zadd(RELIABLE.named("expiry_index"), {f"expired{n}": 1})
        await at.raw.hset(RELIABLE.named("errors"), f"taken{n}", "an error")
        await at.raw.hset(RELIABLE.named("attempts"), f"taken{n}", "1-0:")
        (again,) = await queue.claim(1)
        assert again.id == f"again{n}", again.id
        await again.nack(0, "an error")
    await at.raw.hset(RELIABLE.settings, "expired", "dead")
    start = f"\0{START:019.2f} {HOUR_US} 0 9 0"
    await at.raw.zadd(RELIABLE.named("rate_log"), {start: 0})
    ends = await at.raw.zrange(RELIABLE.leased, 0, -1, withscores=True)
    return {name.decode(): (name.decode(), f"{end:.0f}") for name, end in ends}


# The moment at which a rate has counted nine starts.
START = 8 * 10**15
# The ids that messages() prepares, by state.
WAITING = ("later0", "later1", "again0")
TAKEN = ("taken0", "taken1")
DEAD = ("dead0", "dead1")
# The values of arguments that do not name a message. There is a call for each of them.
VALUES: dict[str, tuple[Any, ...]] = {
    "again": (0, 1),
    "attempt": ("{}",),
    "checkpoint": ("1;1;\n1",),
    "batch": ("1764262996123000000001",),
    "is_last": (1, 0),
    "on_success": ("1:2:a0 0 0 0 raise \n1",),
    "on_failure": ("",),
    "followers": ('1:6:a0 0 0 0 raise x5\n"1"', "1:4:a5 36e8 7200000000 1 ignore gb\n1", ""),
    "for_us": (HOUR_US,),
    "report": ('{"done":1}',),
    "offered": ("17634859251912340",),
    "result": ("=1", ""),
    "after": ("",),
    "first": ("",),
    "group": ("tenant",),
    "what": ("pause", "limit", "resume"),
    "counts": ("o=1 l3=2",),
    "cursor": (0,),
    "worker": ("0123456789ab",),
    "counts_us": (HOUR_US, 0),
    "facts": ("{}",),
    "scope": ("expired", "waiting", "all"),
    "unit": ("m", "h"),
    "span": (3,),
    "brief": (0, 1),
    "delay_us": (0, HOUR_US),
    "when": (0, HOUR_US, "@9000000000000000"),
    "above": ("",),
    "mode": ("declare", "change"),
    "partitions": (1,),
    "partition": (1,),
    "step": ("close", "commit", "reopen"),
    "at_hand": (0,),
    "error": ("an error",),
    "epoch": ("8",),
    "field": ("max_size",),
    "lease_us": (HOUR_US, SECOND_US),
    "limit": (100,),
    "number": (1,),
    "offset": (0,),
    "share": (1,),
    "since_us": (0,),
    "spent": (1, 0),
    "start": (START, 0, ""),
    "remember_us": (0, HOUR_US),
    "state": ("delayed", "ready", "all", "leased"),
    "ttl_us": (HOUR_US, SECOND_US),
    "unique_us": (0, HOUR_US),
    "value": ("1000",),
    "with_leased": (0, 1),
    "keep_due": (0, 1),
    "alone": (0, 1),
    "reason": ("why",),
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
    script_calls = []
    for call in range(count):
        message_id = some_messages[call % len(some_messages)]
        script_calls.append([value(name, message_id, call) for name in plain])
        for message in some_messages:
            script_calls[-1] += [value(name, message, call) for name in columns]
    return script_calls


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
            leases = await messages(at)
            items = [about(id, leases[id][1] if id in leases else "") for id in ids]  # noqa: A001
            return calls(script, items)[call]

        return prepare

    count = len(calls(script, [about(id, "") for id in ids]))  # noqa: A001
    return [(script, str(call), prepared(call)) for call in range(count)]


async def lines_evicted(at: Prepared) -> Any:
    """Return a call that puts back what waits, with a group, without, and in a worker's hands."""
    await messages(at)
    await at.client.reliable_queue(NAME).offer_many([Offer(1, group=each) for each in "ab"])
    await at.raw.delete(RELIABLE.named("group_members"), RELIABLE.waiting[0])
    return [0]


async def limits_changed(at: Prepared) -> Any:
    """Return a claim that gives groups their turns anew: a limit has kept them from running."""
    await at.client.reliable_queue(NAME).offer_many([Offer(1, group=each) for each in "ab"])
    await at.raw.zadd(RELIABLE.named("group_turns"), {"a": 4e15, "": 4e15})
    await at.raw.zrem(RELIABLE.named("group_turns"), "b")
    await at.raw.hset(RELIABLE.settings, "turns_updated_to", "")
    return [*CLAIM, 0, *REST]


def with_settings(prepare: Any, **settings: Any) -> Any:
    """Return a case in a queue with these settings, or without those that are None."""

    async def prepared(at: Prepared) -> Any:
        prepared_args = await prepare(at)
        for name, value in settings.items():
            if value is None:
                await at.raw.hdel(RELIABLE.settings, name)
            else:
                await at.raw.hset(RELIABLE.settings, name, value)
        return prepared_args

    return prepared


def taken(script: Script) -> Any:
    """Return a case about the messages that workers have."""

    async def prepare(at: Prepared) -> Any:
        leases = await messages(at)
        await at.raw.zadd(RELIABLE.awaited, dict.fromkeys(TAKEN, 9e15))
        return calls(script, [about(id, leases[id][1]) for id in TAKEN])[0]  # noqa: A001

    return prepare


async def long_ago(at: Prepared) -> None:
    await messages(at)
    await at.raw.zadd(RELIABLE.awaited, {b"long ago": 1})
    await at.raw.zadd(RELIABLE.remembered, {b"long ago": 1})


async def configure(at: Prepared) -> Any:
    await at.raw.hset(RELIABLE.settings, mapping=SETTINGS)
    return ["change", "", "limit", "c10", "expired", "dead"]


async def numbered(at: Prepared) -> None:
    await at.raw.hset(RELIABLE.settings, mapping=SETTINGS)


async def set_aside(at: Prepared) -> None:
    await at.raw.hset(RELIABLE.settings, mapping=SETTINGS)
    await at.raw.zadd(RELIABLE.remembered, {"old": 9e15})


async def paused_for_move(at: Prepared) -> None:
    await at.raw.hset(RELIABLE.settings, mapping={**SETTINGS, "draining": "1"})
    await at.raw.set(RELIABLE.paused, "1")


async def moving(at: Prepared) -> None:
    await at.raw.hset(RELIABLE.settings, mapping={**SETTINGS, "moving": "2 drains 0 1 me"})


async def closed(at: Prepared) -> None:
    now_s, _ = await at.raw.time()
    fields = {"partitions": "4?", "renumbering": f"me {now_s * 1_000_000}"}
    await at.raw.hset(RELIABLE.settings, mapping={**SETTINGS, **fields})


async def full_offer(at: Prepared) -> Any:
    await long_ago(at)
    await at.raw.hset(RELIABLE.settings, "max_size", 1000)
    offers = (("new", "raise"), ("later1", "replace"), ("handled0", "ignore"), ("later0", "ignore"))
    values: list[Any] = [7, 1]
    for id, on_duplicate in offers:  # noqa: A001
        values += [id, 4, SECOND_US, HOUR_US, HOUR_US, on_duplicate, b"\nvalue"]
    return values


def offer_to_group(at_moment: bool) -> Any:
    async def prepare(at: Prepared) -> Any:
        queue = at.client.reliable_queue(
            NAME, group_limit=Limit(concurrency=1, rate=9, ordered=True)
        )
        await queue.offer(1, group="tenant")
        due = f"@{9 * 10**15}" if at_moment else 0
        rest = (due, HOUR_US, HOUR_US, "raise", b"gtenant\nvalue")
        return [7, 1, "new", 4, *rest, "newer", 4, *rest]

    return prepare


async def offer_for_shared_moments(at: Prepared) -> Any:
    moment_us = 9 * 10**15
    queue = at.client.reliable_queue(NAME)
    await queue.offer_many([Offer(1, at=datetime_at(moment_us))] * 2)
    moments = (moment_us, moment_us, moment_us + 1, moment_us + 1)
    return [7, 1, *chain(*((f"new {n}", f"@{us}", b"\nvalue") for n, us in enumerate(moments)))]


async def scheduled(at: Prepared) -> ReliableQueue[Any]:
    queue: ReliableQueue[Any] = at.client.reliable_queue(NAME, lease=3600)
    await queue.schedule("often", every=3600, value=1, priority=2, ttl=3600)
    return queue


DEFINITION = (1, "often", "every 3600000000", 9, HOUR_US, 1, HOUR_US, b"\n2")


async def schedule_paused(at: Prepared) -> None:
    await (await scheduled(at)).pause_schedule("often")


async def occur(at: Prepared) -> Any:
    await scheduled(at)
    (id,) = await at.raw.zrange(RELIABLE.waiting[2], 0, -1)  # noqa: A001
    await at.raw.zrem(RELIABLE.waiting[2], id)
    await at.raw.zadd(RELIABLE.leased, {id: "3000000000000002"})
    return [id, "3000000000000002"]


async def without_the_next(at: Prepared) -> None:
    await (await scheduled(at)).purge()


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


async def grouped(at: Prepared) -> None:
    queue = at.client.reliable_queue(NAME)
    await queue.offer(1, group="tenant")
    await queue.groups.pause("tenant")


async def stopping(at: Prepared) -> None:
    """Let a message of a group keep its slots that was cancelled while a worker had it."""
    await grouped(at)
    name, place = "a\x009000000000000000", "tenant\0~9000000000000000.00"
    await at.raw.zadd(RELIABLE.kept_slots, {name: 9_000_000_000_000_000})
    await at.raw.zadd(RELIABLE.named("group_members"), {place + name: 0})
    await at.raw.hset(RELIABLE.named("positions"), name, place)


async def batch_of_one(at: Prepared) -> Any:
    """Return a call that notes that a batch is whole, and has ended: its only message leaves it."""
    await messages(at)
    followers = {"1\0then": "1:2:a0 0 0 0 raise \n1", "1": "9 ? 0 9"}
    await at.raw.hset(RELIABLE.batches, mapping=followers)
    await at.raw.zadd(RELIABLE.batch_members, {"1\0o\0later0": 0})
    return ["1", 1, "later0"]


async def registered(at: Prepared) -> None:
    await at.raw.zadd(RELIABLE.workers, {"here": 4e15, "long ago": 1})
    await at.raw.hset(RELIABLE.worker_facts, mapping={"here": "{}", "long ago": "{}"})


async def paused(at: Prepared) -> None:
    await at.raw.set(RELIABLE.paused, 1)


def batch_of_five(scope: str) -> Any:
    """Return a call that ends messages of a batch, of which two have expired and one runs."""

    async def prepare(at: Prepared) -> Any:
        await messages(at)
        follower = "1:2:a0 0 0 0 raise \n1"
        fields = {"1": f"1 5 0 {2**53 - 1}", "1\0failure": follower}
        await at.raw.hset(RELIABLE.batches, mapping=fields)
        for member in ("expired0", "expired1", "later0", "later1", "taken0"):
            await at.raw.zadd(RELIABLE.batch_members, {f"1\0o\0{member}": 0})
            body = await at.raw.hget(RELIABLE.named("bodies"), member)
            await at.raw.hset(RELIABLE.named("bodies"), member, body.replace(b"\n", b"b1\n", 1))
        return ["1", scope, ""]

    return prepare


async def bury_two(at: Prepared) -> Any:
    """Return a call that buries messages of a batch, which has a follower for that."""
    await batch_of_five("all")(at)
    return ["why", "later0", "later1"]


_CASES: list[tuple[Script, str, Any]] = [
    (reliable.MEND, "lines", lines_evicted),
    (delayed.OFFER, "head", given(after(60), 1, SECOND_US, b"new")),
    (
        *(delayed.OFFER, "several"),
        given(after(60), 1, HOUR_US, b"a", SECOND_US, b"b", 2 * SECOND_US, b"c"),
    ),
    (delayed.OFFER, "unlisted", given(nothing, 0, SECOND_US, b"new")),
    (delayed.TRANSFER, "take", transfer(2, 0)),
    (delayed.TRANSFER, "take all", transfer(100, 0)),
    (delayed.TRANSFER, "move", transfer(0, 0)),
    (delayed.TRANSFER, "lease", transfer(2, 1)),
    (delayed.TRANSFER, "only one", transfer(1, 0, after(0))),
    (
        *(delayed.CANCEL, "three"),
        given(after(*[60.0] * 12), 1, *(record_of(place) for place in (0, 5, 11))),
    ),
    *(
        (delayed.RESCHEDULE, where, given(after(60, 120), record_of(1), delay_us))
        for where, delay_us in (("to the head", SECOND_US), ("behind", HOUR_US))
    ),
    *((delayed.PURGE, what, given(unusual, what)) for what in ("all", "delayed", "ready")),
    (delayed.POLL_PENDING, "listed", given(unusual, 3, 100_000, 1, HOUR_US, f"{TOKEN}:pending")),
    (delayed.POLL_PENDING, "unlisted", given(unusual, 9, 100_000, 0, HOUR_US, f"{TOKEN}:pending")),
    (delayed.POLL_LAST, "listed", given(after(60, 61), 1, 10)),
    (delayed.POLL_LAST, "unlisted", given(after(60, 61), 0, 10)),
    (delayed.EXPIRE, "", given(unusual, 3_600_000)),
    (delayed.ACK, "", given(leased, "a:001", "a:002")),
    (delayed.NACK, "head", given(leased, "a:001", SECOND_US, 1)),
    (delayed.NACK, "behind", given(leased, "a:001", HOUR_US, 1)),
    (delayed.EXTEND, "", given(leased, HOUR_US, "a:001")),
    (delayed.RELEASE, "", given(leased, "a:001", "a:002")),
    (delayed.SUMMON, "", given(leased, 1, 0)),
    (delayed.GIVE_BACK, "by value", given(leased, 60_000, "none", 0, b"x", b"y")),
    (delayed.GIVE_BACK, "by name", given(leased, 60_000, "a", 2)),
    (delayed.GIVE_BACK, "pending", polled),
    (delayed.SET_ASIDE, "", given(leased, 60_000, "", b"x")),
    (delayed.SET_ASIDE, "leased", given(leased, 60_000, "a:001", b"1")),
    (RECHECK, "", given(leased, "delayed")),
    (DUE_COUNTS, "", given(leased, "0", "1e15")),
    (delayed.MIGRATE, "", outdated),
    (reliable.OFFER, "full", full_offer),
    (reliable.OFFER, "one", given(numbered, 7, 1, "new", 0, 0, 0, 0, "raise", b"\nvalue")),
    (reliable.OFFER, "group", offer_to_group(False)),
    (reliable.OFFER, "group at", offer_to_group(True)),
    (
        *(reliable.OFFER_NEW, ""),
        given(messages, 7, 1, "new", 0, b"\nvalue", "another", HOUR_US, b"\nvalue"),
    ),
    (reliable.OFFER_NEW, "at", offer_for_shared_moments),
    (reliable.CLAIM, "hand out", given(messages, *CLAIM, 0, *REST)),
    (reliable.CLAIM, "new limits", limits_changed),
    (reliable.CLAIM, "die", given(messages, *CLAIM, 1, *REST)),
    (reliable.CLAIM, "trim", with_settings(given(messages, *CLAIM, 1, *REST), max_dead=1)),
    (reliable.BURY, "", taken(reliable.BURY)),
    (reliable.BURY, "keep", with_settings(taken(reliable.BURY), keep=HOUR_US, max_kept=1)),
    (reliable.BURY, "trim", with_settings(taken(reliable.BURY), keep_dead=HOUR_US, max_dead=2)),
    *cases_of(reliable.BURY_WAITING),
    (reliable.BURY_WAITING, "batch", with_settings(bury_two, keep=HOUR_US, max_dead=1)),
    (reliable.NACK, "", taken(reliable.NACK)),
    (reliable.NACK, "keep", with_settings(taken(reliable.NACK), keep=HOUR_US, max_kept=1)),
    (reliable.FINISH, "", taken(reliable.FINISH)),
    (reliable.FINISH, "keep", with_settings(taken(reliable.FINISH), keep=HOUR_US, max_kept=1)),
    (reliable.AWAIT, "", with_settings(given(long_ago, WAITING[0], HOUR_US), keep=HOUR_US)),
    (reliable.OUTCOME, "", given(long_ago, WAITING[0])),
    (reliable.TRIM_DEAD, "", with_settings(given(messages), keep_dead=HOUR_US, max_dead=1)),
    (reliable.ACK, "forget", with_settings(taken(reliable.ACK), dedup_window=None)),
    (reliable.ACK, "remember", taken(reliable.ACK)),
    (reliable.RESUME, "", given(paused)),
    (reliable.SCHEDULE, "anew", given(numbered, *DEFINITION)),
    (reliable.SCHEDULE, "otherwise", given(scheduled, *DEFINITION)),
    (reliable.UNSCHEDULE, "", given(scheduled, "often")),
    (reliable.PAUSE_SCHEDULE, "", given(scheduled, "often")),
    (reliable.RESUME_SCHEDULE, "", given(schedule_paused, "often")),
    (reliable.OCCUR, "", occur),
    (reliable.RECUR, "", given(without_the_next, "often")),
    (reliable.REFILL, "", refill),
    (reliable.CONFIGURE, "", configure),
    (reliable.RENUMBER, "close", given(closed, "close", "me", 2, "limit", "c10")),
    (reliable.RENUMBER, "commit", given(closed, "commit", "me", 2, "limit", "c10")),
    (reliable.RENUMBER, "reopen", given(closed, "reopen", "me", 2)),
    (reliable.VACATE, "", given(numbered, "8")),
    (reliable.REPARTITION, "begin", given(numbered, "begin", "me", 2)),
    (reliable.REPARTITION, "close", given(moving, "close", "me", 2)),
    (reliable.REPARTITION, "give up", given(moving, "give up", "me", 2)),
    (PAUSE_FOR_MOVE, "pause", given(set_aside, "7", "pause")),
    *(
        (PAUSE_FOR_MOVE, step, given(paused_for_move, "7", step))
        for step in ("resume", "retire", "stay")
    ),
    (SET_ASIDE, "", given(set_aside, "7", "4?")),
    (RECEIVE, "", given(set_aside, "7", 9_000, "scores", "new", 9_000_000_000_000_000)),
    (RECEIVE_LETTERS, "", given(set_aside, "7", DEAD[0], "9000000000000000", "{}\nbody")),
    (DROP, "", given(set_aside, "7", "members", "old")),
    (DISCARD, "", given(set_aside, "7")),
    (reliable.COPY_SETTINGS, "", given(numbered, 1, "8", "partitions", "4", "limit", "c10")),
    (reliable.SEAL_BATCH, "", batch_of_one),
    *((reliable.CANCEL_MEMBERS, scope, batch_of_five(scope)) for scope in VALUES["scope"]),
    (reliable.FREE_SLOTS, "", given(stopping, "a", "9000000000000000")),
    (reliable.REGISTER, "stay", given(registered, "here", HOUR_US, '{"pid":1}')),
    (reliable.REGISTER, "leave", given(registered, "here", 0, '{"pid":1}')),
    *(
        (reliable.SET_GROUP, what, given(grouped, 1, "tenant", what, limit))
        for what, limit in (("limit", "c1"), ("resume", ""))
    ),
    (reliable.SET_GROUP, "pause", given(numbered, 1, "tenant", "pause", "")),
]
_WITH_CASES = {script for script, _, _ in _CASES}
CASES = [
    *_CASES,
    *(case for script in SCRIPTS if script not in _WITH_CASES for case in cases_of(script)),
]
"""A script, the name of the case, and a function that prepares the server and returns arguments."""
