"""The API that users rely on, by name and from end to end: a change here breaks programs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import delayq
import delayq.codecs
from delayq.testing import advance
from tests.support.fields import fields

if TYPE_CHECKING:
    from delayq import Client


@pytest.mark.every_server
async def test_a_delayed_queue(client: Client) -> None:
    queue: delayq.DelayedQueue[Any] = client.delayed_queue("orders", codec=delayq.JsonCodec())
    assert queue.name == "orders"
    receipt = await queue.offer("soon", delay=0.02)
    assert (isinstance(receipt.id, str), receipt.due_at.tzinfo) == (True, UTC)
    await queue.offer("in an hour", at=datetime.now(UTC) + timedelta(hours=1))
    receipts = await queue.offer_many([("far", timedelta(days=1)), ("farther", 100_000)])
    assert await queue.take() == "soon"
    assert await queue.poll(timeout=0) is None
    assert await queue.drain(max_items=None) == []
    assert await receipt.cancel() is False
    assert await receipts[0].reschedule(0) is True
    async for value in queue:
        assert value == "far"
        break
    pending = queue.pending
    assert (await pending.size(), await pending.peek()) == (2, "in an hour")
    assert [value for value, due_at in await pending.entries()] == ["in an hour", "farther"]
    assert await pending.contains("farther")
    assert await pending.contains_all(["farther", "in an hour"])
    assert await pending.poll_many(1) == ["in an hour"]
    assert await pending.remove("farther")
    assert (await pending.poll(), await pending.read_all()) == (None, [])
    await queue.offer_many([(n, 60) for n in range(4)])
    assert await pending.remove_all([0]) is True
    assert await pending.retain_all([1, 2]) is True
    assert await pending.poll_last_and_offer_first_to("others") == 2
    assert await pending.expire(60) is True
    await pending.clear()
    await queue.offer("leased")
    async for message in queue.deliveries(lease=30):
        async with message:
            assert message.value == "leased"
        break
    await queue.offer("ready")
    assert await queue.poll(timeout=60.0) == "ready"
    assert (await queue.ready.size(), await queue.ready.read_all()) == (0, [])
    await queue.ready.clear()


@pytest.mark.every_server
async def test_a_reliable_queue(client: Client) -> None:
    backoff = delayq.Backoff.exponential(base=1, factor=2, max=300, jitter=0.1)
    jobs: delayq.ReliableQueue[Any] = client.reliable_queue(
        "jobs", lease=30, max_attempts=10, backoff=backoff
    )
    options: dict[str, Any] = {"headers": {"k": "v"}, "priority": 0, "ttl": None}
    assert await jobs.offer("a", delay=2.5, id="order-42", **options) == "order-42"
    with pytest.raises(delayq.DuplicateMessage):
        await jobs.offer("b", id="order-42")
    for how in ("ignore", "replace"):
        assert await jobs.offer("c", id="order-42", on_duplicate=how) == "order-42"
    ids = await jobs.offer_many([delayq.Offer("d", delay=60, id="x"), delayq.Offer("e", delay=60)])
    assert (await jobs.cancel("x"), await jobs.reschedule(ids[1], 0)) == (True, True)
    assert await jobs.get("nobody") is None
    async for message in jobs:
        async with message:
            assert isinstance(message, delayq.Message)
            assert fields(message, "value id attempt headers") == ("c", "order-42", 1, {})
            assert message.enqueued_at - message.due_at < timedelta(milliseconds=1)
        break
    (message,) = await jobs.claim(10, wait=60.0)
    await message.extend(60)
    await message.nack(delay=0, error="it broke")
    with pytest.raises(delayq.LeaseLost):
        await message.ack()
    (message,) = await jobs.claim(10, wait=60.0)
    assert message.attempt == 2
    await message.bury("no good")
    stats = await jobs.stats()
    assert fields(stats, "delayed ready leased dead oldest_due_age") == (0, 0, 0, 1, 0)
    (letter,) = await jobs.dead.list()
    assert fields(letter, "id value attempt") == (ids[1], "e", 2)
    assert letter.died_at <= datetime.now(UTC) + timedelta(minutes=1)
    assert isinstance(letter.error, str)
    assert await jobs.dead.redrive(ids=None) == 1
    (message,) = await jobs.claim()
    await message.ack()
    assert await jobs.dead.purge() == 0
    await jobs.pause()
    await jobs.resume()
    await jobs.purge()


async def test_codecs_statistics_and_the_virtual_clock(client: Client) -> None:
    texts = ("JsonCodec", "StringCodec", "Kryo5Codec", "TypedJsonJacksonCodec", "JsonJacksonCodec")
    others = {"BytesCodec": b"seven", "LongCodec": 7, "IntegerCodec": 7}
    for name, value in {**dict.fromkeys(texts, "seven"), **others}.items():
        codec = getattr(delayq.codecs, name)()
        queue: delayq.DelayedQueue[Any] = client.delayed_queue(name, codec=codec)
        await queue.offer(value, delay=60)
        assert codec.decode(codec.encode(value)) == value == await queue.pending.poll()
    await queue.offer(7, delay=60)
    await advance(queue, 60)
    assert await queue.take() == 7
    statistics = client.statistics()
    assert statistics.connections >= 0
    assert (statistics.timers, statistics.errors) >= (0, 0)
    assert statistics.round_trips >= 0
