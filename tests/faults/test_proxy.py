"""The proxy does to the bytes what it says, so that the fault tests test what they say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.faults.proxy import Proxy
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers import PrivateServer

PING, PONG = b"PING\r\n", b"+PONG\r\n"
WHILE = 0.05
"""Nothing comes within so many seconds: something that was not held would come in a thousandth of it."""


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
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._opened: list[Talker] = []

    async def new(self) -> Talker:
        if self._proxy.url.startswith("redis"):
            opened = await asyncio.open_connection("127.0.0.1", int(self._proxy.url.rpartition(":")[2].partition("/")[0]))
        else:
            opened = await asyncio.open_unix_connection(self._proxy.url.removeprefix("unix://"))
        self._opened.append(talker := Talker(*opened))
        return talker

    def close(self) -> None:
        for talker in self._opened:
            talker.writer.transport.abort()


@pytest.fixture(params=["unix", "tcp"])
async def proxy(request: pytest.FixtureRequest, server: PrivateServer) -> AsyncIterator[Proxy]:
    async with Proxy(server, tcp=request.param == "tcp") as proxy:
        yield proxy


@pytest.fixture
async def talkers(proxy: Proxy) -> AsyncIterator[Talkers]:
    talkers = Talkers(proxy)
    yield talkers
    talkers.close()
    await until(lambda: not proxy.links)


async def test_it_hands_on_what_comes_on_each_of_several_links(proxy: Proxy, talkers: Talkers) -> None:
    opened = [await talkers.new() for _ in range(5)]
    assert await asyncio.gather(*(talker.ask(f"ECHO {n}\r\n".encode()) for n, talker in enumerate(opened))) == [b"$1\r\n"] * 5
    assert (proxy.links, proxy.accepted) == (5, 5)


async def test_a_delay_holds_both_directions_and_keeps_the_order(proxy: Proxy, talkers: Talkers) -> None:
    talker, loop = await talkers.new(), asyncio.get_running_loop()
    await talker.ask()
    proxy.delay(30)
    started = loop.time()
    talker.writer.write(b"ECHO a\r\n")
    await asyncio.sleep(0.001)
    talker.writer.write(b"ECHO b\r\n")
    answers = [await talker.answer() for _ in range(4)]
    assert answers[1::2] == [b"a\r\n", b"b\r\n"]
    assert loop.time() - started >= 0.06
    proxy.delay(30, "requests")
    proxy.delay(0, "replies")
    started = loop.time()
    assert await talker.ask() == PONG
    assert loop.time() - started >= 0.03


@pytest.mark.parametrize("direction", ["requests", "replies"])
async def test_what_is_stalled_one_way_arrives_when_it_heals(
    proxy: Proxy, talkers: Talkers, server: PrivateServer, direction: str
) -> None:
    talker = await talkers.new()
    await talker.ask()
    proxy.stall(direction)  # type: ignore[arg-type]
    talker.writer.write(b"SET carried out\r\n")
    assert await talker.hears_nothing()
    assert server.call("EXISTS", "carried") == (b":0" if direction == "requests" else b":1")
    proxy.heal()
    assert await talker.answer() == b"+OK\r\n"


async def test_a_stalled_request_arrives_although_its_sender_has_gone(
    proxy: Proxy, talkers: Talkers, server: PrivateServer
) -> None:
    talker = await talkers.new()
    await talker.ask()
    proxy.stall("requests")
    talker.writer.write(b"SET carried out\r\n")
    await asyncio.sleep(WHILE)
    talker.writer.close()
    await asyncio.sleep(WHILE)
    assert server.call("EXISTS", "carried") == b":0"
    proxy.heal()
    await until(lambda: server.call("EXISTS", "carried") == b":1")


async def test_half_open_links_swallow_everything_and_stay_open(proxy: Proxy, talkers: Talkers, server: PrivateServer) -> None:
    old = await talkers.new()
    await old.ask()
    proxy.half_open()
    new = await talkers.new()
    for talker in (old, new):
        talker.writer.write(b"INCR carried\r\n")
        assert await talker.hears_nothing()
    assert server.call("EXISTS", "carried") == b":0"
    proxy.heal()
    old.writer.write(PING)
    assert await old.hears_nothing(), "its bytes are lost"
    assert await (await talkers.new()).ask() == PONG


async def test_a_cut_ends_all_links_at_once_and_new_ones_work(proxy: Proxy, talkers: Talkers) -> None:
    opened = [await talkers.new() for _ in range(3)]
    for talker in opened:
        await talker.ask()
    assert proxy.cut() == 3
    assert [await talker.is_cut() for talker in opened] == [True] * 3
    assert await (await talkers.new()).ask() == PONG


@pytest.mark.parametrize(("direction", "carried_out"), [("requests", b":0"), ("replies", b":1")])
async def test_a_link_is_cut_in_the_middle_of_a_message(
    proxy: Proxy, talkers: Talkers, server: PrivateServer, direction: str, carried_out: bytes
) -> None:
    talker = await talkers.new()
    await talker.ask()
    proxy.drop_after(3, direction)  # type: ignore[arg-type]
    talker.writer.write(b"INCR carried\r\n")
    await talker.is_cut()
    await until(lambda: not proxy.links)
    assert server.call("EXISTS", "carried") == carried_out


async def test_whoever_connects_is_refused_and_whoever_is_connected_is_not(proxy: Proxy, talkers: Talkers) -> None:
    old = await talkers.new()
    await old.ask()
    proxy.refuse()
    assert await (await talkers.new()).is_cut()
    assert await old.ask() == PONG
    proxy.heal()
    assert await (await talkers.new()).ask() == PONG


async def test_a_server_that_is_gone_is_a_link_that_is_cut(server: PrivateServer, proxy: Proxy, talkers: Talkers) -> None:
    talker = await talkers.new()
    await talker.ask()
    server.kill()
    assert await talker.is_cut()
    assert await (await talkers.new()).is_cut()
    await until(lambda: not proxy.links)


async def test_it_ends_while_links_are_stalled_and_leaves_nothing(server: PrivateServer) -> None:
    async with Proxy(server) as proxy:
        talker = await Talkers(proxy).new()
        proxy.stall()
        proxy.delay(1000)
        talker.writer.write(PING)
        await asyncio.sleep(WHILE)
    assert await talker.is_cut()
    talker.writer.transport.abort()
    assert proxy.links == 0
