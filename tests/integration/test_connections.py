"""Connections: how many a pool has open, which one a caller gets, what they send and read, and
large messages on slow links.
"""

from __future__ import annotations

import asyncio
import gc
import select
import socket
import time
import weakref
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._redis import connection as wire_module
from delayq._redis import handshake
from delayq._redis.connection import Connection, NotSent, ReplyError
from delayq._redis.pool import ConnectionPool
from delayq.codecs import BytesCodec
from tests.support.depth import in_gate
from tests.support.links import Links
from tests.support.reliable import offers
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


async def test_waiting_callers_share_the_next_connection_that_allows_it(
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


async def test_a_reply_that_waits_to_be_read_is_not_missing(
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
        reply = wire.ask("PING")
        asyncio.get_running_loop().call_soon(answer_late)
        assert await reply == b"PONG"
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


# 300 messages of 400 kB take a minute over 40 Mbit/s, and a batch of 100 takes 8 s, longer than a
# call waits. These values have the same effect with a shorter deadline.
COUNT, SIZE, MBIT, DEADLINE = 300, 8_000, 8, 0.5


@pytest.mark.parametrize("way", [in_gate("drain"), in_gate("messages")])
async def test_messages_that_take_longer_than_a_call_waits_come_once_each(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name in (
        "_redis.connection.GIVE_UP_AFTER",
        "_redis.client.GIVE_UP_AFTER",
        "_engine.dispatcher.NOWAIT_TIMEOUT",
    ):
        monkeypatch.setattr(f"delayq.{name}", DEADLINE)
    payloads = [b"%06d" % n + b"x" * (SIZE - 6) for n in range(COUNT)]
    got: list[bytes] = []

    async with Links(own_server, tcp=True, round_trip=20, mbit=MBIT) as links:
        async with delayq.connect(own_server.unix_url) as producer:
            if way == "messages":
                jobs = producer.reliable_queue("orders", codec=BytesCodec())
                await jobs.offer_many([delayq.Offer(value=payload) for payload in payloads])
            else:
                async with Redis.from_url(own_server.unix_url, socket_timeout=60) as raw:
                    await raw.rpush("orders", *payloads)
        async with delayq.connect(links.url) as client, asyncio.timeout(60):
            opens: Any = client.reliable_queue if way == "messages" else client.delayed_queue
            queue = opens("orders", codec=BytesCodec())
            if way == "drain":
                while len(got) < COUNT:
                    # A call may give up after its deadline, or fail with one that did before it;
                    # the messages come with the next one.
                    with suppress(delayq.ServerUnavailable, delayq.OutcomeUnknown):
                        got += await queue.drain(100)
            else:
                async for message in queue:
                    async with message:
                        got.append(message.value)
                    if len(got) == COUNT:
                        break
    assert got == payloads


async def test_a_loop_far_away_fetches_many_at_a_time(own_server: PrivateServer) -> None:
    """Waiting for an acknowledgement does not count as handling."""
    async with delayq.connect(own_server.url) as near:
        await near.reliable_queue("jobs").offer_many(offers(300))
    async with Links(own_server, round_trip=40) as links, delayq.connect(links.url) as client:
        handled = 0
        async for message in client.reliable_queue("jobs"):
            async with message:
                handled += 1
            if handled == 300:
                break
        # One at a time, each message would take two round trips.
        assert client.statistics().round_trips < 150


@pytest.fixture
async def wire(server: PrivateServer) -> AsyncIterator[Connection]:
    connections = ConnectionPool(one_server(server.url), 1)
    yield await connections.open_own()
    await connections.aclose()


class Peer:
    """A server that sends what a test wants, when the test wants it."""

    def __init__(self) -> None:
        self.heard = b""
        self.writer: Any = None

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        while data := await reader.read(65536):
            self.heard += data

    def say(self, data: bytes) -> None:
        self.writer.write(data)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer()
    listening = await asyncio.start_unix_server(peer.listen, tmp_path / "s")
    yield peer
    listening.close()
    if peer.writer is not None:
        peer.writer.close()


@pytest.fixture
async def to_peer(peer: Peer, tmp_path: Path) -> AsyncIterator[Connection]:
    """Open a wire whose other end the test controls.

    Its handshake needs one reply: to CLIENT SETNAME.
    """
    connections = ConnectionPool(one_server(f"unix://{tmp_path / 's'}"), 1)
    opening = asyncio.create_task(connections.open_own())
    answered = 0

    def answer() -> bool:
        nonlocal answered
        count = peer.heard.count(b"*") - answered
        answered += count
        if count:
            peer.say(b"+OK\r\n" * count)
        return opening.done()

    await until(answer)
    peer.heard = b""
    yield await opening
    await connections.aclose()


async def test_every_reply_reaches_its_caller_if_the_caller_still_waits(wire: Connection) -> None:
    good, bad, after = wire.ask("PING"), wire.ask("NONSENSE"), wire.ask("PING")
    assert await good == b"PONG"
    with pytest.raises(ReplyError, match=r"^unknown command"):
        await bad
    assert await after == b"PONG"
    # Nobody waits for these.
    wire.ask("ECHO", "first").cancel()
    wire.tell("ECHO", "nobody")
    wire.tell("NONSENSE")
    assert await wire.ask("ECHO", "somebody") == b"somebody"
    assert wire.is_clean


async def test_unrequested_messages_are_kept_for_the_next_reader(wire: Connection) -> None:
    wire.write("SUBSCRIBE", "channel")
    assert await wire.read() == [b"subscribe", b"channel", 1]
    wire.write("SUBSCRIBE", "another")
    await until(lambda: not wire.is_clean)
    assert await wire.read() == [b"subscribe", b"another", 2]


async def test_a_reply_may_come_in_pieces(peer: Peer, to_peer: Connection) -> None:
    first, second = to_peer.ask("GET", "a"), to_peer.ask("GET", "b")
    for byte in b"$3\r\none\r\n$3\r\nt":
        peer.say(bytes([byte]))
        await asyncio.sleep(0)
    assert await asyncio.wait_for(first, 60) == b"one"
    peer.say(b"wo\r\n")
    assert await asyncio.wait_for(second, 60) == b"two"


@pytest.mark.parametrize("how", ["closed", "reset", "nonsense", "by us"])
async def test_a_break_fails_the_waiting_calls(peer: Peer, to_peer: Connection, how: str) -> None:
    waiting, given_up = to_peer.ask("GET", "a"), to_peer.ask("GET", "b")
    given_up.cancel()
    await until(lambda: b"GET" in peer.heard)
    if how == "closed":
        peer.writer.close()
    elif how == "reset":
        peer.writer.transport.abort()
    elif how == "nonsense":
        peer.say(b"HTTP/1.1 400 Bad Request\r\n")
    else:
        to_peer.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(waiting, 60)
    assert not to_peer.is_open
    for send in (to_peer.ask, to_peer.tell, to_peer.write):
        with pytest.raises(NotSent):
            send("PING")
    with pytest.raises(NotSent):
        await to_peer.read()


async def test_a_read_may_wait_longer_than_a_reply_may_take(
    peer: Peer, to_peer: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "GIVE_UP_AFTER", 0.02)
    reading = asyncio.create_task(to_peer.read())
    await asyncio.sleep(0.1)
    peer.say(b"+at last\r\n")
    assert await asyncio.wait_for(reading, 60) == b"at last"
    # It is told when the connection breaks.
    reading = asyncio.create_task(to_peer.read())
    await asyncio.sleep(0)
    peer.writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(reading, 60)


async def test_a_command_before_the_close_arrives(wire: Connection, server: PrivateServer) -> None:
    wire.tell("SET", "told", "x" * 5_000_000)
    wire.close()
    await until(lambda: server.call("STRLEN", "told") == b":5000000")
    server.call("DEL", "told")


async def test_a_caller_waiting_for_its_bytes_to_leave_may_be_cancelled(
    peer: Peer, to_peer: Connection
) -> None:
    peer.writer.transport.pause_reading()
    question = to_peer.ask("ECHO", b"x" * 20_000_000)
    waiting = [asyncio.create_task(to_peer.drain()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert not waiting[1].done()
    to_peer.close()
    await asyncio.wait_for(waiting[1], 60)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(question, 60)


async def test_calls_behind_a_large_call_have_no_longer_to_wait(
    peer: Peer, to_peer: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without its pool, which would ask the peer over another connection.
    to_peer.owner = None
    monkeypatch.setattr(wire_module, "DOUBT_AFTER", 0.1)
    monkeypatch.setattr(wire_module, "GIVE_UP_AFTER", 0.5)
    # It has 60 s more than others to be answered.
    large = to_peer.ask("ECHO", b"x" * 15_000_000)
    watch = to_peer._watch
    await until(lambda: len(peer.heard) > 15_000_000 and to_peer._watch is not watch)
    peer.say(b"+done\r\n")
    assert await asyncio.wait_for(large, 60) == b"done"
    with pytest.raises(TimeoutError, match="no reply within"):
        await asyncio.wait_for(to_peer.ask("PING"), 20)


async def test_a_call_that_cannot_be_sent_awaits_no_reply(wire: Connection) -> None:
    with pytest.raises(TypeError):
        wire.call(("ECHO", None), None, blocks=1.0)
    with pytest.raises(TypeError):
        wire.call_all([(("PING",), None), (("ECHO", None), None)])
    assert wire.unanswered == 0
    assert not wire.is_blocked
    assert await wire.ask("PING") == b"PONG"


request: ContextVar[object] = ContextVar("request")


async def test_a_connection_forgets_in_which_context_it_was_opened(server: PrivateServer) -> None:
    class Variable:
        pass

    async def opened() -> tuple[ConnectionPool, weakref.ref[Variable]]:
        variable = Variable()
        request.set(variable)
        pool = ConnectionPool(one_server(server.url), 1)
        pool.release(await pool.acquire())
        return pool, weakref.ref(variable)

    pool, variable = await asyncio.create_task(opened())
    # A full collection takes a second in a long run, and this is young.
    await until(lambda: gc.collect(1) >= 0 and variable() is None)
    assert pool.open == 1
    await pool.aclose()


async def test_a_server_that_hangs_up_may_have_said_why(peer: Peer, to_peer: Connection) -> None:
    peer.say(b"-DENIED running in protected mode\r\n")
    await until(lambda: not to_peer.is_clean)
    greeting = asyncio.create_task(handshake._ask(to_peer, ("HELLO", 2)))
    await until(lambda: b"HELLO" in peer.heard)
    peer.writer.close()
    (reply,) = await asyncio.wait_for(greeting, 60)
    assert isinstance(reply, ReplyError)
    assert "protected mode" in str(reply)
