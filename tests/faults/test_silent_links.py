"""Connections that die silently, servers that are merely busy, and links that are merely slow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._redis import connection as wire_module
from delayq._redis.pool import ConnectionPool
from tests.support.depth import in_gate, nightly
from tests.support.links import Links
from tests.support.servers import one_server
from tests.support.timing import Control
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client
    from delayq._redis.connection import Connection
    from tests.support.servers import PrivateServer

# A lost notification may cost a re-check, 5 s, and the promise leaves one second for everything
# else.
PROMISED = 6.0
# The machine that runs the tests may be busy.
MARGIN = 2.0


@asynccontextmanager
async def one_wire(url: str) -> AsyncIterator[Connection]:
    """Open a connection of a pool that has room for another."""
    pool = ConnectionPool(one_server(url), 2)
    wire = await pool.acquire()
    yield wire
    pool.release(wire)
    await pool.aclose()


async def burst(client: Client, connections: int) -> None:
    """Leave as many connections open as a burst of calls would."""
    server = client.session.server
    await asyncio.gather(*(server.anywhere("PING") for _ in range(3 * connections)))


async def by_take(client: Client) -> Any:
    return await client.delayed_queue("orders").take()


async def by_deliveries(client: Client) -> Any:
    async with aclosing(client.delayed_queue("orders").deliveries(30)) as deliveries:  # type: ignore[type-var]
        delivery = await anext(deliveries)
        async with delivery:
            return delivery.value


async def by_claim(client: Client) -> Any:
    while not (messages := await client.reliable_queue("jobs").claim(10, wait=1.0)):
        pass
    return messages[0].value


Way = Callable[["Client"], Awaitable[Any]]


@pytest.mark.timing
@pytest.mark.parametrize(
    ("way", "pooled"),
    [
        (by_take, 1),
        in_gate(by_claim, 4),
        in_gate(by_deliveries, 16),
        *(nightly(*case) for case in ((by_take, 4), (by_take, 16), (by_deliveries, 4))),
        nightly(by_claim, 16),
    ],
)
async def test_when_all_connections_died_silently_the_next_message_comes_and_one_offer_is_unknown(
    own_server: PrivateServer, way: Way, pooled: int
) -> None:
    async with (
        Links(own_server) as links,
        delayq.connect(own_server.url) as other,
        delayq.connect(links.url, max_connections=pooled) as client,
    ):
        await burst(client, pooled)
        taking = asyncio.ensure_future(way(client))
        await asyncio.sleep(0.3)
        links.half_open(new=False)
        await other.delayed_queue("orders").offer("next")
        await other.reliable_queue("jobs").offer("next")
        offered = asyncio.get_running_loop().time()
        outcomes: list[str] = []
        with Control(own_server) as control:
            for number in range(4):
                try:
                    await client.delayed_queue("elsewhere").offer(number, 3600)
                except delayq.DelayqError as error:
                    outcomes.append(type(error).__name__)
            assert await asyncio.wait_for(taking, 60) == "next"
            took = asyncio.get_running_loop().time() - offered
        assert took - control.lost < PROMISED + MARGIN
        assert outcomes in ([], ["OutcomeUnknown"])


@pytest.mark.usefixtures("_patient")
async def test_a_server_that_is_busy_for_seconds_is_waited_for_and_no_outcome_is_unknown(
    own_server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    """No connection gets a reply while a long script runs, which proves nothing about them."""
    async with delayq.connect(own_server.url, max_connections=4) as client:
        orders: delayq.DelayedQueue[int] = client.delayed_queue("orders")
        jobs: delayq.ReliableQueue[int] = client.reliable_queue("jobs")
        await burst(client, 4)
        await asyncio.gather(orders.offer(0), jobs.offer(0))
        before = client.statistics().errors
        with own_server.paused():
            calls = [orders.offer(1), jobs.offer(1), jobs.claim(1, wait=10), orders.poll(10)]
            calls.append(orders.pending.size())
            started: list[asyncio.Future[Any]] = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(1.5)
            # By now the free connections have already been set aside.
            started += [asyncio.ensure_future(orders.offer(2)), asyncio.ensure_future(jobs.stats())]
            await asyncio.sleep(2)
        await asyncio.gather(*started)
        assert client.statistics().errors == before
        assert "interrupted" not in caplog.text


async def test_a_client_waits_for_calls_and_replies_that_take_long_to_cross_the_link(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a megabyte over 1 Mbit/s takes longer than a connection may be silent."""
    monkeypatch.setattr(wire_module, "GIVE_UP_AFTER", 3.5)
    own_server.call("SET", "large", "x" * 500_000)
    async with (
        Links(own_server, mbit=1) as links,
        one_wire(links.url) as reader,
        Links(own_server, mbit=2) as more,
        one_wire(more.url) as writer,
    ):
        # More than the buffers on its way hold.
        sent = writer.ask("SET", "larger", "x" * 1_000_000)
        assert len(await asyncio.wait_for(reader.ask("GET", "large"), 60)) == 500_000
        assert await asyncio.wait_for(sent, 60) == b"OK"
        assert reader.is_open


@pytest.mark.usefixtures("_patient")
async def test_a_server_that_pauses_writes_or_blocks_a_command_is_not_taken_for_silent(
    own_server: PrivateServer,
) -> None:
    """A server that is about to fail over pauses writes. It still answers a PING."""
    async with delayq.connect(own_server.url) as client, one_wire(own_server.url) as wire:
        orders = client.delayed_queue("orders")
        await orders.offer(1, 60)
        # WAIT withholds its reply while every other connection is answered at once.
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        wire.call(("WAIT", 1, 2500), reply.set_result, blocks=2.5)
        own_server.call("CLIENT", "PAUSE", "2500", "WRITE")
        await orders.offer(2, 60)
        assert client.statistics().errors == 0
        assert await orders.pending.read_all() == [1, 2]
        assert await asyncio.wait_for(reply, 30) == 0


@pytest.fixture
async def connections(own_server: PrivateServer) -> AsyncIterator[tuple[Links, ConnectionPool]]:
    async with Links(own_server, tcp=True) as links:
        connections = ConnectionPool(one_server(links.url), 8)
        yield links, connections
        await connections.aclose()


@pytest.mark.usefixtures("_patient")
async def test_a_silent_connection_makes_the_free_connections_prove_that_they_live(
    connections: tuple[Links, ConnectionPool],
) -> None:
    links, pool = connections
    wires = [await pool.acquire() for _ in range(6)]
    assert wires[0].pulse._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    for wire in wires[1:]:
        pool.release(wire)
    links.half_open(new=False)
    silent = wires[0].ask("PING")
    with pytest.raises(TimeoutError, match="a new connection was answered"):
        await asyncio.wait_for(silent, 30)
    pool.release(wires[0])
    fresh = await pool.acquire()
    assert fresh not in wires
    assert await fresh.ask("PING") == b"PONG"
    pool.release(fresh)
    await until(lambda: not any(wire.is_open for wire in wires))
    assert pool.open == 1


@pytest.mark.usefixtures("_patient")
async def test_connections_that_live_are_used_again_after_they_were_doubted(
    connections: tuple[Links, ConnectionPool], own_server: PrivateServer
) -> None:
    _, pool = connections
    wires = [await pool.acquire() for _ in range(3)]
    for wire in wires[1:]:
        pool.release(wire)
    with own_server.paused():
        slow = wires[0].ask("PING")
        await asyncio.sleep(1.5)
        assert pool.acquire_nowait() is None, "they are put aside while nobody knows"
    assert await slow == b"PONG"
    pool.release(wires[0])
    await until(lambda: len(pool._free) >= 3)
    assert all(wire.is_open for wire in wires)
    assert {await pool.acquire() for _ in range(len(pool._free))} >= set(wires)


async def test_a_watch_whose_connection_has_died_is_renewed_when_the_recheck_finds_what_it_missed(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Links(own_server) as links,
        delayq.connect(links.url, resync_interval=1.0) as client,
        Redis.from_url(own_server.url, socket_timeout=60) as raw,
    ):
        queue: delayq.DelayedQueue[int] = client.delayed_queue("orders")
        taking = asyncio.ensure_future(queue.take())
        await until(lambda: queue._open.transfer._watch.is_watching)
        watched = queue._open.transfer._watch._link
        assert watched is not None
        assert watched._wire is not None
        # Only for this connection: nothing that arrives on it is heard, and the server does not
        # know that.
        monkeypatch.setattr(watched._wire, "data_received", lambda _data: None)
        await raw.rpush("orders", 1)
        assert await asyncio.wait_for(taking, 20) == 1
        taking = asyncio.ensure_future(queue.take())
        await until(lambda: queue._open.transfer._watch._link is not watched)
        taking.cancel()
