"""Messages arrive exactly once, never early, and soon, with any loss of notifications."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

import delayq
from delayq._engine.store import resync
from delayq._redisson.keys import DelayedKeys
from tests.support.foreign import store
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, DelayedQueue
    from tests.support.servers import PrivateServer

RESYNC = 1.0


def now_ms() -> float:
    return time.time() * 1000


class Log:
    """A record of deliveries and their times.

    Due times and arrivals use one clock, because the server runs on this machine.
    """

    def __init__(self, seed: int = 0) -> None:
        self.arrived: dict[int, list[float]] = {}
        self.due: dict[int, float] = {}
        self.unknown: set[int] = set()
        self.chance = random.Random(seed)

    @asynccontextmanager
    async def consuming(self, queue: DelayedQueue[int]) -> AsyncIterator[None]:
        async def consume() -> None:
            async for value in queue:
                self.arrived.setdefault(value, []).append(now_ms())

        task = asyncio.create_task(consume())
        yield
        await end(task)

    async def offer(self, queue: DelayedQueue[int], value: int, delay: float) -> None:
        receipt = await queue.offer(value, delay)
        self.due[value] = receipt.due_at.timestamp() * 1000

    async def offer_many(self, queue: DelayedQueue[int], count: int, within: float) -> None:
        """Offer messages at random times, and note those whose outcome is unknown."""

        async def offer(value: int) -> None:
            await asyncio.sleep(self.chance.random() * within)
            try:
                await self.offer(queue, value, self.chance.random())
            except delayq.OutcomeUnknown:
                self.unknown.add(value)

        await asyncio.gather(*(offer(value) for value in range(count)))

    async def complete(self) -> None:
        """Wait until every offered message has arrived."""
        await until(lambda: not self.due.keys() - self.arrived.keys(), 30)

    def check(self) -> None:
        assert self.arrived.keys() >= self.due.keys()
        assert [value for value, times in self.arrived.items() if len(times) > 1] == []
        early = [value for value, due in self.due.items() if self.arrived[value][0] < due]
        assert early == []


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


@pytest.mark.parametrize(
    "storm", ["CLIENT KILL TYPE pubsub", "CLIENT KILL TYPE normal", "SCRIPT FLUSH"]
)
async def test_a_storm_loses_no_message(server: PrivateServer, raw: Any, storm: str) -> None:
    log, over = Log(seed=4), asyncio.Event()

    async def rage() -> None:
        # redis-py may swallow a cancellation.
        while not over.is_set():
            with suppress(RedisError, OSError):
                await raw.execute_command(*storm.split())
            await asyncio.sleep(0.02 if "FLUSH" in storm else 0.2)

    async with delayq.connect(server.url, resync_interval=RESYNC) as client:
        queue: DelayedQueue[int] = client.delayed_queue("orders")
        rager = asyncio.create_task(rage())
        async with log.consuming(queue):
            await log.offer_many(queue, 300, within=1)
            over.set()
            await end(rager)
            await log.complete()
    log.check()
    assert "normal" in storm or not log.unknown


async def test_a_server_killed_and_restarted_loses_nothing(own_server: PrivateServer) -> None:
    log = Log(seed=5)
    async with delayq.connect(own_server.url, resync_interval=RESYNC) as client:
        queue: DelayedQueue[int] = client.delayed_queue("orders")
        async with log.consuming(queue):
            offers = asyncio.create_task(log.offer_many(queue, 500, within=1))
            for _ in range(3):
                await asyncio.sleep(0.3)
                own_server.kill()
                await asyncio.sleep(0.1)
                await asyncio.to_thread(own_server.start)
            await offers
            await log.complete()
    log.check()


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
        return await resync(client, calls)

    monkeypatch.setattr("delayq._engine.scheduler.resync", counted)
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
        await scheduler.run_once()
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
    monkeypatch.setattr("delayq._engine.scheduler._QUEUES_AT_ONCE", 20)
    async with delayq.connect(server.url, resync_interval=3600) as client:
        queues = [client.delayed_queue(f"orders {n}") for n in range(100)]
        await queues[70].offer(70, 3600)
        scheduler, calls = client.session.scheduler, client.session.server
        # Only our own calls are left, and the server knows the script.
        assert scheduler._resync is not None
        scheduler._resync.cancel()
        await scheduler.run_once()
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
            for queue in scheduler.queues:
                note = lambda due_us, _ready, name=queue.name: due_of.update({name: due_us})
                patch.setattr(queue, "resynced", note)
            await scheduler.run_once()
            other.cancel()
            assert turns >= {0, 20, 40, 60, 80}
            assert calls.round_trips == before + 1
            assert len(due_of) == 100
            assert [name for name, due_us in due_of.items() if due_us != -1] == ["orders 70"]
            # If that fails, as it does after a restart, each part is requested separately.
            server.call("SCRIPT", "FLUSH")
            due_of.clear()
            await scheduler.run_once()
            assert len(due_of) == 100
