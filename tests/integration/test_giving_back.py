"""Messages that are given back reach the server, whatever else happens at that moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._engine.dispatcher import ClaimSource
from delayq._redis import return_calls
from delayq._redis.client import RedisClient
from delayq._redis.return_calls import ReturnCall, ShutdownCalls
from delayq._redisson.store import GIVE_BACK
from delayq.codecs import StringCodec
from tests.support.links import Links
from tests.support.waiting import fetch_ahead, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delayq import Client
    from tests.support.servers import PrivateServer


async def everything(url: str) -> list[Any]:
    """Return everything that another client finds."""
    async with delayq.connect(url) as client:
        return await client.delayed_queue("orders").drain()


async def opened(url: str, count: int = 150) -> tuple[Client, delayq.DelayedQueue[Any]]:
    """Open a client, and a queue with ``count`` messages that are due."""
    client = delayq.connect(url)
    await client.__aenter__()
    queue = client.delayed_queue("orders")
    await queue.offer_many([(n, 0) for n in range(count)])
    return client, queue


async def test_closing_returns_what_a_drain_has(own_server: PrivateServer) -> None:
    async with Links(own_server) as links:
        client, queue = await opened(links.url)
        counting, count_due = asyncio.Event(), queue._open.count_due

        async def count() -> int:
            links.delay(150)
            counting.set()
            return await count_due()

        queue._open.count_due = count  # type: ignore[method-assign]
        draining = asyncio.create_task(queue.drain())
        await counting.wait()
        await client.aclose()
        with pytest.raises(delayq.Closed):
            await draining
    assert await everything(own_server.url) == [*range(150)]


@pytest.mark.every_server
async def test_closing_takes_back_in_order_what_callers_were_handed_before_their_tasks_ran(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would give it back later, ahead of what the close has given back."""
    client, queue = await opened(own_server.url, 20)
    scheduler = client.session.scheduler
    end = ClaimSource.end
    written: list[ReturnCall] = []
    ending: list[Any] = []

    def end_and_close(self: ClaimSource[Any], items: Any, **found: Any) -> None:
        end(self, items := list(items), **found)
        if items and not ending:
            ending.append(scheduler.close(scheduler.queues)())

    send = ShutdownCalls.send

    def note(self: ShutdownCalls, name: str, calls: Iterable[ReturnCall]) -> None:
        written.extend(calls := list(calls))
        send(self, name, calls)

    monkeypatch.setattr(ClaimSource, "end", end_and_close)
    monkeypatch.setattr(ShutdownCalls, "send", note)
    drains = [asyncio.create_task(queue.drain(10)) for _ in range(2)]
    for drain in drains:
        with pytest.raises(delayq.Closed):
            await drain
    # In a single call, because only that keeps the order.
    (back,) = [call for call in written if call.request.script is GIVE_BACK]
    assert [int(payload) for payload in back.request.args[3:]] == [*range(20)]
    await ending[0]
    await client.aclose()
    assert await everything(own_server.url) == [*range(20)]


async def test_a_closing_client_waits_for_a_closing_queue(own_server: PrivateServer) -> None:
    async with Links(own_server, round_trip=100) as links:
        client, queue = await opened(links.url)
        values = aiter(queue)
        first = await anext(values)
        # The first try does not arrive.
        links.half_open(new=False)
        closing = asyncio.create_task(queue.aclose())
        await asyncio.sleep(0)
        await client.aclose()
        # Closing was not cancelled.
        await closing
    assert [first, *await everything(own_server.url)] == [*range(150)]


async def test_closing_does_not_claim_to_know_what_arrives_later(
    own_server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Links(own_server) as links:
        client, queue = await opened(links.url, 10)
        values = aiter(queue)
        taken = [await anext(values) for _ in range(3)]
        # Some of the others have been fetched ahead; the rest is on the server.
        ready = await queue.ready.size()
        assert ready < 7
        links.stall()
        await client.aclose()
        messages = [record.getMessage() for record in caplog.records]
        (warning,) = [message for message in messages if "handed back" in message]
        assert warning.startswith(
            f"queue 'orders': {7 - ready} messages were taken and may not have been handed back: "
        )
        links.heal()
        left: list[Any] = []

        async def all_back() -> bool:
            left.extend(await everything(own_server.url))
            return len(left) == 7

        await until(all_back)
    assert sorted([*taken, *left]) == [*range(10)]


@pytest.mark.every_server
async def test_a_server_that_is_full_takes_back_what_it_handed_out(server: PrivateServer) -> None:
    value = "x" * 1000
    async with Links(server) as links, delayq.connect(links.url) as client:
        queue = client.delayed_queue("orders", codec=StringCodec())
        await queue.offer_many([(value, 0)] * 50)
        assert await queue.take() == value
        server.call("CONFIG", "SET", "maxmemory", "1mb")
        try:
            assert server.call("SET", "another", "one").startswith(b"-OOM")
            links.lose_replies(b"EVALSHA")
            async with asyncio.timeout(60):
                assert await queue.take() == value
            assert links.lost_replies == 1
            async for _ in queue:
                break
            # Messages that were fetched ahead are back.
            await until(lambda: queue._dispatcher.is_idle)
            assert len(await queue.drain()) == 47
        finally:
            server.call("CONFIG", "SET", "maxmemory", "0")


@pytest.mark.every_server
async def test_closing_outlasts_a_demotion(own_server: PrivateServer) -> None:
    client, queue = await opened(own_server.url)
    _loop, taken = await fetch_ahead(queue)
    own_server.call("REPLICAOF", "127.0.0.1", "1")
    errors = client.statistics().errors
    server = client._session.server  # type: ignore[union-attr]
    closing = asyncio.create_task(client.aclose())
    # At least the first calls have failed.
    await until(lambda: server.errors >= errors + 2)
    own_server.call("REPLICAOF", "NO", "ONE")
    await closing
    assert [*taken, *await everything(own_server.url)] == [*range(150)]


@pytest.mark.every_server
async def test_closing_tries_now_and_then_while_the_server_cannot_serve_and_gives_up(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, queue = await opened(own_server.url)
    _loop, _ = await fetch_ahead(queue)
    send_anew = return_calls.send_anew
    tries: list[Any] = []
    looks: list[RedisClient] = []

    def look(server: RedisClient) -> int:
        looks.append(server)
        return 0

    # Counted before it runs: after a pause, the time may be up by then.
    def send(server: RedisClient, calls: Any) -> Any:
        tries.append(calls)
        return send_anew(server, calls)

    monkeypatch.setattr(return_calls, "send_anew", send)
    monkeypatch.setattr(RedisClient, "bytes_to_send", property(look))
    monkeypatch.setattr(return_calls, "_LONGEST_EXTENSION", 1.0)
    own_server.call("CONFIG", "SET", "min-replicas-to-write", "1")
    await asyncio.wait_for(client.aclose(), 60)
    assert 1 <= len(tries) < 100
    assert 1 <= len(looks) < 100, "it kept the processor busy"


@pytest.mark.every_server
async def test_polled_messages_that_took_too_long_go_back_as_a_whole(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redisson.take_calls._SAFE_WITHIN", 0.0)
    async with delayq.connect(own_server.unix_url) as client:
        queue = client.delayed_queue("orders")
        await queue.offer_many([(n, 60) for n in range(150)])
        take_calls = queue._open.transfer.take_calls
        poll_pending, calls = take_calls.poll_pending, 0

        async def poll(limit: int) -> Any:
            nonlocal calls
            calls += 1
            polled = await poll_pending(limit)
            if calls == 1:
                # The first part goes back before the second one has come.
                await queue._open.store.send(take_calls.return_by_name(polled[0]).request)
            return polled

        monkeypatch.setattr(take_calls, "poll_pending", poll)
        with pytest.raises(delayq.ServerUnavailable, match="poll fewer"):
            await queue.pending.poll_many(150)
        await until(lambda: not take_calls._lost_calls)
        assert await queue.pending.read_all() == [*range(150)]
        assert await queue.pending.poll_many(150) == [*range(150)]
