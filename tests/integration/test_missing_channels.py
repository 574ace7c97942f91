"""A user without channels, as ``ACL SETUSER name on >password ~* +@all`` creates on Redis 7 and
Valkey, loses nothing.

An announcement that only delayq hears is a hint, so the call does its work without it. A call whose
announcement Redisson's clients depend on is refused, and changes nothing.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq.admin.acl import acl_rules
from tests.integration.test_acl import contents, granted
from tests.support.reliable import claim_one
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

WITHOUT_CHANNELS = ("~*", "resetchannels", "+@all")
NAME = "orders"
KEYS = DelayedKeys.of(NAME)


@pytest.fixture
async def silent(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    """Open a client as that user."""
    async with (
        granted(server, WITHOUT_CHANNELS) as url,
        delayq.connect(url, resync_interval=0.1) as client,
    ):
        yield client


async def test_a_user_without_channels_takes_due_messages(
    silent: delayq.Client, client: delayq.Client, raw: Any
) -> None:
    await client.delayed_queue(NAME).offer_many([(n, 0.05) for n in range(30)])
    await client.delayed_queue(NAME).aclose()
    queue = silent.delayed_queue(NAME)
    assert [await queue.take() for _ in range(30)] == [*range(30)]
    await until(lambda: nothing_left(raw))


async def test_the_key_of_a_channel_is_necessary_to_take(
    server: PrivateServer, client: delayq.Client
) -> None:
    # The server takes a channel that is passed to a script for a key, too.
    await client.delayed_queue(NAME).offer("due")
    await client.delayed_queue(NAME).aclose()
    rules = acl_rules("consumer", delayed=[NAME])
    async with (
        granted(server, [rule for rule in rules if rule != f"~{KEYS.turns}"]) as url,
        delayq.connect(url) as other,
    ):
        with pytest.raises(delayq.ServerRefused):
            await other.delayed_queue(NAME).take()
    assert await client.delayed_queue(NAME).take() == "due"


async def nothing_left(raw: Any) -> bool:
    # A fence remains for a minute, and keeps a late repetition from taking effect twice.
    return all(key.startswith(b"delayq_fence:") for key in await raw.keys("*"))


async def test_a_new_head_for_redisson_is_refused_and_nothing_changed(
    silent: delayq.Client, client: delayq.Client, raw: Any
) -> None:
    theirs = client.delayed_queue(NAME)
    receipt = await theirs.offer("pending", 60)
    await theirs.aclose()
    queue: delayq.DelayedQueue[Any] = silent.delayed_queue(NAME)
    mine = delayq.Receipt(queue, receipt._payload, receipt._stored)
    before = await contents(raw)
    for change in (lambda: queue.offer("sooner", 30), lambda: mine.reschedule(30)):
        with pytest.raises(delayq.ServerRefused):
            await change()
    assert await contents(raw) == before
    # A message due after the head needs no announcement.
    await queue.offer("later", 90)
    assert await queue.pending.size() == 2


async def test_rescheduling_the_head_is_announced(client: delayq.Client, raw: Any) -> None:
    queue = client.delayed_queue(NAME)
    first, second = await queue.offer_many([("a", 60), ("b", 7000)])
    async with raw.pubsub() as listener:
        await listener.subscribe(KEYS.channel)
        assert (await listener.get_message(timeout=20))["type"] == "subscribe"
        await first.reschedule(65)
        # No longer the head: the others wake up at 65 s, and learn of the next one.
        await first.reschedule(8000)
        await first.reschedule(9000)
        await second.reschedule(10)
        heard = [int((await listener.get_message(timeout=20))["data"]) for _ in range(2)]
        assert heard[1] == round(second.due_at.timestamp() * 1000)
        assert heard[1] < heard[0] < round(first.due_at.timestamp() * 1000)
        assert await listener.get_message(timeout=0.2) is None


async def test_a_nack_for_redisson_is_refused_and_the_message_stays_under_its_lease(
    silent: delayq.Client, client: delayq.Client, raw: Any
) -> None:
    await raw.rpush(KEYS.ready, b'"work"')
    queue = silent.delayed_queue(NAME)
    async with aclosing(queue.deliveries(lease=60)) as deliveries:  # type: ignore[type-var]
        delivery = await anext(deliveries)
        with pytest.raises(delayq.ServerRefused):
            await delivery.nack(30)
        assert await raw.hvals(KEYS.leased) == [b'"work"']
        assert await raw.zcard(KEYS.leases) == 1
        await delivery.ack()
    assert await nothing_left(raw)


async def test_a_reliable_queue_does_all_its_work(
    silent: delayq.Client, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue = silent.reliable_queue(NAME, lease=60, max_attempts=3)
    await queue.offer_many([delayq.Offer(n, id=str(n), priority=n % 2) for n in range(4)])
    await queue.offer("instead", id="3", on_duplicate="replace")
    assert await queue.reschedule("0", 30)
    assert await queue.reschedule("0", 0)
    messages = {message.id: message for message in await queue.claim(10)}
    assert sorted(messages) == ["0", "1", "2", "3"]
    await messages["0"].nack(0)
    await messages["1"].release()
    await messages["2"].bury("why")
    await messages["3"].ack()
    assert await queue.dead.redrive() == 1
    await queue.pause()
    assert await queue.resume()
    again = await queue.claim(10, wait=5)
    assert {message.id: message.attempt for message in again} == {"0": 2, "1": 1, "2": 1}
    for message in again:
        await message.ack()
    await queue.schedule("often", every=0.02, value=1)
    await (await claim_one(queue, wait=5)).ack()
    assert await queue.unschedule("often")
    warnings = [line for line in caplog.messages if "no permission to PUBLISH" in line]
    # Once by the call that offers, once by the call that claims.
    assert len(warnings) <= 2
    assert any(repr(NAME) in line for line in warnings)
