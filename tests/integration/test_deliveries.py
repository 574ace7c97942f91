"""Deliveries: each message is leased, and delivered at least once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.ready_watch import LINGER
from delayq._redisson.records import pack
from delayq._redisson.store import ACK, NACK, TRANSFER
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client, Delivery
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer

    Orders = delayq.DelayedQueue[int]

LEASES, LEASED = "delayq_leases:{orders}", "delayq_leased:{orders}"
# A lease that is short enough to wait for its end.
SHORT = 0.2


async def hold(queue: Orders, count: int = 1, lease: float = 30) -> list[Delivery[int]]:
    """Take ``count`` deliveries, then leave the loop."""
    held: list[Delivery[int]] = []
    async with aclosing(queue.deliveries(lease)) as deliveries:  # type: ignore[type-var]
        async for delivery in deliveries:
            held.append(delivery)
            if len(held) == count:
                break
    return held


async def let_leases_pass(raw: Any, seconds: float) -> None:
    """Let ``seconds`` pass for all leases."""
    for token in await raw.zrange(LEASES, 0, -1):
        await raw.zincrby(LEASES, -seconds * 1000, token)


@pytest.mark.every_server
async def test_a_lease_goes_by_the_servers_clock(client: Client, queue: Orders, raw: Any) -> None:
    await queue.offer(1)
    before = await client.server_time()
    (delivery,) = await hold(queue, lease=30)
    for lease in (30, 60):
        if lease == 60:
            await delivery.extend(lease)
        after = await client.server_time() + timedelta(milliseconds=1)
        assert before <= delivery.lease_ends_at - timedelta(seconds=lease) <= after
        ends = await raw.zrange(LEASES, 0, -1, withscores=True)
        assert [end for _, end in ends] == [delivery.lease_ends_at.timestamp() * 1000]


async def test_a_message_of_an_ended_lease_comes_next(server: PrivateServer, raw: Any) -> None:
    # Only the client's own timer can wake it.
    async with delayq.connect(server.url, resync_interval=3600) as client:
        queue: Orders = client.delayed_queue("orders")
        await queue.offer_many([(1, 0), (2, 0), (3, 0)])
        slow, fine = await hold(queue, 2, lease=30)
        await fine.ack()
        assert await asyncio.wait_for(queue.take(), 60) == 3
        # Only from here on does the end of the lease matter.
        await slow.extend(SHORT)
        # The end of the first lease would wake it after 30 s.
        assert await asyncio.wait_for(queue.take(), 20) == 1
        assert await client.server_time() >= slow.lease_ends_at
        assert client.statistics().returned == 1
        assert await raw.exists(LEASES, LEASED) == 0


async def test_a_caller_that_lost_its_lease_is_told_and_changes_nothing(queue: Orders) -> None:
    await queue.offer(1)
    (late,) = await hold(queue, lease=SHORT)
    (next_one,) = await asyncio.wait_for(hold(queue), 60)
    for attempt in (late.ack(), late.nack(), late.extend(30)):
        with pytest.raises(delayq.LeaseLost, match="another worker may have the message"):
            await attempt
    assert await queue.ready.leased() == 1
    assert await queue.pending.size() == 0
    await next_one.ack()
    with pytest.raises(delayq.LeaseLost):
        await next_one.ack()


@pytest.mark.every_server
async def test_messages_of_ended_leases_come_back_in_order(server: PrivateServer, raw: Any) -> None:
    async with delayq.connect(server.url) as dying:
        queue: Orders = dying.delayed_queue("orders")
        await queue.offer_many([(n, 0) for n in range(80)])
        held = await hold(queue, 60, lease=3600)
    # The leases end only now, so that none comes back while the others are taken.
    await let_leases_pass(raw, 3600)
    async with delayq.connect(server.url) as client:
        assert await client.server_time() >= held[-1].lease_ends_at - timedelta(hours=1)
        queue = client.delayed_queue("orders")
        await until(queue.ready.read_all, equals=list(range(80)))


@pytest.mark.every_server
async def test_returned_messages_are_taken_before_those_that_just_came_due(raw: Any) -> None:
    keys = DelayedKeys.of("orders")
    await raw.zadd(keys.leases, {"t:001": 1, "t:002": 2})
    await raw.hset(keys.leased, mapping={"t:001": b"1", "t:002": b"2"})
    await raw.zadd(keys.timeout, {pack(b"ABCDEFGH", b"3", 8): 3})
    names = keys.of_script(TRANSFER, fence="fence")
    arguments = (100, 2, 1000, 60_000_000, 0, "call", "")
    reply = await raw.eval(TRANSFER.text, len(names), *names, *arguments)
    assert reply[2:] == [1, 0, 2, 1, 0, [b"1", b"2"]]
    assert await raw.lrange("orders", 0, -1) == [b"3"]


async def test_a_bad_lease_is_refused_at_once(queue: Orders) -> None:
    bad: list[Any] = [-1, float("nan"), float("inf"), "30"]
    for lease in (0, *bad):
        with pytest.raises(delayq.BadInput):
            queue.deliveries(lease)
    for delay in bad:
        with pytest.raises(delayq.BadInput):
            queue.deliveries(retry_delay=delay)


# Acknowledging and giving back


@pytest.mark.every_server
async def test_a_nack_writes_redissons_form(queue: Orders, client: Client, raw: Any) -> None:
    await queue.offer(7)
    (delivery,) = await hold(queue)
    before = await client.server_time()
    await delivery.nack(3600)
    after = await client.server_time() + timedelta(milliseconds=1)
    ((value, due_at),) = await queue.pending.entries()
    assert value == 7
    assert before <= due_at - timedelta(hours=1) <= after
    (record,) = await raw.lrange("redisson_delay_queue:{orders}", 0, -1)
    assert await raw.zrange("redisson_delay_queue_timeout:{orders}", 0, -1) == [record]
    assert record == pack(record[1:9], b"7", 8)
    assert await raw.exists(LEASES, LEASED) == 0


async def test_a_nack_wakes_whoever_waits(server: PrivateServer, queue: Orders) -> None:
    async with delayq.connect(server.url) as other:
        waiting = asyncio.create_task(other.delayed_queue("orders").take())
        await asyncio.sleep(0.02)
        await queue.offer(7, 0.05)
        assert await asyncio.wait_for(waiting, 60) == 7
        await queue.offer(8)
        (delivery,) = await hold(queue)
        waiting = asyncio.create_task(other.delayed_queue("orders").take())
        await delivery.nack(0.05)
        assert await asyncio.wait_for(waiting, 60) == 8


async def test_a_block_that_raises_offers_again_later(queue: Orders, client: Client) -> None:
    await queue.offer(1)
    before = await client.server_time()
    with suppress(ZeroDivisionError):
        async for delivery in queue.deliveries(retry_delay=1000):
            async with delivery:
                raise ZeroDivisionError
    after = await client.server_time() + timedelta(milliseconds=1)
    ((value, due_at),) = await queue.pending.entries()
    assert value == 1
    assert before <= due_at - timedelta(seconds=1000) <= after


async def test_acks_of_concurrent_handlers_share_a_call(queue: Orders, faults: Faults) -> None:
    await queue.offer_many([(n, 0) for n in range(101)])
    first, *held = await hold(queue, 101)
    # From now on, the server knows the script.
    await first.ack()
    faults.calls.clear()
    await asyncio.gather(*(delivery.ack() for delivery in held))
    assert faults.calls.count(ACK.name) <= 3


@pytest.mark.every_server
async def test_only_a_lease_allows_to_quarantine(queue: Orders, raw: Any) -> None:
    store = queue._open.store
    await raw.zadd(LEASES, {"call:001": 1e15})
    await raw.hset(LEASED, "call:001", b"{")
    for token, carried_out, left in (("gone:001", 0, 0), ("call:001", 1, 1), ("call:001", 0, 1)):
        aside = store.set_aside_request(store.keys.fence("aside"), 60_000_000, token, b"{")
        assert await store.send(aside) == carried_out
        assert await raw.llen(store.keys.quarantine) == left
    assert await raw.exists(LEASES, LEASED) == 0


async def test_what_java_pushes_is_delivered_at_once(server: PrivateServer, raw: Any) -> None:
    async with delayq.connect(server.url, resync_interval=3600) as client:
        queue: Orders = client.delayed_queue("orders")
        waiting = asyncio.create_task(hold(queue))
        assert await queue.poll(0.05) is None
        # Longer than the ready list is watched when no caller waits.
        await asyncio.sleep(LINGER + 0.2)
        await raw.rpush("orders", 1)
        (delivery,) = await asyncio.wait_for(waiting, 60)
        assert delivery.value == 1


async def test_takes_and_deliveries_share_messages_that_come_singly(queue: Orders) -> None:
    taken: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    async def take() -> None:
        while True:
            taken.put_nowait((0, await queue.take()))

    async def lease(seconds: int) -> None:
        async for delivery in queue.deliveries(seconds):
            async with delivery:
                taken.put_nowait((seconds, delivery.value))

    def all_wait() -> bool:
        waiting = [
            source.dispatcher.caller_queue.has_patient_callers
            for source in queue._open.transfer._sources.values()
        ]
        return len(waiting) == 3 and all(waiting)

    kinds = set()
    async with running(take(), lease(3600), lease(7200)):
        for n in range(12):
            await until(all_wait)
            await queue.offer(n)
            kind, value = await asyncio.wait_for(taken.get(), 60)
            assert value == n
            kinds.add(kind)
    assert kinds == {0, 3600, 7200}
    assert await queue.ready.leased() == 0


async def test_a_lease_is_renewed_while_its_block_runs(
    queue: Orders, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ten times a second.
    monkeypatch.setattr("delayq._engine.lease_keeper._TIMES", 36_000)
    await queue.offer(1)
    (delivery,) = await hold(queue, lease=3600)
    at_least = delivery.lease_ends_at.timestamp() * 1000
    async with delivery:
        for _ in range(2):
            await let_leases_pass(raw, 3000)
            await until(lambda: raw.zcount(LEASES, at_least, "+inf"))
    assert await raw.exists(LEASES, LEASED) == 0


# Faults


@pytest.mark.every_server
async def test_a_producer_returns_what_a_dead_one_held(server: PrivateServer, raw: Any) -> None:
    """Java consumers get it as well, although they know nothing of leases."""
    async with delayq.connect(server.url) as dying:
        queue: Orders = dying.delayed_queue("orders")
        await queue.offer(1)
        (delivery,) = await hold(queue, lease=3600)
    assert await raw.lrange("orders", 0, -1) == []
    # Only now, or the dying client may return the message itself.
    await let_leases_pass(raw, 3600 - SHORT)
    async with delayq.connect(server.url, resync_interval=0.1) as producer:
        producer.delayed_queue("orders")
        assert await asyncio.wait_for(raw.blpop(["orders"], 50), 60) == (b"orders", b"1")
        ended_at = delivery.lease_ends_at - timedelta(seconds=3600 - SHORT)
        assert await producer.server_time() >= ended_at


async def test_a_lost_reply_costs_no_lease(queue: Orders, faults: Faults, raw: Any) -> None:
    """Messages in a lost reply go back at once, not when the lease ends."""
    await queue.offer_many([(1, 3600), (2, 3600)])
    await raw.rpush("orders", 1, 2)
    faults.fail(TRANSFER, "lost", times=2)
    held = await asyncio.wait_for(hold(queue, 2, lease=3600), 60)
    assert [delivery.value for delivery in held] == [1, 2]
    assert await queue.ready.leased() == 2


async def test_an_ack_is_repeated(queue: Orders, faults: Faults, raw: Any) -> None:
    for fault in ("unsent", "lost"):
        await queue.offer(1)
        (delivery,) = await hold(queue)
        faults.calls.clear()
        faults.fail(ACK, fault, times=1)
        await delivery.ack()
        assert faults.calls.count(ACK.name) == 2, fault
        assert await raw.keys() == []


async def test_an_ack_that_may_be_late_says_so(
    queue: Orders, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the end of the lease, a lost reply may be of an ack that came too late."""
    monkeypatch.setattr("delayq._engine.leases._MARGIN", 60)
    await queue.offer_many([(1, 0), (2, 0)])
    first, delivery = await hold(queue, 2, lease=30)
    # From now on, the server knows the script.
    await first.ack()
    faults.fail(ACK, "lost", times=1)
    with pytest.raises(delayq.OutcomeUnknown):
        await delivery.ack()


async def test_a_nack_without_a_reply_is_unknown(queue: Orders, faults: Faults) -> None:
    await queue.offer(1)
    (delivery,) = await hold(queue)
    faults.fail(NACK, "lost")
    with pytest.raises(delayq.OutcomeUnknown):
        await delivery.nack(3600)
    assert await queue.pending.read_all() == [1]
    with pytest.raises(delayq.LeaseLost):
        await delivery.ack()


async def test_a_payload_too_large_to_offer_is_taken_and_returned(client: Client, raw: Any) -> None:
    queue = client.delayed_queue("orders", codec=delayq.StringCodec())
    large = "x" * 3_000_000
    await raw.rpush("orders", large, large)
    assert await queue.take() == large
    with pytest.raises(delayq.PayloadTooLarge):
        await queue.offer(large)
    for attempt in range(2):
        async with aclosing(queue.deliveries()) as deliveries:  # type: ignore[type-var]
            async for delivery in deliveries:
                assert delivery.value == large
                await (delivery.ack() if attempt else delivery.nack(0))
                break
    assert await raw.llen("orders") == 0
