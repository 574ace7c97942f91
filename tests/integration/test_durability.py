"""An offer returns once it is as durable as requested; if that cannot be achieved, it says so."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._engine.durability import parse
from delayq._redis.client import RedisClient
from delayq._redis.durability import Durability
from delayq.admin.doctor import diagnose
from delayq.errors import OutcomeUnknown
from tests.support.clusters import admin, wait_for
from tests.support.servers import WAIT_FOR_DISK, Kind, PrivateServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractContextManager

    from delayq import Client

    Breaking = Callable[[], AbstractContextManager[None]]
    Orders = delayq.DelayedQueue[int]
    Jobs = delayq.ReliableQueue[int]

TIMEOUT = "redisson_delay_queue_timeout:{orders}"
Pair = tuple[PrivateServer, PrivateServer]


async def test_an_unknown_durability_is_refused(client: Client) -> None:
    assert parse("memory") is None
    disk, replicas = parse("fsync"), parse("replicas:2")
    assert (disk, replicas) == (Durability(0), Durability(2))
    assert Durability(0).command[0] == "WAITAOF"
    assert Durability(2).command[:2] == ("WAIT", 2)
    bad: Any
    words = ("", "disk", "replicas", "replicas:0", "replicas:-1", "replicas:x", "replicas:1 ")
    for bad in (*words, None, 1):
        with pytest.raises(delayq.BadInput, match="durability must be"):
            parse(bad)
    for open_queue in (client.reliable_queue, client.delayed_queue):
        with pytest.raises(delayq.BadInput):
            open_queue("other", durability="disk")


def test_a_durability_holds_with_enough_replicas_and_fails_with_fewer_or_on_an_error() -> None:
    assert [Durability(2).failure(2), Durability(2).failure(3)] == ["", ""]
    assert Durability(0).failure([1, 0]) == ""
    assert "1 of 2" in Durability(2).failure(1)
    assert "not on disk" in Durability(0).failure([0, 0])
    assert "lost" in Durability(2).failure(ConnectionError("lost"))


@pytest.fixture(scope="module")
def _pair(server_kind: Kind) -> Iterator[Pair]:
    options = ("--repl-diskless-sync-delay", "0")
    with (
        PrivateServer(server_kind, tcp=True, options=options) as master,
        PrivateServer(server_kind, tcp=True, options=options) as replica,
    ):
        replica.call("REPLICAOF", "127.0.0.1", str(master.port))
        is_up = lambda: b"master_link_status:up" in replica.call("INFO", "replication")
        wait_for(is_up, "the replica's link")
        # A replica acknowledges once a second, and whenever it is asked to.
        wait_for(lambda: master.call("WAIT", "1", "100") == b":1", "the replica's word")
        yield master, replica


@pytest.fixture
def pair(_pair: Pair) -> Pair:
    """Provide a master without data, and its replica."""
    _pair[0].flush()
    return _pair


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[Client]:
    async with delayq.connect(pair[0].url) as client:
        yield client


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    """Return a block in which promises break soon. Outside it, they have time to be kept."""

    def set_within(seconds: float) -> None:
        monkeypatch.setattr("delayq._redis.durability.WITHIN_MS", int(seconds * 1000))

    @contextmanager
    def soon() -> Iterator[None]:
        set_within(0.3)
        yield
        set_within(20)

    monkeypatch.setattr("delayq._redis.client.BLOCKS_FOR", 20)
    set_within(20)
    return soon


@pytest.mark.every_server
@pytest.mark.usefixtures("breaking")
async def test_a_durable_offer_returns_once_replicas_have_it(client: Client, pair: Pair) -> None:
    jobs: Jobs = client.reliable_queue("jobs", durability="replicas:1")
    orders: Orders = client.delayed_queue("orders", durability="replicas:1")
    with admin(pair[1]) as replica:

        def has(count: int) -> bool:
            stored = replica.hlen("delayq:{jobs}:bodies"), replica.zcard(TIMEOUT)
            return bool(stored == (count, count))

        for count in range(1, 6):
            await asyncio.gather(jobs.offer(count), orders.offer(count, delay=3600))
            assert has(count)
        await jobs.offer_many([Offer(n) for n in range(500)])
        await orders.offer_many([(n, 3600) for n in range(500)])
        assert has(505)
    (finding,) = [each async for each in diagnose(client, []) if each.check == "durability"]
    assert '"memory", "replicas:1"' in finding.text


@pytest.mark.every_server
async def test_without_enough_replicas_the_message_stays(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.durability.WITHIN_MS", 300)
    jobs: Jobs = client.reliable_queue("jobs", durability="replicas:2")
    # The only one acknowledges in time, unless the machine pauses.
    with pytest.raises(delayq.NotDurable, match=r"[01] of 2 replicas") as caught:
        await jobs.offer(1, id="mine")
    assert caught.value.stored == ("mine",)
    # Offering the message again is safe, and waits for the replicas again.
    with pytest.raises(delayq.NotDurable):
        await jobs.offer(1, id="mine", on_duplicate="ignore")
    with pytest.raises(delayq.NotDurable) as caught:
        await jobs.offer_many([Offer(2, id="two"), Offer(3, id="three")])
    assert caught.value.stored == ("two", "three")
    with pytest.raises(delayq.DuplicateMessage):
        await jobs.offer(1, id="mine")
    assert (await jobs.stats()).ready == 3

    orders: Orders = client.delayed_queue("orders", durability="replicas:2")
    with pytest.raises(delayq.NotDurable) as caught:
        await orders.offer(1, delay=3600)
    (receipt,) = caught.value.stored
    assert await receipt.cancel()
    with pytest.raises(delayq.NotDurable, match="2 of 2 messages") as caught:
        await orders.offer_many([(1, 3600), (2, 3600)])
    assert [await receipt.cancel() for receipt in caught.value.stored] == [True, True]


async def test_a_hanging_replica_is_not_counted(jobs: Jobs, pair: Pair, breaking: Breaking) -> None:
    await jobs.offer(0, durability="replicas:1")
    with pair[1].paused():
        with breaking(), pytest.raises(delayq.NotDurable, match="0 of 1"):
            await jobs.offer(1, durability="replicas:1")
        # On the same queue, a caller that asked for no durability does not wait.
        await asyncio.wait_for(jobs.offer(2), 20)
    await jobs.offer(3, durability="replicas:1")


async def test_a_repetition_waits_for_what_the_first_try_wrote(
    client: Client, pair: Pair, breaking: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry writes nothing, but its message's durability was promised."""
    jobs: Jobs = client.reliable_queue("jobs", durability="replicas:1")
    await jobs.offer(0)
    attempt, lost = RedisClient._attempt, 0

    async def losing(server: RedisClient, *args: Any, **options: Any) -> Any:
        nonlocal lost
        reply = await attempt(server, *args, **options)
        if lost < 1:
            lost += 1
            # As after a broken connection: on a new one, nothing has been written yet that could be
            # waited for.
            server.topology.pool_of(None).renew()
            raise OutcomeUnknown("planned")
        return reply

    send_now = RedisClient.send_now
    monkeypatch.setattr(RedisClient, "send_now", lambda *_args, **_options: None)
    monkeypatch.setattr(RedisClient, "_attempt", losing)
    with pair[1].paused(), breaking(), pytest.raises(delayq.NotDurable, match="0 of 1"):
        await jobs.offer(1)
    assert lost == 1
    monkeypatch.setattr(RedisClient, "send_now", send_now)
    assert (await jobs.stats()).ready == 2


@pytest.mark.every_server
@pytest.mark.usefixtures("breaking")
async def test_an_offer_durable_on_disk_survives_the_server(server_kind: Kind) -> None:
    if server_kind.name not in WAIT_FOR_DISK:
        pytest.skip(f"{server_kind.name} cannot wait for its disk")
    with PrivateServer(server_kind, appendonly="everysec") as server:
        async with delayq.connect(server.url) as client:
            jobs: Jobs = client.reliable_queue("jobs", durability="fsync")
            orders: Orders = client.delayed_queue("orders")
            offers = [jobs.offer(n) for n in range(300)]
            await asyncio.gather(*offers, orders.offer(1, durability="fsync"))
            server.restart()
            assert (await jobs.stats()).ready == 300
            assert await orders.take() == 1


@pytest.mark.every_server
async def test_an_unsupported_durability_writes_nothing(client: Client, jobs: Jobs) -> None:
    """Redis 7.0 lacks the command, and the newer servers here do not write to their disk."""
    orders: Orders = client.delayed_queue("orders")
    for offer in (jobs.offer, orders.offer):
        with pytest.raises(delayq.ServerRefused, match=r"(?i)waitaof"):
            await offer(1, durability="fsync")
    assert (await jobs.stats()).ready == 0
    assert await orders.ready.size() == await orders.pending.size() == 0
