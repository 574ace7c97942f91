"""Many clients wait on one queue: each message comes once, with about one call per due moment."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._engine import stagger
from delayq._redis.client import RedisClient
from delayq._redisson.store import TRANSFER
from delayq._reliable.scripts import CLAIM
from tests.support.depth import in_gate
from tests.support.reliable import values
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import HOUR
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delayq import Client, DelayedQueue
    from delayq._redis.scripts import Script
    from tests.support.servers import PrivateServer

# The re-check interval: no message of a test arrives by a re-check.
NEVER = HOUR
# Seconds between two due moments: longer than a stagger.
APART = 0.025
# A busy machine wakes all clients late and together, but not in every round.
ROUNDS = 12


class Kind:
    """A common interface to both kinds of queue."""

    def __init__(self, kind: str) -> None:
        self.reliable = kind == "reliable"
        self.script = (CLAIM if self.reliable else TRANSFER).name

    def open(self, client: Client) -> Any:
        if self.reliable:
            return client.reliable_queue("jobs", lease=LEASE)
        return client.delayed_queue("jobs")

    def keys(self, queue: Any) -> Any:
        return queue._open.partitions[0].keys if self.reliable else queue._keys

    def wakeups(self, queue: Any) -> Any:
        return (queue._open.partitions[0] if self.reliable else queue._open).wakeups

    def watches(self, queue: Any) -> bool:
        """Return whether the queue's client watches a ready list."""
        return not self.reliable and queue._open.transfer._watch._task is not None

    async def offer(self, queue: Any, delays: dict[int, float]) -> None:
        many: list[Any] = [*delays.items()]
        await queue.offer_many([Offer(n, delay=at) for n, at in many] if self.reliable else many)

    async def take(self, queue: Any) -> Any:
        if not self.reliable:
            return await queue.take()
        (value,) = await values(queue, 1, wait=60)
        return value

    async def consume(self, queue: Any, got: Callable[[int], None]) -> None:
        async for value in queue:
            if self.reliable:
                got(value.value)
                await value.ack()
            else:
                got(value)


@pytest.fixture(params=["delayed", "reliable"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


# Both kinds of queue share what decides who asks, and when. Where a script is what matters, both
# are tried in ``make test``.
mostly_delayed = pytest.mark.parametrize("kind", ["delayed", in_gate("reliable")], indirect=True)
mostly_reliable = pytest.mark.parametrize("kind", ["reliable", in_gate("delayed")], indirect=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[RedisClient]:
    """Count how often each client asks for due messages."""
    made: Counter[RedisClient] = Counter()
    run_once = RedisClient.run_once

    async def counted(server: RedisClient, script: Script, *arguments: Any) -> Any:
        if script.name in (CLAIM.name, TRANSFER.name):
            made[server] += 1
        return await run_once(server, script, *arguments)

    monkeypatch.setattr(RedisClient, "run_once", counted)
    return made


class Crowd:
    """Clients that all consume one queue, with a record of which client got what."""

    def __init__(self, kind: Kind, url: str, *, resync: float = NEVER) -> None:
        self.kind = kind
        self.url = url
        self.resync = resync
        self.queues: list[Any] = []
        self.clients: list[Client] = []
        self.consumers: list[asyncio.Task[None]] = []
        self.got: list[tuple[int, int, float]] = []
        self.due: dict[int, float] = {}
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def of(self, count: int) -> AsyncIterator[Crowd]:
        async with self._stack:
            try:
                for place in range(count):
                    await self._join(place)
                yield self
            finally:
                await end(*self.consumers)

    async def _join(self, place: int) -> None:
        client = await self._stack.enter_async_context(
            delayq.connect(self.url, resync_interval=self.resync)
        )
        queue = self.kind.open(client)
        self.clients.append(client)
        self.queues.append(queue)
        got: Callable[[int], None] = lambda value: self.got.append((value, place, time.time()))
        self.consumers.append(asyncio.create_task(self.kind.consume(queue, got)))
        await until(lambda: client.statistics().waiting)

    async def leave(self, place: int, fate: str) -> None:
        """Let a client close its queue, fall silent, or be cancelled."""
        if fate == "silent":
            self.kind.wakeups(self.queues[place]).close()
        elif fate == "closed":
            await self.queues[place].aclose()
        else:
            self.consumers[place].cancel()

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Any]:
        """Open the queue in a client that only offers."""
        async with delayq.connect(self.url, resync_interval=NEVER) as client:
            queue = self.kind.open(client)
            self.kind.wakeups(queue).close()
            yield queue

    async def subscribed(self, raw: Any, others: int = 0) -> None:
        """Wait until all clients hear what is published.

        A client that has only offered listens if it may have to move messages.
        """
        await until(lambda: self.listeners(raw), equals=len(self.queues) + others)

    async def listeners(self, raw: Any) -> int:
        """Return how many clients hear what is published."""
        keys = self.kind.keys(self.queues[0])
        channel = keys.wake if self.kind.reliable else keys.turns
        listener_count: int = dict(await raw.pubsub_numsub(channel))[channel.encode()]
        return listener_count

    async def offer(self, delays: dict[int, float], by: Any = None) -> None:
        # A lower bound for the due times: read before the offer, from the server's own clock.
        now = (await self.clients[0].server_time()).timestamp()
        self.due |= {value: now + delay for value, delay in delays.items()}
        await self.kind.offer(by or self.queues[0], delays)

    @property
    def values(self) -> set[int]:
        return {value for value, _, _ in self.got}

    async def complete(self) -> None:
        await until(lambda: self.due.keys() <= self.values, 30)

    def check(self) -> None:
        """Check that each message came once, and none before it was due."""
        assert sorted(value for value, _, _ in self.got) == sorted(self.due)
        assert [value for value, _, at in self.got if at < self.due[value] - 0.001] == []


async def one_of_many(a_round: Callable[[], Awaitable[float]], most: float) -> None:
    """Require that one round costs at most ``most``: the machine may be busy in the others."""
    costs: list[float] = []
    for _ in range(ROUNDS):
        costs.append(await a_round())
        if costs[-1] <= most:
            return
    pytest.fail(f"each round costs more than {most}: {costs}")


@mostly_reliable
async def test_six_clients_get_each_message_once_and_hardly_ever_call_together(
    server: PrivateServer, kind: Kind, calls: Counter[RedisClient], raw: Any
) -> None:
    crowd, values = Crowd(kind, server.url), iter(range(10_000))
    async with crowd.of(6):
        await crowd.subscribed(raw)

        async def ten_moments() -> float:
            before = calls.total()
            await crowd.offer({next(values): 0.05 + n * APART for n in range(10)})
            await crowd.complete()
            return calls.total() - before

        # Warm up: no client knows yet which one is first.
        for _ in range(2):
            await ten_moments()
        await one_of_many(ten_moments, 30)
        crowd.check()


@pytest.mark.parametrize("fate", ["closed", in_gate("cancelled"), "silent"])
@mostly_delayed
async def test_when_the_client_that_is_first_goes_the_others_get_what_comes(
    server: PrivateServer, kind: Kind, fate: str, raw: Any
) -> None:
    crowd = Crowd(kind, server.url)
    async with crowd.of(4), crowd.producer() as queue:
        await crowd.subscribed(raw, others=not kind.reliable)
        alive = set(range(4))
        at = 0
        while len(alive) > 1:
            await crowd.offer(
                {at + n: 0.02 + n * APART for n in range(6)} | {at + 6: 0.4, at + 7: 0.45}, by=queue
            )
            # An offer announces its first message. Notices alone tell the others of the last ones.
            await until(lambda at=at: at + 5 in crowd.values)  # type: ignore[misc]
            first = [
                place
                for place in sorted(alive)
                if not kind.wakeups(crowd.queues[place]).plan.stagger.delay(wants_messages=True)
            ]
            for place in first[: len(alive) - 1]:
                alive.remove(place)
                await crowd.leave(place, fate)
            await crowd.complete()
            at += 8
        crowd.check()


def dormant(crowd: Crowd) -> list[int]:
    """Return the positions of the dormant clients."""
    return [
        place
        for place, queue in enumerate(crowd.queues)
        if crowd.kind.wakeups(queue).plan.stagger.is_dormant
    ]


@pytest.fixture
def four_are_a_crowd(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the re-check interval with which more than four clients are a crowd."""
    monkeypatch.setattr(stagger, "ENOUGH_LISTENERS", 2)
    monkeypatch.setattr(stagger, "_FEW_CLIENTS", 2)
    monkeypatch.setattr(stagger, "_RECHECK_SPACING", 0.25)
    return 0.5


@pytest.mark.every_server
@mostly_delayed
async def test_few_clients_of_a_crowd_listen_and_every_message_comes_once(
    server: PrivateServer, kind: Kind, raw: Any, four_are_a_crowd: float
) -> None:
    crowd = Crowd(kind, server.url, resync=four_are_a_crowd)
    async with crowd.of(12):
        await until(lambda: len(dormant(crowd)) >= 8)

        async def few_listen() -> bool:
            return await crowd.listeners(raw) <= 4

        # The server learns a moment later who is dormant.
        await until(few_listen)
        await crowd.offer({n: 0.05 + n * APART for n in range(30)})
        await crowd.complete()
        crowd.check()
        # A client that finds a message listens, so others may become dormant.
        await until(lambda: len(dormant(crowd)) >= 8)


async def test_clients_that_only_offer_make_no_crowd(
    server: PrivateServer, raw: Any, four_are_a_crowd: float
) -> None:
    kind = Kind("reliable")
    crowd = Crowd(kind, server.url, resync=four_are_a_crowd)
    async with AsyncExitStack() as stack:
        for n in range(8):
            producer = await stack.enter_async_context(
                delayq.connect(server.url, resync_interval=four_are_a_crowd)
            )
            await kind.offer(kind.open(producer), {-n: 60.0})
        await stack.enter_async_context(crowd.of(3))

        async def consumers_listen() -> bool:
            return not dormant(crowd) and await crowd.listeners(raw) == 3

        await until(consumers_listen)
        # Whatever they learn from further re-checks.
        await asyncio.sleep(2 * four_are_a_crowd)
        assert await consumers_listen()


@pytest.mark.parametrize("fate", ["closed", "silent"])
@mostly_reliable
async def test_when_all_listeners_go_those_who_rest_take_their_place(
    server: PrivateServer, kind: Kind, fate: str, four_are_a_crowd: float
) -> None:
    crowd, alive = Crowd(kind, server.url, resync=four_are_a_crowd), {*range(14)}
    async with crowd.of(14), crowd.producer() as queue:
        for at in (0, 4):
            await until(lambda: len(alive.intersection(dormant(crowd))) >= len(alive) - 4)
            for place in alive.difference(dormant(crowd)):
                alive.remove(place)
                await crowd.leave(place, fate)
            await crowd.offer({at + n: 0.05 + n * APART for n in range(4)}, by=queue)
            await crowd.complete()
        crowd.check()


@pytest.mark.every_server
@mostly_reliable
async def test_if_more_is_due_than_the_listeners_take_the_others_are_summoned(
    server: PrivateServer, kind: Kind, raw: Any, four_are_a_crowd: float
) -> None:
    crowd = Crowd(kind, server.url, resync=four_are_a_crowd)
    async with crowd.of(12), raw.pubsub() as summons:
        await summons.subscribe(kind.keys(crowd.queues[0]).summons)
        await end(*crowd.consumers)

        async def a_summons() -> bool:
            heard = await summons.get_message(ignore_subscribe_messages=True, timeout=0.1)
            return heard is not None and 0 < int(heard["data"]) < 12

        async def not_summoned(first: int) -> float:
            # Each client takes one message, and wants no other.
            takes = [asyncio.create_task(kind.take(queue)) for queue in crowd.queues]
            # The one that goes first has to know that others are dormant.
            staggers = [kind.wakeups(queue).plan.stagger for queue in crowd.queues]
            await until(
                lambda: len(dormant(crowd)) >= 8 and all(each._dormant for each in staggers)
            )
            # A client that has become dormant watches the ready list for a moment longer.
            await until(lambda: sum(map(kind.watches, crowd.queues)) <= 4)
            # An earlier round's may be late.
            while await summons.get_message(ignore_subscribe_messages=True, timeout=0):
                pass
            mine = range(first, first + 12)
            await crowd.offer(dict.fromkeys(mine, 0.1))
            assert sorted(await asyncio.gather(*takes)) == [*mine]
            for _ in range(10):
                if await a_summons():
                    return 0
            return 1

        # If the machine pauses, their re-checks wake dormant ones.
        rounds = itertools.count(0, 12)
        await one_of_many(lambda: not_summoned(next(rounds)), 0)


@mostly_delayed
async def test_a_client_that_comes_back_to_wait_makes_one_call_for_each_message(
    server: PrivateServer, kind: Kind, calls: Counter[RedisClient]
) -> None:
    async with delayq.connect(server.url, resync_interval=NEVER) as client:
        queue = kind.open(client)
        values = iter(range(10_000))

        async def ten_messages() -> float:
            # The waiting client is woken by its own timer for all of them.
            expected = [next(values) for _ in range(10)]
            await kind.offer(queue, {value: 0.05 + n * APART for n, value in enumerate(expected)})
            assert await kind.take(queue) == expected[0]
            before = calls.total()
            assert [await kind.take(queue) for _ in range(9)] == expected[1:]
            return calls.total() - before

        await one_of_many(ten_messages, 11)


async def test_a_producer_moves_what_is_due_and_leaves_it_to_a_consumer_that_is_there(
    server: PrivateServer, calls: Counter[RedisClient], raw: Any
) -> None:
    kind = Kind("delayed")
    async with delayq.connect(server.url, resync_interval=NEVER) as producer:
        queue: DelayedQueue[int] = producer.delayed_queue("jobs")
        # There is no other client yet.
        await queue.offer_many([(-1 - n, 0.02 + n * APART) for n in range(5)])
        await until(queue.ready.size, equals=5)
        assert sorted(await queue.drain()) == [-5, -4, -3, -2, -1]

        crowd = Crowd(kind, server.url)
        async with crowd.of(1):
            crowd.queues.append(queue)
            await crowd.subscribed(raw)
            values = iter(range(10_000))

            async def ten_moments() -> float:
                before = calls[queue.session.server]
                await crowd.offer({next(values): 0.05 + n * APART for n in range(10)}, by=queue)
                await crowd.complete()
                return calls[queue.session.server] - before

            await ten_moments()
            await one_of_many(ten_moments, 3)
            crowd.check()
            # Without a consumer, the producer moves due messages again.
            await crowd.queues[0].aclose()
            await queue.offer(0, 0.02)
            await until(queue.ready.size, equals=1)


@mostly_reliable
async def test_large_offers_reach_all_waiting_clients(server: PrivateServer, kind: Kind) -> None:
    """A batch is backdated slightly to keep its order. No earlier claim may hide it."""
    crowd = Crowd(kind, server.url)
    async with crowd.of(3), delayq.connect(server.url) as producer:
        queue = kind.open(producer)
        at = 0
        for count in (1, 200, 2, 199, 1, 400, 1, 1):
            await crowd.offer(dict.fromkeys(range(at, at + count), 0.0), by=queue)
            at += count
            await crowd.complete()
        crowd.check()
