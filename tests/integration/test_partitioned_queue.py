"""A queue in partitions does what any other queue does: ids decide where a message lies, and
consumers take from all partitions in turn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

import delayq
from delayq import Offer
from delayq._redis.client import RedisClient
from delayq._redis.slots import SLOTS, hash_tag
from delayq._reliable.ids import home_of, is_occurrence, partition_of
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import CLAIM
from delayq.errors import OutcomeUnknown
from tests.support.reliable_fixtures import LEASE
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq import Client
    from delayq._redis.scripts import Script
    from tests.support.clusters import TestCluster
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

PARTITIONS = 5


@pytest.fixture
async def jobs(client: delayq.Client) -> Jobs:
    return client.reliable_queue("jobs", lease=LEASE, partitions=PARTITIONS)


def ids_in(partition: int, count: int, partitions: int = PARTITIONS) -> list[str]:
    """Return ids of messages that lie in this partition."""
    names = (f"p{partition}-{n}" for n in itertools.count())
    return list(islice((n for n in names if partition_of(n, partitions) == partition), count))


async def handled(jobs: Jobs, count: int) -> list[int]:
    got = []
    async for message in jobs:
        async with message:
            got.append(message.value)
        if len(got) == count:
            break
    return got


class TestRouting:
    def test_ids_decide_and_always_the_same(self) -> None:
        assert [partition_of(name, 16) for name in ("order-1", "order-2", "ü")] == [14, 7, 6]
        assert ReliableKeys.of("jobs", partition=0) == ReliableKeys.of("jobs")
        assert ReliableKeys.of("jobs", partition=3).wake == "delayq:part:{3:027:jobs}:wake"

    @given(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(1, 64))
    def test_occurrences_lie_beside_their_schedule(self, name: str, partitions: int) -> None:
        occurrence = f"{name}@{1_700_000_000_000_000}"
        assert is_occurrence(occurrence.encode())
        assert partition_of(occurrence, partitions) == home_of(name, partitions)

    @pytest.mark.parametrize("name", ["jobs", "{tag}:jobs", "a}b", "Aufträge"])
    def test_partitions_lie_evenly_over_any_number_of_masters(self, name: str) -> None:
        wakes = [ReliableKeys.of(name, partition=number).wake for number in range(41)]
        assert len(set(map(hash_tag, wakes))) == 41
        for masters in (2, 3, 5, 6):
            on: Counter[int] = Counter(dict.fromkeys(range(masters), 0))
            for partition in range(1, 41):
                on[key_slot(wakes[partition].encode()) * masters // SLOTS] += 1
                if partition >= masters * 2:
                    # The boundaries between masters fall inside the partitions' ranges of slots.
                    # The first partition has the queue's own keys, which lie anywhere.
                    assert max(on.values()) - min(on.values()) <= 3, masters


async def test_messages_of_all_partitions_come_once_in_the_order_of_each(jobs: Jobs) -> None:
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(500)])
    stored = [(await partition.store.depth()).ready for partition in jobs._open.partitions]
    assert (len(stored), sum(stored)) == (PARTITIONS, 500)
    assert min(stored) > 0
    got = await handled(jobs, 500)
    assert sorted(got) == list(range(500))
    for place in range(PARTITIONS):
        mine = [n for n in got if partition_of(f"m{n}", PARTITIONS) == place]
        assert mine == sorted(mine)


async def test_offers_of_many_callers_share_calls(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A partition's turn ends with its last message, not with the time that a slow machine needs.
    monkeypatch.setattr("delayq._reliable.ids._TURN_NS", 10**12)
    queue: Jobs = client.reliable_queue("jobs", lease=LEASE, partitions=64)
    await queue.stats()
    before = client.statistics().round_trips
    for _ in range(3):
        await asyncio.gather(*(queue.offer(n) for n in range(1000)))
    # If each partition got one message in 64, each would need a call of its own, at least.
    assert client.statistics().round_trips - before < 150
    before = client.statistics().round_trips
    await queue.offer_many([Offer(n) for n in range(1000)])
    assert client.statistics().round_trips - before < 40
    assert (await queue.stats()).ready == 4000


async def test_generated_ids_find_their_messages_everywhere(jobs: Jobs) -> None:
    ids = [*await asyncio.gather(*(jobs.offer(n, 3600) for n in range(100)))]
    ids += await jobs.offer_many([Offer(n, delay=3600) for n in range(100)])
    for n in range(100):
        if n % 20 == 0:
            # The next turn.
            await asyncio.sleep(0.006)
        ids.append(await jobs.offer(n, 3600))
    assert all([(await partition.store.depth()).delayed for partition in jobs._open.partitions])
    assert all(await asyncio.gather(*map(jobs.cancel, ids)))
    assert len(set(ids)) == 300


async def test_every_partition_gets_its_turn(jobs: Jobs) -> None:
    """A partition with a long backlog must not delay another partition's message."""
    await jobs.offer_many([Offer(n, id=name) for n, name in enumerate(ids_in(0, 300))])
    await jobs.offer(-1, id=ids_in(3, 1)[0])
    got = []
    async for message in jobs:
        async with message:
            got.append(message.value)
        if -1 in got:
            break
    assert len(got) < 150


@pytest.mark.usefixtures("_full_batches")
async def test_a_backlog_takes_few_claims(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions with a backlog take turns, and each brings a whole batch."""
    # However busy the machine is, handling counts as quick.
    monkeypatch.setattr("delayq._engine.prefetch.WITHIN", 1e6)
    claims, run_once = 0, RedisClient.run_once

    async def counted(server: RedisClient, script: Script, *arguments: Any) -> Any:
        nonlocal claims
        claims += script is CLAIM
        return await run_once(server, script, *arguments)

    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(2000)])
    monkeypatch.setattr(RedisClient, "run_once", counted)
    await handled(jobs, 2000)
    # At least 20, and some more at first, when the batches grow, and at the end.
    assert 20 <= claims < 90


@pytest.mark.usefixtures("_full_batches")
async def test_a_batch_comes_from_all_partitions_and_what_is_too_much_goes_back(jobs: Jobs) -> None:
    await jobs.offer_many([Offer(n) for n in range(100)])
    for _ in range(4):
        messages = await jobs.claim(20)
        assert len(messages) == 20
        await asyncio.gather(*(message.ack() for message in messages))
    rest = await jobs.claim(100)
    assert len(rest) == 20
    # Messages that went back have used no attempt.
    assert {message.attempt for message in rest} == {1}
    assert await jobs.claim(1) == []
    with pytest.raises(delayq.BadInput):
        await jobs.claim(0)


async def test_a_message_claimed_for_a_cancelled_caller_goes_back_uncounted(jobs: Jobs) -> None:
    for turns in (0, 1, 2, 3, 5, 8, 11):
        claiming = asyncio.create_task(jobs.claim(20, wait=60))
        await until(lambda: jobs._open.dispatcher.caller_queue.has_patient_callers)
        await jobs.offer_many([Offer(n) for n in range(20)])
        # Messages of some partitions are here already, others are on their way.
        await until(lambda: jobs._open.dispatcher.caller_queue.capacity < 20)
        for _ in range(turns):
            await asyncio.sleep(0)
        claiming.cancel()
        got = []
        with suppress(asyncio.CancelledError):
            got = await claiming
        rest: list[delayq.Message[int]] = []
        while len(got) + len(rest) < 20:
            rest += await jobs.claim(20, wait=10)
        assert {message.attempt for message in rest} <= {1}, turns
        assert sorted(message.value for message in [*got, *rest]) == [*range(20)], turns
        await asyncio.gather(*(message.ack() for message in [*got, *rest]))


async def test_a_partition_that_nobody_may_read_ends_the_loop_though_others_have_messages(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any, **__: Any) -> Any:
        raise delayq.ServerRefused("planned")

    await jobs.offer_many([Offer(n) for n in range(1000)])
    monkeypatch.setattr(jobs._open.partitions[2].store, "claim", refused)
    with pytest.raises(delayq.ServerRefused, match="planned"):
        await handled(jobs, 1000)


async def test_a_loop_that_handles_one_message_for_long_leaves_the_others_to_others(
    jobs: Jobs, server: PrivateServer
) -> None:
    """By then each partition has a message at hand for the loop.

    Those messages go back without an attempt counted.
    """
    done = asyncio.Event()
    began = asyncio.Event()
    first: list[int] = []

    async def handle_long() -> None:
        async for message in jobs:
            async with message:
                first.append(message.value)
                began.set()
                await done.wait()

    here = ids_in(0, 1000)
    elsewhere, again = (
        [name for name in (f"{kind}{n}" for n in range(50)) if partition_of(name, PARTITIONS)]
        for kind in "ea"
    )
    await jobs.offer_many([Offer(n, id=name) for n, name in enumerate(elsewhere)])
    slow = asyncio.create_task(handle_long())
    await began.wait()
    attempts = []
    async with delayq.connect(server.url) as other:
        async for message in other.reliable_queue("jobs", lease=LEASE):
            async with message:
                attempts.append(message.attempt)
            if len(attempts) == len(elsewhere) - 1:
                break
    assert attempts == [1] * (len(elsewhere) - 1)
    # When the loop continues, it fetches from all partitions again, although one of them has had a
    # message at hand since then, and always has more.
    await jobs.offer_many([Offer(1000 + n, id=name) for n, name in enumerate(here)])
    await jobs.offer_many([Offer(100 + n, id=name) for n, name in enumerate(again)])
    await until(lambda: jobs._open.dispatcher.caller_queue.capacity == 0)
    done.set()
    values = {100 + n for n in range(len(again))}
    await until(lambda: values <= set(first))
    assert max(first.index(value) for value in values) < len(here) / 2
    await end(slow)


async def test_closing_ends_loops_and_claims_and_gives_back_what_was_at_hand(
    client: delayq.Client, jobs: Jobs
) -> None:
    await jobs.offer_many([Offer(n) for n in range(50)])
    got = []
    async for message in jobs:
        async with message:
            got.append(message.value)
        if len(got) == 5:
            await jobs.aclose()
    again: Jobs = client.reliable_queue("jobs", lease=LEASE, partitions=PARTITIONS)
    rest: list[delayq.Message[int]] = []
    while len(got) + len(rest) < 50:
        rest += await again.claim(100, wait=10)
    assert {message.attempt for message in rest} == {1}
    assert sorted([*got, *(message.value for message in rest)]) == [*range(50)]
    looping = asyncio.create_task(handled(again, 1))
    claiming = asyncio.create_task(again.claim(1, wait=60))
    await until(lambda: again._open.dispatcher.caller_queue.has_patient_callers)
    await again.aclose()
    assert await looping == []
    with pytest.raises(delayq.Closed):
        await claiming


async def test_stats_lists_and_purges_are_of_all_partitions(jobs: Jobs) -> None:
    await jobs.offer_many([Offer(n, delay=1000 + n, id=f"d{n}") for n in range(30)])
    await jobs.offer_many([Offer(100 + n, id=f"r{n}", priority=n % 2) for n in range(10)])
    stats = await jobs.stats()
    assert (stats.delayed, stats.ready, stats.leased, stats.dead) == (30, 10, 0, 0)
    assert [message.value for message in await jobs.list("delayed", limit=30)] == list(range(30))
    assert [message.value for message in await jobs.list("delayed", offset=5, limit=3)] == [5, 6, 7]
    ready = await jobs.peek(12)
    assert [message.priority for message in ready] == [1] * 5 + [0] * 7
    assert [message.value for message in ready[10:]] == [0, 1]
    await jobs.pause()
    assert (await jobs.stats()).paused
    assert await jobs.claim(1) == []
    assert await jobs.resume()
    assert not await jobs.resume()
    assert await jobs.purge("delayed") == 30
    assert await jobs.purge() == 10


@pytest.mark.usefixtures("_full_batches")
async def test_dead_letters_are_of_all_partitions(jobs: Jobs) -> None:
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(20)])
    for message in await jobs.claim(20):
        await message.bury(f"reason {message.value}")
    assert await jobs.dead.size() == 20
    letters = await jobs.dead.list(limit=20)
    assert [letter.died_at for letter in letters] == sorted(letter.died_at for letter in letters)
    assert len(await jobs.dead.list(offset=18, limit=5)) == 2
    steps: list[tuple[int, int]] = []
    assert (
        await jobs.dead.redrive(["m1", "m2", "m3"], progress=lambda *step: steps.append(step)) == 3
    )
    assert steps[-1] == (3, 3)
    assert await jobs.dead.purge(["m4", "m5"]) == 2
    assert await jobs.dead.redrive() == 15
    assert sorted(await handled(jobs, 18)) == [n for n in range(20) if n not in (4, 5)]


async def test_a_failed_batch_names_stored_and_refused_messages_everywhere(jobs: Jobs) -> None:
    await jobs.offer_many([Offer(n, delay=3600, id=f"m{n}") for n in range(5)])
    with pytest.raises(delayq.DuplicateMessage) as caught:
        await jobs.offer_many([Offer(n, delay=3600, id=f"m{n}") for n in range(3, 20)])
    assert set(caught.value.ids) == {"m3", "m4"}
    assert set(caught.value.stored) == {f"m{n}" for n in range(5, 20)}
    with pytest.raises(delayq.BadInput):
        await jobs.offer_many([Offer(1, id="fine"), Offer(2, id="not", priority=99)])
    assert await jobs.get("fine") is None


async def test_a_lost_reply_leaves_only_its_own_calls_unknown(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.stats()
    place = partition_of("m1", PARTITIONS)

    async def lost(items: Sequence[Any], _: Any) -> Any:
        return [OutcomeUnknown("planned")] * len(items)

    monkeypatch.setattr(jobs._open.partitions[place].offers.batcher, "submit_many", lost)
    names = [f"m{n}" for n in range(20)]
    with pytest.raises(OutcomeUnknown) as caught:
        await jobs.offer_many([Offer(n, delay=3600, id=name) for n, name in enumerate(names)])
    elsewhere = {name for name in names if partition_of(name, PARTITIONS) != place}
    assert set(caught.value.stored) == elsewhere


async def test_a_worker_with_few_hands_handles_all_partitions_and_all_of_them_serve_a_busy_one(
    client: delayq.Client, jobs: Jobs
) -> None:
    worker, got, running, most = delayq.Worker(client, concurrency=2), [], 0, 0

    @worker.listener("jobs", lease=LEASE, partitions=PARTITIONS)
    async def handle(value: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        # A message of the busy partition waits until both hands are at work.
        while value < 0 and most < 2:
            await asyncio.sleep(0.001)
        got.append(value)
        running -= 1

    await jobs.offer_many([Offer(-1 - n, id=name) for n, name in enumerate(ids_in(0, 2))])
    await worker.run(burst=True)
    assert sorted(got) == [-2, -1]
    await jobs.offer_many([Offer(n) for n in range(100)])
    await worker.run(burst=True)
    assert sorted(got) == list(range(-2, 100))
    assert most == 2


@pytest.mark.gate
async def test_on_a_cluster_each_master_has_a_share_and_slots_move(cluster: TestCluster) -> None:
    async with delayq.connect(cluster.url) as client:
        jobs: Jobs = client.reliable_queue("jobs", lease=LEASE, partitions=16)
        got: list[int] = []

        async def consume() -> None:
            async for message in jobs:
                async with message:
                    got.append(message.value)

        await jobs.offer_many([Offer(n, delay=3600, id=f"later{n}") for n in range(100)])
        for node in cluster.nodes:
            assert node.call("DBSIZE") != b":0"
        consuming = asyncio.create_task(consume())
        offered = 0
        for moves in range(6):
            key = jobs._open.partitions[moves].keys.wake
            target = next(node for node in cluster.nodes if node is not cluster.owner(key))
            moving = asyncio.create_task(asyncio.to_thread(cluster.move, key, target))
            while not moving.done():
                await asyncio.gather(
                    *(jobs.offer(offered + n, id=f"m{offered + n}") for n in range(20))
                )
                offered += 20
            await moving
        await until(lambda: len(got) == offered)
        await end(consuming)
        assert sorted(got) == list(range(offered))
        mine = [n for n in got if partition_of(f"m{n}", 16) == 3]
        assert mine == sorted(mine)
        assert await jobs.purge() == 100


@pytest.mark.usefixtures("_full_batches")
async def test_a_claim_that_does_not_wait_finds_what_is_due_although_others_claim_too(
    server: PrivateServer,
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(delayq.connect(server.url)) for _ in range(6)]
        queues = [client.reliable_queue("jobs", partitions=6) for client in clients]
        for _ in range(5):
            for partition in range(6):
                await queues[0].offer(1, id=ids_in(partition, 1, 6)[0])
            claims = await asyncio.gather(*(queue.claim(1) for queue in queues))
            assert [len(messages) for messages in claims] == [1] * 6
            for (message,) in claims:
                await message.ack()


async def test_a_handle_that_names_only_the_queue_finds_all_partitions_and_no_other_number_is_right(
    server: PrivateServer, jobs: Jobs
) -> None:
    ids = await jobs.offer_many([Offer(n) for n in range(100)])
    async with delayq.connect(server.url) as other:
        queue: Jobs = other.reliable_queue("jobs", lease=LEASE)
        assert await queue.cancel(ids[0])
        assert sorted(await handled(queue, 99)) == list(range(1, 100))
        bad: Any
        for bad in (0, -1, True, 1.5, 100_000):
            with pytest.raises(delayq.BadInput, match="partitions"):
                other.reliable_queue("jobs", partitions=bad)
        worker = delayq.Worker(other)
        worker.listener("jobs", partitions=8)(print)
        with pytest.raises(delayq.ConfigurationError, match=r"5 partitions .* 8 here"):
            await worker.run(burst=True)


async def test_handles_that_wait_together_get_messages_of_their_own_policy(client: Client) -> None:
    queues: list[Jobs] = [
        client.reliable_queue("jobs", lease=lease, max_attempts=attempts)
        for lease, attempts in ((3600, 1), (360_000, None))
    ]
    claims = [asyncio.create_task(queue.claim(wait=10)) for queue in queues * 3]
    await until(lambda: queues[0]._open.dispatcher.caller_queue.capacity == 6)
    await queues[0].offer_many([Offer(n) for n in range(6)])
    now = await client.server_time()
    for queue, claim in zip(queues * 3, claims, strict=True):
        (message,) = await claim
        left = (message.lease_ends_at - now).total_seconds()
        assert left == pytest.approx(queue._consumer.policy.lease_us / 1e6, rel=0.2)
        await message.nack(0, error="no")
    stats = await queues[0].stats()
    assert (stats.dead, stats.ready) == (3, 3)
