"""The behaviour of a delayed queue, from its users' point of view."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import due_us_of_stored, pack
from delayq.admin.doctor import diagnose
from delayq.codecs import BytesCodec
from tests.support.foreign import store
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from delayq import Client, DelayedQueue, ReliableQueue
    from tests.support.servers import PrivateServer

    Orders = delayq.DelayedQueue[Any]


KEYS = DelayedKeys.of("orders")
ORDERED = "redisson_delay_queue:{orders}"
TIMEOUT = "redisson_delay_queue_timeout:{orders}"


@pytest.fixture
async def listener(raw: Any) -> AsyncIterator[Any]:
    """Listen to the queue's channel."""
    async with raw.pubsub() as listener:
        await listener.subscribe(KEYS.channel)
        assert (await listener.get_message(timeout=60))["type"] == "subscribe"
        yield listener


class TestOffering:
    @pytest.mark.every_server
    async def test_an_offer_writes_what_redisson_writes(
        self, queue: Orders, raw: Any, listener: Any
    ) -> None:
        receipt = await queue.offer({"order": 42}, 60)
        record = pack(bytes.fromhex(receipt.id), b'{"order":42}', 8)
        due_ms = receipt.due_at.timestamp() * 1000
        assert await raw.lrange(ORDERED, 0, -1) == [record]
        assert await raw.zrange(TIMEOUT, 0, -1, withscores=True) == [(record, due_ms)]
        assert (await listener.get_message(timeout=60))["data"] == str(round(due_ms)).encode()

    async def test_a_receipt_names_its_record_and_due_time(self, queue: Orders, raw: Any) -> None:
        delays = (60, 60 + 1e-6, 60.0005, 61.1, timedelta(days=1), 3600.5, 8e9, 1e11, 9e12 - 3e9)
        receipts = await queue.offer_many([(n, delays[n % len(delays)]) for n in range(300)])
        receipts += [await queue.offer(0, delay) for delay in delays]
        stored = await raw.zrange(TIMEOUT, 0, -1, withscores=True)
        assert {record: int(score) * 1000 for record, score in stored} == {
            receipt._record(): due_us_of_stored(receipt._stored) for receipt in receipts
        }
        assert await raw.lrange(ORDERED, 0, -1) == [receipt._record() for receipt in receipts]
        # An id is the server's time in microseconds, times 4096.
        now = await queue.offer(1)
        assert due_us_of_stored(now._stored) == int(now.id, 16) // 4_096_000 * 1000

    async def test_only_a_new_head_is_announced(self, queue: Orders, listener: Any) -> None:
        first = await queue.offer(1, 60)
        await queue.offer_many([(2, 120), (3, 90)])
        fourth = await queue.offer(4, 30)
        for head in (first, fourth):
            heard = int((await listener.get_message(timeout=60))["data"])
            assert heard == round(head.due_at.timestamp() * 1000)
        assert await listener.get_message(timeout=0.05) is None

    @pytest.mark.every_server
    async def test_ids_of_all_clients_sort_by_offer_order(self, server: PrivateServer) -> None:
        ids = []
        async with delayq.connect(server.url) as one, delayq.connect(server.url) as two:
            for _ in range(20):
                ids += [r.id for r in await one.delayed_queue("orders").offer_many([(0, 60)] * 30)]
                ids.append((await two.delayed_queue("orders").offer(0, 60)).id)
        assert ids == sorted(set(ids))

    async def test_ids_go_on_when_the_clock_steps_back(self, queue: Orders, raw: Any) -> None:
        first = await queue.offer(1, 60)
        hour = 3600 * 1_000_000 * 4096
        ahead = (int(first.id, 16) + hour).to_bytes(8, "big")
        await store(raw, KEYS, {pack(ahead, b"2", 8): first.due_at.timestamp() * 1000})
        third = await queue.offer(3, 60)
        assert int(third.id, 16) == int.from_bytes(ahead, "big") + 1
        assert await queue.pending.read_all() == [1, 2, 3]
        # A random id of Java does not disturb ours.
        await store(raw, KEYS, {pack(b"\xff" * 8, b"4", 8): (time.time() + 60) * 1000})
        assert (await queue.offer(5, 60)).id < "ff"
        assert await queue.pending.read_all() == [1, 2, 3, 4, 5]

    @pytest.mark.every_server
    async def test_a_delay_counts_from_the_servers_clock_and_a_moment_may_be_anywhere(
        self, client: Client, queue: Orders
    ) -> None:
        before = await client.server_time()
        receipt = await queue.offer(1, timedelta(seconds=2.5))
        after = await client.server_time()
        assert before + timedelta(seconds=2.5) <= receipt.due_at <= after + timedelta(seconds=2.502)
        for zone in (UTC, timezone(timedelta(hours=-7))):
            at = datetime.now(zone).replace(microsecond=123_001) + timedelta(minutes=5)
            # A moment is that of the server's clock, however long the call takes; Redisson counts
            # in milliseconds.
            due_at = at.replace(microsecond=124_000)
            receipts = [await queue.offer(number, at=at) for number in range(5)]
            assert [receipt.due_at for receipt in receipts] == [due_at] * 5
            assert await receipts[0].reschedule(at=at + timedelta(minutes=1))
            assert receipts[0].due_at == due_at + timedelta(minutes=1)
            put_off = (0, due_at + timedelta(minutes=1))
            entries = await queue.pending.entries()
            assert entries[-5:] == [*((number, due_at) for number in range(1, 5)), put_off]
            assert await queue.pending.clear()

    @pytest.mark.every_server
    async def test_no_delay_and_a_moment_in_the_past_are_due_at_once(self, queue: Orders) -> None:
        await queue.offer(1, at=datetime.now(UTC) - timedelta(days=1))
        assert await queue.poll() == 1
        for value in range(50):
            await queue.offer(value)
            assert await queue.poll() == value

    async def test_a_moment_and_delays_share_a_call(self, queue: Orders) -> None:
        soon = datetime.now(UTC) + timedelta(seconds=0.2)
        await asyncio.gather(queue.offer(1, 3600), queue.offer(2, at=soon), queue.offer(3, 7200))
        assert await queue.take() == 2

    async def test_bad_input_is_refused_unwritten(self, client: Client, raw: Any) -> None:
        queue: Orders = client.delayed_queue("orders", max_payload=10)
        bad: list[Any] = [-1, -0.001, math.nan, math.inf, -math.inf, 2**53 / 1000 + 1, True, "5"]
        for delay in (*bad, timedelta(seconds=-1), timedelta.max, None):
            with pytest.raises(delayq.BadDelay):
                await queue.offer_many([(1, 1), (2, delay)])
            if delay is not None:
                with pytest.raises(ValueError):
                    await queue.offer(1, delay)
        for messages in ([delayq.Offer(1)], [(1, 1, 1)], [(1,)], 5):
            with pytest.raises(delayq.BadInput, match="takes pairs of value and delay"):
                await queue.offer_many(messages)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timezone"):
            await queue.offer(1, at=datetime.now())  # noqa: DTZ005
        with pytest.raises(delayq.BadDelay, match="not both"):
            await queue.offer(1, 1, at=datetime.now(UTC))
        with pytest.raises(delayq.EncodeError):
            await queue.offer(object(), 1)
        with pytest.raises(delayq.PayloadTooLarge, match="11 bytes"):
            await queue.offer("x" * 9, 1)
        with pytest.raises(delayq.EncodeError):
            await queue.offer_many([(1, 1), (math.nan, 1)])
        for name in ("", "a{b", "a}b", "{}x", "x{}{y}", "\ud800"):
            with pytest.raises(delayq.BadName):
                client.delayed_queue(name)
        assert await raw.keys() == []

    async def test_concurrent_offers_share_calls(self, client: Client, queue: Orders) -> None:
        await queue.offer(-1, 3600)
        before = client.statistics().round_trips
        receipts = await asyncio.gather(*(queue.offer(n, 3600) for n in range(500)))
        # About four, and those of the client's own checks.
        assert client.statistics().round_trips - before <= 60
        assert [receipt.id for receipt in receipts] == sorted({receipt.id for receipt in receipts})
        assert await receipts[250].cancel()
        assert await queue.pending.read_all() == [*range(-1, 250), *range(251, 500)]

    @pytest.mark.every_server
    async def test_keys_of_foreign_types_are_kept(self, queue: Orders, raw: Any) -> None:
        for key in (ORDERED, TIMEOUT):
            await raw.flushall()
            await raw.set(key, "mine")
            with pytest.raises(delayq.ServerRefused, match="wrong type"):
                await queue.offer(1, 60)
            assert await raw.keys() == [key.encode()]


class TestReceipts:
    async def test_a_message_can_be_put_off(self, client: Client, queue: Orders) -> None:
        for delay in (0.05, 1, 5, 25):
            receipt = await queue.offer(1, delay)
            if await receipt.reschedule(at=datetime.now(UTC) + timedelta(hours=1)) is True:
                break
            # It was too late for this one.
            assert await client.server_time() >= receipt.due_at
            assert await queue.take() == 1
        assert await queue.poll(delay + 0.05) is None
        assert [due for _, due in await queue.pending.entries()] == [receipt.due_at]


class TestTaking:
    async def test_poll_waits_as_long_as_it_is_told(self, queue: Orders) -> None:
        receipt = await queue.offer(1, 3600)
        assert await queue.poll(0.01) is None
        assert await receipt.reschedule(0.5) is True
        assert await queue.poll(timedelta(seconds=60)) == 1
        for timeout in (-1, math.nan, math.inf):
            with pytest.raises(delayq.BadDelay):
                await queue.poll(timeout)

    async def test_more_polls_than_one_call_serves_leave_nothing(self, queue: Orders) -> None:
        await queue.offer_many((n, 0) for n in range(250))
        polled = await asyncio.gather(*(queue.poll(0) for _ in range(250)))
        assert {*polled} == {*range(250)}

    @pytest.mark.every_server
    async def test_an_unreadable_payload_goes_to_quarantine_whole(
        self, queue: Orders, raw: Any
    ) -> None:
        await raw.rpush("orders", b"\xffnot json", "1", b"{", "2")
        words = "^queue 'orders': JsonCodec cannot decode the payload: it is not UTF-8; was it"
        with pytest.raises(delayq.DecodeError, match=words) as caught:
            await queue.take()
        assert caught.value.payload == b"\xffnot json"
        seen = []
        async for value in queue:
            seen.append(value)
            if value == 2:
                break
        assert seen == [1, 2]
        await until(lambda: raw.lindex(KEYS.quarantine, 1))
        assert await raw.lrange(KEYS.quarantine, 0, -1) == [b"\xffnot json", b"{"]


class TestViews:
    @pytest.mark.every_server
    async def test_a_message_that_only_the_ordered_list_has_can_be_removed(
        self, queue: Orders, raw: Any
    ) -> None:
        arguments: dict[str, Any] = {"remove": 1, "remove_all": [1], "retain_all": [2]}
        for method, argument in arguments.items():
            await raw.flushall()
            await queue.offer_many([(1, 60), (2, 60)])
            await raw.zrem(TIMEOUT, await raw.lindex(ORDERED, 0))
            assert await queue.pending.contains(1)
            assert await getattr(queue.pending, method)(argument), method
            assert not await getattr(queue.pending, method)(argument), method
            assert await queue.pending.read_all() == [2]

    @pytest.mark.every_server
    async def test_clearing_and_expiring_spare_the_ready(self, queue: Orders, raw: Any) -> None:
        await raw.rpush("orders", "1")
        assert await queue.pending.expire(60) is False
        await queue.offer(2, 60)
        assert await queue.pending.expire(timedelta(minutes=1)) is True
        assert await raw.pttl("orders") == -1
        assert 0 < await raw.pttl(ORDERED) <= 60_000
        assert 0 < await raw.pttl(TIMEOUT) <= 60_000
        assert await queue.pending.clear() is True
        assert await queue.pending.clear() is False
        assert await queue.ready.read_all() == [1]

    @pytest.mark.every_server
    @pytest.mark.parametrize("listed", [True, False])
    async def test_long_queues_are_read_in_joined_pages(self, client: Client, listed: bool) -> None:
        queue: Orders = client.delayed_queue("orders", ordered_list=listed)
        # Minutes apart: offering takes seconds.
        delays = [60 * (1 + (i * 7919) % 2500) for i in range(2500)]
        await queue.offer_many(enumerate(delays))
        assert await queue.pending.read_all() == list(range(2500))
        by_due = sorted(range(2500), key=lambda i: (delays[i], i))
        assert [value for value, _ in await queue.pending.entries()] == by_due
        assert await queue.pending.contains(0)
        assert await queue.pending.remove(0)
        assert await queue.pending.retain_all(range(2000, 2500))
        assert await queue.pending.size() == 500

    async def test_pages_miss_nothing_while_the_head_is_due(self, queue: Orders) -> None:
        await queue.offer_many([(i, 60) for i in range(4000)])
        keep = set(range(1000, 4000))

        async def pollute() -> None:
            for _ in range(10):
                await queue.pending.poll_many(100)
                await queue.offer(0, 60)

        polluter = asyncio.create_task(pollute())
        while not polluter.done():
            assert keep <= set(await queue.pending.read_all())
            assert keep <= {value for value, _ in await queue.pending.entries()}


class TestClients:
    async def test_a_given_client_gives_its_address_and_stays(self, server: PrivateServer) -> None:
        async with Redis.from_url(server.url, decode_responses=True, socket_timeout=60) as mine:
            async with delayq.connect(mine) as client:
                queue = client.delayed_queue("orders")
                taker = asyncio.create_task(queue.take())
                await queue.offer("é", 0.01)
                assert await taker == "é"
            assert await mine.ping()

    async def test_a_client_is_opened_once_and_before_use(self, server: PrivateServer) -> None:
        client = delayq.connect(server.url)
        with pytest.raises(delayq.Closed, match="async with"):
            client.delayed_queue("orders")
        async with client:
            with pytest.raises(delayq.Closed, match="opened only once"):
                await client.__aenter__()
        with pytest.raises(delayq.Closed, match="the client is closed"):
            client.statistics()
        await client.aclose()


async def test_the_mapper_comes_before_the_rule_of_braces(server: PrivateServer, raw: Any) -> None:
    async with delayq.connect(server.url, name_mapper="prod:{}".format) as client:
        queue: DelayedQueue[int] = client.delayed_queue("orders")
        assert queue.name == "orders"
        await queue.offer(1, 60)
        await queue.offer(2)
        assert await asyncio.wait_for(queue.take(), 60) == 2
        assert await queue.pending.poll_last_and_offer_first_to("other") == 1
        assert await raw.lrange("prod:other", 0, -1) == [b"1"]
        await queue.offer(3, 60)
        assert sorted(await raw.keys("redisson*")) == [
            b"redisson_delay_queue:{prod:orders}",
            b"redisson_delay_queue_timeout:{prod:orders}",
        ]
        tagged: DelayedQueue[int] = client.delayed_queue("{t1}:orders")
        await tagged.offer(4, 60)
        assert await raw.exists("redisson_delay_queue:prod:{t1}:orders")


async def test_a_doctor_finds_mapped_queues_that_are_stuck(server: PrivateServer) -> None:
    async with delayq.connect(server.url, name_mapper="prod:{}".format) as client:
        jobs: ReliableQueue[int] = client.reliable_queue("jobs", partitions=3)
        await jobs.offer_many([delayq.Offer(n) for n in range(3)])
        await jobs.pause()
        orders: DelayedQueue[int] = client.delayed_queue("orders")
        await orders.offer(1, 60)
        checks = {each.check: each async for each in diagnose(client, overdue=0)}
        assert checks["reliable prod:jobs"].level == "wrong"
        assert "3 ready" in checks["reliable prod:jobs"].text
        assert "1 delayed" in checks["delayed prod:orders"].text


async def test_a_mapped_name_must_be_a_good_one(server: PrivateServer) -> None:
    mapped: Any
    for mapped in ("", "a{b", None):
        async with delayq.connect(server.url, name_mapper=lambda _: mapped) as client:  # noqa: B023
            with pytest.raises(delayq.BadName):
                client.delayed_queue("orders")


async def test_two_names_that_share_keys_are_not_open_on_one_client(client: delayq.Client) -> None:
    queue = client.delayed_queue("orders")
    with pytest.raises(delayq.BadName, match="shares its keys with 'orders'"):
        client.delayed_queue("{orders}")
    await queue.aclose()
    client.delayed_queue("{orders}")


LONG = "x" * 513


async def test_nothing_is_written_of_what_is_too_much(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", codec=BytesCodec(), max_payload=100)
    orders = client.delayed_queue("orders", codec=BytesCodec(), max_payload=100)
    calls: list[Callable[[], Any]] = [
        lambda: orders.offer_many([(b"", 1), (bytes(101), 1)]),
        lambda: jobs.offer_many([delayq.Offer(b""), delayq.Offer(bytes(101))]),
        lambda: jobs.offer(b"", headers={"a": "é" * 8_192}),
        lambda: jobs.offer(b"", ttl=2.0**53),
        lambda: jobs.schedule(LONG, every=1, value=b""),
        lambda: jobs.schedule("a", cron="* * * * " + "1," * 300 + "1", value=b""),
        lambda: jobs.schedule("a", every=1, value=bytes(101)),
        lambda: jobs.schedule("a", every=1, value=b"", version=2**53 + 1),
        lambda: jobs.get(LONG),
        lambda: orders.pending.poll_last_and_offer_first_to(LONG),
    ]
    for call in calls:
        with pytest.raises(delayq.BadInput):
            await call()
    assert not await raw.keys("*")
    with pytest.raises(delayq.BadName):
        client.delayed_queue(LONG)
    queue: Any = orders
    for count in (2.5, "3", True, -1):
        with pytest.raises(delayq.BadInput, match="max_items"):
            await queue.drain(count)
        with pytest.raises(delayq.BadInput, match="n must be an int"):
            await queue.pending.poll_many(count)
    size: Any
    for size in (-1, True, 1.5, "1", 2**29):
        with pytest.raises(delayq.BadInput, match="max_payload"):
            client.delayed_queue("orders", max_payload=size)
    with pytest.raises(delayq.BadName):
        delayq.Worker(client).listener(LONG)(lambda value: None)
