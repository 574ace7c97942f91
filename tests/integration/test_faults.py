"""Every network call fails on purpose once, and the tests check what it leaves on the server."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._redis import return_calls
from delayq._redis.client import RedisClient
from delayq._redis.return_calls import ReturnCall
from delayq._redis.rights import Rights
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack
from delayq._redisson.store import GIVE_BACK, OFFER, POLL_PENDING, SET_ASIDE, TRANSFER
from delayq._redisson.take_calls import TakeCall
from delayq.errors import OutcomeUnknown, ServerRefused, ServerUnavailable
from tests.support.foreign import store
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq import Client
    from delayq._redis.connection import Connection
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.scripts import Script
    from tests.support.servers import PrivateServer

    Orders = delayq.DelayedQueue[int]


QUARANTINE = DelayedKeys.of("orders").quarantine


class Faults:
    """Makes calls fail, either before they are sent or after they have been carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.plan: Callable[[str, int], str | None] = lambda _name, _n: None
        attempt, send_now, send_one = (
            RedisClient._attempt,
            RedisClient.send_now,
            return_calls.send_one,
        )

        def faulty_back(
            client: RedisClient, connection: Connection, pool: ConnectionPool, call: ReturnCall
        ) -> asyncio.Future[None]:
            name = call.request.script.name
            self.calls.append(name)
            fault = self.plan(name, self.calls.count(name))
            if fault is None:
                return send_one(client, connection, pool, call)
            if fault == "lost":
                # The call is carried out, but its reply never arrives.
                send_one(client, connection, pool, ReturnCall(call.request))
            call.tries += 1
            call.record(
                OutcomeUnknown("planned") if fault == "lost" else ServerUnavailable("planned")
            )
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

        def faulty_soon(
            server: RedisClient,
            script: Script,
            keys: Any,
            args: Any,
            on_reply: Callable[[Any], object],
            beside: Connection | None = None,
        ) -> Connection | None:
            self.calls.append(script.name)
            fault = self.plan(script.name, self.calls.count(script.name))
            if fault == "unsent":
                asyncio.get_running_loop().call_soon(on_reply, ServerUnavailable("planned"))
                pool = server.topology.pool_of(None)
                return beside or next(iter((*pool._free, *pool._in_use)))
            # If the call was not carried out, its reply is not lost: the server did not know the
            # script.
            lost: Callable[[Any], object] = lambda reply: on_reply(
                reply if isinstance(reply, ServerUnavailable) else OutcomeUnknown("planned")
            )
            wire = send_now(
                server, script, keys, args, lost if fault == "lost" else on_reply, beside
            )
            if wire is None:
                # The call is made another way, which counts it again.
                self.calls.pop()
            return wire

        async def faulty(server: RedisClient, key: str | None, call: Any) -> Any:
            name = call.script.name if call.script else call.command[0]
            self.calls.append(name)
            fault = self.plan(name, self.calls.count(name))
            if fault == "unsent":
                raise ServerUnavailable("planned")
            if fault == "full":
                raise ServerRefused("OOM command not allowed when used memory > 'maxmemory'.")
            # A lost reply is never confirmed.
            reply = await attempt(
                server, key, call._replace(confirm=None) if fault == "lost" else call
            )
            if fault == "lost":
                raise OutcomeUnknown("planned")
            return reply

        # Give each script one form only, and one name on the server.
        monkeypatch.setattr(Rights, "form", lambda _rights, _wire, script, _key: script)
        monkeypatch.setattr(RedisClient, "_attempt", faulty)
        monkeypatch.setattr(RedisClient, "send_now", faulty_soon)
        monkeypatch.setattr(return_calls, "send_one", faulty_back)

    def fail(self, script: Script, fault: str, *, after: int = 0, times: float = math.inf) -> None:
        """Let the next calls of a script fail, after some that do not, and ``times`` of them."""
        first = self.calls.count(script.name) + after + 1
        self.plan = lambda name, n: (
            fault if name == script.name and first <= n < first + times else None
        )


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.mark.parametrize("fault", ["unsent", "lost"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_transfer_that_fails_loses_and_doubles_nothing(
    queue: Orders, faults: Faults, fault: str, times: int
) -> None:
    await queue.offer_many([(i, 0) for i in range(20)])
    faults.fail(TRANSFER, fault, times=times)
    assert [await asyncio.wait_for(queue.take(), 60) for _ in range(20)] == list(range(20))
    await asyncio.sleep(0.02)
    assert await queue.poll() is None


async def test_a_late_call_hands_nothing_out(client: Client, queue: Orders, raw: Any) -> None:
    ours = queue._open.store
    give_up = queue._open.transfer.take_calls.return_by_name(TakeCall("late")).request
    await raw.rpush("orders", 1, 2)
    assert await ours.send(give_up) == 0
    reply = await ours.transfer(
        "late", take=5, lease_us=60_000_000, lease_each=False, signature="", confirm=lambda: None
    )
    assert not reply.payloads
    assert await queue.drain() == [1, 2]
    assert await ours.send(give_up) == 0


@pytest.mark.parametrize("fault", ["unsent", "lost"])
async def test_giving_back_is_repeated(queue: Orders, faults: Faults, fault: str, raw: Any) -> None:
    await queue.offer_many([(i, 0) for i in range(10)])
    faults.fail(GIVE_BACK, fault, times=2)
    await take_three(queue)
    # The marker is gone too, or expires by itself: a try whose reply was lost may have been
    # overtaken by the next one.
    await until(lambda: lasting(raw), equals=[b"orders"])
    await until(lambda: faults.calls.count(GIVE_BACK.name) >= 3)
    if fault == "unsent":
        await until(raw.dbsize, equals=1)
    assert await raw.lrange("orders", 0, -1) == [b"%d" % value for value in range(3, 10)]


async def take_three(queue: Orders) -> None:
    """Leave a loop at its third message, when others have been fetched ahead."""
    async for value in queue:
        if value == 2:
            return


async def lasting(raw: Any) -> list[bytes]:
    """Return the keys that do not expire by themselves."""
    return [name for name in await raw.keys() if await raw.pttl(name) == -1]


async def test_messages_that_stay_with_the_client_go_to_the_next_caller(
    queue: Orders, faults: Faults
) -> None:
    await queue.offer_many([(i, 0) for i in range(10)])
    faults.fail(GIVE_BACK, "unsent")
    await take_three(queue)
    assert sorted([await asyncio.wait_for(queue.take(), 60) for _ in range(7)]) == [*range(3, 10)]


async def test_closing_returns_what_was_lost(server: PrivateServer, faults: Faults) -> None:
    async with delayq.connect(server.url) as client:
        queue: Orders = client.delayed_queue("orders")
        await queue.offer(1, 0.05)
        faults.fail(TRANSFER, "lost")
        with suppress(delayq.OutcomeUnknown):
            while True:
                await queue.poll()
    faults.fail(TRANSFER, "lost", times=0)
    async with delayq.connect(server.url) as client:
        assert await asyncio.wait_for(client.delayed_queue("orders").take(), 60) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [("unsent", "could not be given back"), ("lost", "may not have been given back")],
)
async def test_closing_tells_what_it_did_not_give_back_from_what_may_not_be_back(
    server: PrivateServer, faults: Faults, caplog: pytest.LogCaptureFixture, fault: str, words: str
) -> None:
    async with delayq.connect(server.url) as client:
        queue: Orders = client.delayed_queue("orders")
        await queue.offer_many([(i, 0) for i in range(20)])
        faults.fail(GIVE_BACK, fault)
        # Batches of 1 and 10.
        await take_three(queue)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"queue 'orders': 8 messages were taken and {words}: planned"]
    async with delayq.connect(server.url) as client:
        assert await client.delayed_queue("orders").ready.size() == (9 if fault == "unsent" else 17)


async def test_an_offer_that_fails_is_stored_once(queue: Orders, faults: Faults) -> None:
    faults.fail(OFFER, "unsent", times=3)
    await queue.offer(1, 60)
    tries = faults.calls.count(OFFER.name)
    faults.fail(OFFER, "lost", times=1)
    with pytest.raises(delayq.OutcomeUnknown):
        await queue.offer(2, 60)
    assert faults.calls.count(OFFER.name) == tries + 1
    assert await queue.pending.read_all() == [1, 2]


async def test_offer_many_tells_what_is_stored(queue: Orders, faults: Faults) -> None:
    # From now on the server knows the script.
    for _ in range(2):
        await (await queue.offer(0, 60)).cancel()
    faults.fail(OFFER, "lost", after=1, times=1)
    with pytest.raises(delayq.OutcomeUnknown, match="400 of 600 messages are stored") as caught:
        await queue.offer_many([(i, 60) for i in range(600)])
    assert len(caught.value.stored) == 400
    assert all([await receipt.cancel() for receipt in caught.value.stored])
    assert await queue.pending.read_all() == list(range(200, 400))


@pytest.mark.usefixtures("_impatient")
async def test_even_calls_with_nothing_to_do_raise_while_the_server_is_away(
    queue: Orders, faults: Faults
) -> None:
    faults.plan = lambda name, _: "unsent" if name in (OFFER.name, TRANSFER.name) else None
    many = [(i, 60) for i in range(600)]
    for call in (lambda: queue.offer_many(many), lambda: queue.offer(1), queue.poll, queue.drain):
        with pytest.raises(delayq.ServerUnavailable):
            await call()
    assert await queue.poll(0.05) is None


async def test_a_poll_that_does_not_wait_gives_up_on_a_silent_server(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.dispatcher.NOWAIT_TIMEOUT", 0.1)
    async with delayq.connect(own_server.url) as client:
        queue: Orders = client.delayed_queue("orders")
        await queue.offer(1)
        with own_server.paused(), pytest.raises(delayq.ServerUnavailable, match=r"within 0\.1 s"):
            await queue.poll()
        assert await queue.take() == 1


async def test_a_failed_drain_puts_all_back(queue: Orders, faults: Faults, raw: Any) -> None:
    await raw.rpush("orders", *range(300))
    faults.fail(TRANSFER, "unsent", after=1, times=1)
    with pytest.raises(delayq.ServerUnavailable):
        await queue.drain()
    await until(queue.ready.size, equals=300)
    assert await queue.drain() == list(range(300))


@pytest.mark.parametrize("fault", ["unsent", "lost"])
async def test_an_unreadable_payload_reaches_quarantine_once(
    queue: Orders, faults: Faults, fault: str, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await raw.rpush("orders", "{", "1")
    faults.fail(SET_ASIDE, fault, times=2)
    async for value in queue.deliveries():
        async with value:
            break
    await until(lambda: lasting(raw), equals=[QUARANTINE.encode()])
    await until(lambda: faults.calls.count(SET_ASIDE.name) >= 3)
    assert await raw.lrange(QUARANTINE, 0, -1) == [b"{"]
    assert "JsonCodec cannot decode" in caplog.text


async def test_a_failed_poll_quarantines_nothing(queue: Orders, faults: Faults, raw: Any) -> None:
    await store(raw, DelayedKeys.of("orders"), {pack(b"ABCDEFGH", b"{", 8): 1e15})
    await queue.offer_many([(n, 60) for n in range(150)])
    faults.fail(POLL_PENDING, "lost", after=1, times=1)
    with pytest.raises(delayq.OutcomeUnknown):
        await queue.pending.poll_many(150)
    await until(lambda: not queue._open.transfer.take_calls._lost_calls)
    assert await queue.pending.size() == 151
    assert await raw.keys("delayq_quarantine*") == []
    assert await queue.pending.poll_many(150) == list(range(150))
    await until(lambda: raw.exists(QUARANTINE))
    assert await raw.lrange(QUARANTINE, 0, -1) == [b"{"]


async def test_a_foreign_key_fails_all_callers(client: Client, queue: Orders, raw: Any) -> None:
    await raw.set("orders", "mine")
    results = await asyncio.gather(
        *(queue.take() for _ in range(3)), queue.poll(), return_exceptions=True
    )
    assert all(
        isinstance(result, delayq.ServerRefused) and "wrong type" in str(result)
        for result in results
    )
    await raw.delete("orders")
    await queue.offer(1)
    assert await asyncio.wait_for(queue.take(), 60) == 1


async def test_a_foreign_key_hides_no_other_queue(server: PrivateServer, raw: Any) -> None:
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        await raw.set("redisson_delay_queue_timeout:{bad}", "mine")
        await raw.hset("bad", "mine", "1")
        client.delayed_queue("bad")
        queue: Orders = client.delayed_queue("orders")
        taker = asyncio.create_task(queue.take())
        await until(lambda: client.statistics().waiting)
        await raw.zadd(DelayedKeys.of("orders").timeout, {pack(b"ABCDEFGH", b"1", 8): 1})
        assert await asyncio.wait_for(taker, 60) == 1


@pytest.mark.usefixtures("_impatient")
async def test_while_the_server_is_away_calls_wait_and_then_say_so(
    own_server: PrivateServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with delayq.connect(own_server.url, resync_interval=0.2) as client:
        queue: Orders = client.delayed_queue("orders")
        taker = asyncio.create_task(queue.take())
        await until(lambda: client.statistics().waiting)
        own_server.kill()
        # From now on the event loop knows; before this, an offer could not tell whether it had been
        # sent.
        await until(lambda: "notifications are interrupted" in caplog.text)
        with pytest.raises(delayq.ServerUnavailable) as caught:
            await queue.offer(1)
        assert caught.value.__cause__ is not None
        with pytest.raises(delayq.ServerUnavailable):
            await queue.pending.size()
        await until(lambda: "re-checking 1 queues failed" in caplog.text)
        await asyncio.to_thread(own_server.start)
        # The next call succeeds, however long it takes to connect.
        monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 60)
        monkeypatch.setattr(queue._open.offers.plain._plan, "expires_after", 60)
        await queue.offer(2)
        assert await asyncio.wait_for(taker, 60) == 2
