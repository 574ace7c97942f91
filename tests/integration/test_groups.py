"""Groups take turns, and limits are exact, whatever becomes of the messages."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Limit, Offer, OutcomeUnknown
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import ACK, FINISH, REGISTER, TALLY
from delayq._reliable.store import ReliableStore
from tests.support.reliable import Jobs, claim_all, claim_one, get, values
from tests.support.reliable_store import Store
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, Message
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer


def of_group(group: str | None, *numbers: int, **fields: Any) -> list[Offer[int]]:
    return [Offer(number, group=group, **fields) for number in numbers]


async def claimed(queue: Jobs) -> list[int]:
    """Claim what may run, and keep it."""
    return [message.value for message in await queue.claim(10)]


def calls(faults: Faults) -> int:
    """Count the calls so far that concern messages: no re-checks, and no reports to the history,
    both of which may come in between.
    """
    scripts = [name for name in faults.calls if name.startswith("reliable/")]
    return len(scripts) - scripts.count(TALLY.name) - scripts.count(REGISTER.name)


async def one_by_one(queue: Jobs) -> list[int]:
    """Claim and acknowledge every due message, one at a time."""
    claimed_values = []
    while messages := await queue.claim():
        claimed_values.append(messages[0].value)
        await messages[0].ack()
    return claimed_values


async def test_a_message_knows_its_group(client: Client) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer(1, group="tenant 42/é%", id="a")
    assert (await get(jobs, "a")).group == "tenant 42/é%"
    message = await claim_one(jobs)
    assert message.group == "tenant 42/é%"
    await message.ack()
    await jobs.offer(2)
    assert (await claim_one(jobs)).group is None
    name: Any
    for name in ("", "a\0b", "x" * 513, 5):
        with pytest.raises(delayq.BadInput, match="group"):
            await jobs.offer(1, group=name)
        with pytest.raises(delayq.BadInput, match="group"):
            await jobs.groups.set_limit(name, Limit())


async def test_many_lost_leases_let_no_group_exceed_its_limit(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", lease=3600, group_limit=Limit(concurrency=1))
    await jobs.offer_many([Offer(n, group=f"{n % 130}") for n in range(260)])
    assert len(await claim_all(jobs)) == 130
    # One call looks at no more than 100 of them.
    await Store(raw, "jobs").let_pass(3601)
    running: list[Message[int]] = []
    for _ in range(3):
        running += [*await jobs.claim(), *await claim_all(jobs)]
        assert max(Counter(message.group for message in running).values()) == 1
        await running.pop(0).ack()
    assert len(running) >= 128


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        *((how, "group_limit") for how in ("ack", "nack", "bury", "release", "snooze")),
        ("ack", "limit"),
        ("nack", "limit"),
    ],
)
async def test_a_freed_slot_wakes_a_waiting_client_at_once(
    server: PrivateServer, faults: Faults, how: str, kind: Any
) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"nack": (3600,), "snooze": (3600,), "bury": ("why",)}
    async with delayq.connect(server.url, resync_interval=3600) as other:
        options: dict[str, Any] = {kind: Limit(concurrency=1)}
        jobs = other.reliable_queue("jobs", lease=3600, **options)
        await jobs.offer_many(of_group("a", 0, 1, 2))
        # An acknowledgement is sent twice if the server does not know its script yet.
        await (await claim_one(jobs)).ack()
        first = await claim_one(jobs)
        waiting = asyncio.create_task(jobs.claim(wait=60))
        await until(lambda: jobs._open.partitions[0].wakeups.plan.is_up_to_date)
        before = calls(faults)
        await getattr(first, how)(*arguments.get(how, ()))
        (message,) = await waiting
        assert message.value == (1 if how == "release" else 2)
        # One call freed the slot, and one claimed the message.
        assert calls(faults) == before + 2


@dataclass
class Two:
    """Two clients of a queue whose messages run one at a time: the first one has one of them."""

    first: Client
    jobs: Jobs
    held: Message[int]
    others: Jobs

    async def wait(self, jobs: Jobs) -> asyncio.Task[list[Message[int]]]:
        """Wait for a message, and return once the client relies on being woken for it."""
        waiting = asyncio.create_task(jobs.claim(wait=60))
        plan, callers = jobs._open.partitions[0].wakeups.plan, jobs._open.dispatcher.caller_queue
        await until(lambda: callers.has_patient_callers and plan.is_up_to_date)
        return waiting


@asynccontextmanager
async def two(server: PrivateServer, **settings: Any) -> AsyncIterator[Two]:
    # No message of these tests arrives by a re-check.
    async with (
        delayq.connect(server.url, resync_interval=3600) as first,
        delayq.connect(server.url, resync_interval=3600) as second,
    ):
        jobs: Jobs = first.reliable_queue("jobs", lease=3600, **settings)
        others: Jobs = second.reliable_queue("jobs", lease=3600)
        await jobs.offer_many(of_group("a", *range(4)))
        # Each script is sent twice if the server does not know it yet.
        await (await claim_one(jobs)).ack()
        yield Two(first, jobs, await claim_one(jobs), others)


LIMITED = pytest.mark.parametrize(
    "settings",
    [{"limit": Limit(concurrency=1)}, {"group_limit": Limit(concurrency=1), "keep": 60}],
    ids=["limit", "group limit and results"],
)


@LIMITED
@pytest.mark.usefixtures("_last_reports_arrive")
@pytest.mark.parametrize("then", ["waits no more", "closes"])
async def test_a_slot_reaches_another_client_if_its_own_no_longer_waits(
    server: PrivateServer, settings: Any, then: str
) -> None:
    async with two(server, **settings) as both:
        theirs = await both.wait(both.others)
        ours = await both.wait(both.jobs)
        acked = asyncio.create_task(both.held.ack())
        # It leaves while somebody waits here.
        await asyncio.sleep(0)
        ours.cancel()
        await asyncio.wait([ours])
        if then == "closes":
            await both.first.aclose()
        await acked
        assert [each.value for each in await asyncio.wait_for(theirs, 30)] == [2]


@LIMITED
async def test_a_slot_is_taken_although_the_reply_that_frees_it_is_lost(
    server: PrivateServer, faults: Faults, settings: Any
) -> None:
    async with two(server, **settings) as both:
        ours = await both.wait(both.jobs)
        lost = set[str]()

        def plan(name: str, _n: int) -> str | None:
            if name in (ACK.name, FINISH.name) and not lost:
                lost.add(name)
                return "lost"
            return None

        faults.plan = plan
        with suppress(OutcomeUnknown):
            await both.held.ack()
        assert lost
        assert [each.value for each in await asyncio.wait_for(ours, 30)] == [2]


async def test_a_refilled_rate_wakes_who_waits(client: Client, faults: Faults, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", group_limit=Limit(rate=2, per=3600))
    await jobs.offer_many(of_group("a", 1, 2, 3))
    for _ in range(2):
        await (await claim_one(jobs)).ack()
    assert await jobs.claim() == []
    # From here on, the rate is refilled within half a second.
    await Store(raw, "jobs").let_pass(3599.5)
    before = calls(faults)
    (message,) = await jobs.claim(wait=60)
    assert message.value == 3
    # The first finds out when the next message may start. On a busy machine, a few come a little
    # early, or with a re-check; one that polls every 20 ms would make 25.
    assert calls(faults) <= before + 8


@pytest.mark.every_server
async def test_a_message_whose_moment_cannot_be_read_is_due(client: Client, raw: Any) -> None:
    jobs, keys = client.reliable_queue("jobs"), ReliableKeys.of("jobs")
    await jobs.offer(1, group="a", id="x")
    place = await raw.hget(keys.named("positions"), "x")
    damaged = place[:3] + b"?" * 19
    await raw.hset(keys.named("positions"), "x", damaged)
    await raw.zrem(keys.named("group_members"), place + b"x")
    await raw.zadd(keys.named("group_members"), {damaged + b"x": 0})
    assert await one_by_one(jobs) == [1]


async def test_outdated_starts_are_removed_even_of_deleted_groups(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", group_limit=Limit(rate=1, per=3600))
    starts = ReliableKeys.of("jobs").named("rate_log")
    # A group, when it started one, the period, how many it had started before and after, and how
    # many of those count no more.
    gone = [b"gone\0%019.2f 1000000 %d %d 0" % (n, n, n + 1) for n in range(2000)]
    await raw.zadd(starts, dict.fromkeys(gone, 0))
    await jobs.offer_many([Offer(n, group=f"group {n}") for n in range(500)])
    for _ in range(100):
        assert len(await jobs.claim(5)) == 5
    # By chance, about one call in four has looked at 48.
    assert await raw.zcard(starts) - 500 < 1700


@pytest.mark.every_server
async def test_a_message_returned_before_it_is_begun_counts_for_no_rate(client: Client) -> None:
    rate = Limit(rate=1, per=3600)
    jobs = client.reliable_queue("jobs", partitions=2, group_limit=rate)
    await jobs.offer_many([Offer(n, group=f"group {n}") for n in range(8)])
    handled: list[int] = []
    async with asyncio.timeout(30):
        # What one partition brings too late for a call goes back.
        while len(handled) < 8:
            handled += await values(jobs, 10, wait=0.5)


@pytest.mark.every_server
async def test_earlier_starts_count_by_a_period_that_has_changed(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", lease=3600, group_limit=Limit(rate=2, per=60))
    await jobs.offer_many(of_group("a", 1, 2, 3, 4, 5))
    assert len(await jobs.claim(3)) == 2
    await Store(raw, "jobs").let_pass(61)
    await jobs.groups.set_limit("a", Limit(rate=3, per=3600))
    assert len(await jobs.claim(3)) == 1
    await jobs.groups.set_limit("a", Limit(rate=1, per=0.000001))
    assert len(await jobs.claim(3)) == 1


async def test_starts_count_although_the_clock_was_set_back(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", lease=3600, group_limit=Limit(rate=15, per=60))
    await jobs.offer_many(of_group("a", *range(40)))
    assert len(await jobs.claim(1)) == 1
    starts = ReliableKeys.of("jobs").named("rate_log")
    [start] = await raw.zrange(starts, 0, -1)
    later = b"%019.2f" % (float(start[2:21]) + 3_600_000_000)
    await raw.zadd(starts, {start[:2] + later + start[21:]: 0})
    await raw.zrem(starts, start)
    assert [len(await jobs.claim(1, wait=0)) for _ in range(16)] == [1] * 14 + [0, 0]
    await Store(raw, "jobs").let_pass(61)
    assert [len(await jobs.claim(1, wait=0)) for _ in range(16)] == [1] * 15 + [0]


async def test_a_start_counts_until_its_period_is_over(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", lease=3600, group_limit=Limit(rate=1, per=3600))
    await jobs.offer(0, group="a")
    first = await claim_one(jobs)
    await Store(raw, "jobs").let_pass(3599.7)
    for n in itertools.count(1):
        # Starts of other groups clear away those that count no more, and whatever is offered asks
        # for the next turn of its group.
        await jobs.offer_many([*of_group(f"other {n}", n), *of_group("a", n)])
        again = [message for message in await jobs.claim(10) if message.group == "a"]
        if again:
            break
    assert again[0].lease_ends_at - first.lease_ends_at >= timedelta(seconds=0.3)


async def test_a_group_lies_whole_in_one_partition(client: Client) -> None:
    jobs = client.reliable_queue(
        "jobs", partitions=4, limit=Limit(concurrency=8), group_limit=Limit(concurrency=1)
    )
    for group in "abcdefgh":
        await jobs.offer_many([Offer(i, group=group, id=f"{group}{i}") for i in range(2)])
        await jobs.offer(2, group=group)
    messages = await claim_all(jobs)
    assert len({message.group for message in messages}) == len(messages) <= 8
    for message in messages:
        assert (await get(jobs, message.id)).group == message.group
        await message.ack()
    assert await jobs.cancel_many(["a1", "h1"]) == [True, True]
    assert len(await one_by_one(jobs)) == 24 - len(messages) - 2
    # Partitions share the limit of the queue out.
    jobs = client.reliable_queue("shared", partitions=4, limit=Limit(concurrency=6))
    await jobs.offer_many([Offer(i) for i in range(400)])
    assert len(await claim_all(jobs)) == 6
    with pytest.raises(delayq.ConfigurationError, match="concurrency"):
        await jobs.configure(limit=Limit(concurrency=3))


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_change_of_limits_needs_no_more_of_the_client_that_makes_it(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    async with (
        delayq.connect(server.url, resync_interval=3600) as client,
        delayq.connect(server.url) as other,
    ):
        jobs = client.reliable_queue(
            "jobs", lease=3600, partitions=partitions, group_limit=Limit(ordered=True)
        )
        await jobs.offer_many(of_group("a", 1, 2))
        await claim_one(jobs)
        waiting = asyncio.create_task(jobs.claim(wait=60))
        await are_looked_at(jobs)
        last = "configure" if partitions == 1 else "copy_settings"
        store_settings = getattr(ReliableStore, last)

        async def die_once_stored(store: ReliableStore, *args: Any) -> None:
            await store_settings(store, *args)
            raise asyncio.CancelledError

        theirs = other.reliable_queue("jobs")
        await theirs.stats()
        monkeypatch.setattr(ReliableStore, last, die_once_stored)
        with pytest.raises(asyncio.CancelledError):
            await theirs.configure(group_limit=Limit(concurrency=2))
        assert [message.value for message in await waiting] == [2]


async def are_looked_at(queue: Jobs) -> None:
    """Wait until the client knows that no partition has anything for it."""
    await until(
        lambda: all(partition.wakeups.plan.is_up_to_date for partition in queue._open.partitions)
    )


@pytest.mark.every_server
@pytest.mark.usefixtures("_full_batches")
@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_change_of_limits_reaches_all_groups_however_many(
    client: Client, raw: Any, partitions: int
) -> None:
    jobs = client.reliable_queue(
        "jobs", lease=3600, partitions=partitions, group_limit=Limit(concurrency=1)
    )
    await jobs.offer_many([Offer(n, group=f"{n:03}") for n in range(200)])
    assert len(await claim_all(jobs)) == 200
    await jobs.offer(200, group="199")
    for partition in range(partitions):
        lines = ReliableKeys.of("jobs", partition=partition).named("group_members")
        # Foreign members sort even between groups, and behind all of a group.
        await raw.zadd(lines, {"": 0, "199": 0, b"100\0\xffx": 0, "not of a group": 0})
    waiting = asyncio.create_task(jobs.claim(wait=60))
    await are_looked_at(jobs)
    await jobs.configure(group_limit=Limit(concurrency=2))
    assert [message.value for message in await waiting] == [200]


async def test_a_group_that_becomes_ordered_awaits_its_suspects(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", lease=3600)
    # One claim does not come to the last group.
    await jobs.offer_many([*(Offer(n, group=f"{n:03}") for n in range(60)), *of_group("z", 60, 61)])
    held = {message.value: message for message in await claim_all(jobs)}
    await held[61].nack(0)
    # The leases of two are lost again, and the client has one of these suspects at work.
    keys = ReliableKeys.of("jobs")
    await raw.hset(keys.named("attempts"), mapping={held[n].id: "1-1::1" for n in (0, 60)})
    await raw.zadd(keys.leased, {held[n].id: 2 for n in (0, 60)})
    assert (await claim_one(jobs)).value == 0
    await jobs.configure(group_limit=Limit(ordered=True))
    assert await claimed(jobs) == []


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_limit_that_is_withdrawn_lets_a_waiting_client_go_on(
    server: PrivateServer, raw: Any, partitions: int
) -> None:
    async with delayq.connect(server.url, resync_interval=3600) as client:
        limit = Limit(concurrency=partitions)
        jobs = client.reliable_queue("jobs", lease=3600, partitions=partitions, limit=limit)
        await jobs.offer_many([Offer(n) for n in range(200)])
        assert len(await claim_all(jobs)) == partitions
        waiting = asyncio.create_task(jobs.claim(wait=60))
        await are_looked_at(jobs)
        await jobs.configure(limit=None)
        assert await waiting
        assert await claim_all(jobs)
    for partition in range(partitions):
        # A re-check would wait as long as the queue does.
        turns = ReliableKeys.of("jobs", partition=partition).named("group_turns")
        assert await raw.zscore(turns, "") is None
