"""Messages arrive exactly once, never early, and soon, with any loss of notifications."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._engine.store import recheck
from delayq._redisson.keys import DelayedKeys
from tests.support.foreign import store
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client, DelayedQueue
    from tests.support.servers import PrivateServer

RESYNC = 1.0


def now_ms() -> float:
    return time.time() * 1000


async def test_short_delays_come_first(server: PrivateServer, queue: DelayedQueue[int]) -> None:
    """Redisson's defect delivered a 3 s message together with the 50 s one before it."""
    taker = asyncio.create_task(queue.take())
    async with delayq.connect(server.url) as other:
        await other.delayed_queue("orders").offer_many([(50, 50), (3, 0.05)])
    assert await asyncio.wait_for(taker, 20) == 3


async def test_a_late_consumer_gets_due_messages(server: PrivateServer, client: Client) -> None:
    async with delayq.connect(server.url) as producer:
        await producer.delayed_queue("orders").offer_many([(i, 0.01) for i in range(250)])
    await asyncio.sleep(0.02)
    queue: DelayedQueue[int] = client.delayed_queue("orders")
    assert await asyncio.wait_for(queue.take(), 20) == 0
    assert await queue.drain() == list(range(1, 250))


async def test_payloads_pushed_by_java_arrive_at_once_and_a_take_holds_up_no_java_pop(
    server: PrivateServer,
) -> None:
    async with (
        delayq.connect(server.url, resync_interval=60) as client,
        Redis.from_url(server.url, socket_timeout=None) as java,
        asyncio.timeout(60),
    ):
        queue: DelayedQueue[int] = client.delayed_queue("orders")
        takers = [asyncio.create_task(queue.take()) for _ in range(3)]
        await asyncio.sleep(0.05)
        popped: asyncio.Future[Any] = asyncio.ensure_future(java.blpop(["orders"]))
        await asyncio.sleep(0.05)
        await java.rpush("orders", "1", "2")
        await java.rpush("orders", "3", "4")
        values = [*await asyncio.gather(*takers), int((await popped)[1])]
        assert sorted(values) == [1, 2, 3, 4]


async def test_the_recheck_finds_unannounced_records(server: PrivateServer, raw: Any) -> None:
    async with delayq.connect(server.url, resync_interval=RESYNC) as client:
        taker = asyncio.create_task(client.delayed_queue("orders").take())
        await asyncio.sleep(0.05)
        record = b"\x08ABCDEFGH" + (2).to_bytes(8, "little") + b"17"
        due = int(now_ms()) + 100
        await store(raw, DelayedKeys.of("orders"), {record: due})
        assert await asyncio.wait_for(taker, 20) == 17
        assert due <= now_ms()
        assert await raw.keys() == []


@pytest.mark.gate
async def test_many_queues_and_waiting_takes_are_nearly_idle(server: PrivateServer) -> None:
    async with (
        delayq.connect(server.url) as client,
        Redis.from_url(server.url, socket_timeout=60) as observer,
    ):
        queues = [client.delayed_queue(f"queue-{i}") for i in range(200)]
        takers = [asyncio.create_task(queue.take()) for queue in queues[:20]]

        async def are_at_rest() -> bool:
            ours = [each for each in await observer.client_list() if each["name"] == "delayq"]
            blocked = [client for client in ours if client["cmd"].startswith("blmove")]
            # One blocked connection for each waiting take, one for the subscription, and one for
            # calls.
            return (len(ours), len(blocked)) == (20 + 1 + 1, 20)

        # Each confirmed subscription is followed by a re-check out of turn.
        subscriptions = client.session.scheduler.subscriber._plan
        await until(lambda: subscriptions._requested and not subscriptions._sent)
        await until(are_at_rest, within=60)
        await asyncio.sleep(0.5)

        async def commands() -> int:
            # A script's own commands are counted too; count only the calls that came over the wire.
            stats = await observer.info("commandstats")
            counted = ("evalsha", "eval", "ping", "subscribe", "blmove")
            return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in counted)

        before, start = await commands(), time.monotonic()
        await asyncio.sleep(6)
        assert (await commands() - before) / (time.monotonic() - start) <= 1
        assert await are_at_rest()
        for i, queue in enumerate(queues[:20]):
            await queue.offer(i, 0)
        assert await asyncio.wait_for(asyncio.gather(*takers), 20) == list(range(20))


async def test_every_further_queue_costs_as_much_as_the_first(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch, raw: Any
) -> None:
    """An application may have a queue for each of its users."""
    looked_at: list[str] = []

    async def counted(client: Any, calls: Any) -> Any:
        looked_at.extend(keys[0] for queues in calls for _, keys in queues)
        return await recheck(client, calls)

    monkeypatch.setattr("delayq._engine.scheduler.recheck", counted)
    async with delayq.connect(server.url, resync_interval=1_000_000) as client:
        scheduler, calls = client.session.scheduler, client.session.server
        costs = []
        for n in range(30):
            before = calls.round_trips
            await client.reliable_queue(f"user {n}").offer(n, 3600)
            costs.append(calls.round_trips - before)
        # Scripts that the server does not know yet take a second call.
        assert len(set(costs[2:])) == 1
        before = calls.round_trips
        await scheduler.recheck()
        assert (calls.round_trips - before, looked_at) == (0, [])
        assert await raw.pubsub_channels() == []
        async with asyncio.TaskGroup() as consumers:
            waiting = []
            for n in range(30):
                queue = client.reliable_queue(f"user {n}")
                waiting.append(consumers.create_task(queue.claim(wait=3600)))
                await until(lambda: len({*looked_at}), equals=n + 1)
            # Each subscription has a look at its own queue, and not at all of them.
            assert len(looked_at) <= 4 * 30
            for claiming in waiting:
                claiming.cancel()


async def test_the_re_check_of_many_queues_is_one_round_trip(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.scheduler._PARTS_AT_ONCE", 20)
    async with delayq.connect(server.url, resync_interval=3600) as client:
        queues = [client.delayed_queue(f"orders {n}") for n in range(100)]
        await queues[70].offer(70, 3600)
        scheduler, calls = client.session.scheduler, client.session.server
        # Only our own calls are left, and the server knows the script.
        assert scheduler._recheck_task is not None
        scheduler._recheck_task.cancel()
        await scheduler.recheck()
        before = calls.round_trips
        with monkeypatch.context() as patch:
            due_of: dict[str, int] = {}
            # How many queues were looked at when other tasks had their turns.
            turns = {0}

            async def take_turns() -> None:
                while True:
                    turns.add(len(due_of))
                    await asyncio.sleep(0)

            other = asyncio.create_task(take_turns())
            for queue in scheduler.parts:
                note = lambda due_us, _ready, name=queue.name: due_of.update({name: due_us})
                patch.setattr(queue, "on_recheck", note)
            await scheduler.recheck()
            other.cancel()
            assert turns >= {0, 20, 40, 60, 80}
            assert calls.round_trips == before + 1
            assert len(due_of) == 100
            assert [name for name, due_us in due_of.items() if due_us != -1] == ["orders 70"]
            # If that fails, as it does after a restart, each part is requested separately.
            server.call("SCRIPT", "FLUSH")
            due_of.clear()
            await scheduler.recheck()
            assert len(due_of) == 100
