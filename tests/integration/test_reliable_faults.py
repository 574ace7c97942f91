"""Each call of a reliable queue fails in turn: the keys and the error that each of them leaves."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq import Limit, Offer
from delayq._engine.store import RECHECK
from delayq._reliable.bodies import PlainMessage
from delayq._reliable.scripts import CANCEL, CLAIM, OFFER, OFFER_NEW
from delayq._reliable.settings import StoredSettings
from tests.support.depth import in_gate
from tests.support.links import Links
from tests.support.reliable import bodies, bury_all, claim_one, leased, offers
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import HOUR, Store, Stored, hours
from tests.support.waiting import be_impatient, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from delayq import Client, Message
    from tests.integration.test_faults import Faults
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

OFFERS = (OFFER.name, OFFER_NEW.name)


def working(_name: str, _n: int) -> str | None:
    """Plan no fault."""
    return None


def nth_call(faults: Faults, plan: str, n: int) -> Callable[[str, int], str | None]:
    """Plan faults for the calls from now on, of which the ``n``-th is the first to fail."""
    before = len(faults.calls)
    return lambda _name, _n: PLANS[plan](len(faults.calls) - before, n)


def meaning(stored: Stored) -> dict[str, Any]:
    """Return what is stored, without anything that differs from run to run."""
    stored.demand_no_orphans()
    schedules = {
        name: {fact: facts[fact] for fact in SCHEDULE_FACTS if fact in facts}
        for name, record in stored.schedules.items()
        for facts in [json.loads(record.partition(b"\n")[0])]
    }

    def plain(key: str) -> str:
        # The id of an occurrence contains its due time.
        return re.sub(r"@\d{16}$", "@", key)

    def due(key: str) -> int | str:
        """Return hours from now, or the moment itself for a cron expression, which fixes it."""
        name, _, moment = key.rpartition("@")
        is_cron = name in schedules and schedules[name]["every"] == "0"
        return moment if is_cron else hours(stored.live[key][1])

    return {
        "live": [(plain(key), stored.live[key][0], due(key)) for key in stored.order],
        "payloads": {plain(key): body.partition(b"\n")[2] for key, body in stored.bodies.items()},
        "schedules": schedules,
        "leased": set(stored.leases),
        "attempts": stored.attempts,
        "errors": {key: error.rsplit("\n", 1)[-1] for key, error in stored.errors.items()},
        "done": set(stored.remembered),
        "dead": sorted(stored.dead),
        "paused": stored.paused,
        "saved": stored.checkpoints,
    }


SCHEDULE_FACTS = ("timing", "version", "priority", "ttl", "every", "last")


# The operations. Each finds what it needs: "held" is leased to us, "later" waits, "dead" is a dead
# letter; the queue is paused.


async def handle(message: Message[int]) -> None:
    async with message:
        pass


async def fail(message: Message[int]) -> None:
    error = ZeroDivisionError("divided")
    with suppress(ZeroDivisionError):
        async with message:
            raise error


async def be_cancelled(message: Message[int]) -> None:
    with suppress(asyncio.CancelledError):
        async with message:
            raise asyncio.CancelledError


NOT_REPEATED = ("cancel", "cancel_many", "bury waiting", "unschedule")
OPERATIONS: dict[str, Any] = {
    "offer": lambda queue, _: queue.offer(7, HOUR, id="new"),
    "replace": lambda queue, _: queue.offer(7, HOUR, id="later", on_duplicate="replace"),
    "offer_many": lambda queue, _: queue.offer_many(
        [Offer(value=n, id=f"new {n}", delay=HOUR) for n in range(5)]
    ),
    "ack": lambda _, message: message.ack(),
    "nack": lambda _, message: message.nack(2 * HOUR, "it broke"),
    "nack at once": lambda _, message: message.nack(0),
    "extend": lambda _, message: message.extend(5 * HOUR),
    "save": lambda _, message: message.save(7),
    "step": lambda _, message: message.step("charge", int),
    "bury": lambda _, message: message.bury("no good"),
    "release": lambda _, message: message.release(),
    "handle": lambda _, message: handle(message),
    "fail": lambda _, message: fail(message),
    "be cancelled": lambda _, message: be_cancelled(message),
    "cancel": lambda queue, _: queue.cancel("later"),
    "cancel_many": lambda queue, _: queue.cancel_many(["later", "dead", "none"]),
    "bury waiting": lambda queue, _: queue.bury_many(["later", "none"], "no good"),
    "reschedule": lambda queue, _: queue.reschedule("later", 9 * HOUR),
    "reschedule_many": lambda queue, _: queue.reschedule_many(["later", "none"], 9 * HOUR),
    "get": lambda queue, _: queue.get("later"),
    "stats": lambda queue, _: queue.stats(),
    "list": lambda queue, _: queue.list("delayed"),
    "peek": lambda queue, _: queue.peek(3),
    "purge": lambda queue, _: queue.purge(),
    "pause": lambda queue, _: queue.pause(),
    "resume": lambda queue, _: queue.resume(),
    "schedule": lambda queue, _: queue.schedule("new", every=9 * HOUR, value=8),
    "schedule a cron": lambda queue, _: queue.schedule("new", cron="0 0 1 1 *", value=8),
    "schedule otherwise": lambda queue, _: queue.schedule("known", every=8 * HOUR, value=9),
    "unschedule": lambda queue, _: queue.unschedule("known"),
    "pause a schedule": lambda queue, _: queue.pause_schedule("known"),
    "resume a schedule": lambda queue, _: queue.resume_schedule("known"),
    "schedules": lambda queue, _: queue.schedules(),
    "dead.size": lambda queue, _: queue.dead.size(),
    "dead.list": lambda queue, _: queue.dead.list(),
    "dead.redrive": lambda queue, _: queue.dead.redrive(),
    "dead.redrive one": lambda queue, _: queue.dead.redrive(["dead"]),
    "dead.purge": lambda queue, _: queue.dead.purge(),
    "dead.purge one": lambda queue, _: queue.dead.purge(["dead"]),
}

# The block's own error propagates, so the error of settling is logged.
LOGS = ("fail", "be cancelled")
# After a lost reply, it is unknown whether the queue was paused or how much was dropped.
VARYING = ("resume", "purge", "get", "list", "peek", "dead.list", "stats")
PLANS: dict[str, Callable[[int, int], str | None]] = {
    "unsent": lambda call, n: "unsent" if call == n else None,
    "lost": lambda call, n: "lost" if call == n else None,
    "unsent ever after": lambda call, n: "unsent" if call >= n else None,
    "lost ever after": lambda call, n: "lost" if call >= n else None,
    "lost, then unsent ever after": lambda call, n: (
        "lost" if call == n else "unsent" if call > n else None
    ),
    "unsent, then lost ever after": lambda call, n: (
        "unsent" if call == n else "lost" if call > n else None
    ),
}


async def prepare(client: Client, name: str, operation: str) -> tuple[Jobs, Message[int]]:
    # With dedup_window, an ack has more to do.
    queue = client.reliable_queue(
        name, lease=LEASE, backoff=delayq.Backoff.fixed(3 * HOUR), dedup_window=HOUR
    )
    await queue.offer(1, id="dead", priority=3)
    (dead,) = await queue.claim()
    await dead.bury("no good", "it broke")
    await queue.offer(2, id="held", priority=1, ttl=9 * HOUR)
    (held,) = await queue.claim()
    await queue.offer(3, 2 * HOUR, id="later")
    if "schedule" in operation:
        await queue.schedule("known", every=7 * HOUR, value=9)
    if operation == "resume":
        await queue.pause()
    return queue, held


def logged(caplog: pytest.LogCaptureFixture) -> Exception | None:
    """Return the error that a block has logged, if any. Its wording and its type agree."""
    lines = [
        record.getMessage() for record in caplog.records if "given back" in record.getMessage()
    ]
    if not lines:
        return None
    (line,) = lines
    if "may not have been given back: OutcomeUnknown: " in line:
        return delayq.OutcomeUnknown(line)
    assert "could not be given back: ServerUnavailable: " in line
    return delayq.ServerUnavailable(line)


# One of each kind. The others differ from one of these in their scripts alone.
USUAL = {"offer", "offer_many", "ack", "nack", "handle", "fail", "be cancelled", "cancel_many"}
USUAL |= {"reschedule", "purge", "schedule", "unschedule", "dead.redrive"}


@pytest.mark.parametrize(
    "operation", [name if name in USUAL else in_gate(name) for name in OPERATIONS]
)
async def test_an_operation_has_its_whole_effect_or_none_and_tells_truly(
    client: Client,
    raw: Any,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    act = OPERATIONS[operation]
    queue, held = await prepare(client, "undisturbed", operation)
    none = meaning(await Store(raw, "undisturbed").look())
    count = len(faults.calls)
    answer = await act(queue, held)
    count = len(faults.calls) - count
    whole = meaning(await Store(raw, "undisturbed").look())
    for plan, n in itertools.product(PLANS, range(1, count + 1)):
        name = f"call {n} {plan}"
        lasts = plan.endswith("ever after")
        with monkeypatch.context() as patience:
            if lasts:
                # A queue that opens from here on gives up its offers after this time.
                be_impatient(patience, 0.3)
            queue, held = await prepare(client, name, operation)
            caplog.clear()
            faults.plan = nth_call(faults, plan, n)
            error: Exception | None = None
            if lasts:
                be_impatient(patience)
            try:
                again = await act(queue, held)
            except delayq.ServerError as raised:
                error = raised
        faults.plan = working
        after = meaning(await Store(raw, name).look())
        if operation in LOGS:
            assert error is None, name
            error = logged(caplog)
        if error is None:
            assert after == whole, name
            if operation not in VARYING and "schedule" not in operation:
                assert again == answer, name
        elif isinstance(error, delayq.OutcomeUnknown):
            assert after in (none, whole), name
        else:
            assert after == none, f"{name}: it says that nothing was done"
        # A lost cancel is not repeated, because the message may exist again by then.
        if plan == "unsent" or (plan == "lost" and operation not in NOT_REPEATED):
            assert error is None, f"{name}: one fault is overcome"


# Offers


async def test_a_repeated_offer_of_a_handled_message_is_not_stored(
    jobs: Jobs, faults: Faults, store: Store
) -> None:
    # The server has to know the script, or the first call is not carried out.
    await jobs.cancel(await jobs.offer(0, HOUR))
    faults.calls.clear()
    faults.plan = lambda name, n: ("lost" if n == 1 else "unsent") if name in OFFERS else None
    offer = asyncio.create_task(jobs.offer(7))
    message = await claim_one(jobs, wait=10)
    await message.ack()
    faults.plan = working
    assert await offer == message.id
    assert await bodies(store) == 0
    assert await jobs.claim(1) == []


@pytest.mark.every_server
async def test_a_call_that_arrives_after_later_calls_is_void(jobs: Jobs, store: Store) -> None:
    """The call was given up and repeated; then the first try arrives."""
    for n in range(2):
        await jobs.offer(n, HOUR)
    partition = jobs._open.partitions[0]
    late = PlainMessage("late", 0, b"\n1")
    for max_size in ("0", "9"):
        jobs._open.settings.stored = StoredSettings({"partitions": "1", "max_size": max_size})
        request = partition.offers.request(partition.offers.call_keys[0], 1, [late])
        with pytest.raises(delayq.ServerRefused, match="LATE"):
            await partition.store.client.run(*request)
    assert await bodies(store) == 2


@pytest.mark.every_server
async def test_the_record_of_calls_does_not_stay(server: PrivateServer, raw: Any) -> None:
    async with delayq.connect(server.url) as client:
        await client.reliable_queue("jobs").offer(1)
        (key,) = await raw.keys("*:call:*")
        assert 60 < await raw.ttl(key) <= 120
    assert await raw.keys("*:call:*") == []


@pytest.mark.parametrize("fault", ["unsent", "lost"])
async def test_offer_many_names_the_stored_messages_when_it_fails_half_way(
    jobs: Jobs, faults: Faults, fault: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes 200 messages. The second call and its repetitions fail."""
    # From now on, the server knows the script.
    await jobs.offer(0, HOUR, id="first")
    await jobs.cancel("first")
    be_impatient(monkeypatch)
    monkeypatch.setattr(jobs._open.partitions[0].offers.batcher._plan, "expires_after", 0.05)
    if fault == "unsent":
        faults.plan = lambda name, _n: fault if name in OFFERS else None
        with pytest.raises(delayq.ServerUnavailable):
            await jobs.offer_many(offers(600, delay=HOUR))
        assert await bodies(store) == 0
    faults.calls.clear()
    faults.plan = lambda name, n: fault if name in OFFERS and n >= 2 else None
    with pytest.raises(delayq.OutcomeUnknown, match="200 of 600 messages are stored") as caught:
        await jobs.offer_many(offers(600, ids=True, delay=HOUR))
    assert caught.value.stored == tuple(str(n) for n in range(200))
    assert set(caught.value.stored) <= set((await store.look()).bodies)


# Claims


async def test_a_claim_that_does_not_wait_raises_if_the_server_is_away(
    jobs: Jobs, faults: Faults
) -> None:
    await jobs.offer(1)
    errors = {"unsent": delayq.ServerUnavailable, "lost": delayq.OutcomeUnknown}
    for fault, error in errors.items():
        faults.plan = lambda name, _n, fault=fault: fault if name == CLAIM.name else None  # type: ignore[misc]
        with pytest.raises(error):
            await jobs.claim()
        assert await jobs.claim(wait=0.05) == []
    faults.plan = working
    message = await claim_one(jobs, wait=20)
    assert (message.value, message.attempt) == (1, 1)


async def loop_and_leave(queue: Jobs) -> list[Message[int]]:
    taken: list[Message[int]] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1), aclosing(queue.__aiter__()) as messages:  # type: ignore[type-var]
            async for message in messages:
                taken.append(message)
                if len(taken) == 3:
                    break
    return taken


CLAIMING: dict[str, Callable[[Jobs], Any]] = {
    "claim_without_waiting": lambda queue: queue.claim(3),
    "claim_and_wait": lambda queue: queue.claim(3, wait=0.1),
    "loop_and_leave": loop_and_leave,
}


@pytest.mark.parametrize("operation", CLAIMING)
async def test_a_claim_hands_each_message_out_once_with_any_faults(
    client: Client, raw: Any, faults: Faults, operation: str
) -> None:
    # The longest path: claim, find messages claimed in vain, give them back, claim again.
    for plan, n in itertools.product(PLANS, range(1, 7)):
        rate = Limit(rate=5, per=LEASE)
        queue = client.reliable_queue(f"call {n} {plan}", lease=LEASE, limit=rate)
        await queue.offer_many([Offer(n, id=str(n), priority=n % 2) for n in range(5)])
        faults.plan = nth_call(faults, plan, n)
        got: list[Message[int]] = []
        with suppress(delayq.ServerError):
            got += await CLAIMING[operation](queue)
        faults.plan = working
        # All the others arrive now, and none of them has an attempt counted that never happened.
        async with asyncio.timeout(20):
            while len(got) < 5:
                got += await queue.claim(5, wait=10)
        assert sorted((message.id, message.attempt) for message in got) == [
            (str(value), 1) for value in range(5)
        ], queue.name
        assert await queue.claim(5) == []
        await asyncio.gather(*(message.ack() for message in got))
        stored = await Store(raw, queue.name).look()
        stored.demand_no_orphans()
        assert stored.bodies == {}
        await queue.aclose()


async def test_closing_gives_back_messages_claimed_by_a_lost_reply(
    server: PrivateServer, faults: Faults, jobs: Jobs
) -> None:
    await jobs.offer(1)
    async with delayq.connect(server.url) as client:
        faults.plan = lambda name, _n: "lost" if name == CLAIM.name else None
        with pytest.raises(delayq.OutcomeUnknown):
            await client.reliable_queue("jobs", lease=LEASE).claim()
    faults.plan = working
    message = await claim_one(jobs)
    assert (message.value, message.attempt) == (1, 1)


# A full server

FULL: dict[str, Any] = {
    **{
        name: OPERATIONS[name]
        for name in ("ack", "bury", "release", "extend", "cancel", "purge", "dead.purge")
    },
    "nack": lambda _, message: message.nack(0, "it broke"),
    "claim": lambda queue, _: queue.claim(),
    "redrive": OPERATIONS["dead.redrive"],
}


@asynccontextmanager
async def full(raw: Any) -> AsyncIterator[None]:
    """Let the server refuse what needs more memory."""
    await raw.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await raw.config_set("maxmemory", 0)


@pytest.mark.every_server
async def test_a_full_server_refuses_only_offers(client: Client, raw: Any) -> None:
    for operation, act in FULL.items():
        queue, message = await prepare(client, operation, operation)
        store = Store(raw, operation)
        await queue.offer(4, id="due")
        # There are ids to forget: that must not let an offer through.
        await (await leased(queue, 5, id="done", priority=9)).ack()
        await store.let_pass(2 * HOUR)
        async with full(raw):
            before = meaning(await store.look())
            with pytest.raises(delayq.ServerRefused, match=r"OOM|memory"):
                await queue.offer(6)
            assert meaning(await store.look()) == before, operation
            await act(queue, message)
        (await store.look()).demand_no_orphans()


@pytest.mark.every_server
async def test_a_full_server_lets_messages_die(client: Client, raw: Any, store: Store) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, max_attempts=1, expired="dead")
    await queue.offer(1, id="expires", ttl=HOUR)
    assert (await leased(queue, 2, id="dies", priority=1)).id == "dies"
    # It has lost two leases before this one.
    await raw.hset(store.keys.named("attempts"), "dies", "2-2::2")
    await store.let_pass(2 * HOUR)
    async with full(raw):
        assert await queue.claim() == []
    reasons = {letter.id: letter.reason for letter in await queue.dead.list()}
    assert reasons == {"expires": "expired", "dies": "attempts"}


@pytest.mark.parametrize(
    ("operation", "n", "done"),
    [("purge", 4, 200), ("dead.redrive", 5, 10), ("dead.purge", 4, 25)],
)
async def test_work_in_steps_that_fails_half_way_says_how_far_it_came(
    jobs: Jobs,
    faults: Faults,
    operation: str,
    n: int,
    done: int,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await jobs.offer_many(offers(450))
    if operation != "purge":
        await bury_all(jobs)
    be_impatient(monkeypatch)
    before = len(faults.calls)

    def plan(name: str, _n: int) -> str | None:
        # The client looks at its queues in the meantime; do not count those calls.
        made = [call for call in faults.calls[before:] if call not in (CLAIM.name, RECHECK.name)]
        return "unsent" if len(made) >= n and name in made else None

    faults.plan = plan
    words = f"^{done} messages were processed, then: planned$"
    with pytest.raises(delayq.OutcomeUnknown, match=words):
        await OPERATIONS[operation](jobs, None)
    (await store.look()).demand_no_orphans()


@pytest.mark.every_server
async def test_an_offer_refused_on_repetition_may_be_stored(own_server: PrivateServer) -> None:
    async with (
        Links(own_server, tcp=True) as links,
        delayq.connect(links.url) as client,
        Redis.from_url(own_server.unix_url, socket_timeout=60) as redis,
    ):
        raw: Any = redis
        jobs = client.reliable_queue("jobs")
        # After these offers, the server knows both forms of the script.
        await jobs.offer(1)
        await jobs.offer(2)
        links.stall("replies")
        offering = asyncio.create_task(jobs.offer(3))
        await until(lambda: raw.hlen("delayq:{jobs}:bodies"), equals=3)
        await raw.execute_command("ACL", "SETUSER", "default", "-hset")
        links.cut()
        links.heal()
        with pytest.raises(delayq.OutcomeUnknown):
            await offering


async def test_many_messages_are_cancelled_in_few_calls_and_an_error_says_how_far_they_came(
    jobs: Jobs, faults: Faults
) -> None:
    await jobs.offer_many(offers(500, ids=True, delay=HOUR))
    assert await jobs.cancel("499")
    faults.calls.clear()
    faults.plan = lambda name, n: "lost" if (name, n) == (CANCEL.name, 2) else None
    with pytest.raises(delayq.OutcomeUnknown, match="100 messages"):
        await jobs.cancel_many(map(str, range(499)))
    assert faults.calls.count(CANCEL.name) == 2
    # The call whose reply was lost was carried out.
    assert (await jobs.stats()).delayed == 299
