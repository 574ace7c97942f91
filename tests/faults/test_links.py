"""Links treat the bytes as their names say, so tests over links test what they claim to test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.links import BOTH, Links
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers import PrivateServer

PING, PONG = b"PING\r\n", b"+PONG\r\n"
WHILE = 0.05
"""Seconds in which nothing arrives; usually, bytes take a thousandth of that."""


@dataclass
class Talker:
    """A client that speaks plain bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes = PING) -> bytes:
        self.writer.write(request)
        return await self.answer()

    async def answer(self) -> bytes:
        async with asyncio.timeout(30):
            return await self.reader.readuntil(b"\r\n")

    async def hears_nothing(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(WHILE):
                await self.reader.readexactly(1)
            return False
        return True

    async def is_cut(self) -> bool:
        with suppress(ConnectionError):
            async with asyncio.timeout(30):
                return await self.reader.read(1) == b""
        return True


@dataclass
class Talkers:
    links: Links
    opened: list[Talker] = field(default_factory=list)

    async def new(self, *, asks: bool = True) -> Talker:
        """Open a link, and make sure that it works."""
        talker = Talker(*await asyncio.open_connection("127.0.0.1", self.links.port))
        self.opened.append(talker)
        if asks:
            assert await talker.ask() == PONG
        return talker


@asynccontextmanager
async def talking(server: PrivateServer, **options: Any) -> AsyncIterator[tuple[Links, Talkers]]:
    async with Links(server, tcp=True, **options) as links:
        talkers = Talkers(links)
        yield links, talkers
        for talker in talkers.opened:
            talker.writer.transport.abort()
        await until(lambda: not links.count)


@pytest.fixture
def server(own_server: PrivateServer) -> PrivateServer:
    """Return any server: these tests are about the bytes before they reach it."""
    return own_server


@pytest.fixture
async def talkers(server: PrivateServer) -> AsyncIterator[Talkers]:
    async with talking(server) as (_, talkers):
        yield talkers


@pytest.fixture
def links(talkers: Talkers) -> Links:
    return talkers.links


def carried(server: PrivateServer) -> bytes:
    """Return how many of the requests to count have been carried out."""
    return server.call("STRLEN", "carried")


CARRY = b"APPEND carried x\r\n"


async def test_stalled_bytes_arrive_once_the_link_heals_even_if_their_sender_has_gone(
    links: Links, talkers: Talkers, server: PrivateServer
) -> None:
    for count, direction in enumerate(BOTH):
        talker = await talkers.new()
        links.stall(direction)
        talker.writer.write(CARRY)
        assert await talker.hears_nothing()
        # A server that pauses carries it out later.
        expected = b":%d" % (0 if direction == "requests" else 2)
        await until(lambda expected=expected: carried(server) == expected)  # type: ignore[misc]
        links.heal()
        assert await talker.answer() == b":%d\r\n" % (count + 1)
    talker = await talkers.new()
    links.stall("requests")
    talker.writer.write(CARRY)
    await asyncio.sleep(WHILE)
    talker.writer.close()
    await asyncio.sleep(WHILE)
    assert carried(server) == b":2"
    links.heal()
    await until(lambda: carried(server) == b":3")


async def test_links_are_cut_at_once_or_in_the_middle_of_a_message_or_refused(
    links: Links, talkers: Talkers, server: PrivateServer
) -> None:
    opened = [await talkers.new() for _ in range(3)]
    assert links.cut() == 3
    assert [await talker.is_cut() for talker in opened] == [True] * 3
    for direction in BOTH:
        talker = await talkers.new()
        links.cut_after(3, direction)
        talker.writer.write(CARRY)
        await talker.is_cut()
        await until(lambda: not links.count)
        links.heal()
        assert carried(server) == (b":0" if direction == "requests" else b":1")
    old = await talkers.new()
    links.refuse()
    assert await (await talkers.new(asks=False)).is_cut()
    assert await old.ask() == PONG
    links.heal()
    talker = await talkers.new()
    server.kill()
    assert await talker.is_cut()
    assert await (await talkers.new(asks=False)).is_cut()
    await until(lambda: not links.count)


async def test_a_reply_is_lost_after_its_request_was_executed(
    server: PrivateServer, links: Links, talkers: Talkers
) -> None:
    other = await talkers.new()
    for count, then in enumerate(("cut", "silence")):
        talker = await talkers.new()
        links.lose_replies(b"APPEND", then=then)  # type: ignore[arg-type]
        assert await talker.ask() == PONG, "another request is answered"
        talker.writer.write(CARRY[:3])
        await asyncio.sleep(WHILE)
        talker.writer.write(CARRY[3:])
        await until(lambda: links.lost_replies == 1)
        assert carried(server) == b":%d" % (2 * count + 1)
        assert await (talker.is_cut() if then == "cut" else talker.hears_nothing())
        answer = await other.ask(CARRY)
        assert answer == b":%d\r\n" % (2 * count + 2), "one reply was to be lost"
        links.heal()
    links.lose_replies(times=None)
    other.writer.write(PING)
    await until(lambda: links.lost_replies == 1)
    links.heal()
    await talkers.new()


# Links as slow as a network


async def test_a_round_trip_delays_each_answer_and_a_new_link_takes_one_more(
    server: PrivateServer,
) -> None:
    loop = asyncio.get_running_loop()
    async with talking(server, round_trip=100) as (links, talkers):
        started = loop.time()
        talker = await talkers.new()
        assert loop.time() - started >= 0.2
        started = loop.time()
        talker.writer.write(PING * 3)
        assert [await talker.answer() for _ in range(3)] == [PONG] * 3
        assert loop.time() - started >= 0.1
        links.delay(0)
        links.heal()
        started = loop.time()
        assert await talker.ask() == PONG
        assert loop.time() - started >= 0.1, "heal() returns to the usual round trip"
        # What is on its way arrives before the link ends.
        talker.writer.write(CARRY)
        talker.writer.close()
        await until(lambda: carried(server) == b":1")
        await until(lambda: not links.count)
