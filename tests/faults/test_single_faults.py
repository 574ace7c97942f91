"""Single faults, and what the user sees of each."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Self

import pytest

import delayq
from delayq._reliable import ids
from tests.support.depth import in_gate, nightly
from tests.support.reliable_fixtures import raw
from tests.support.servers import Kind, PrivateServer
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from delayq import Client

__all__ = ["raw"]

HOUR = 3600.0


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[Client]:
    async with delayq.connect(server.url, resync_interval=0.2) as client:
        yield client


@pytest.fixture
def start(server_kind: Kind) -> Iterator[Callable[..., PrivateServer]]:
    """Return a function that starts servers of one kind, for this test alone."""
    started: list[PrivateServer] = []

    def start(*options: str, **more: Any) -> PrivateServer:
        started.append(server := PrivateServer(server_kind, options=options, **more))
        server.start()
        return server

    yield start
    for server in started:
        server.close()


async def consume(queue: delayq.ReliableQueue[int], into: list[int]) -> None:
    async for message in queue:
        # A message whose lease the fault took comes again.
        with suppress(delayq.LeaseLost):
            async with message:
                pass
            into.append(message.value)


class Both:
    """A queue of each kind, and the values that its consumer got."""

    def __init__(self, client: Client, **options: Any) -> None:
        self.jobs: delayq.ReliableQueue[int] = client.reliable_queue("jobs", **options)
        self.orders: delayq.DelayedQueue[int] = client.delayed_queue("orders")
        self.handled: list[int] = []
        self.taken: list[int] = []

    async def __aenter__(self) -> Self:
        self._consumers = [
            asyncio.create_task(each) for each in (consume(self.jobs, self.handled), self._take())
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(*self._consumers)

    async def _take(self) -> None:
        while True:
            self.taken.append(await self.orders.take())

    async def offer(self, value: int, delay: float = 0) -> None:
        await self.jobs.offer(value, delay)
        await self.orders.offer(value, delay)

    async def got(self, *values: int) -> None:
        """Wait until each consumer has got these, in any order."""
        await until(lambda: sorted(self.handled) == sorted(self.taken) == [*values])


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# All data is gone


async def test_after_flushall_consumers_go_on(client: Client, server: PrivateServer) -> None:
    async with Both(client) as both:
        await both.offer(1)
        await both.got(1)
        # Wait for the acknowledgement as well: otherwise its lease is lost, which delayq reports.
        await until(lambda: client.queue_statistics()[0].acked == 1)
        # The timers are armed for these, which vanish. On a machine that freezes in the meantime,
        # they arrive before that.
        await both.offer(2, 0.3)
        server.flush()
        await both.offer(3, 0.5)
        await until(lambda: both.handled[-1] == both.taken[-1] == 3)


async def test_after_flushall_no_lease_is_left_to_acknowledge(
    client: Client, server: PrivateServer
) -> None:
    jobs, orders = client.reliable_queue("jobs"), client.delayed_queue("orders")
    await jobs.offer_many([delayq.Offer(n) for n in range(3)])
    await orders.offer(1)
    acked, failed, freed = await jobs.claim(3)
    deliveries = orders.deliveries()
    delivery = await anext(deliveries)
    server.flush()
    for settle in (acked.ack, failed.nack, freed.release, delivery.ack, delivery.nack):
        with pytest.raises(delayq.LeaseLost):
            await settle()
    await deliveries.aclose()  # type: ignore[attr-defined]


# A full server


@pytest.mark.every_server
async def test_a_full_server_refuses_whole_offers_to_a_delayed_queue_and_hands_out_the_rest(
    client: Client, raw: Any
) -> None:
    orders = client.delayed_queue("orders")
    await orders.offer_many([(n, 0) for n in range(3)])
    await until(lambda: raw.llen("orders"), equals=3)
    await raw.config_set("maxmemory", 1)
    try:
        for offer in (
            lambda: orders.offer(7),
            lambda: orders.offer_many([(n, HOUR) for n in range(100)]),
        ):
            with pytest.raises(delayq.ServerRefused, match=r"OOM|memory"):
                await offer()
        assert await orders.pending.size() == 0
        assert [await orders.take() for _ in range(3)] == [0, 1, 2]
    finally:
        await raw.config_set("maxmemory", 0)


# Replicas


@pytest.mark.every_server
async def test_a_brief_demotion_costs_only_time(start: Callable[..., PrivateServer]) -> None:
    primary = start(tcp=True)
    async with delayq.connect(primary.url, resync_interval=0.2) as client, Both(client) as both:
        await both.offer(1)
        await both.got(1)
        # Replicating a server that it never reaches: it is read-only and keeps its data.
        primary.call("REPLICAOF", "127.0.0.1", "1")
        offers = [asyncio.create_task(queue.offer(2)) for queue in (both.jobs, both.orders)]
        await asyncio.sleep(0.3)
        assert not any(offer.done() for offer in offers)
        primary.call("REPLICAOF", "NO", "ONE")
        await asyncio.gather(*offers)
        await both.got(1, 2)


# Clocks


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_step_of_the_clients_clock_moves_no_message(
    client: Client, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    clock, nanoseconds = time.time, time.time_ns
    others = client.reliable_queue("others")
    async with Both(client, lease=2) as both:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await both.offer(1, 2)
        await others.offer(1)
        (held,) = await others.claim()
        started = loop.time()
        # Until then, ids would continue where this hour has ended.
        monkeypatch.setattr(ids, "_until_ns", ids._until_ns)
        monkeypatch.setattr(time, "time", lambda: clock() + hours * HOUR)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + hours * 3_600_000_000_000)
        await both.offer(2, 2.2)
        await asyncio.sleep(0.1)
        nothing = (both.handled, both.taken) == ([], [])
        assert nothing or loop.time() - began >= 2, "nothing is early"
        await both.got(1, 2)
        assert loop.time() - started >= 2.2
        await held.extend(30)
        await held.ack()


LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


@pytest.mark.every_server
@pytest.mark.skipif(
    not (LIBRARIES and shutil.which("faketime")),
    reason="FAKETIME IS NOT INSTALLED: apt-get install faketime",
)
@pytest.mark.parametrize("step", [in_gate("+1h"), nightly("-1h")])
async def test_a_step_of_the_servers_clock_loses_nothing(
    start: Callable[..., PrivateServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    server_kind: Kind,
    step: str,
) -> None:
    """After a step forward, messages are due; after a step back, new ones arrive on time."""
    clock = tmp_path / "clock"
    clock.write_text("+0")
    if server_kind.name == "redis-7":
        pytest.skip("libfaketime and the jemalloc of Debian's Redis 7 call each other without end")
    with monkeypatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(LIBRARIES[0]))
        environment.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
        environment.setenv("FAKETIME_NO_CACHE", "1")
        environment.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        server = start()
    async with delayq.connect(server.url, resync_interval=0.2) as client, Both(client) as both:
        await both.offer(1, HOUR / 2)
        clock.write_text(step)

        async def stepped() -> bool:
            return abs((await client.server_time()).timestamp() - time.time()) > HOUR / 2

        # Under load the server may still run a script at the old time.
        await until(stepped)
        await both.offer(2, 0.3)
        await both.got(*([1, 2] if step == "+1h" else [2]))


# Permissions


async def test_an_unannounced_reliable_message_reaches_its_offerer_in_time_others_by_the_recheck(
    server: PrivateServer, raw: Any
) -> None:
    async with (
        limited(server, raw, "-publish", resync_interval=HOUR) as silent,
        delayq.connect(server.url, resync_interval=0.3) as other,
    ):
        mine, theirs = silent.reliable_queue("jobs"), other.reliable_queue("jobs")
        # Both have looked by then, and found nothing.
        assert [await mine.claim(), await theirs.claim()] == [[], []]
        claiming = asyncio.create_task(mine.claim(wait=20))
        await mine.offer("to itself", 0.2)
        (message,) = await claiming
        assert message.due_at <= await silent.server_time()
        await message.ack()
        claiming = asyncio.create_task(theirs.claim(wait=20))
        await mine.offer("to others", 0.2)
        assert await stored(raw) == 1
        (message,) = await claiming
        assert message.due_at <= await other.server_time()
        await message.ack()


@asynccontextmanager
async def limited(
    server: PrivateServer, raw: Any, denied: str, **options: Any
) -> AsyncIterator[Client]:
    """Open a client whose user may do everything except this."""
    rights = {"keys": ["*"], "channels": ["*"], "commands": ["+@all", *denied.split()]}
    await raw.acl_setuser("limited", enabled=True, nopass=True, **rights)
    try:
        async with delayq.connect(f"unix://limited:any@{server.socket_path}", **options) as client:
            yield client
    finally:
        await raw.acl_deluser("limited")


async def stored(raw: Any) -> int:
    return int(
        await raw.hlen("delayq:{jobs}:bodies")
        + await raw.zcard("redisson_delay_queue_timeout:{orders}")
    )


# An event loop that freezes


async def test_a_loop_blocked_beyond_its_lease_loses_it_and_says_so(server: PrivateServer) -> None:
    """Meanwhile one other client, and only one, has the message."""
    taken = Queue[tuple[int, datetime]]()

    async def take_elsewhere() -> None:
        async with delayq.connect(server.url) as client:
            (message,) = await client.reliable_queue("jobs", lease=60).claim(1, wait=30)
            taken.put((message.attempt, message.lease_ends_at))
            async with message:
                await asyncio.sleep(1)

    async with delayq.connect(server.url, resync_interval=0.2) as client:
        jobs = client.reliable_queue("jobs", lease=1)
        await jobs.offer(1)
        (message,) = await jobs.claim()
        first_end = message.lease_ends_at
        loop = asyncio.get_running_loop()
        elsewhere = loop.run_in_executor(None, asyncio.run, take_elsewhere())
        with pytest.raises(delayq.LeaseLost):  # noqa: PT012
            async with message, asyncio.timeout(60):
                # Nothing else runs in this loop until then.
                attempt, second_end = taken.get(timeout=60)
                # The renewal finds out and cancels the handler.
                await asyncio.Event().wait()
        assert attempt == 2
        assert second_end > first_end
        await elsewhere
        assert await jobs.claim() == []
        assert (await jobs.stats()).leased == 0
