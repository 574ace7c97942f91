"""A reliable queue: offers, order, retries, dead letters, pauses, large replies."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Backoff, Offer
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import REDRIVE, TRIM_DEAD
from delayq.admin.acl import acl_rules
from delayq.testing import advance
from tests.support.reliable import (
    all_values,
    bury_all,
    claim_all,
    claim_one,
    depths,
    get,
    leased,
    listed,
    offers,
    values,
)
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import HOUR, Store, hours
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq import Client, Message
    from tests.integration.test_faults import Faults
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer


# Offering


@pytest.mark.every_server
async def test_a_message_tells_what_was_offered(client: Client, jobs: Jobs) -> None:
    before = await client.server_time()
    headers = {"trace": "00-ab", "ключ": "two\nlines"}
    message = await leased(jobs, {"a": [1, None]}, id="order-42", headers=headers, priority=7)
    assert (message.id, message.value, message.headers) == ("order-42", {"a": [1, None]}, headers)
    assert (message.attempt, message.priority, message.state) == (1, 7, "leased")
    assert before <= message.enqueued_at <= await client.server_time()
    assert abs(message.due_at - message.enqueued_at) < timedelta(milliseconds=1)
    assert repr(message) == "<Message 'order-42', leased, attempt 1>"


@pytest.mark.every_server
async def test_a_message_does_not_come_too_early(client: Client, jobs: Jobs) -> None:
    delay = timedelta(milliseconds=100)
    waits: list[Callable[[], dict[str, Any]]] = [
        lambda: {"delay": 0.1},
        lambda: {"delay": delay},
        lambda: {"at": datetime.now(UTC) + delay},
    ]
    for wait in waits:
        before = await client.server_time()
        await jobs.offer(1, **wait())
        # When it came, by the clock of the server: the first claim may be a late one.
        (message,) = await jobs.claim() or await jobs.claim(wait=20)
        came = message.lease_ends_at - timedelta(seconds=LEASE)
        assert came >= message.due_at >= before + timedelta(milliseconds=95)
    await jobs.offer(1, HOUR)
    await jobs.offer(2, at=datetime(2020, 1, 1, tzinfo=UTC))
    assert await values(jobs) == [2]


@pytest.mark.every_server
async def test_messages_for_one_moment_are_due_then_and_come_in_the_order_of_their_offers(
    client: Client, jobs: Jobs
) -> None:
    """Whatever their ids, groups and calls, and however long the calls took."""
    at = datetime.now(UTC) + timedelta(hours=1)
    soon = at - timedelta(microseconds=1)
    ids = [f"{number * 37 % 101:03}" for number in range(60)]
    for name in ids[:20]:
        await jobs.offer(0, at=at, id=name)
    await jobs.offer_many([Offer(0, at=at, id=name) for name in ids[20:40]])
    for name in ids[40:]:
        await jobs.offer(0, at=at, id=name)
    made_up = [await jobs.offer(0, at=at) for _ in range(3)]
    made_up += await jobs.offer_many([Offer(0, at=at)] * 5)
    made_up.append(await jobs.offer(0, at=at, id="after those without an id"))
    # The place of one that has left stays empty.
    assert await jobs.cancel_many([ids[0], ids[7]]) == [True, True]
    await jobs.offer(0, at=soon, id="last, and due first")
    await jobs.offer(0, at=at, id=ids[7])
    await jobs.offer(0, delay=7200, id="moved")
    assert await jobs.reschedule("moved", at=at + timedelta(hours=1))
    due = ["last, and due first", *ids[1:7], *ids[8:], *made_up, ids[7], "moved"]
    listed = await jobs.list("delayed")
    assert [message.id for message in listed] == due
    assert [message.due_at for message in listed] == [
        soon,
        *[at] * (len(due) - 2),
        at + timedelta(hours=1),
    ]
    assert [(await jobs.get(name)).due_at for name in ids[1:6]] == [at] * 5  # type: ignore[union-attr]
    others: Jobs = client.reliable_queue("others")
    first = await others.offer(0, at=at)
    second = await others.offer(0, at=at, id="0")
    rest = await others.offer_many([Offer(0, at=soon), *[Offer(0, at=at)] * 2])
    listed = await others.list("delayed")
    assert [message.id for message in listed] == [rest[0], first, second, *rest[1:]]
    ordered = client.reliable_queue("ordered", group_limit=delayq.Limit(ordered=True))
    for name in ids:
        await ordered.offer(0, at=at, id=name, group="g", priority=3)
    await advance(client, 4000)
    claimed = await jobs.claim(100)
    assert [message.id for message in claimed] == due[:-1]
    assert {at - message.due_at for message in claimed[1:]} == {timedelta(seconds=4000)}
    for name in ids:
        (message,) = await ordered.claim()
        assert message.id == name
        await message.ack()


@pytest.mark.every_server
async def test_messages_of_one_call_that_go_back_keep_their_order(jobs: Jobs) -> None:
    """Although others of the call wait for a moment, whichever script stores them."""
    at = datetime.now(UTC) + timedelta(hours=1)
    for ttl in (None, 7200):
        await jobs.offer_many([Offer(n, at=None if n % 4 else at, ttl=ttl) for n in range(40)])
        for message in await jobs.claim(100):
            await message.release()
        due = [n for n in range(40) if n % 4]
        assert await values(jobs, 100) == due
    assert (await jobs.stats()).delayed == 20


@pytest.mark.every_server
async def test_a_message_that_would_expire_before_its_moment_is_refused(jobs: Jobs) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(delayq.BadDelay, match="ttl ends before the message is due"):
        await jobs.offer(1, at=at, ttl=60)
    with pytest.raises(delayq.OutcomeUnknown, match="ttl ends before") as caught:
        await jobs.offer_many([Offer(1, id="a"), Offer(1, at=at, ttl=60)])
    assert caught.value.stored == ("a",)
    await jobs.offer(1, at=at, ttl=7200)


async def test_a_priority_may_be_a_member_of_an_enumeration(jobs: Jobs) -> None:
    class Level(IntEnum):
        HIGH = 7

    await jobs.offer(1, priority=Level.HIGH)
    await jobs.offer_many(offers(2, priority=Level.HIGH))
    assert [message.priority for message in await jobs.claim(3)] == [7, 7, 7]


BAD_FIELDS: dict[str, list[Any]] = {
    "delay": [-1, math.nan, math.inf, 2**53 / 1000 + 1, timedelta(seconds=-1), "1", True],
    "at": [datetime(2030, 1, 1), 12.5],  # noqa: DTZ001 - that is the point
    "id": ["", 42, "\ud800", "x" * 513, "é" * 257, "a\x001234567890123456"],
    "headers": [{"a": 1}, {1: "a"}, [("a", "b")], {"a": "x" * 17_000}],
    "priority": [-1, 10, 1.0, True],
    "ttl": [0, -1, math.inf, "1"],
    "max_attempts": [0, -1, 1.5, True],
    "timeout": [0, -1, "1", math.inf],
    "unique_for": [0, -1, "1", 60],
    "on_duplicate": ["drop"],
    "value": [math.nan, "x" * 1000, object()],
}
BAD: list[dict[str, Any]] = [
    *({name: value} for name, values in BAD_FIELDS.items() for value in values),
    {"delay": 1, "at": datetime(2030, 1, 1, tzinfo=UTC)},
    {"delay": 10, "ttl": 10},
]


async def test_bad_input_is_never_written(client: Client, raw: Any) -> None:
    queue = client.reliable_queue("jobs", max_payload=100)
    for bad in BAD:
        arguments = {"value": 1, **bad}
        with pytest.raises((delayq.BadInput, delayq.EncodeError)):
            await queue.offer(**arguments)
        with pytest.raises((delayq.BadInput, delayq.EncodeError)):
            await queue.offer_many([Offer(value=1), Offer(**arguments), Offer(value=2)])
        assert await raw.dbsize() == 0, bad
    wrong: dict[str, Any] = {"id": 5, "group": 5, "delay": "5s", "ttl": "5s", "headers": {"a": 5}}
    for name, value in (wrong | {"at": 5, "priority": "5", "max_attempts": "5"}).items():
        with pytest.raises(delayq.BadInput, match=rf"^{name} must .*5s?'? \((int|str)\)"):
            await queue.offer(1, **{name: value})
    # This is refused before settings are stored.
    with pytest.raises(delayq.BadInput, match="durability must be"):
        await queue.offer_many([], durability="nonsense")
    assert await raw.dbsize() == 0


BAD_CALLS = """
claim(0); claim(True); claim(1.5); claim(1, wait=-1); claim(1, wait=math.nan)
cancel(""); cancel(7); cancel("x" * 513); get(b"a")
reschedule("a"); reschedule("a", -1); reschedule("a", 1, at=datetime.now(UTC))
list("dead"); list("ready", limit=-1); list("ready", offset=-1); list("ready", limit=1.5); peek(-1)
purge("dead"); dead.list(limit=-1); dead.list(offset=-1); dead.redrive("order-42")
dead.purge(b"bytes"); dead.redrive([None]); dead.purge([7]); dead.redrive([""]); dead.purge(7)
cancel_many(None); cancel_many("order-42"); cancel_many(["a", ""]); reschedule_many(5, 0)
offer_many(None); offer_many([Offer(1), "a"]); bury("a", ""); bury("a", None); bury_many("a", "b")
"""
BAD_SETTINGS: dict[str, list[Any]] = {
    "lease": [0, -1, 1e-6, math.inf],
    "max_attempts": [0, True],
    "max_size": [0, 1.5],
    "max_payload": [-1, True, 1.5, "1", 2**29],
    "partitions": [0, 1025],
    "dedup_window": [-1, "1h"],
    **{name: [0, "many"] for name in ("keep_dead", "max_dead", "max_kept")},
    "keep": [-1, "7d"],
    "limit": [5, delayq.Limit(ordered=True)],
    "group_limit": [5, "1/s"],
    "expired": ["keep"],
    "when_full": ["drop"],
    "backoff": [5],
    "codec": [object(), delayq.JsonCodec],
    "durability": [5],
}


async def test_bad_arguments_of_other_calls_are_refused(client: Client, jobs: Jobs) -> None:
    await jobs.offer(1)
    for call in re.split("[;\n]", BAD_CALLS.strip()):
        with pytest.raises(delayq.BadInput):
            await eval(f"jobs.{call.strip()}")
    assert await values(jobs) == [1]
    for name, values_of_it in BAD_SETTINGS.items():
        for bad in values_of_it:
            with pytest.raises(delayq.BadInput, match=name):
                client.reliable_queue("jobs", **{name: bad})
    for queue in ("", "}a", "\ud800", "x" * 513):
        with pytest.raises(delayq.BadName):
            client.reliable_queue(queue)


# Ids that are taken


async def test_a_taken_id_is_generated_anew(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(["a", "b", "b", "a", "c", "d"])
    await jobs.stats()
    for module in ("ids", "sending"):
        monkeypatch.setattr(f"delayq._reliable.{module}.new_id", lambda: next(made))
    assert [await jobs.offer(1), await jobs.offer(2)] == ["a", "b"]
    assert await jobs.offer_many([Offer(3), Offer(4), Offer(5, id="e")]) == ["c", "d", "e"]
    assert sorted(await values(jobs)) == [1, 2, 3, 4, 5]


async def test_offer_many_stores_what_it_can_and_names_the_rest(jobs: Jobs) -> None:
    await jobs.offer(0, HOUR, id="taken")
    many = [Offer(value=n, id=key, delay=HOUR) for n, key in enumerate(["a", "taken", "b", "a"])]
    with pytest.raises(delayq.DuplicateMessage, match="2 ids are already taken") as caught:
        await jobs.offer_many(many)
    assert caught.value.ids == ("taken", "a")
    assert caught.value.stored == ("a", "b")
    assert await listed(jobs, "delayed") == [0, 0, 2]
    # It takes any iterable, and returns the ids in order.
    ids = await jobs.offer_many(iter(offers(450, ids=True, delay=HOUR)))
    assert ids == [str(n) for n in range(450)]
    assert (await jobs.stats()).delayed == 453
    assert await jobs.offer_many([]) == []


# A queue that is full


async def test_an_offer_to_a_full_queue_may_wait_for_room(client: Client) -> None:
    queue = client.reliable_queue("small", max_size=2, when_full="wait")
    offer = asyncio.create_task(queue.offer_many(offers(6)))
    got: list[int] = []
    while len(got) < 6:
        some = await queue.claim(10, wait=10)
        assert len(some) <= 2
        await asyncio.gather(*(message.ack() for message in some))
        got += [message.value for message in some]
    assert len(await offer) == 6
    assert sorted(got) == list(range(6))


async def test_an_offer_that_waits_for_room_ends_with_the_queue(client: Client) -> None:
    queue = client.reliable_queue("small", max_size=2, when_full="wait")
    many = asyncio.create_task(queue.offer_many(offers(4, ids=True)))
    await until(lambda: depths(queue), equals=(0, 2, 0, 0))
    one = asyncio.create_task(queue.offer(9))
    await asyncio.sleep(0.01)
    await queue.aclose()
    with pytest.raises(delayq.OutcomeUnknown) as caught:
        await many
    assert caught.value.stored == ("0", "1")
    with pytest.raises(delayq.Closed):
        await one


async def test_concurrent_claims_get_all_messages(jobs: Jobs) -> None:
    """No caller is told that the queue is empty while messages are left."""
    await jobs.offer_many(offers(450))
    claimed = await asyncio.gather(*(jobs.claim(100) for _ in range(6)))
    assert min(map(len, claimed)) >= 25
    assert sorted(message.value for messages in claimed for message in messages) == list(range(450))
    await jobs.offer_many(offers(40))
    claimed = await asyncio.gather(*(jobs.claim(100) for _ in range(4)))
    assert list(map(len, claimed)) == [10, 10, 10, 10]


# Order


@pytest.mark.every_server
async def test_messages_of_one_offer_keep_their_order(jobs: Jobs) -> None:
    await jobs.offer_many([Offer(value=n, id=f"{n * 7919 % 200:03}") for n in range(200)])
    await jobs.offer_many([Offer(value=n) for n in range(200, 400)])
    assert await all_values(jobs, 37) == list(range(400))


async def test_concurrent_offers_keep_their_order(jobs: Jobs) -> None:
    await asyncio.gather(*(jobs.offer(n, id=str(n * 7919 % 100)) for n in range(100)))
    assert await all_values(jobs) == list(range(100))


# Retries


async def test_a_failure_is_kept_and_retried_after_a_backoff(client: Client, store: Store) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, backoff=Backoff.explicit([HOUR, 3 * HOUR]))
    await queue.offer(1, id="a", priority=2)
    for attempt, waits in ((1, 1), (2, 3), (3, 3)):
        message = await claim_one(queue)
        assert message.attempt == attempt
        with pytest.raises(ZeroDivisionError):
            async with message:
                raise ZeroDivisionError(f"attempt {attempt}")
        stored = await store.look()
        stored.demand_no_orphans()
        assert hours(stored.live["a"][1]) == waits
        seen = await get(queue, "a")
        assert seen.attempt == attempt
        assert (seen.last_error or "").startswith("Traceback")
        assert (seen.last_error or "").endswith(f"ZeroDivisionError: attempt {attempt}")
        await store.let_pass(waits * HOUR)


async def test_the_last_attempt_makes_a_dead_letter(client: Client) -> None:
    queue = client.reliable_queue("jobs", max_attempts=2, backoff=Backoff.fixed(0))
    before = await client.server_time()
    await queue.offer("x", id="a", headers={"h": "1"}, priority=4)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such"):
            async with await claim_one(queue, wait=10):
                raise ValueError("no such order")
    assert await queue.claim() == []
    (letter,) = await queue.dead.list()
    assert (letter.id, letter.value, letter.headers, letter.priority) == ("a", "x", {"h": "1"}, 4)
    assert (letter.reason, letter.attempt) == ("attempts", 2)
    assert letter.error == "ValueError: no such order"
    assert letter.traceback.startswith("Traceback")
    assert before <= letter.enqueued_at <= letter.died_at <= await client.server_time()
    assert await queue.dead.redrive() == 1
    message = await claim_one(queue)
    assert (message.id, message.attempt, message.headers) == ("a", 1, {"h": "1"})


async def test_a_message_knows_its_limit_of_attempts(client: Client) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, max_attempts=3, backoff=Backoff.fixed(0))
    await queue.offer_many([Offer(most, max_attempts=most) for most in (None, 1, 4)])
    for number in range(1, 5):
        for message in await claim_all(queue):
            assert message.max_attempts == (message.value or 3)
            assert message.is_last_attempt is (number == message.max_attempts)
            await message.nack()
    assert await queue.dead.size() == 3
    # Attempts may be unlimited.
    endless = client.reliable_queue("endless", max_attempts=None, backoff=Backoff.fixed(0))
    await endless.offer(1)
    for attempt in range(1, 40):
        message = await claim_one(endless)
        assert (message.attempt, message.is_last_attempt) == (attempt, False)
        await message.nack()


async def test_a_handler_may_say_when_to_come_again(jobs: Jobs, store: Store) -> None:
    async with await leased(jobs, id="a"):
        raise delayq.RetryAfter(timedelta(hours=5), "the shop is closed")
    stored = await store.look()
    assert hours(stored.live["a"][1]) == 5
    assert (stored.errors, stored.attempts) == ({"a": "the shop is closed"}, {"a": (1, 0)})
    for instruction in (delayq.RetryAfter, delayq.Snooze):
        with pytest.raises(delayq.BadDelay):
            instruction(-1)
    # Whatever a rejection says, it is the reason.
    async with await leased(jobs):
        raise delayq.Reject("not leased to this consumer")
    (letter,) = await jobs.dead.list()
    assert (letter.reason, letter.error) == ("not leased to this consumer", "")


@pytest.mark.every_server
async def test_errors_are_bounded_and_keep_their_end(jobs: Jobs, store: Store) -> None:
    await (await leased(jobs)).nack(0, "x" * 100_000 + "the end \ud800 é")
    (error,) = (await store.look()).errors.values()
    assert error.endswith("the end ? é")
    assert len(error) == 8000
    await (await claim_one(jobs)).bury("r" * 100_000)
    (letter,) = await jobs.dead.list()
    assert letter.error == error
    assert len(letter.reason) <= 8000


@pytest.mark.every_server
async def test_dead_letters_keep_errors(client: Client, store: Store, raw: Any) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, max_attempts=2)

    async def lose(message: Message[int]) -> None:
        # As if two leases had been lost before.
        await raw.hset(store.keys.named("attempts"), message.id, "3-2::2")
        await store.let_pass(2 * LEASE)
        assert await queue.claim() == []
        with pytest.raises(delayq.LeaseLost):
            await message.ack()

    ends: dict[str, Callable[[Message[int]], Any]] = {
        "at the end": lambda message: message.nack(),
        "by lease": lose,
        "buried": lambda message: message.bury("no good"),
    }
    for how, error in itertools.product(ends, ('quo"te', "a\nb", "\x00\x1f\x7f/", "é \U0001f600")):
        await (await leased(queue)).nack(0, error)
        await ends[how](await claim_one(queue))
        (letter,) = await queue.dead.list()
        reason = "no good" if how == "buried" else "attempts"
        assert (letter.reason, letter.traceback) == (reason, error), how
        await queue.dead.purge()


# Dead letters


async def test_redriving_reports_progress_and_keeps_order(jobs: Jobs, faults: Faults) -> None:
    # A reply that is lost half way doubles nothing.
    faults.plan = lambda name, n: "lost" if (name, n) == (REDRIVE.name, 4) else None
    await jobs.offer_many([Offer(value=n, id=f"{n:03}") for n in range(250)])
    await bury_all(jobs)
    steps: list[tuple[int, int]] = []
    await jobs.offer(-1, HOUR, id="007")
    assert await jobs.dead.redrive(progress=lambda *step: steps.append(step)) == 249
    assert steps == [(done, 250) for done in range(10, 251, 10)]
    assert [letter.id for letter in await jobs.dead.list()] == ["007"]
    assert await all_values(jobs) == [n for n in range(250) if n != 7]


@pytest.mark.every_server
async def test_messages_that_no_worker_has_are_buried(jobs: Jobs, store: Store) -> None:
    await (await leased(jobs, id="tried")).nack(HOUR, "KeyError: 'to'")
    await leased(jobs, id="held")
    await jobs.offer_batch([Offer(1, delay=HOUR, id="member")], on_failure=Offer(2, id="alarm"))
    for n in range(2):
        await jobs.offer(n, id=f"acme-{n}", group="acme", priority=4)
    ids = ["tried", "held", "member", "acme-0", "never"]
    assert await jobs.bury_many(ids, "hope\ud800less") == [True, False, True, True, False]
    letters = await jobs.dead.list()
    assert {it.id: (it.reason, it.error, it.attempt, it.priority) for it in letters} == {
        "tried": ("hope?less", "KeyError: 'to'", 1, 0),
        "member": ("hope?less", "", 0, 0),
        "acme-0": ("hope?less", "", 0, 4),
    }
    assert [message.id for message in await claim_all(jobs)] == ["acme-1", "alarm"]
    assert await jobs.dead.redrive() == 3
    assert await jobs.bury("tried", "again")
    assert (await store.look()).live.keys() == {"held", "alarm", "acme-1", "member", "acme-0"}


# By id


@pytest.mark.every_server
async def test_many_messages_are_cancelled_or_rescheduled(jobs: Jobs, store: Store) -> None:
    await jobs.offer_many(offers(500, ids=True, delay=HOUR))
    await leased(jobs, 3, id="held")
    ids = [*map(str, range(450)), "never", "held", "7"]
    assert await jobs.reschedule_many(iter(ids), 2 * HOUR) == [True] * 450 + [False, False, True]
    live = (await store.look()).live
    assert {name for name, (_, moment) in live.items() if hours(moment) == 2} == {*ids[:450]}
    assert await jobs.cancel_many(ids) == [True] * 450 + [False, False, True]
    assert await jobs.cancel_many([]) == []
    assert await depths(jobs) == (50, 0, 1, 0)


CHANGES: dict[str, Any] = {
    "offer": lambda jobs, _: jobs.offer(1),
    "reschedule": lambda jobs, _: jobs.reschedule("a", 0.01),
    "nack": lambda _, held: held.nack(0.01),
    "release": lambda _, held: held.release(),
    "extend": lambda _, held: held.extend(0.2),
    "resume": lambda jobs, _: jobs.resume(),
    "redrive": lambda jobs, _: jobs.dead.redrive(),
}


@pytest.mark.parametrize("how", CHANGES)
async def test_every_change_wakes_a_claim_of_another_client(
    server: PrivateServer, jobs: Jobs, how: str
) -> None:
    async with delayq.connect(server.url, resync_interval=HOUR) as other:
        if how != "offer":
            await jobs.offer(1, HOUR if how == "reschedule" else 0, id="a")
        held = await claim_one(jobs) if how in ("nack", "release", "extend") else None
        if how == "redrive":
            await bury_all(jobs)
        if how == "resume":
            await jobs.pause()
        waiting = asyncio.create_task(other.reliable_queue("jobs", lease=LEASE).claim(wait=60))
        # Wait until it has looked and found nothing.
        await until(lambda: other.statistics().waiting and other.statistics().round_trips > 3)
        await asyncio.sleep(0.05)
        await CHANGES[how](jobs, held)
        (message,) = await asyncio.wait_for(waiting, 30)
        assert message.value == 1


async def test_reading_messages_leases_none(jobs: Jobs) -> None:
    await jobs.offer(1, id="a", priority=2)
    for message in (await get(jobs, "a"), *await jobs.peek(), *await jobs.list("ready")):
        assert (message.value, message.attempt, message.priority) == (1, 0, 2)
        assert message.state == "ready"
        for settle in (message.ack, message.nack, message.release, partial(message.bury, "x")):
            with pytest.raises(delayq.LeaseLost, match="only read"):
                await settle()
        with pytest.raises(delayq.LeaseLost):
            async with message:
                pass
    assert await values(jobs) == [1]


@pytest.mark.every_server
async def test_stats_are_exact_with_any_number_of_leases(jobs: Jobs, store: Store) -> None:
    await jobs.offer_many([Offer(value=n, priority=n % 3) for n in range(1_100)])
    for _ in range(11):
        assert len(await jobs.claim(100)) == 100
    await store.let_pass(2 * HOUR)
    # These leases have ended; the ones claimed below have not.
    await jobs.offer_many(offers(1_100, priority=9))
    await jobs.offer_many(offers(10, delay=9 * HOUR))
    for claimed in range(0, 1_100, 100):
        assert await depths(jobs) == (10, 2_200 - claimed, claimed, 0)
        assert len(await jobs.claim(100)) == 100
    assert await depths(jobs) == (10, 1_100, 1_100, 0)


async def test_callers_of_two_leases_learn_together_that_nothing_is_left(client: Client) -> None:
    some: Jobs = client.reliable_queue("jobs", lease=30)
    others: Jobs = client.reliable_queue("jobs", lease=60)
    assert await some.claim() == await others.claim() == []
    await some.offer(1)
    async with asyncio.timeout(20):
        taken = await asyncio.gather(some.claim(), others.claim())
    assert sorted(map(len, taken)) == [0, 1]


# Closing


async def test_a_closed_queue_refuses_everything(server: PrivateServer) -> None:
    async with delayq.connect(server.url) as client:
        async with client.reliable_queue("jobs", lease=LEASE) as queue:
            await queue.offer_many(offers(3))
            held = await queue.claim(2)
        await queue.aclose()
        for call in (
            queue.offer(1),
            queue.offer_many([]),
            queue.claim(),
            queue.cancel("a"),
            queue.reschedule("a", 1),
            queue.get("a"),
            queue.stats(),
            queue.list("ready"),
            queue.peek(),
            queue.purge(),
            queue.pause(),
            queue.resume(),
            anext(aiter(queue)),
            held[0].ack(),
        ):
            with pytest.raises(delayq.Closed):
                await call
        assert repr(queue) == "<ReliableQueue 'jobs'>"
        # It can be opened again.
        assert await values(client.reliable_queue("jobs", lease=LEASE)) == [2]
    with pytest.raises(delayq.Closed):
        await held[1].nack()


async def test_a_codec_that_makes_no_bytes_is_refused(client: Client, raw: Any) -> None:
    codec: Any = type(
        "Bad", (), {"encode": lambda _, value: str(value), "decode": lambda _, data: {}[data]}
    )
    queue = client.reliable_queue("jobs", codec=codec())
    with pytest.raises(delayq.EncodeError, match=r"Bad\.encode returned str"):
        await queue.offer(1)
    assert await raw.dbsize() == 0
    await raw.zadd("delayq:{jobs}:waiting", {"a": 1})
    await raw.hset("delayq:{jobs}:bodies", "a", b"1 \n1")
    (message,) = await queue.claim()
    with pytest.raises(delayq.DecodeError) as caught:
        _ = message.value
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.every_server
async def test_a_reply_holds_only_a_few_large_bodies(jobs: Jobs) -> None:
    await jobs.offer_many([Offer("x" * 100_000) for _ in range(7)])
    sizes = []
    while some := await values(jobs):
        sizes.append(len(some))
    # The first message, and 256 KiB beyond it.
    assert sizes == [3, 3, 1]
    # A body larger than that comes alone.
    await jobs.offer_many([Offer("x" * 400_000), Offer("small"), Offer("y" * 400_000)])
    for first_letters in (["x", "s"], ["y"]):
        assert [message.value[0] for message in await jobs.claim(100)] == first_letters


@pytest.mark.every_server
async def test_dead_letters_of_one_id_lie_side_by_side(jobs: Jobs, store: Store) -> None:
    for value in ("first", "second", "third"):
        await (await leased(jobs, value, id="order-42")).bury(f"reason of {value}")
    letters = await jobs.dead.list()
    assert [(letter.id, letter.value, letter.reason) for letter in letters] == [
        ("order-42", value, f"reason of {value}") for value in ("first", "second", "third")
    ]
    assert await jobs.dead.size() == 3
    for value in ("first", "second"):
        # Only one message of an id lives at a time.
        assert await jobs.dead.redrive(["order-42"]) == 1
        assert await jobs.dead.redrive(["order-42"]) == await jobs.dead.redrive() == 0
        assert await values(jobs, 5) == [value]
    await (await leased(jobs, "fourth", id="order-42")).bury("no good")
    assert await jobs.dead.purge(["order-42"]) == 2
    assert (await store.look()).dead_messages == {}


async def test_a_bad_reply_to_a_claim_hands_out_nothing(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.offer(1)
    client = jobs._open.partitions[0].store.client
    run_once = client.run_once

    async def break_one(*call: Any) -> Any:
        monkeypatch.undo()
        await run_once(*call)
        return ["?"]

    monkeypatch.setattr(client, "run_once", break_one)
    message = await claim_one(jobs, wait=60)
    # The messages claimed by the first call went back, and its attempt does not count.
    assert (message.value, message.attempt) == (1, 1)


KEYS = ReliableKeys.of("jobs")
DAY = 86_400


async def die(queue: Jobs, *ids: str) -> None:
    """Make a dead letter of a new message under each id, in that order."""
    for key in ids:
        await (await leased(queue, 0, id=key)).bury("why")


async def grow_old(raw: Any, *names: str, by: float) -> None:
    """Make it as if these letters had died ``by`` seconds earlier."""
    for name in names:
        await raw.zincrby(KEYS.dead, -by * 1_000_000, name)


@pytest.mark.every_server
async def test_no_call_drops_more_than_a_bounded_number(jobs: Jobs, raw: Any) -> None:
    names = [f"{n:04d}" for n in range(1500)]
    await raw.zadd(KEYS.dead, {name: n + 1 for n, name in enumerate(names)})
    await raw.hset(KEYS.dead_messages, mapping=dict.fromkeys(names, "{}\n1\n0"))
    await jobs.configure(keep_dead=60, max_dead=10)
    left = [await jobs._open.partitions[0].store.trim_dead() for _ in range(4)]
    assert left == [600, 600, 300, 0]
    assert await raw.hlen(KEYS.dead_messages) == 0


@pytest.mark.every_server
async def test_a_limit_that_cannot_be_read_is_none(jobs: Jobs, raw: Any) -> None:
    await die(jobs, "a")
    # Without a limit, letters stay.
    await grow_old(raw, "a", by=10_000 * DAY)
    for n, text in enumerate(("junk", "-1", "nan", "1e400", "")):
        await raw.hset(KEYS.settings, mapping={"keep_dead": text, "max_dead": text})
        await die(jobs, "b")
        assert await raw.zcard(KEYS.dead) == 2 + n, text


async def test_a_user_that_may_only_look_sees_letters_that_are_about_to_go(
    jobs: Jobs, server: PrivateServer, raw: Any
) -> None:
    await die(jobs, "a", "b")
    await jobs.configure(max_dead=1)
    rules = acl_rules("dashboard", reliable=["jobs"])
    await raw.execute_command("ACL", "SETUSER", "reader", "on", ">secret", *rules)
    url = server.url.replace("://", "://reader:secret@")
    async with delayq.connect(url) as theirs:
        letters = await theirs.reliable_queue("jobs").dead.list()
        assert [letter.id for letter in letters] == ["a", "b"]
    assert [letter.id for letter in await jobs.dead.list()] == ["b"]


async def test_the_limit_of_dead_letters_applies_to_each_partition(client: Client) -> None:
    queue = client.reliable_queue("parts", lease=LEASE, partitions=4, max_dead=1)
    await die(queue, *(f"{n}" for n in range(40)))
    assert len(await queue.dead.list()) == 4
    assert TRIM_DEAD.roles == {"admin"}
