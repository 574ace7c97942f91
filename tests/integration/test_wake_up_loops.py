"""The loops that keep a client awake survive exceptions, nonsense, and missing rights."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis
from redis.credentials import CredentialProvider

import delayq
from tests.support.links import Links
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import DelayedQueue
    from tests.support.servers import PrivateServer

CHANNEL = "redisson_delay_queue_channel:{{{}}}"
TURNS = "delayq_turns:{{{}}}"
REFUSED = "no permission to subscribe"


@pytest.fixture
async def raw(own_server: PrivateServer) -> AsyncIterator[Any]:
    async with Redis.from_url(own_server.url, socket_timeout=60) as raw:
        yield raw


async def hears(queue: DelayedQueue[Any], server: PrivateServer) -> None:
    """Take a message that only a notification announces, and whose producer is gone."""
    taking = asyncio.create_task(queue.take())
    await until(lambda: queue._open.transfer.has_patient_callers)
    async with delayq.connect(server.url) as other:
        await other.delayed_queue(queue.name).offer("heard", 0.3)
    assert await asyncio.wait_for(taking, 60) == "heard", queue.name


async def subscribed(raw: Any, *channels: str) -> None:
    counts = lambda: raw.pubsub_numsub(*channels)
    await until(counts, equals=[(channel.encode(), 1) for channel in channels])


async def limited(raw: Any, server: PrivateServer, *rules: str) -> str:
    """Return the address for a user with these rules."""
    await raw.execute_command("ACL", "SETUSER", "app", "on", "nopass", "~*", *rules)
    return server.unix_url.replace("unix://", "unix://app:any@")


class Tokens(CredentialProvider):
    """Provides a password, unless its service is away."""

    away = False
    asked = 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        if self.away:
            raise RuntimeError("the token service is away")
        return "app", "secret"


async def test_a_provider_of_passwords_that_raises_ends_nothing_and_callers_see_an_error_of_ours(
    own_server: PrivateServer, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.3)
    await raw.acl_setuser(
        "app", enabled=True, passwords=["+secret"], keys=["*"], channels=["*"], commands=["+@all"]
    )
    tokens = Tokens()
    async with (
        Links(own_server, tcp=True) as links,
        delayq.connect(
            Redis(port=int(links.url.split(":")[2].split("/")[0]), credential_provider=tokens),
            resync_interval=0.5,
        ) as client,
    ):
        queue: DelayedQueue[str] = client.delayed_queue("orders")
        await hears(queue, own_server)
        tokens.away, asked, connections = True, tokens.asked, links.count

        async def offer_while_connections_die() -> None:
            # A connection that was about to be opened survives the first time.
            for _ in range(5):
                await raw.client_kill_filter(user="app")
                # Each dead connection may cost one offer.
                for _ in range(connections):
                    with suppress(delayq.OutcomeUnknown):
                        await queue.offer("x", 60)
                await queue.offer("x", 60)

        with pytest.raises(
            delayq.ServerUnavailable, match="provider failed with RuntimeError"
        ) as caught:
            await offer_while_connections_die()
        assert isinstance(caught.value.__cause__, RuntimeError)
        # The subscription and the queue's calls have tried too.
        await until(lambda: tokens.asked > asked + 5)
        tokens.away = False
        await subscribed(raw, CHANNEL.format("orders"))
        await hears(queue, own_server)


NONSENSE = (
    (CHANNEL, b"9" * 400),
    (CHANNEL, b"-" + b"9" * 400),
    (CHANNEL, b"\xff\xfe"),
    (CHANNEL, b""),
    (TURNS, b"9" * 400 + b" 5 abc 1"),
    (TURNS, b"5 " + b"9" * 400 + b" abc 1"),
    (TURNS, b"5 9000000000000000000 abc 1"),
    (TURNS, b"5 5 abc." + b"9" * 400 + b" 1"),
    (TURNS, b"5 5 \xff\xff 1"),
)


async def test_nonsense_on_a_channel_silences_nothing(own_server: PrivateServer, raw: Any) -> None:
    async with AsyncExitStack() as opened:
        queues: list[DelayedQueue[str]] = []
        for number, (channel, content) in enumerate(NONSENSE):
            client = await opened.enter_async_context(
                delayq.connect(own_server.url, resync_interval=3600)
            )
            name, innocent = f"orders {number}", f"innocent {number}"
            queues += (client.delayed_queue(name), client.delayed_queue(innocent))
            await subscribed(raw, channel.format(name), TURNS.format(innocent))
            await raw.publish(channel.format(name), content)
        await asyncio.gather(*(hears(queue, own_server) for queue in queues))


async def test_a_forbidden_channel_silences_no_other_and_is_named_with_the_cure(
    own_server: PrivateServer,
    raw: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq._engine.subscription_plan._RETRY_FORBIDDEN_AFTER", 0.3)
    allowed = [f"queue{n}" for n in range(300)]
    channels = [f"&{kind.format(name)}" for name in allowed for kind in (CHANNEL, TURNS)]
    address = await limited(raw, own_server, "+@all", "resetchannels", *channels)
    async with delayq.connect(address, resync_interval=3600) as client:
        queues: list[DelayedQueue[str]] = [client.delayed_queue(name) for name in allowed]
        await subscribed(raw, TURNS.format("queue299"))
        accepted = (await raw.info("stats"))["total_connections_received"]
        forbidden: DelayedQueue[str] = client.delayed_queue("forbidden")
        more: DelayedQueue[str] = client.delayed_queue("forbidden too")
        await until(lambda: "&redisson_delay_queue_channel:{forbidden too}" in caplog.text)
        (named,) = [record.message for record in caplog.records if REFUSED in record.message]
        for kind in (CHANNEL, TURNS):
            for queue in (forbidden, more):
                assert f"&{kind.format(queue.name)}" in named
        await asyncio.gather(
            *(hears(queue, own_server) for queue in (queues[0], queues[150], queues[299]))
        )
        # The refused channels are tried again, and none of this needed a new connection.
        assert (await raw.info("stats"))["total_connections_received"] - accepted < 20
        await raw.execute_command("ACL", "SETUSER", "app", "allchannels")
        await subscribed(raw, CHANNEL.format("forbidden"), TURNS.format("forbidden too"))
        await hears(forbidden, own_server)
        assert caplog.text.count(REFUSED) == 1


async def test_a_user_who_may_not_subscribe_at_all_is_told_once_and_served_by_the_recheck(
    own_server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    address = await limited(raw, own_server, "allchannels", "+@all", "-subscribe")
    async with delayq.connect(address, resync_interval=0.2) as client:
        queue: DelayedQueue[str] = client.delayed_queue("orders")
        taking = asyncio.create_task(queue.take())
        await until(lambda: REFUSED in caplog.text)
        async with delayq.connect(own_server.url) as other:
            await other.delayed_queue("orders").offer("found", 0.05)
        assert await asyncio.wait_for(taking, 20) == "found"
        assert caplog.text.count(REFUSED) == 1


async def test_a_loop_that_raises_unexpectedly_is_logged_and_goes_on(
    own_server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Only notifications wake this client.
    async with delayq.connect(own_server.url, resync_interval=3600) as client:
        queue: DelayedQueue[str] = client.delayed_queue("orders")
        await subscribed(raw, CHANNEL.format("orders"), TURNS.format("orders"))
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(queue._open.transfer.wakeups, "on_due", lambda _moment: 1 / 0)
            await raw.publish(CHANNEL.format("orders"), "5")
            await until(lambda: "ZeroDivisionError" in caplog.text)
        await hears(queue, own_server)
        caplog.clear()
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(queue._open.transfer.wakeups, "_make_call", lambda: 1 / 0)
            taking = asyncio.create_task(queue.take())
            await queue.offer("x")
            await until(lambda: "ZeroDivisionError" in caplog.text)
            # By then, everything else that would wake it has come and gone.
            await asyncio.sleep(0.5)
        assert await asyncio.wait_for(taking, 60) == "x"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_a_queue_with_eager_tasks_survives_a_restart(own_server: PrivateServer) -> None:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    try:
        async with delayq.connect(own_server.url, resync_interval=0.2) as client:
            queue: DelayedQueue[str] = client.delayed_queue("orders")
            taking = asyncio.create_task(queue.take())
            await asyncio.sleep(0.2)
            own_server.stop()
            await asyncio.sleep(1)
            own_server.start()
            async with delayq.connect(own_server.url) as other:
                await other.delayed_queue("orders").offer("x", 0.1)
            assert await asyncio.wait_for(taking, 20) == "x"
    finally:
        loop.set_task_factory(None)


async def test_a_client_is_used_and_closed_in_its_own_event_loop(own_server: PrivateServer) -> None:
    client = await delayq.connect(own_server.url).__aenter__()
    queue: DelayedQueue[int] = client.delayed_queue("orders")

    async def use_elsewhere() -> None:
        for use in (queue.take, queue.poll, queue.drain, lambda: queue.offer(2), client.aclose):
            with pytest.raises(delayq.ConfigurationError, match="another event loop"):
                await use()

    await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(use_elsewhere())), 60)
    await queue.offer(1)
    assert await queue.drain() == [1]
    await client.aclose()
    await client.aclose()


async def test_draining_ends_though_producers_are_faster(queue: DelayedQueue[int]) -> None:
    await queue.offer_many([(n, 0) for n in range(250)])
    get, offered = queue._dispatcher.take, 250

    async def slower(max_items: int, timeout: float | None, policy: Any = None) -> Any:
        nonlocal offered
        await queue.offer_many([(n, 0) for n in range(offered, offered + 200)])
        offered += 200
        return await get(max_items, timeout, policy)

    queue._dispatcher.take = slower  # type: ignore[method-assign]
    values = await asyncio.wait_for(queue.drain(), 20)
    assert values[:250] == list(range(250))
    assert len(values) < 1000
    assert await queue.drain(0) == []


async def test_a_delay_that_is_too_long_fails_no_other_offer(queue: DelayedQueue[int]) -> None:
    offers = [queue.offer(n, 60) for n in range(10)]
    outcomes = await asyncio.gather(
        *offers[:5], queue.offer(-1, 2**53 / 1000 - 1), *offers[5:], return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes].count(delayq.BadDelay) == 1
    assert await queue.pending.size() == 10
