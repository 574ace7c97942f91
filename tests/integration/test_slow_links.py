"""Messages that are large for the link take their time, but each comes exactly once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq.codecs import BytesCodec
from tests.support.depth import in_gate
from tests.support.links import Links
from tests.support.reliable import offers

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

# 300 messages of 400 kB take a minute over 40 Mbit/s, and a batch of 100 takes 8 s, longer than a
# call waits. These values have the same effect with a shorter deadline.
COUNT, SIZE, MBIT, DEADLINE = 300, 8_000, 8, 0.5


@pytest.mark.parametrize("way", [in_gate("drain"), in_gate("messages")])
async def test_messages_that_take_longer_than_a_call_waits_come_once_each(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for module in ("_redis.connection", "_redis.client", "_engine.dispatcher"):
        monkeypatch.setattr(f"delayq.{module}.ANSWER_WITHIN", DEADLINE)
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
