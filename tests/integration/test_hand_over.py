"""Messages on their way to a caller or back, over links that are slow or break at that moment."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq._engine.dispatcher import ClaimSource
from delayq._redis import return_calls
from delayq._redis.client import RedisClient
from delayq._redis.return_calls import ReturnCall, ShutdownCalls
from delayq._redis.rights import Rights
from delayq._redisson import take_calls
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.store import GIVE_BACK, TRANSFER
from delayq._redisson.take_calls import TakeCall
from delayq.codecs import StringCodec
from tests.support.depth import in_gate
from tests.support.links import Links
from tests.support.tasks import end, running
from tests.support.waiting import fetch_ahead, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from delayq import Client, DelayedQueue
    from tests.support.servers import PrivateServer

    Orders = delayq.DelayedQueue[int]


@pytest.fixture
async def raw(own_server: PrivateServer) -> AsyncIterator[Any]:
    async with Redis.from_url(own_server.url, socket_timeout=60) as raw:
        yield raw


LEASED, LEASES = "delayq_leased:{orders}", "delayq_leases:{orders}"
Linked = tuple[Links, "Client", "Orders"]


@pytest.fixture
async def linked(own_server: PrivateServer) -> AsyncIterator[Linked]:
    """Provide links, and a client and its queue behind them."""
    async with Links(own_server) as links, delayq.connect(links.url, resync_interval=0.2) as client:
        yield links, client, client.delayed_queue("orders")


async def confirmed(raw: Any) -> None:
    """Wait until every message that was handed out is known to have arrived."""
    await until(lambda: raw.exists(LEASED, LEASES), equals=0)


async def numbers(raw: Any, name: str) -> list[int]:
    return [int(payload) for payload in await raw.lrange(name, 0, -1)]


async def filled(raw: Any, name: str, count: int) -> None:
    await raw.rpush(name, *(str(number) for number in range(count)))


async def handled(queue: Orders, seen: list[int]) -> None:
    """Handle messages without end, and quickly enough for many to be fetched ahead."""
    async for value in queue:
        seen.append(value)
        if len(seen) >= 40:
            await asyncio.sleep(3600)


@pytest.mark.parametrize(("queues", "round_trip"), [(1, 100), in_gate(20, 100), in_gate(50, 20)])
async def test_closing_a_client_over_a_long_round_trip_brings_back_what_was_fetched_ahead(
    own_server: PrivateServer, raw: Any, queues: int, round_trip: int
) -> None:
    names = [f"q{number}" for number in range(queues)]
    for name in names:
        await filled(raw, name, 100)
    seen: dict[str, list[int]] = {name: [] for name in names}
    async with (
        Links(own_server, round_trip=round_trip) as links,
        delayq.connect(links.url) as client,
        running(*(handled(client.delayed_queue(name), seen[name]) for name in names)),
    ):
        await until(lambda: all(len(each) == 40 for each in seen.values()), 30)
        await client.aclose()
        for name in names:
            # Calls that were sent before the client was closed may still be on their way.
            await until(partial(raw.llen, name), equals=60)
            assert await numbers(raw, name) == list(range(40, 100))


async def test_a_caller_cancelled_twice_loses_nothing(own_server: PrivateServer, raw: Any) -> None:
    async with Links(own_server, round_trip=40) as links:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            async with delayq.connect(links.url) as client:
                queue: Orders = client.delayed_queue("orders")
                await queue.ready.size()
                await filled(raw, "orders", 1)
                opened.set_result(queue)
                await queue.take()

        task = asyncio.create_task(work())
        queue = await opened
        await until(lambda: queue._open.transfer.take_calls._in_flight)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.001)
        with suppress(asyncio.CancelledError):
            await task
        await until(lambda: raw.llen("orders"), equals=1)


async def by_take(queue: Orders) -> list[int]:
    return [await queue.take()]


async def by_drain(queue: Orders) -> list[int]:
    while not (taken := await queue.drain()):
        await asyncio.sleep(0.01)
    return taken


async def by_loop(queue: Orders) -> list[int]:
    async for value in queue:
        return [value]
    return []


@pytest.mark.parametrize(
    ("way", "then"), [(by_take, "cut"), (by_drain, "silence"), (by_loop, "cut")]
)
async def test_messages_in_lost_replies_come_once(
    linked: Linked, raw: Any, way: Any, then: Any
) -> None:
    links, _, queue = linked
    # Make sure that the server knows the scripts.
    await filled(raw, "orders", 1)
    assert await way(queue) == [0]
    links.lose_replies(b"orders", then=then)
    await filled(raw, "orders", 3)
    got: list[int] = []
    while len(got) < 3:
        with suppress(delayq.ServerError):
            got += await asyncio.wait_for(way(queue), 60)
    assert sorted(got) == [0, 1, 2]
    assert await queue.poll() is None


async def test_an_unanswered_poll_of_pending_takes_nothing(linked: Linked, raw: Any) -> None:
    links, _, queue = linked
    await queue.offer_many([(number, 3600) for number in range(250)])
    stored = partial(raw.zrange, DelayedKeys.of("orders").timeout, 0, -1, withscores=True)
    before = await stored()
    assert await queue.pending.poll_many(1) == [0]
    await confirmed(raw)
    links.lose_replies(b"pending")
    with pytest.raises(delayq.ServerError):
        await queue.pending.poll_many(200)
    await until(stored, equals=before[1:])
    # Nor does one that is cancelled on the way.
    links.delay(300)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await queue.pending.poll_many(200)
    links.delay(0)
    await until(stored, equals=before[1:])
    assert await queue.pending.poll_many(1000) == list(range(1, 250))
    assert not await queue.pending.size()


async def test_unconfirmed_messages_of_a_dead_client_go_back_by_themselves(
    own_server: PrivateServer, raw: Any, linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, client, queue = linked
    # From now on the server knows the script in both forms.
    for _ in range(2):
        await filled(raw, "orders", 1)
        assert await queue.take() == 0
    await confirmed(raw)
    monkeypatch.setattr(take_calls, "CONFIRM_US", 500_000)
    # The call is carried out, but from then on nothing reaches the client, nor the server.
    links.lose_replies(b"orders", then="silence", times=None)
    await filled(raw, "orders", 2)
    poll = asyncio.create_task(queue.poll())
    await until(lambda: raw.exists(LEASED))
    links.half_open()
    await end(poll)
    await client.aclose()
    async with delayq.connect(own_server.url, resync_interval=0.1) as other:
        theirs: Orders = other.delayed_queue("orders")
        assert [await asyncio.wait_for(theirs.take(), 60) for _ in range(2)] == [0, 1]


async def test_a_lost_confirmation_is_repeated_without_harm(raw: Any, linked: Linked) -> None:
    links, _, queue = linked
    await filled(raw, "orders", 1)
    # The link breaks right behind the confirmation: its reply is lost, whether or not the request
    # arrived.
    links.lose_replies(b"HDEL")
    assert await queue.take() == 0
    await confirmed(raw)
    assert await queue.poll() is None


async def test_half_a_confirmation_is_repeated(
    raw: Any, linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right was there when it was checked, some seconds ago."""
    *_, queue = linked
    checked = Rights.form
    monkeypatch.setattr(
        Rights,
        "form",
        lambda rights, wire, script, key: (
            script if script is TRANSFER else checked(rights, wire, script, key)
        ),
    )
    for refused in ("hdel", "zrem"):
        await raw.execute_command("ACL", "SETUSER", "default", f"-{refused}")
        await filled(raw, "orders", 1)
        assert await queue.poll(60) == 0, refused
        await until(lambda: raw.exists(LEASED, LEASES), equals=1)
        await raw.execute_command("ACL", "SETUSER", "default", "+@all")
        await confirmed(raw)


async def test_a_confirmation_that_a_new_master_lacks_is_repeated(raw: Any, linked: Linked) -> None:
    *_, queue = linked
    await filled(raw, "orders", 1)
    assert await queue.poll(60) == 0
    kept = queue._open.transfer.take_calls._confirmations
    await until(lambda: kept._tokens and kept._path)
    (_, token), *_ = kept._tokens
    await new_master_without_confirmation(raw, token)
    await confirmed(raw)
    assert await queue.poll() is None


async def new_master_without_confirmation(raw: Any, token: str) -> None:
    """Pretend that a replica without the confirmation of a call has become the master."""
    await raw.hset(LEASED, token, "1:0")
    await raw.zadd(LEASES, {token: int(time.time() * 1000) + 300_000})
    await raw.client_kill_filter(_type="normal", skipme=True)


async def test_messages_that_went_back_are_not_confirmed_again(
    raw: Any, linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new master may have the only copy."""
    tokens: list[str] = []
    add = take_calls._Confirmations.add

    def noted(self: take_calls._Confirmations, token: str) -> None:
        tokens.append(token)
        add(self, token)

    monkeypatch.setattr(take_calls._Confirmations, "add", noted)
    _, client, queue = linked
    await filled(raw, "orders", 300)
    await fetch_ahead(queue)
    await until(lambda: queue._dispatcher.is_idle)
    await confirmed(raw)
    kept = queue._open.transfer.take_calls._confirmations
    before = kept._path
    await new_master_without_confirmation(raw, tokens[-1])
    # The re-check has noticed that the connection broke.
    await until(lambda: kept._path != before)
    await client.server_time()
    assert await raw.hexists(LEASED, tokens[-1])


@pytest.mark.parametrize("answered", [True, False])
async def test_the_fence_of_a_call_stays_until_the_call_cannot_arrive_any_more(
    own_server: PrivateServer, raw: Any, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that pauses gets no second try, behind which the fence would have to stay.
    monkeypatch.setattr(return_calls, "_FIRST_DOUBT", 60)
    monkeypatch.setattr("delayq._engine.scheduler._GRACE", 60)
    async with delayq.connect(own_server.url) as client:
        queue: Orders = client.delayed_queue("orders")
        await queue.drain()
        calls = queue._open.transfer.take_calls
        handed = TakeCall(calls.new_call())
        over = asyncio.Event()

        async def call() -> None:
            with calls.handing_out(handed):
                await over.wait()
                if not answered:
                    raise delayq.OutcomeUnknown("the connection broke")

        calling = asyncio.create_task(call())
        await asyncio.sleep(0)
        # Meanwhile the call is given back by its name.
        await queue.aclose()
        fence = queue._open.keys.fence(handed.name)
        assert await raw.exists(fence)
        over.set()
        await asyncio.wait({calling})
        assert isinstance(calling.exception(), delayq.OutcomeUnknown) == (not answered)
        if answered:
            await until(lambda: raw.exists(fence), equals=0)
        else:
            # Calls that were made before have arrived.
            await client.server_time()
            assert await raw.exists(fence)


async def test_many_messages_go_back_in_short_scripts(
    own_server: PrivateServer, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await raw.rpush("orders", *(str(number).ljust(5_000) for number in range(500)), "{")
    sent: list[ReturnCall] = []
    send_one = return_calls.send_one

    def watched(client: Any, connection: Any, pool: Any, call: ReturnCall) -> Any:
        sent.append(call)
        return send_one(client, connection, pool, call)

    monkeypatch.setattr(return_calls, "send_one", watched)
    async with delayq.connect(own_server.url) as client:
        with pytest.raises(delayq.DecodeError):
            await client.delayed_queue("orders").drain()
        await until(lambda: raw.llen("orders"), equals=500)
    assert await numbers(raw, "orders") == list(range(500))
    assert await raw.lrange(DelayedKeys.of("orders").quarantine, 0, -1) == [b"{"]
    assert max(len(call.request.args) for call in sent) <= 100 + 3
    assert max(sum(len(str(arg)) for arg in call.request.args) for call in sent) < 300_000


@pytest.mark.parametrize("payload", [100_000, in_gate(400_000)])
async def test_large_pages_cross_a_slow_link(own_server: PrivateServer, payload: int) -> None:
    async with delayq.connect(own_server.url) as near:
        queue: DelayedQueue[str] = near.delayed_queue("orders")
        await queue.offer_many([("x" * payload + str(number), 3600) for number in range(60)])
        async with Links(own_server, mbit=200) as links, delayq.connect(links.url) as far:
            pending = far.delayed_queue("orders").pending
            assert not await pending.contains("y")
            assert await pending.remove("x" * payload + "30")
            assert await pending.size() == 59


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
    deliver = ClaimSource.deliver
    written: list[ReturnCall] = []
    ending: list[Any] = []

    def deliver_and_close(self: ClaimSource[Any], items: Any, **found: Any) -> None:
        deliver(self, items := list(items), **found)
        if items and not ending:
            ending.append(scheduler.close(scheduler.parts)())

    send = ShutdownCalls.send

    def note(self: ShutdownCalls, name: str, calls: Iterable[ReturnCall]) -> None:
        written.extend(calls := list(calls))
        send(self, name, calls)

    monkeypatch.setattr(ClaimSource, "deliver", deliver_and_close)
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
        (warning,) = [message for message in messages if "given back" in message]
        assert warning.startswith(
            f"queue 'orders': {7 - ready} messages were taken and may not have been given back: "
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
