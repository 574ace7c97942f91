"""Queues behind Sentinels continue on another server when theirs is replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Sentinel

import delayq
from delayq import Offer
from tests.conftest import FOUND
from tests.support.clusters import Watched, admin, is_replicated, wait_for
from tests.support.depth import nightly
from tests.support.reliable import is_empty
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import Kind, PrivateServer


@pytest.mark.usefixtures("_usual_limits")
@pytest.mark.gate
@pytest.mark.every_server
@pytest.mark.parametrize("way", ["planned", "killed", nightly("stopped")])
async def test_producers_and_consumers_follow_a_failover(server_kind: Kind, way: str) -> None:
    with Watched(server_kind) as watched:
        await follow(watched, way)


async def follow(watched: Watched, way: str) -> None:
    old, got = watched.master(), Counter[int]()
    offered = 0
    unknown: set[int] = set()
    stop = asyncio.Event()
    # A failover may lose messages that only the old master has, and even when it is planned, the
    # old one confirms writes until Sentinel tells it that a replica has been promoted.
    durability = "replicas:2" if way == "planned" else "memory"
    lost = 0 if way == "planned" else 5

    async with (
        delayq.connect(watched.url, resync_interval=1) as client,
        delayq.connect(watched.url, resync_interval=1) as other,
    ):
        queue = client.reliable_queue("jobs", lease=3)
        orders: delayq.DelayedQueue[int] = client.delayed_queue("orders")

        async def produce() -> None:
            nonlocal offered
            while not stop.is_set():
                number, offered = offered, offered + 1
                try:
                    await queue.offer(number, delay=0.01, id=f"m{number}", durability=durability)
                except (delayq.OutcomeUnknown, delayq.ServerUnavailable, delayq.NotDurable):
                    unknown.add(number)
                await asyncio.sleep(0.005)

        async def consume() -> None:
            async for message in other.reliable_queue("jobs", lease=3):
                # After a long failover or a pause of the machine, the message comes again.
                with suppress(delayq.LeaseLost, delayq.ServerUnavailable, delayq.OutcomeUnknown):
                    async with message:
                        got[message.value] += 1

        tasks = [asyncio.create_task(produce()), asyncio.create_task(consume())]
        await until(lambda: len(got) > 20)
        if way == "planned":
            await asyncio.to_thread(watched.fail_over)
        else:
            # Messages that the replicas do not have yet would be lost with the server.
            stop.set()
            await tasks[0]
            await until(lambda: len(got) == offered)
            await until(lambda: is_replicated(old))
            stop.clear()
            tasks[0] = asyncio.create_task(produce())
            (old.kill if way == "killed" else old.pause)()
            await asyncio.to_thread(wait_for, lambda: watched.master() is not old, "the failover")
        seen = len(got)
        await until(lambda: len(got) > seen + 20, within=60)
        if way == "stopped":
            old.resume()  # as a master of former times
        stop.set()
        await tasks[0]
        await orders.offer(1)
        assert await orders.take() == 1
        await until(lambda: len({*range(offered)} - set(got) - unknown) <= lost, within=60)
        # All acknowledgements arrive in the end.
        await until(lambda: is_empty(queue))
        await end(*tasks)


@pytest.fixture(scope="module")
def small() -> Iterator[Watched]:
    with Watched(FOUND[next(iter(FOUND))]) as watched:
        yield watched


async def test_a_service_that_no_sentinel_knows_is_named(
    small: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time for another try, if the first one does not say so.
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 1)
    with pytest.raises(delayq.ServerUnavailable, match="does not know the service 'market'"):
        async with delayq.connect(small.url.replace("/shop", "/market")):
            pass


@pytest.mark.usefixtures("_usual_limits")
async def test_sentinels_that_are_dead_or_hang_are_passed_over(small: Watched) -> None:
    hanging = small.sentinels[1]
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{hanging.port},127.0.0.1:{small.sentinels[2].port}/shop"
    with hanging.paused():
        async with delayq.connect(url) as client:
            await client.reliable_queue("jobs").offer(1)


async def test_a_given_client_names_the_sentinels(small: Watched) -> None:
    sentinels: Any = Sentinel([("127.0.0.1", sentinel.port) for sentinel in small.sentinels])  # type: ignore[no-untyped-call]
    async with sentinels.master_for("shop", db=2) as theirs, delayq.connect(theirs) as client:
        await client.reliable_queue("given").offer(1)
        with admin(small.master()) as redis:
            redis.select(2)
            assert redis.exists("delayq:{given}:bodies")


@pytest.mark.every_server
async def test_a_server_that_became_a_replica_is_not_used_again(own_server: PrivateServer) -> None:
    """If a name leads to another server after a failover, all it takes is a new connection."""
    async with delayq.connect(own_server.url) as client:
        queue = client.reliable_queue("jobs")
        await queue.offer_many([Offer(n) for n in range(3)])
        opened = client.statistics().connections_opened
        own_server.call("REPLICAOF", "127.0.0.1", "1")
        offering = asyncio.create_task(queue.offer(3))
        await until(lambda: client.statistics().connections_opened > opened + 1)
        own_server.call("REPLICAOF", "NO", "ONE")
        await offering
        assert (await queue.stats()).ready == 4
