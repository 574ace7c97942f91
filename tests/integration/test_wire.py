"""One connection: questions, answers, and what happens to waiting callers when it breaks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

from delayq._redis import connection as wire_module
from delayq._redis import handshake
from delayq._redis.connection import Connection, NotSent, ReplyError
from delayq._redis.pool import ConnectionPool
from tests.support.servers import one_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.servers import PrivateServer


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

    Its handshake needs one answer: to CLIENT SETNAME.
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


async def test_every_answer_reaches_its_caller_if_the_caller_still_waits(wire: Connection) -> None:
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


async def test_an_answer_may_come_in_pieces(peer: Peer, to_peer: Connection) -> None:
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


async def test_a_read_may_wait_longer_than_an_answer_may_take(
    peer: Peer, to_peer: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "ANSWER_WITHIN", 0.02)
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
    monkeypatch.setattr(wire_module, "ANSWER_WITHIN", 0.5)
    # It has 60 s more than others to be answered.
    large = to_peer.ask("ECHO", b"x" * 15_000_000)
    watch = to_peer._watch
    await until(lambda: len(peer.heard) > 15_000_000 and to_peer._watch is not watch)
    peer.say(b"+done\r\n")
    assert await asyncio.wait_for(large, 60) == b"done"
    with pytest.raises(TimeoutError, match="no answer within"):
        await asyncio.wait_for(to_peer.ask("PING"), 20)


async def test_a_call_that_cannot_be_sent_awaits_no_answer(wire: Connection) -> None:
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
    (answer,) = await asyncio.wait_for(greeting, 60)
    assert isinstance(answer, ReplyError)
    assert "protected mode" in str(answer)
