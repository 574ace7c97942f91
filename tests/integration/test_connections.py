"""The pool: how many connections are open, and which one a caller gets."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._redis.connection import Connection
from delayq._redis.pool import ConnectionPool
from tests.support.links import Links
from tests.support.servers import one_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.servers import PrivateServer

    MakePool = Callable[..., ConnectionPool]


@pytest.fixture
async def make_pool(server: PrivateServer) -> AsyncIterator[MakePool]:
    """Return a function that makes a pool with a maximum number of connections."""
    pools: list[ConnectionPool] = []

    def make(most: int, url: str = server.url) -> ConnectionPool:
        pools.append(ConnectionPool(one_server(url), most))
        return pools[-1]

    yield make
    for each in pools:
        await each.aclose()


@pytest.fixture
def pool(make_pool: MakePool) -> ConnectionPool:
    return make_pool(4)


@pytest.fixture
def single(make_pool: MakePool) -> ConnectionPool:
    return make_pool(1)


async def burst(pool: ConnectionPool, size: int) -> None:
    for connection in [await pool.acquire() for _ in range(size)]:
        pool.release(connection)


async def test_connections_unused_since_a_burst_are_closed(pool: ConnectionPool) -> None:
    await burst(pool, 4)
    pool.prune()
    assert pool.open == 4
    await burst(pool, 1)
    await burst(pool, 2)
    pool.prune()
    assert pool.open == 2
    # One that is in use is not closed.
    used = await pool.acquire()
    for _ in range(3):
        pool.prune()
    assert pool.open == 1
    assert await used.ask("PING") == b"PONG"
    pool.release(used)
    pool.prune()
    pool.prune()
    assert pool.open == 0


async def test_calls_share_the_least_busy_connection_in_use(pool: ConnectionPool) -> None:
    used = [await pool.acquire() for _ in range(4)]
    for busy in (0, 1, 3):
        used[busy].tell("PING")
    assert await pool.acquire() is used[2]
    assert pool.open == 4
    # The connection is free once both callers have released it.
    pool.release(used[2])
    assert pool.acquire_nowait() is None
    pool.release(used[2])
    assert pool.acquire_nowait() is used[2]


async def test_a_connection_that_blocks_is_not_shared(pool: ConnectionPool) -> None:
    used = [await pool.acquire() for _ in range(4)]
    held: list[Any] = []
    for wire in used:
        wire.call(("BLPOP", "nothing", 30), held.append, 30)
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    # Waiting callers come first.
    pool.release(used[0])
    assert pool.acquire_nowait() is None
    assert await waiting is used[0]


async def test_a_connection_in_doubt_is_not_shared(
    own_server: PrivateServer, make_pool: MakePool
) -> None:
    async with Links(own_server) as links:
        pool = make_pool(1, links.url)
        silent = await pool.acquire()
        links.half_open(new=False)
        asked = silent.ask("PING")
        assert await pool.acquire() is silent
        pool.release(silent)
        await until(lambda: silent.pulse.is_doubted)
        waiting = asyncio.create_task(pool.acquire())
        with pytest.raises(TimeoutError):
            await asked
        # The connection that exposed the silent one can be used, even before the silent one is
        # released.
        fresh = await asyncio.wait_for(waiting, 60)
        assert fresh is not silent
        assert await fresh.ask("PING") == b"PONG"
        pool.release(silent)
        pool.release(fresh)


async def test_an_abandoned_connection_is_not_shared(
    server: PrivateServer, single: ConnectionPool
) -> None:
    """The caller may have gone because the server hangs."""
    wire = await single.acquire()
    wire.tell("BLPOP", "nothing", 30)
    single.abandon(wire)
    waiting = asyncio.create_task(single.acquire())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    server.call("RPUSH", "nothing", "x")
    assert await asyncio.wait_for(waiting, 60) is wire


async def test_waiting_callers_share_a_connection_as_soon_as_one_allows_it(
    single: ConnectionPool,
) -> None:
    """Callers need not wait until the connection is free: with many callers, it may never be."""
    wire = await single.acquire()
    assert single.share(wire)
    unblocked = asyncio.Event()
    wire.call(("BLPOP", "nothing", 0.1), lambda _: unblocked.set(), 30)
    waiting = [asyncio.create_task(single.acquire()) for _ in range(10)]
    await unblocked.wait()
    # One of two calls is over, the other continues.
    single.release(wire)
    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [wire] * 10
    for _ in range(11):
        single.release(wire)
    assert single.acquire_nowait() is wire


async def test_callers_who_wait_for_a_connection_are_not_overtaken(single: ConnectionPool) -> None:
    order: list[str] = []

    async def call(name: str) -> None:
        wire = await single.acquire()
        order.append(name)
        held: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        wire.call(("BLPOP", "nothing", 0.05), held.set_result, 30)
        await held
        single.release(wire)

    wire = await single.acquire()
    blocked: list[Any] = []
    wire.call(("BLPOP", "nothing", 0.05), blocked.append, 30)
    early = [asyncio.create_task(call(name)) for name in ("first", "gone", "second")]
    await until(lambda: bool(blocked))
    early[1].cancel()
    single.release(wire)
    # This caller looks for a connection before those that were woken get to run.
    await call("third")
    await asyncio.gather(*early, return_exceptions=True)
    assert order == ["first", "second", "third"]


async def test_connections_have_a_name_without_a_right(server: PrivateServer, raw: Any) -> None:
    rules = ("on", "nopass", "~*", "&*", "+@all", "-client")
    await raw.execute_command("ACL", "SETUSER", "plain", *rules)
    address = server.unix_url.replace("unix://", "unix://plain:any@")
    async with delayq.connect(server.unix_url), delayq.connect(address) as client:
        queue = client.delayed_queue("orders")
        await queue.offer(1, 0.01)
        assert await queue.take() == 1
        names = {(entry["user"], entry["name"]) for entry in await raw.client_list()}
    assert {("default", "delayq"), ("plain", "delayq")} <= names
    await raw.acl_deluser("plain")


async def test_a_server_that_accepts_and_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("delayq._redis.pool.OPEN_TIMEOUT", 0.05)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the peer hangs up
        writer.close()

    pool = ConnectionPool(one_server(f"unix://{tmp_path / 's'}"), 4)
    async with await asyncio.start_unix_server(listen, tmp_path / "s"):
        with pytest.raises(delayq.ServerUnavailable, match=r"within 0\.05 s"):
            await pool.open_own()
        assert pool.open == 0


async def test_a_busy_event_loop_uses_up_no_time_to_connect(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand clients that are opened at once wait for each other, and not for the server."""
    monkeypatch.setattr("delayq._redis.pool.OPEN_TIMEOUT", 0.5)

    async def keep_busy() -> None:
        while True:
            time.sleep(0.12)
            await asyncio.sleep(0)

    busy = asyncio.create_task(keep_busy())
    pool.close(await pool.open_own())
    busy.cancel()


async def test_an_answer_that_waits_to_be_read_is_not_missing(
    server: PrivateServer, single: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.connection.DOUBT_AFTER", 0.05)
    doubted: list[bool] = []
    monkeypatch.setattr(ConnectionPool, "connection_doubted", lambda _: doubted.append(True))
    wire = await single.acquire()
    await wire.ask("PING")

    def answer_late() -> None:
        server.resume()
        select.select([wire._transport.get_extra_info("socket")], [], [])
        time.sleep(0.1)

    with server.paused():
        # The look at the connection is due at once from here on.
        time.sleep(0.1)
        answer = wire.ask("PING")
        asyncio.get_running_loop().call_soon(answer_late)
        assert await answer == b"PONG"
    await asyncio.sleep(0.01)
    assert doubted == []
    single.release(wire)


async def test_a_client_waits_while_the_backlog_of_a_unix_socket_is_full(
    server: PrivateServer, single: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def soon(tried: int, **_: float) -> float:
        tries.append(tried)
        return 0.01

    monkeypatch.setattr("delayq._redis.handshake.retry_delay", soon)
    with ExitStack() as crowd, server.paused():
        while True:
            client = crowd.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(str(server.socket_path)):
                break
        opening = asyncio.create_task(single.open_own())
        await until(lambda: tries)
        server.resume()
        single.close(await opening)


async def test_a_shared_connection_is_in_use_until_both_calls_end(pool: ConnectionPool) -> None:
    await burst(pool, 1)
    shared = await pool.acquire()
    assert pool.share(shared)
    pool.release(shared)
    assert pool.acquire_nowait() is None
    own = await pool.open_own()
    assert own is not shared
    pool.close(own)
    pool.release(shared)
    assert pool.acquire_nowait() is shared
    pool.release(shared)
    # The connection has no caller now, so it cannot be shared.
    assert not pool.share(shared)
    # One that breaks gives back one place: the pool has room for as many as before.
    broken = await pool.acquire()
    assert pool.share(broken)
    broken.close()
    pool.release(broken)
    assert not pool.share(broken)
    pool.release(broken)
    assert pool.open == 0
    assert len({await asyncio.wait_for(pool.acquire(), 60) for _ in range(5)}) == 4


async def test_calls_that_cannot_be_made_keep_no_connection(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with delayq.connect(server.url) as client:
        jobs = client.reliable_queue("jobs")
        await jobs.offer(0, 60)
        with monkeypatch.context() as broken:
            # As if an argument could not be packed.
            broken.setattr(Connection, "call", lambda *_: 1 / 0)
            for n in range(8):
                with pytest.raises(ZeroDivisionError):
                    await jobs.offer(n, 60)
        server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.wait_for(asyncio.gather(*(jobs.offer(n, 60) for n in range(8))), 60)
        assert (await jobs.stats()).delayed == 9
