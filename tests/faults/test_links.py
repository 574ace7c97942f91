"""Links treat the bytes as their names say, so tests over links test what they claim to test."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pytest

from tests.support.links import BOTH, Links
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.servers import PrivateServer

    Talk = Callable[[Links], Awaitable["Talker"]]

CARRY, PING, PONG = b"APPEND carried x\r\n", b"PING\r\n", b"+PONG\r\n"
WHILE = 0.05
"""Seconds in which nothing arrives; usually, bytes take a thousandth of that."""


@dataclass
class Talker:
    """A client that speaks plain bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes = CARRY) -> bytes:
        """Return the answer, as far as it arrives before the link is cut."""
        self.writer.write(request)
        async with asyncio.timeout(30):
            try:
                return await self.reader.readline()
            except ConnectionError:
                return b""


@pytest.fixture
async def links(own_server: PrivateServer) -> AsyncIterator[Links]:
    async with Links(own_server, tcp=True) as links:
        yield links


@pytest.fixture
async def talk() -> AsyncIterator[Talk]:
    """Return a function that opens a link, and makes sure that it works."""
    talkers: list[Talker] = []

    async def talk(links: Links) -> Talker:
        talkers.append(Talker(*await asyncio.open_connection("127.0.0.1", links.port)))
        assert await talkers[-1].ask(PING) == PONG
        return talkers[-1]

    yield talk
    for talker in talkers:
        talker.writer.transport.abort()


def carried(server: PrivateServer) -> bytes:
    """Return how many of the requests to count have been carried out."""
    return server.call("STRLEN", "carried")


async def test_stalled_bytes_arrive_once_the_link_heals(
    links: Links, own_server: PrivateServer, talk: Talk
) -> None:
    for count, direction in enumerate(BOTH):
        talker = await talk(links)
        links.stall(direction)
        asking = asyncio.create_task(talker.ask())
        expected = b":%d" % (0 if direction == "requests" else 2)
        await until(lambda expected=expected: carried(own_server) == expected)  # type: ignore[misc]
        await asyncio.sleep(WHILE)
        assert not asking.done()
        links.heal()
        assert await asking == b":%d\r\n" % (count + 1)


async def test_links_are_cut_at_once_or_in_the_middle_of_a_message(
    links: Links, own_server: PrivateServer, talk: Talk
) -> None:
    for direction in BOTH:
        talker = await talk(links)
        links.cut_after(3, direction)
        assert len(await talker.ask()) <= 3
        assert carried(own_server) == (b":0" if direction == "requests" else b":1")
    talkers = [await talk(links) for _ in range(3)]
    assert links.cut() == 3
    assert [await talker.ask(PING) for talker in talkers] == [b""] * 3


@pytest.mark.parametrize("then", ["cut", "silence"])
async def test_one_reply_is_lost_after_its_request_was_executed(
    links: Links, own_server: PrivateServer, talk: Talk, then: Literal["cut", "silence"]
) -> None:
    talker, other = await talk(links), await talk(links)
    links.lose_replies(b"APPEND", then=then)
    assert await talker.ask(PING) == PONG, "another request is answered"
    asking = asyncio.create_task(talker.ask())
    await until(lambda: links.lost_replies == 1)
    assert carried(own_server) == b":1"
    await asyncio.wait({asking}, timeout=WHILE if then == "silence" else 30)
    assert asking.done() == (then == "cut")
    assert await other.ask() == b":2\r\n", "one reply was to be lost"
    links.cut()
    assert await asking == b""


async def test_a_round_trip_delays_each_reply(own_server: PrivateServer, talk: Talk) -> None:
    loop = asyncio.get_running_loop()
    async with Links(own_server, tcp=True, round_trip=100) as links:
        started = loop.time()
        await talk(links)
        # A new link takes one more.
        assert loop.time() - started >= 0.2
