"""A partitioned queue does what a single queue does: ids decide where a message lies, and consumers
take from all in turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

import delayq
from delayq import Offer
from delayq._delayed.keys import DelayedKeys
from delayq._redis.slots import SLOTS, hash_tag
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.partitions import partition_of
from delayq._reliable.recurrence import is_occurrence
from delayq.errors import OutcomeUnknown
from tests.support.clusters import TestCluster, admin
from tests.support.reliable_fixtures import LEASE
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq import Client, PartitionedQueue
    from tests.support.servers import Kind, PrivateServer

PARTITIONS = 5


@pytest.fixture
async def jobs(client: delayq.Client) -> PartitionedQueue[int]:
    return client.reliable_queue("jobs", lease=LEASE, partitions=PARTITIONS)


async def handled(jobs: PartitionedQueue[int], count: int) -> list[int]:
    got = []
    async for message in jobs:
        async with message:
            got.append(message.value)
        if len(got) == count:
            break
    return got


class TestRouting:
    def test_ids_decide_and_always_the_same(self) -> None:
        assert [partition_of(name, 16) for name in ("order-1", "order-2", "ü")] == [15, 5, 5]

    @given(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(1, 64))
    def test_what_recurs_lies_where_its_schedule_does(self, name: str, partitions: int) -> None:
        occurrence = f"{name}@{1_700_000_000_000_000}"
        assert is_occurrence(occurrence.encode())
        assert partition_of(occurrence, partitions) == crc32(name.encode()) % partitions

    def test_ids_spread_evenly(self) -> None:
        counts = Counter(partition_of(f"order-{n}", 16) for n in range(16_000))
        assert len(counts) == 16
        assert max(counts.values()) < 1200

    @pytest.mark.parametrize("masters", [2, 3, 5, 6])
    @pytest.mark.parametrize("name", ["jobs", "{tag}:jobs", "a}b", "Aufträge"])
    def test_they_lie_evenly_over_any_number_of_masters_however_many_there_are(
        self, name: str, masters: int
    ) -> None:
        on: Counter[int] = Counter(dict.fromkeys(range(masters), 0))
        for partition in range(40):
            keys = ReliableKeys.of(name, partition=partition)
            on[key_slot(keys.wake.encode()) * masters // SLOTS] += 1
            if partition + 1 >= masters * 2:
                # The boundaries between masters fall inside the partitions' ranges of slots.
                assert max(on.values()) - min(on.values()) <= 3
        assert (
            len(
                {
                    hash_tag(ReliableKeys.of(name, partition=partition).wake)
                    for partition in range(40)
                }
            )
            == 40
        )

    def test_where_one_lies_never_changes(self) -> None:
        assert ReliableKeys.of("jobs", partition=3).wake == "delayq:part:{3:027:jobs}:wake"
        assert (
            ReliableKeys.of("Aufträge", partition=12).wake == "delayq:part:{12:021:Aufträge}:wake"
        )

    @given(st.text(min_size=1), st.text(min_size=1), st.integers(0, 99), st.integers(0, 99))
    def test_no_partition_has_a_key_of_another_or_of_a_queue(
        self, one: str, other: str, here: int, there: int
    ) -> None:
        def keys(of: Any) -> set[str]:
            facts = [getattr(of, name) for name in of.__slots__ if name not in ("name", "whole")]
            return {key for fact in facts for key in ([fact] if isinstance(fact, str) else fact)}

        try:
            mine = keys(ReliableKeys.of(one, partition=here))
            others = keys(ReliableKeys.of(other)) | keys(DelayedKeys.of(other))
        except delayq.BadName:
            return
        assert len({hash_tag(key) for key in mine}) == 1
        # The list of a delayed queue has the queue's own name, which may be anything.
        assert not mine & (others - {other})
        if (one, here) != (other, there):
            assert not mine & keys(ReliableKeys.of(other, partition=there))


async def test_messages_spread_over_all_partitions_and_come_all_once(
    jobs: PartitionedQueue[int],
) -> None:
    assert len(await jobs.offer_many([Offer(n) for n in range(500)])) == 500
    stored = [(await queue.stats()).ready for queue in jobs.partitions]
    assert sum(stored) == 500
    assert min(stored) > 0
    assert sorted(await handled(jobs, 500)) == list(range(500))
    assert (await jobs.stats()).ready == 0


async def test_every_partition_gets_its_turn(jobs: PartitionedQueue[int]) -> None:
    """A partition with a long backlog must not delay another partition's message."""
    full, small = jobs.partitions[0], jobs.partitions[3]
    await full.offer_many([Offer(n) for n in range(300)])
    await small.offer(-1)
    got = []
    async for message in jobs:
        async with message:
            got.append(message.value)
        if -1 in got:
            break
    assert len(got) < 150


async def test_order_holds_within_a_partition(jobs: PartitionedQueue[int]) -> None:
    ids = [f"m{n}" for n in range(200)]
    await jobs.offer_many([Offer(n, id=name) for n, name in enumerate(ids)])
    got = await handled(jobs, 200)
    for place in range(PARTITIONS):
        mine = [n for n in got if partition_of(f"m{n}", PARTITIONS) == place]
        assert mine == sorted(mine)


async def test_ids_find_their_message(jobs: PartitionedQueue[int]) -> None:
    for n in range(20):
        assert (
            await jobs.offer(n, 3600, id=f"m{n}", priority=n % 3, headers={"n": str(n)}) == f"m{n}"
        )
    with pytest.raises(delayq.DuplicateMessage):
        await jobs.offer(5, id="m5")
    assert await jobs.offer(5, 3600, id="m5", on_duplicate="ignore") == "m5"
    assert await jobs.cancel("m3")
    assert not await jobs.cancel("m3")
    found = await jobs.get("m4")
    assert found is not None
    assert (found.value, found.headers) == (4, {"n": "4"})
    assert await jobs.get("m3") is None
    assert await jobs.reschedule("m7", 0)
    (message,) = await jobs.claim(5, wait=10)
    assert message.value == 7
    await message.ack()
    made_up = await jobs.offer(1, 3600)
    assert await jobs.cancel(made_up)


async def test_a_batch_comes_from_all_partitions_and_what_is_too_much_goes_back(
    jobs: PartitionedQueue[int],
) -> None:
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


@pytest.mark.parametrize("turns", range(12))
async def test_what_came_for_a_caller_who_is_cancelled_goes_back_untried(
    jobs: PartitionedQueue[int], turns: int
) -> None:
    claiming = asyncio.create_task(jobs.claim(20, wait=60))
    await until(lambda: all(queue._open.claims.taker.waiting for queue in jobs.partitions))
    await jobs.offer_many([Offer(n) for n in range(20)])
    # Messages of some partitions are here already, others are on their way.
    await until(lambda: not all(queue._open.claims.taker.waiting for queue in jobs.partitions))
    for _ in range(turns):
        await asyncio.sleep(0)
    claiming.cancel()
    try:
        got = await claiming
    except asyncio.CancelledError:
        got = []
    rest: list[delayq.Message[int]] = []
    while len(got) + len(rest) < 20:
        rest += await asyncio.wait_for(jobs.claim(20, wait=10), 15)
    assert {message.attempt for message in rest} <= {1}
    assert sorted(message.value for message in [*got, *rest]) == [*range(20)]


async def test_a_partition_that_nobody_may_read_ends_the_loop_though_others_have_messages(
    jobs: PartitionedQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> Any:
        raise delayq.ServerRefused("planned")

    await jobs.offer_many([Offer(n) for n in range(1000)])
    monkeypatch.setattr(jobs.partitions[2]._open.claims.taker, "get", refused)
    with pytest.raises(delayq.ServerRefused, match="planned"):
        await handled(jobs, 800)


async def test_while_the_server_is_away_claims_that_wait_go_on_and_the_others_say_so(
    own_server: PrivateServer,
) -> None:
    async with delayq.connect(own_server.url) as client:
        jobs: PartitionedQueue[int] = client.reliable_queue(
            "jobs", lease=LEASE, partitions=PARTITIONS
        )
        await jobs.offer(0)
        assert await handled(jobs, 1) == [0]
        own_server.kill()
        with pytest.raises((delayq.ServerUnavailable, OutcomeUnknown)):
            await jobs.claim()
        assert await jobs.claim(wait=0.1) == []
        reading = asyncio.create_task(handled(jobs, 1))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(own_server.start)
        await jobs.offer(1)
        assert await asyncio.wait_for(reading, 15) == [1]


async def test_a_loop_that_handles_one_message_for_long_leaves_the_others_to_others(
    jobs: PartitionedQueue[int], server: PrivateServer
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

    home = jobs.partitions[0]
    here = [name for name in (f"h{n}" for n in range(5000)) if jobs.partition(name) is home]
    elsewhere, again = (
        [name for name in (f"{kind}{n}" for n in range(50)) if jobs.partition(name) is not home]
        for kind in "ea"
    )
    await jobs.offer_many([Offer(n, id=name) for n, name in enumerate(elsewhere)])
    slow = asyncio.create_task(handle_long())
    await began.wait()
    attempts = []
    async with delayq.connect(server.url) as other:
        others: PartitionedQueue[int] = other.reliable_queue(
            "jobs", lease=LEASE, partitions=PARTITIONS
        )
        async for message in others:
            async with message:
                attempts.append(message.attempt)
            if len(attempts) == len(elsewhere) - 1:
                break
    assert attempts == [1] * (len(elsewhere) - 1)
    # When the loop continues, it fetches from all partitions again, although one of them has had a
    # message at hand since then, and always has more.
    await jobs.offer_many([Offer(1000 + n, id=name) for n, name in enumerate(here)])
    await jobs.offer_many([Offer(100 + n, id=name) for n, name in enumerate(again)])
    await until(lambda: home._open.claims.taker.wanted == 0)
    done.set()
    values = {100 + n for n in range(len(again))}
    await until(lambda: values <= set(first))
    assert max(first.index(value) for value in values) < len(here) / 2
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_closing_while_a_message_is_handled_ends_the_loop_and_gives_back_what_it_had_at_hand(
    client: delayq.Client, jobs: PartitionedQueue[int]
) -> None:
    await jobs.offer_many([Offer(n) for n in range(50)])
    got = []
    async for message in jobs:
        async with message:
            got.append(message.value)
        if len(got) == 5:
            await jobs.aclose()
    again: PartitionedQueue[int] = client.reliable_queue("jobs", lease=LEASE, partitions=PARTITIONS)
    rest: list[delayq.Message[int]] = []
    while len(got) + len(rest) < 50:
        rest += await asyncio.wait_for(again.claim(100, wait=10), 15)
    assert {message.attempt for message in rest} == {1}
    assert sorted([*got, *(message.value for message in rest)]) == [*range(50)]


async def test_claiming_waits_for_whichever_comes_first(jobs: PartitionedQueue[int]) -> None:
    claiming = asyncio.create_task(jobs.claim(5, wait=20))
    await asyncio.sleep(0.05)
    await jobs.offer(1, 0.05)
    (message,) = await asyncio.wait_for(claiming, 10)
    assert message.value == 1
    await message.ack()
    # Claims that waited in vain hold nothing.
    await jobs.offer_many([Offer(n) for n in range(50)])
    assert len(await handled(jobs, 50)) == 50


async def test_what_is_fetched_ahead_goes_back_when_a_loop_is_left(
    jobs: PartitionedQueue[int],
) -> None:
    await jobs.offer_many([Offer(n) for n in range(400)])
    await handled(jobs, 100)
    await until_ready(jobs, 300)
    assert sorted(await handled(jobs, 300))


async def until_ready(jobs: PartitionedQueue[int], count: int) -> None:
    async def all_back() -> bool:
        stats = await jobs.stats()
        return stats.ready == count and stats.leased == 0

    await until(all_back)


async def test_stats_lists_and_purges_are_of_all_partitions(jobs: PartitionedQueue[int]) -> None:
    await jobs.offer_many([Offer(n, delay=1000 + n, id=f"d{n}") for n in range(30)])
    await jobs.offer_many([Offer(100 + n, id=f"r{n}", priority=n % 2) for n in range(10)])
    stats = await jobs.stats()
    assert (stats.delayed, stats.ready, stats.leased, stats.dead, stats.paused) == (
        30,
        10,
        0,
        0,
        False,
    )
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


async def test_dead_letters_are_of_all_partitions(jobs: PartitionedQueue[int]) -> None:
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(20)])
    for message in await jobs.claim(20):
        await message.bury(f"reason {message.value}")
    assert await jobs.dead.size() == 20
    letters = await jobs.dead.list(limit=20)
    assert [letter.died_at for letter in letters] == sorted(letter.died_at for letter in letters)
    assert len(await jobs.dead.list(offset=18, limit=5)) == 2
    told: list[tuple[int, int]] = []
    assert (
        await jobs.dead.redrive(["m1", "m2", "m3"], progress=lambda *step: told.append(step)) == 3
    )
    assert told[-1] == (3, 3)
    assert await jobs.dead.purge(["m4", "m5"]) == 2
    assert await jobs.dead.redrive() == 15
    assert sorted(await handled(jobs, 18)) == [n for n in range(20) if n not in (4, 5)]


async def test_what_recurs_does_so_in_one_partition(jobs: PartitionedQueue[int]) -> None:
    for name in ("a", "b", "c"):
        await jobs.schedule(name, every=0.05, value=1)
    assert [each.name for each in await jobs.schedules()] == ["a", "b", "c"]
    seen: Counter[str] = Counter()
    async for message in jobs:
        async with message:
            seen[message.id.partition("@")[0]] += 1
            assert await jobs.get(message.id) is not None
        if min(seen[name] for name in ("a", "b", "c")) >= 2:
            break
    for name in ("a", "b", "c"):
        assert await jobs.unschedule(name)
    assert await jobs.schedules() == []


async def test_what_was_refused_and_what_is_stored_is_told_of_all_partitions(
    jobs: PartitionedQueue[int],
) -> None:
    await jobs.offer_many([Offer(n, delay=3600, id=f"m{n}") for n in range(5)])
    with pytest.raises(delayq.DuplicateMessage) as caught:
        await jobs.offer_many([Offer(n, delay=3600, id=f"m{n}") for n in range(3, 20)])
    assert set(caught.value.ids) == {"m3", "m4"}
    assert set(caught.value.stored) == {f"m{n}" for n in range(5, 20)}
    with pytest.raises(delayq.BadInput):
        await jobs.offer_many([Offer(1, id="fine"), Offer(2, id="not", priority=99)])
    assert await jobs.get("fine") is None


async def test_an_answer_that_is_lost_leaves_open_only_what_it_concerns(
    jobs: PartitionedQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: Any) -> Any:
        raise OutcomeUnknown("planned", ("x",))

    monkeypatch.setattr(jobs.partition("m1"), "_offer_messages", lost)
    names = [f"m{n}" for n in range(20)]
    with pytest.raises(OutcomeUnknown) as caught:
        await jobs.offer_many([Offer(n, delay=3600, id=name) for n, name in enumerate(names)])
    elsewhere = {name for name in names if jobs.partition(name) is not jobs.partition("m1")}
    assert set(caught.value.stored) == elsewhere | {"x"}


async def test_closing_ends_loops_and_waiting_claims(
    client: delayq.Client, jobs: PartitionedQueue[int]
) -> None:
    looping = asyncio.create_task(handled(jobs, 1))
    claiming = asyncio.create_task(jobs.claim(1, wait=60))
    await asyncio.sleep(0.05)
    await jobs.aclose()
    assert await asyncio.wait_for(looping, 10) == []
    with pytest.raises(delayq.Closed):
        await asyncio.wait_for(claiming, 10)
    again: PartitionedQueue[int] = client.reliable_queue("jobs", lease=LEASE, partitions=PARTITIONS)
    async with again:
        await again.offer(1)
        assert await handled(again, 1) == [1]
    assert "5 partitions" in repr(again)


async def test_a_worker_handles_all_partitions(
    client: delayq.Client, jobs: PartitionedQueue[int]
) -> None:
    worker, got, running, most = delayq.Worker(client, concurrency=7), [], 0, 0

    @worker.listener("jobs", lease=LEASE, partitions=PARTITIONS)
    async def handle(value: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        got.append(value)
        running -= 1

    await jobs.offer_many([Offer(n) for n in range(200)])
    await worker.run(burst=True)
    assert sorted(got) == list(range(200))
    assert most <= 7


async def test_a_worker_with_fewer_hands_than_partitions_handles_all_of_them(
    client: delayq.Client,
) -> None:
    worker, got, running, most = delayq.Worker(client, concurrency=2), [], 0, 0

    @worker.listener("jobs", lease=LEASE, partitions=16)
    async def handle(value: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        got.append(value)
        running -= 1

    queue: PartitionedQueue[int] = client.reliable_queue("jobs", lease=LEASE, partitions=16)
    await queue.offer_many([Offer(n) for n in range(100)])
    await worker.run(burst=True)
    assert sorted(got) == list(range(100))
    assert most <= 2


async def test_all_hands_of_a_worker_serve_the_one_busy_partition(
    client: delayq.Client, jobs: PartitionedQueue[int]
) -> None:
    worker, together = delayq.Worker(client), asyncio.Barrier(7)

    @worker.listener("jobs", lease=LEASE, partitions=PARTITIONS, concurrency=7, timeout=10)
    async def handle(value: int) -> None:
        await together.wait()

    await jobs.partitions[0].offer_many([Offer(n) for n in range(7)])
    await worker.run(burst=True)
    stats = await jobs.stats()
    assert (stats.ready, stats.leased, stats.delayed) == (0, 0, 0)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, 100_000])
async def test_a_number_of_partitions_that_cannot_be_is_refused(
    client: delayq.Client, bad: Any
) -> None:
    with pytest.raises(delayq.BadInput, match="partitions"):
        client.reliable_queue("jobs", partitions=bad)


@pytest.fixture(scope="module")
def cluster(cluster_kind: Kind) -> Iterator[TestCluster]:
    with TestCluster(cluster_kind) as cluster:
        yield cluster


async def test_on_a_cluster_every_master_has_a_share_and_slots_may_move(
    cluster: TestCluster,
) -> None:
    def size(node: PrivateServer) -> int:
        with admin(node) as redis:
            return int(redis.dbsize())

    async with delayq.connect(cluster.url) as client:
        jobs: PartitionedQueue[int] = client.reliable_queue("jobs", lease=LEASE, partitions=16)
        got: list[int] = []

        async def consume() -> None:
            async for message in jobs:
                async with message:
                    got.append(message.value)

        await jobs.offer_many([Offer(n, delay=3600, id=f"later{n}") for n in range(100)])
        assert all(size(node) for node in cluster.nodes)
        consuming = asyncio.create_task(consume())
        offered = 0
        for moves in range(6):
            key = jobs.partitions[moves]._keys.wake
            target = next(node for node in cluster.nodes if node is not cluster.owner(key))
            moving = asyncio.create_task(asyncio.to_thread(cluster.move, key, target))
            while not moving.done():
                await asyncio.gather(
                    *(jobs.offer(offered + n, id=f"m{offered + n}") for n in range(20))
                )
                offered += 20
            await moving
        assert await jobs.cancel("later7")
        assert await jobs.reschedule("later8", 0)
        await until(lambda: len(got) == offered + 1)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        assert Counter(got) == Counter([*range(offered), 8])
        mine = [n for n in got if partition_of(f"m{n}", 16) == 3]
        assert [n for n in mine if n != 8] == sorted(n for n in mine if n != 8)
        assert await jobs.purge() == 98


async def test_a_claim_that_does_not_wait_finds_what_is_due_although_others_claim_too(
    server: PrivateServer,
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(delayq.connect(server.url)) for _ in range(6)]
        queues = [client.reliable_queue("jobs", partitions=6) for client in clients]
        for _ in range(5):
            for partition in queues[0].partitions:
                await partition.offer(1)
            claims = await asyncio.gather(*(queue.claim(1) for queue in queues))
            assert [len(messages) for messages in claims] == [1] * 6
            for (message,) in claims:
                await message.ack()


async def test_a_slow_loop_costs_a_few_round_trips_for_each_message(client: Client) -> None:
    queue: PartitionedQueue[int] = client.reliable_queue("jobs", partitions=12)
    await queue.offer_many([Offer(n) for n in range(200)])
    before, handled = client.statistics().round_trips, 0
    async for message in queue:
        async with message:
            await asyncio.sleep(0.3)
        handled += 1
        if handled == 4:
            break
    # A look, a claim, an acknowledgement, and occasionally a re-check.
    assert client.statistics().round_trips - before <= 4 * 5
