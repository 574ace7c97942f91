"""The pool: how many connections are open, and which one is used."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._redis.connections import Connections
from tests.servers import one_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.servers import PrivateServer


@pytest.fixture
async def connections(server: PrivateServer) -> AsyncIterator[Connections]:
    connections = Connections(one_server(server.url), 4)
    yield connections
    await connections.aclose()


async def burst(connections: Connections, size: int) -> None:
    for connection in [await connections.acquire() for _ in range(size)]:
        connections.release(connection)


async def test_the_connection_that_was_used_last_is_used_next(connections: Connections) -> None:
    await burst(connections, 3)
    one = await connections.acquire()
    connections.release(one)
    assert await connections.acquire() is one
    assert connections.opened == 3


async def test_what_a_burst_opened_and_nobody_needed_since_is_closed(connections: Connections) -> None:
    await burst(connections, 4)
    connections.prune()
    assert connections.open == 4
    await burst(connections, 1)
    await burst(connections, 2)
    connections.prune()
    assert connections.open == 2
    connections.prune()
    connections.prune()
    assert connections.open == 0
    await burst(connections, 1)
    assert connections.open == 1


async def test_a_connection_that_is_in_use_is_not_closed(connections: Connections) -> None:
    await burst(connections, 2)
    used = await connections.acquire()
    for _ in range(3):
        connections.prune()
    assert connections.open == 1
    assert await used.ask("PING") == b"PONG"
    connections.release(used)


async def test_whoever_comes_when_all_are_in_use_waits(connections: Connections) -> None:
    used = [await connections.acquire() for _ in range(4)]
    waiting = asyncio.create_task(connections.acquire())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    connections.release(used[0])
    assert await waiting is used[0]


async def test_a_connection_that_the_server_has_closed_is_replaced(connections: Connections, server: PrivateServer) -> None:
    await burst(connections, 1)
    server.call("CLIENT", "KILL", "TYPE", "normal")
    await asyncio.sleep(0.05)
    connection = await connections.acquire()
    assert await connection.ask("PING") == b"PONG"
    assert connections.opened == 2
    connections.release(connection)


async def test_an_answer_that_nobody_waits_for_reaches_nobody(connections: Connections) -> None:
    connection = await connections.acquire()
    connection.tell("NONSENSE")
    connections.release(connection)
    assert await connections.acquire() is connection
    assert await connection.ask("PING") == b"PONG"


async def test_a_closed_pool_opens_nothing(connections: Connections) -> None:
    await connections.aclose()
    with pytest.raises(delayq.Closed):
        await connections.acquire()


async def test_connections_have_a_name_also_where_the_user_may_not_give_one(server: PrivateServer) -> None:
    async with Redis.from_url(server.url) as admin:
        await admin.acl_setuser("plain", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-client"])
        address = server.unix_url.replace("unix://", "unix://plain:any@")
        async with delayq.connect(server.unix_url), delayq.connect(address) as client:
            queue = client.delayed_queue("orders")
            await queue.offer(1, 0.01)
            assert await queue.take() == 1
            names: list[Any] = [(entry["user"], entry["name"]) for entry in await admin.client_list()]
        assert ("default", "delayq") in names
        assert ("plain", "delayq") in names
        await admin.acl_deluser("plain")


async def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("delayq._redis.connections.OPEN_TIMEOUT", 0.05)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side hangs up
        writer.close()

    silent = await asyncio.start_unix_server(listen, tmp_path / "s")
    connections = Connections(one_server(f"unix://{tmp_path / 's'}"), 4)
    with pytest.raises(delayq.ServerUnavailable, match=r"within 0\.05 s"):
        await connections.open_own()
    assert connections.open == 0
    silent.close()
    await silent.wait_closed()


async def test_a_connection_that_two_calls_share_is_nobody_elses_until_both_are_done(connections: Connections) -> None:
    await burst(connections, 1)
    shared = await connections.acquire()
    assert connections.share(shared)
    connections.release(shared)
    assert connections.acquire_nowait() is None
    own = await connections.open_own()
    assert own is not shared
    connections.close(own)
    connections.release(shared)
    assert connections.acquire_nowait() is shared
    connections.release(shared)
    # It is nobody's now, so nobody can share it.
    assert not connections.share(shared)
    # And as many as before can be had.
    assert len({await asyncio.wait_for(connections.acquire(), 10) for _ in range(4)}) == 4


async def test_a_shared_connection_that_breaks_takes_one_place_and_gives_back_one(connections: Connections) -> None:
    shared = await connections.acquire()
    assert connections.share(shared)
    connections.drop(shared)
    assert not connections.share(shared)
    connections.drop(shared)
    assert connections.open == 0
    assert len({await asyncio.wait_for(connections.acquire(), 10) for _ in range(4)}) == 4
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(connections.acquire(), 0.01)


async def test_subscriptions_and_watches_start_beside_calls_that_share_a_connection(server: PrivateServer) -> None:
    for turn in range(10):
        async with delayq.connect(server.url) as client:
            jobs: delayq.ReliableQueue[int] = client.reliable_queue(f"jobs {turn}")
            orders: delayq.DelayedQueue[int] = client.delayed_queue(f"orders {turn}")
            taking = asyncio.create_task(orders.take())
            ids = await asyncio.gather(*(jobs.offer(n, 3600) for n in range(700)))
            receipts = await orders.offer_many([(n, 3600) for n in range(700)])
            await orders.offer(-1)
            assert await asyncio.wait_for(taking, 20) == -1
            assert len(set(ids)) == len({receipt.id for receipt in receipts}) == 700
            assert (await jobs.stats()).delayed == await orders.pending.size() == 700
