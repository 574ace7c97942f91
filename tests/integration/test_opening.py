"""How a client finds its server: over long round trips, past servers that do not answer, and when
Sentinels replace it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis, Sentinel

import delayq
from delayq import Offer
from delayq._reliable.keys import ReliableKeys
from tests.conftest import FOUND
from tests.support.clusters import SentinelServer, Watched, admin, is_replicated, wait_for
from tests.support.depth import nightly
from tests.support.links import Links
from tests.support.reliable import is_empty
from tests.support.servers import Kind, PrivateServer, free_port
from tests.support.tasks import end
from tests.support.tls import Authority
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


KIND = next(iter(FOUND.values()))
ROUND_TRIP = 250
"""Milliseconds to a server that is far away."""


@pytest.fixture
def some_kind(server_kind: Kind) -> Iterator[PrivateServer]:
    """Start a private server that listens on a port."""
    with PrivateServer(
        server_kind, tcp=True, options=("--repl-diskless-sync-delay", "0")
    ) as server:
        yield server


async def use(address: Any) -> None:
    """Open a client, and offer a message."""
    async with delayq.connect(address) as client:
        await client.reliable_queue("jobs").offer(1)


@pytest.fixture
async def opened() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


@pytest.mark.gate
@pytest.mark.every_server
@pytest.mark.usefixtures("_usual_limits")
async def test_a_distant_cluster_opens(opened: AsyncExitStack, cluster_kind: Kind) -> None:
    port = free_port()
    options: tuple[str, ...] = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    options += ("--cluster-port", str(free_port()), "--cluster-announce-port", str(port))
    server = opened.enter_context(PrivateServer(cluster_kind, tcp=True, options=options))
    await opened.enter_async_context(Links(server, tcp=port, round_trip=ROUND_TRIP))
    with admin(server) as redis:
        redis.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_for(
            lambda: re.search(r"cluster_state\W+ok", str(redis.execute_command("CLUSTER", "INFO"))),
            "the cluster",
        )
        redis.config_set("requirepass", "secret")
    await use(f"redis+cluster://:secret@127.0.0.1:{port}")


@pytest.mark.gate
@pytest.mark.usefixtures("_usual_limits")
async def test_a_server_behind_far_sentinels_opens(opened: AsyncExitStack) -> None:
    ports = free_port(), free_port()
    master = opened.enter_context(PrivateServer(KIND, tcp=True))
    master.call("CONFIG", "SET", "requirepass", "secret")
    sentinel = opened.enter_context(SentinelServer(KIND, ports[0], password="hidden"))
    await opened.enter_async_context(Links(master, tcp=ports[0], round_trip=ROUND_TRIP))
    await opened.enter_async_context(Links(sentinel, tcp=ports[1], round_trip=ROUND_TRIP))
    url = f"redis+sentinel://:secret@127.0.0.1:{ports[1]}/shop/2?sentinel_password=hidden"
    await use(url)


@pytest.mark.parametrize("stale", ["dead", "silent", "replica"])
@pytest.mark.usefixtures("_usual_limits")
async def test_a_sentinel_with_a_wrong_server_is_skipped(
    opened: AsyncExitStack, stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = opened.enter_context(PrivateServer(KIND, tcp=True))
    other = opened.enter_context(PrivateServer(KIND, tcp=True))
    port = other.port
    if stale == "silent":
        mute = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        opened.callback(mute.close)
        port = mute.sockets[0].getsockname()[1]
    elif stale == "replica":
        with admin(other) as redis:
            redis.execute_command("REPLICAOF", "127.0.0.1", 1)
    else:
        port = free_port()
    wrong = opened.enter_context(SentinelServer(KIND, port, 2))
    right = opened.enter_context(SentinelServer(KIND, master.port, 2))
    links = await opened.enter_async_context(Links(wrong, tcp=True))
    place = links.url.removeprefix("redis://").removesuffix("/0")
    # No slow answer makes the client doubt its server.
    monkeypatch.setattr("delayq._redis.connection.DOUBT_AFTER", 60)
    async with delayq.connect(f"redis+sentinel://{place},127.0.0.1:{right.port}/shop") as client:
        await client.server_time()
        assert links.accepted == 1
        # From now on, none makes it ask another Sentinel either.
        monkeypatch.setattr("delayq._redis.retry.ASK_NEXT_AFTER", 60)
        with admin(master) as redis:
            redis.execute_command("CLIENT", "KILL", "TYPE", "normal")
        await client.server_time()
        assert client.statistics().connections_opened == 2
        assert links.accepted == 1


async def test_a_wrong_password_for_the_sentinel_is_told_at_once(some_kind: PrivateServer) -> None:
    with SentinelServer(some_kind.kind, some_kind.port, password="right") as sentinel:
        for given in ("", "?sentinel_password=wrong"):
            with pytest.raises(delayq.ServerRefused, match="sentinel_password") as caught:
                await delayq.connect(
                    f"redis+sentinel://127.0.0.1:{sentinel.port}/shop{given}"
                ).__aenter__()
            assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


async def test_a_refusal_that_passes_spends_no_acknowledgement(
    some_kind: PrivateServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a certificate that is replaced, or users that are read from a file again."""
    caplog.set_level("INFO", "delayq")
    some_kind.call("ACL", "SETUSER", "me", "on", ">mine", "allkeys", "allchannels", "+@all")
    async with delayq.connect(some_kind.url.replace("redis://", "redis://me:mine@")) as client:
        queue = client.reliable_queue("jobs", lease=3600)
        await queue.offer_many([delayq.Offer(n) for n in range(2)])
        messages = await queue.claim(2, wait=10)
        some_kind.call("ACL", "SETUSER", "me", "off")
        some_kind.call("CLIENT", "KILL", "USER", "me")
        await until(lambda: "notifications are interrupted" in caplog.text)
        # Whatever is done meanwhile takes longer than calls are retried.
        monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.05)
        settling = [asyncio.create_task(messages[0].ack()), asyncio.create_task(messages[1].nack())]
        with pytest.raises(delayq.ServerUnavailable, match="rejected the credentials"):
            await queue.stats()
        some_kind.call("ACL", "SETUSER", "me", "on")
        await asyncio.wait_for(asyncio.gather(*settling), 60)
        await until(lambda: "connected again after" in caplog.text)
        stats = await queue.stats()
        assert (stats.leased, stats.delayed + stats.ready) == (0, 1)


async def test_a_call_that_tries_once_waits_for_a_connection_and_for_calls_before_it(
    some_kind: PrivateServer,
) -> None:
    async with delayq.connect(some_kind.url, retry_for=0) as client:
        jobs, orders = client.reliable_queue("jobs"), client.delayed_queue("orders")
        # More than one call takes.
        await jobs.offer_many([delayq.Offer("x" * 200_000)] * 3)
        await orders.offer_many([("x" * 200_000, 0)] * 3)
        connections = client.statistics().connections
        with admin(some_kind) as redis:
            redis.client_kill_filter(_type="normal", skipme=True)
        await until(lambda: client.statistics().connections < connections)
        await jobs.offer(1)


async def test_a_replica_serves_reads_and_refuses_the_first_write(some_kind: PrivateServer) -> None:
    with PrivateServer(some_kind.kind, tcp=True) as replica:
        replica.call("REPLICAOF", "127.0.0.1", str(some_kind.port))
        await use(some_kind.url)
        await until(lambda: replica.call("EXISTS", ReliableKeys.of("jobs").waiting[0]) == b":1")
        async with delayq.connect(replica.url) as client:
            assert (await client.reliable_queue("jobs").stats()).ready == 1
            with pytest.raises(delayq.ServerRefused, match=r"is a replica.*redis\+sentinel://"):
                await client.reliable_queue("jobs").offer(2)


async def test_a_server_that_is_full_may_have_room_later(
    some_kind: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with admin(some_kind) as redis:
        redis.config_set("maxclients", 1)
        redis.ping()
        with monkeypatch.context() as patch:
            # Time for another try, if the first one does not say so.
            patch.setattr("delayq._redis.client.RETRY_FOR", 1)
            with pytest.raises(delayq.ServerUnavailable, match="max number of clients"):
                await delayq.connect(some_kind.url).__aenter__()
        redis.config_set("maxclients", 100)
    await use(some_kind.url)


@pytest.mark.every_server
async def test_a_server_without_hello_is_greeted_as_of_old(server_kind: Kind) -> None:
    options = ("--rename-command", "HELLO", "")
    with PrivateServer(server_kind, tcp=True, options=options) as server:
        server.call("CONFIG", "SET", "requirepass", "secret")
        await use(server.url.replace("//", "//:secret@").replace("/0", "/2"))
        with pytest.raises(delayq.ServerRefused, match="check user and password"):
            await delayq.connect(server.url.replace("//", "//:wrong@")).__aenter__()
        with pytest.raises(delayq.ServerRefused, match="requires a password, and none was given"):
            await delayq.connect(server.url).__aenter__()


async def test_a_client_with_a_greeting_of_its_own_keeps_it(some_kind: PrivateServer) -> None:
    some_kind.call("CONFIG", "SET", "requirepass", "secret")

    async def greet(connection: Any) -> None:
        connection._parser.on_connect(connection)
        await connection.send_command("AUTH", "secret")
        assert await connection.read_response() == b"OK"

    theirs = Redis(host="127.0.0.1", port=some_kind.port or 0, redis_connect_func=greet)
    async with theirs:
        await use(theirs)


async def test_a_missing_client_certificate_is_reported_at_once(
    tls_kind: Kind, tmp_path: Path
) -> None:
    authority = Authority.new(tmp_path / "ours")
    port = free_port()
    options = [
        *authority.server_options("IP:127.0.0.1", port),
        "--tls-ca-cert-file",
        str(authority.certificate),
    ]
    options[options.index("--tls-auth-clients") + 1] = "yes"
    for protocols in ("TLSv1.2", "TLSv1.3"):
        with PrivateServer(tls_kind, options=(*options, "--tls-protocols", protocols)):
            url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.certificate}"
            # The server's alert may be lost when it resets the connection right after it.
            unsaid = (delayq.ServerRefused, delayq.ServerUnavailable)
            with pytest.raises(unsaid, match="client certificate, add ssl_certfile="):
                await delayq.connect(url).__aenter__()
            with pytest.raises(delayq.ServerRefused, match="certificates cannot be loaded"):
                await delayq.connect(
                    f"{url}&ssl_certfile={tmp_path}/none.crt&ssl_keyfile={tmp_path}/none.key"
                ).__aenter__()
            own = f"{authority.folder}/server"
            url += f"&ssl_certfile={own}.crt&ssl_keyfile={own}.key"
            await use(url)


class Loops:
    """Loops and calls that wait for messages, two on delayed queues and two on reliable queues."""

    def __init__(self, client: delayq.Client) -> None:
        self.client = client
        orders, others = map(client.delayed_queue, ("orders", "others"))
        jobs, more = map(client.reliable_queue, ("jobs", "more"))
        self.queues: list[Any] = [orders, others, jobs, more]
        waiting = (anext(aiter(orders)), others.take(), anext(aiter(jobs)), more.claim(wait=60))
        self.tasks = [asyncio.ensure_future(each) for each in waiting]

    async def offer(self, delay: float) -> None:
        for queue in self.queues:
            await queue.offer(1, delay)
        self.due_at = time.monotonic() + delay

    async def go_on(self) -> None:
        """Wait until messages are due, and calls have failed: nobody has been told."""
        asked = self.client.statistics().errors
        await until(
            lambda: time.monotonic() > self.due_at and self.client.statistics().errors > asked + 5,
            40,
        )
        assert not any(task.done() for task in self.tasks)

    async def end(self) -> None:
        order, other, job, (more,) = await asyncio.gather(*self.tasks)
        assert (order, other, job.value, more.value) == (1, 1, 1, 1)


@pytest.mark.gate
async def test_loops_wait_for_a_server_whose_disk_is_full(some_kind: PrivateServer) -> None:
    (some_kind.directory / "dump.rdb" / "in the way").mkdir(parents=True)
    async with delayq.connect(some_kind.url, resync_interval=0.5) as client:
        loops = Loops(client)
        await loops.offer(8)
        with admin(some_kind) as redis:
            redis.config_set("save", "3600 1000000")
            redis.execute_command("BGSAVE")
            wait_for(lambda: snapshot(redis) == "err", "the snapshot fails")
            await loops.go_on()
            (some_kind.directory / "dump.rdb" / "in the way").rmdir()
            (some_kind.directory / "dump.rdb").rmdir()
            redis.execute_command("BGSAVE")
            wait_for(lambda: snapshot(redis) == "ok", "the snapshot succeeds")
        await loops.end()


@pytest.mark.gate
async def test_loops_wait_for_a_server_that_is_busy_while_they_connect_again(
    some_kind: PrivateServer, opened: AsyncExitStack
) -> None:
    some_kind.call("CONFIG", "SET", "lua-time-limit", "50")
    port = free_port()
    links = await opened.enter_async_context(Links(some_kind, tcp=port))
    # A Sentinel that takes the server for down would end the script.
    sentinel = opened.enter_context(SentinelServer(some_kind.kind, port, down_after=60_000))
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/shop/1"
    async with delayq.connect(url, resync_interval=0.5) as client:
        loops = Loops(client)
        await loops.offer(5)
        script = asyncio.create_task(
            asyncio.to_thread(some_kind.call, "EVAL", "while true do end", "0", timeout=30.0)
        )
        await until(lambda: some_kind.call("PING").startswith(b"-BUSY"))
        links.cut()
        await loops.go_on()
        some_kind.call("SCRIPT", "KILL")
        await script
        await loops.end()


def snapshot(redis: Any) -> str:
    return str(redis.info("persistence")["rdb_last_bgsave_status"])


@pytest.mark.usefixtures("_usual_limits")
@pytest.mark.gate
@pytest.mark.every_server
@pytest.mark.parametrize("way", ["planned", "killed", nightly("stopped")])
async def test_producers_and_consumers_follow_a_failover(server_kind: Kind, way: str) -> None:
    with Watched(server_kind) as watched:
        await follow(watched, way)


async def follow(watched: Watched, way: str) -> None:
    old, got = watched.master(), Counter[int]()
    offered = 0
    unknown: set[int] = set()
    stop = asyncio.Event()
    # A failover may lose messages that only the old master has, and even when it is planned, the
    # old one confirms writes until Sentinel tells it that a replica has been promoted.
    durability = "replicas:2" if way == "planned" else "memory"
    lost = 0 if way == "planned" else 5

    async with (
        delayq.connect(watched.url, resync_interval=1) as client,
        delayq.connect(watched.url, resync_interval=1) as other,
    ):
        queue = client.reliable_queue("jobs", lease=3)
        orders: delayq.DelayedQueue[int] = client.delayed_queue("orders")

        async def produce() -> None:
            nonlocal offered
            while not stop.is_set():
                number, offered = offered, offered + 1
                try:
                    await queue.offer(number, delay=0.01, id=f"m{number}", durability=durability)
                except (delayq.OutcomeUnknown, delayq.ServerUnavailable, delayq.NotDurable):
                    unknown.add(number)
                await asyncio.sleep(0.005)

        async def consume() -> None:
            async for message in other.reliable_queue("jobs", lease=3):
                # After a long failover or a pause of the machine, the message comes again.
                with suppress(delayq.LeaseLost, delayq.ServerUnavailable, delayq.OutcomeUnknown):
                    async with message:
                        got[message.value] += 1

        tasks = [asyncio.create_task(produce()), asyncio.create_task(consume())]
        await until(lambda: len(got) > 20)
        if way == "planned":
            await asyncio.to_thread(watched.fail_over)
        else:
            # Messages that the replicas do not have yet would be lost with the server.
            stop.set()
            await tasks[0]
            await until(lambda: len(got) == offered)
            await until(lambda: is_replicated(old))
            stop.clear()
            tasks[0] = asyncio.create_task(produce())
            (old.kill if way == "killed" else old.pause)()
            await asyncio.to_thread(wait_for, lambda: watched.master() is not old, "the failover")
        seen = len(got)
        await until(lambda: len(got) > seen + 20, within=60)
        if way == "stopped":
            old.resume()  # as a master of former times
        stop.set()
        await tasks[0]
        await orders.offer(1)
        assert await orders.take() == 1
        await until(lambda: len({*range(offered)} - set(got) - unknown) <= lost, within=60)
        # All acknowledgements arrive in the end.
        await until(lambda: is_empty(queue))
        await end(*tasks)


@pytest.fixture(scope="module")
def small() -> Iterator[Watched]:
    with Watched(FOUND[next(iter(FOUND))]) as watched:
        yield watched


async def test_a_service_that_no_sentinel_knows_is_named(
    small: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time for another try, if the first one does not say so.
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 1)
    with pytest.raises(delayq.ServerUnavailable, match="does not know the service 'market'"):
        async with delayq.connect(small.url.replace("/shop", "/market")):
            pass


@pytest.mark.usefixtures("_usual_limits")
async def test_sentinels_that_are_dead_or_hang_are_passed_over(small: Watched) -> None:
    hanging = small.sentinels[1]
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{hanging.port},127.0.0.1:{small.sentinels[2].port}/shop"
    with hanging.paused():
        async with delayq.connect(url) as client:
            await client.reliable_queue("jobs").offer(1)


async def test_a_given_client_names_the_sentinels(small: Watched) -> None:
    sentinels: Any = Sentinel([("127.0.0.1", sentinel.port) for sentinel in small.sentinels])  # type: ignore[no-untyped-call]
    async with sentinels.master_for("shop", db=2) as theirs, delayq.connect(theirs) as client:
        await client.reliable_queue("given").offer(1)
        with admin(small.master()) as redis:
            redis.select(2)
            assert redis.exists("delayq:{given}:bodies")


@pytest.mark.every_server
async def test_a_server_that_became_a_replica_is_not_used_again(own_server: PrivateServer) -> None:
    """If a name leads to another server after a failover, all it takes is a new connection."""
    async with delayq.connect(own_server.url) as client:
        queue = client.reliable_queue("jobs")
        await queue.offer_many([Offer(n) for n in range(3)])
        opened = client.statistics().connections_opened
        own_server.call("REPLICAOF", "127.0.0.1", "1")
        offering = asyncio.create_task(queue.offer(3))
        await until(lambda: client.statistics().connections_opened > opened + 1)
        own_server.call("REPLICAOF", "NO", "ONE")
        await offering
        assert (await queue.stats()).ready == 4
