"""Links treat the bytes as their names say, so tests over links test what they claim to test."""

from __future__ import annotations

import asyncio
import importlib.util
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest

import delayq
from tests.support.links import Links, detour
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers import PrivateServer

PING, PONG = b"PING\r\n", b"+PONG\r\n"
WHILE = 0.05
"""Seconds in which nothing arrives; usually, bytes take a thousandth of that."""


class Talker:
    """A client that speaks plain bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes = PING) -> bytes:
        self.writer.write(request)
        return await self.answer()

    async def answer(self) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readuntil(b"\r\n")

    async def hears_nothing(self) -> bool:
        try:
            async with asyncio.timeout(WHILE):
                await self.reader.readexactly(1)
        except TimeoutError:
            return True
        return False

    async def is_cut(self) -> bool:
        try:
            async with asyncio.timeout(10):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class Talkers:
    def __init__(self, links: Links) -> None:
        self._links = links
        self._opened: list[Talker] = []

    async def new(self, *, asks: bool = True) -> Talker:
        """Open a link, and make sure that it works."""
        if self._links.url.startswith("redis"):
            opened = await asyncio.open_connection(
                "127.0.0.1", int(self._links.url.rpartition(":")[2].partition("/")[0])
            )
        else:
            opened = await asyncio.open_unix_connection(self._links.url.removeprefix("unix://"))
        self._opened.append(talker := Talker(*opened))
        if asks:
            assert await talker.ask() == PONG
        return talker

    async def close(self) -> None:
        for talker in self._opened:
            talker.writer.transport.abort()
        await until(lambda: not self._links.count)


@asynccontextmanager
async def talking(server: PrivateServer, **options: Any) -> AsyncIterator[tuple[Links, Talkers]]:
    async with Links(server, **options) as links:
        talkers = Talkers(links)
        yield links, talkers
        await talkers.close()


@pytest.fixture
def server(own_server: PrivateServer) -> PrivateServer:
    """Return any server: these tests are about the bytes before they reach it."""
    return own_server


@pytest.fixture(params=["unix", "tcp"])
async def links(request: pytest.FixtureRequest, server: PrivateServer) -> AsyncIterator[Links]:
    async with Links(server, tcp=request.param == "tcp") as links:
        yield links


@pytest.fixture
async def talkers(links: Links) -> AsyncIterator[Talkers]:
    talkers = Talkers(links)
    yield talkers
    await talkers.close()


async def test_it_passes_on_the_bytes_of_several_links(links: Links, talkers: Talkers) -> None:
    opened = [await talkers.new() for _ in range(5)]
    assert (
        await asyncio.gather(
            *(talker.ask(f"ECHO {n}\r\n".encode()) for n, talker in enumerate(opened))
        )
        == [b"$1\r\n"] * 5
    )
    assert (links.count, links.accepted) == (5, 5)


async def test_a_delay_holds_both_ways_and_keeps_the_order(links: Links, talkers: Talkers) -> None:
    talker, loop = await talkers.new(), asyncio.get_running_loop()
    links.delay(30)
    started = loop.time()
    talker.writer.write(b"ECHO a\r\n")
    await asyncio.sleep(0.001)
    talker.writer.write(b"ECHO b\r\n")
    answers = [await talker.answer() for _ in range(4)]
    assert answers[1::2] == [b"a\r\n", b"b\r\n"]
    assert loop.time() - started >= 0.06
    links.delay(30, "requests")
    links.delay(0, "replies")
    started = loop.time()
    assert await talker.ask() == PONG
    assert loop.time() - started >= 0.03


@pytest.mark.parametrize("direction", ["requests", "replies"])
async def test_what_is_stalled_one_way_arrives_when_it_heals(
    links: Links, talkers: Talkers, server: PrivateServer, direction: str
) -> None:
    talker = await talkers.new()
    links.stall(direction)  # type: ignore[arg-type]
    talker.writer.write(b"SET carried out\r\n")
    assert await talker.hears_nothing()
    assert server.call("EXISTS", "carried") == (b":0" if direction == "requests" else b":1")
    links.heal()
    assert await talker.answer() == b"+OK\r\n"


async def test_a_stalled_request_arrives_although_its_sender_has_gone(
    links: Links, talkers: Talkers, server: PrivateServer
) -> None:
    talker = await talkers.new()
    links.stall("requests")
    talker.writer.write(b"SET carried out\r\n")
    await asyncio.sleep(WHILE)
    talker.writer.close()
    await asyncio.sleep(WHILE)
    assert server.call("EXISTS", "carried") == b":0"
    links.heal()
    await until(lambda: server.call("EXISTS", "carried") == b":1")


async def test_half_open_links_swallow_everything_and_stay_open(
    links: Links, talkers: Talkers, server: PrivateServer
) -> None:
    old = await talkers.new()
    links.half_open()
    new = await talkers.new(asks=False)
    for talker in (old, new):
        talker.writer.write(b"INCR carried\r\n")
        assert await talker.hears_nothing()
    assert server.call("EXISTS", "carried") == b":0"
    links.heal()
    old.writer.write(PING)
    assert await old.hears_nothing(), "it stays mute"
    await talkers.new()


async def test_a_cut_ends_all_links_at_once_new_ones_work(links: Links, talkers: Talkers) -> None:
    opened = [await talkers.new() for _ in range(3)]
    assert links.cut() == 3
    assert [await talker.is_cut() for talker in opened] == [True] * 3
    await talkers.new()


@pytest.mark.parametrize(("direction", "carried_out"), [("requests", b":0"), ("replies", b":1")])
async def test_a_link_is_cut_in_the_middle_of_a_message(
    links: Links, talkers: Talkers, server: PrivateServer, direction: str, carried_out: bytes
) -> None:
    talker = await talkers.new()
    links.cut_after(3, direction)  # type: ignore[arg-type]
    talker.writer.write(b"INCR carried\r\n")
    await talker.is_cut()
    await until(lambda: not links.count)
    assert server.call("EXISTS", "carried") == carried_out


async def test_new_links_are_refused_and_open_ones_stay(links: Links, talkers: Talkers) -> None:
    old = await talkers.new()
    links.refuse()
    assert await (await talkers.new(asks=False)).is_cut()
    assert await old.ask() == PONG
    links.heal()
    await talkers.new()


async def test_a_dead_server_cuts_links(
    server: PrivateServer, links: Links, talkers: Talkers
) -> None:
    talker = await talkers.new()
    server.kill()
    assert await talker.is_cut()
    assert await (await talkers.new(asks=False)).is_cut()
    await until(lambda: not links.count)


async def test_it_ends_while_links_are_stalled_and_leaves_nothing(server: PrivateServer) -> None:
    async with Links(server) as links:
        talker = await Talkers(links).new()
        links.stall()
        links.delay(1000)
        talker.writer.write(PING)
        await asyncio.sleep(WHILE)
    assert await talker.is_cut()
    talker.writer.transport.abort()
    assert links.count == 0


# Links as slow as a network


@pytest.fixture(params=["unix", "tcp"])
def tcp(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "tcp")


async def test_a_round_trip_delays_each_answer_and_a_new_link_takes_one_more(
    server: PrivateServer, tcp: bool
) -> None:
    loop = asyncio.get_running_loop()
    async with talking(server, tcp=tcp, round_trip=200) as (links, talkers):
        started = loop.time()
        talker = await talkers.new()
        assert loop.time() - started >= 0.4
        # A hundred calls that are sent at once share a round trip; one by one they would take
        # twenty seconds.
        started = loop.time()
        talker.writer.write(PING * 100)
        assert [await talker.answer() for _ in range(100)] == [PONG] * 100
        assert 0.2 <= loop.time() - started < 15
        links.delay(0)
        links.heal()
        started = loop.time()
        assert await talker.ask() == PONG
        assert loop.time() - started >= 0.2, "heal() returns to the usual round trip"


@pytest.mark.parametrize("mbit", [1, 8, 100])
async def test_a_bandwidth_limits_each_direction_and_a_long_round_trip_does_not(
    server: PrivateServer, mbit: int
) -> None:
    loop, size = asyncio.get_running_loop(), mbit * 125_000 // 5
    async with talking(server, round_trip=100, mbit=mbit) as (_, talkers):
        talker = await talkers.new()
        started = loop.time()
        assert (
            await talker.ask(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n" % (size, b"x" * size))
            == b"+OK\r\n"
        )
        assert 0.299 <= loop.time() - started < 5
        started = loop.time()
        assert await talker.ask(b"GET k\r\n") == b"$%d\r\n" % size
        async with asyncio.timeout(20):
            assert await talker.reader.readexactly(size) == b"x" * size
        assert 0.299 <= loop.time() - started < 5


async def test_links_share_a_bandwidth_fairly(server: PrivateServer) -> None:
    """Two large replies are not faster than one alone, and hold up no small one."""
    size, loop = 500_000, asyncio.get_running_loop()
    server.call("SET", "k", "x" * size)
    async with talking(server, mbit=8) as (_, talkers):
        busy, other, quick = [await talkers.new() for _ in range(3)]
        started = loop.time()
        for talker in (busy, other):
            talker.writer.write(b"GET k\r\n")
        await busy.answer()
        large = asyncio.gather(*(talker.reader.readexactly(size) for talker in (busy, other)))
        assert await quick.ask() == PONG
        assert not large.done()
        await asyncio.wait_for(large, 20)
        assert loop.time() - started >= 1


async def test_bytes_in_flight_arrive_before_a_link_ends(server: PrivateServer, tcp: bool) -> None:
    async with talking(server, tcp=tcp, round_trip=60, mbit=10) as (links, talkers):
        talker = await talkers.new()
        loop = asyncio.get_running_loop()
        started = loop.time()
        talker.writer.write(b"SET carried out\r\n")
        talker.writer.close()
        await asyncio.sleep(0.01)
        assert server.call("EXISTS", "carried") == b":0" or loop.time() - started >= 0.03
        await until(lambda: server.call("EXISTS", "carried") == b":1")
        await until(lambda: not links.count)


async def test_dead_links_stay_dead_while_new_ones_work(
    server: PrivateServer, links: Links, talkers: Talkers
) -> None:
    old = await talkers.new()
    links.half_open(new=False)
    await talkers.new()
    for _ in range(2):
        old.writer.write(b"INCR carried\r\n")
        assert await old.hears_nothing()
        links.heal()
    assert server.call("EXISTS", "carried") == b":0"


async def test_stalled_links_are_overtaken_by_new_ones(
    server: PrivateServer, links: Links, talkers: Talkers
) -> None:
    old = await talkers.new()
    links.stall("requests", new=False)
    old.writer.write(b"SET k old\r\n")
    assert await (await talkers.new()).ask(b"SET k new\r\n") == b"+OK\r\n"
    assert server.call("GET", "k") == b"new"
    links.heal()
    assert await old.answer() == b"+OK\r\n"
    assert server.call("GET", "k") == b"old"


@pytest.mark.parametrize("then", ["cut", "silence"])
async def test_a_reply_is_lost_after_its_request_was_executed(
    server: PrivateServer, links: Links, talkers: Talkers, then: Literal["cut", "silence"]
) -> None:
    talker, other = await talkers.new(), await talkers.new()
    links.lose_replies(b"INCR", then=then)
    assert await talker.ask() == PONG, "another request is answered"
    talker.writer.write(b"INC")
    await asyncio.sleep(WHILE)
    talker.writer.write(b"R carried\r\n")
    await until(lambda: links.lost_replies == 1)
    assert server.call("GET", "carried") == b"1"
    assert await (talker.is_cut() if then == "cut" else talker.hears_nothing())
    assert await other.ask(b"INCR carried\r\n") == b":2\r\n", "one reply was to be lost"
    links.lose_replies(times=None)
    other.writer.write(PING)
    await until(lambda: links.lost_replies == 1)
    links.heal()
    await talkers.new()


@pytest.mark.skipif(importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed")
def test_links_work_on_uvloop(server: PrivateServer) -> None:
    import uvloop

    async def talk() -> None:
        for tcp in (False, True):
            async with talking(server, tcp=tcp, round_trip=20, mbit=10) as (links, talkers):
                talker = await talkers.new()
                started = asyncio.get_running_loop().time()
                assert await talker.ask() == PONG
                # uvloop's clock counts whole milliseconds.
                assert asyncio.get_running_loop().time() - started >= 0.018
                links.cut()
                assert await talker.is_cut()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())


async def test_connections_take_a_detour_while_it_lasts(server: PrivateServer) -> None:
    async with Links(server, tcp=True) as direct, Links(server, tcp=True) as around:
        with detour({direct.port: around.port}):
            async with delayq.connect(direct.url) as client:
                await client.delayed_queue("orders").ready.size()
        assert around.accepted > 0
        assert direct.accepted == 0
        async with delayq.connect(direct.url) as client:
            await client.delayed_queue("orders").ready.size()
        assert direct.accepted > 0
