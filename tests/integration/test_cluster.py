"""Queues on a cluster: each lies whole on one master, wherever that is or moves to."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections import Counter
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import RedisCluster

import delayq
from delayq import Offer
from delayq._redis.topology import Cluster, read_host_port, read_slots
from delayq._reliable.keys import ReliableKeys
from delayq.admin.catalog import list_queues
from tests.conftest import FOUND
from tests.support.clusters import TestCluster, admin, is_replicated, wait_for
from tests.support.depth import in_gate
from tests.support.reliable import is_empty
from tests.support.servers import Kind, PrivateServer
from tests.support.tasks import end, running
from tests.support.timing import Control
from tests.support.waiting import fetch_ahead, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from delayq import Client

    Jobs = delayq.ReliableQueue[int]


LEASE = 5


def test_the_masters_of_all_slots_are_read_and_the_place_that_a_redirection_names() -> None:
    reply = [
        [0, 99, [b"a", 1, b"id"], [b"r", 9, b"id"]],
        [100, 199, [b"b", 2, b"id", []]],
        [200, 299, [b"a", 1, b"id"]],
    ]
    assert read_slots(reply, ("asked", 5)) == {
        ("a", 1): [range(100), range(200, 300)],
        ("b", 2): [range(100, 200)],
    }
    # A node without a name has the address that was asked.
    unknown: list[Any] = [[b"", 7, b"id"], [None, 7, b"id"], [b"?", 7], [b"?", 7, b"id", []]]
    unknown += [[b"?", 7, b"id", [b"hostname", b"x"]]]
    named = [b"?", 7, b"id", [b"ip", b"10.0.0.1"]]
    for name, host in (*((name, "asked") for name in unknown), (named, "10.0.0.1")):
        assert read_slots([[0, 9, name]], ("asked", 5)) == {(host, 7): [range(10)]}, name
    assert read_host_port("10.0.0.1:7000", ("asked", 5)) == ("10.0.0.1", 7000)
    assert read_host_port("::1:7000", ("asked", 5)) == ("::1", 7000)
    assert read_host_port(":7000", ("asked", 5)) == ("asked", 7000)
    assert read_host_port("?:7000", ("asked", 5)) is None


@pytest.fixture
async def client(cluster: TestCluster) -> AsyncIterator[Client]:
    async with delayq.connect(cluster.url) as client:
        yield client


def names(cluster: TestCluster, prefix: str) -> list[str]:
    """Return one queue name per master, each of which the cluster places on that master."""
    found: dict[Any, str] = {}
    for number in range(1000):
        name = f"{prefix}{number}"
        found.setdefault(cluster.owner(name), name)
        if len(found) == cluster.masters:
            return [found[node] for node in cluster.nodes[: cluster.masters]]
    raise AssertionError("no names")


async def test_every_queue_lies_whole_on_one_master(client: Client, cluster: TestCluster) -> None:
    for name in names(cluster, "jobs"):
        jobs = client.reliable_queue(name, lease=LEASE)
        await jobs.offer_many(Offer(n, delay=n % 2 * 3600, priority=n % 3) for n in range(100))
        await client.delayed_queue(f"orders:{{{name}}}").offer_many([(n, 3600) for n in range(100)])
    for node, name in zip(cluster.nodes, names(cluster, "jobs"), strict=True):
        with admin(node) as redis:
            keys = redis.keys()
        assert keys
        assert all(name in key for key in keys)


@pytest.mark.every_server
async def test_a_reliable_queue_does_all_its_work(client: Client, cluster: TestCluster) -> None:
    for name in names(cluster, "jobs"):
        queue: delayq.ReliableQueue[Any] = client.reliable_queue(name, lease=60, max_attempts=1)
        await queue.offer("first", id="a")
        await queue.offer("later", delay=3600, id="b")
        await queue.offer("never", delay=3600, id="c")
        with pytest.raises(delayq.DuplicateMessage):
            await queue.offer("again", id="a")
        assert await queue.cancel("c")
        assert await queue.reschedule("b", 0.05)
        assert (await queue.get("b")) is not None
        got = []
        async for message in queue:
            async with message:
                got.append(message.value)
            if len(got) == 2:
                break
        assert got == ["first", "later"]
        await queue.offer("bad")
        (message,) = await queue.claim(1, wait=20)
        await message.bury("no use")
        assert await queue.dead.redrive() == 1
        await queue.pause()
        assert await queue.claim(1) == []
        assert await queue.resume()
        assert await queue.purge() == 1
        await queue.schedule("tick", value="every", every=0.05)
        (tick,) = await queue.claim(1, wait=20)
        await tick.ack()
        assert await queue.unschedule("tick")


@pytest.mark.every_server
async def test_a_delayed_queue_does_all_its_work(client: Client, cluster: TestCluster) -> None:
    for name in names(cluster, "orders"):
        queue: delayq.DelayedQueue[Any] = client.delayed_queue(name)
        receipts = await queue.offer_many([(n, 3600) for n in range(3)])
        assert await receipts[1].cancel()
        assert await queue.pending.read_all() == [0, 2]
        assert await receipts[2].reschedule(0.05)
        assert await queue.take() == 2
        # A value that Java pushes is noticed.
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0.05)
        with admin(cluster.owner(name)) as redis:
            redis.rpush(name, '"from Java"')
        assert await taking == "from Java"
        await queue.offer("leased")
        async for message in queue.deliveries(lease=60):
            async with message:
                assert message.value == "leased"
            break
        assert await queue.pending.clear()


@pytest.mark.every_server
async def test_messages_do_not_cross_slots(client: Client, cluster: TestCluster) -> None:
    here, there, _ = names(cluster, "orders")
    queue: delayq.DelayedQueue[int] = client.delayed_queue(here)
    await queue.offer(1, delay=3600)
    with pytest.raises(delayq.DelayqError, match=r"(?i)slot"):
        await queue.pending.poll_last_and_offer_first_to(there)
    assert await queue.pending.size() == 1


@pytest.mark.every_server
async def test_clients_are_notified_of_new_heads_on_any_server(cluster: TestCluster) -> None:
    # With these intervals no client re-checks on its own.
    async with (
        delayq.connect(cluster.url, resync_interval=3600) as consumer,
        delayq.connect(cluster.url, resync_interval=3600) as producer,
    ):
        for name in names(cluster, "jobs"):
            queue = consumer.reliable_queue(name, lease=LEASE)
            taking = asyncio.create_task(queue.claim(1, wait=30))
            await until(partial(_subscribers, cluster.nodes, name), equals=1)
            await producer.reliable_queue(name, lease=LEASE).offer(name, delay=0.05)
            (message,) = await taking
            assert message.value == name
            await message.ack()


def _subscribers(nodes: Iterable[PrivateServer], name: str) -> int:
    """Count the subscribers to a reliable queue's channel."""
    count = 0
    for node in nodes:
        with admin(node) as redis:
            reply = redis.execute_command("PUBSUB", "NUMSUB", ReliableKeys.of(name).wake)
        found = reply[1] if isinstance(reply, list) else next(iter(dict(reply).values()))
        count += int(found)
    return count


async def consume(queue: Jobs, handle: Callable[[int], object]) -> None:
    async for message in queue:
        async with message:
            handle(message.value)


def nodes_of(client: Client) -> Cluster:
    nodes = client.session.nodes
    assert isinstance(nodes, Cluster)
    return nodes


@pytest.mark.every_server
async def test_a_cluster_named_as_one_server_is_refused_with_a_hint(cluster: TestCluster) -> None:
    *_, there = names(cluster, "jobs")
    async with delayq.connect(f"redis://127.0.0.1:{cluster.nodes[0].port}") as client:
        with pytest.raises(delayq.ServerRefused, match=r"redis\+cluster://"):
            await client.reliable_queue(there, lease=LEASE).offer(1)


async def test_a_single_server_named_as_a_cluster_is_refused_with_a_hint() -> None:
    with (
        PrivateServer(next(iter(FOUND.values())), tcp=True) as server,
        pytest.raises(delayq.ServerRefused, match="redis://host:port"),
    ):
        await delayq.connect(f"redis+cluster://127.0.0.1:{server.port}").__aenter__()


@pytest.mark.usefixtures("_impatient")
async def test_an_unreachable_cluster_is_named_in_the_error_without_its_secrets() -> None:
    places = "me:secret@127.0.0.1:1,127.0.0.1:2"
    sentinels = f"redis+sentinel://{places}/shop?sentinel_password=hidden"
    for url in (f"redis+cluster://{places}", sentinels):
        with pytest.raises(delayq.ServerUnavailable, match=r"127\.0\.0\.1:1\b") as caught:
            await delayq.connect(url).__aenter__()
        assert not re.search(r"\b(secret|hidden)\b", str(caught.value))


@pytest.mark.every_server
async def test_moving_slots_lose_and_double_nothing(client: Client, cluster: TestCluster) -> None:
    name = names(cluster, "jobs")[0]
    queue: Jobs = client.reliable_queue(name, lease=30)
    orders: delayq.DelayedQueue[int] = client.delayed_queue(f"orders{{{name}}}")
    got: list[int] = []
    taken: list[int] = []
    stop = asyncio.Event()
    offered = 0

    async def produce() -> None:
        nonlocal offered
        while not stop.is_set():
            await asyncio.gather(queue.offer(offered, id=f"m{offered}"), orders.offer(offered))
            offered += 1
            await asyncio.sleep(0.002)

    async def take() -> None:
        async for value in orders:
            taken.append(value)  # noqa: PERF401 - it never ends

    async with running(produce(), consume(queue, got.append), take()) as (producing, *_):
        await queue.offer(-1, delay=3600, id="cancelled")
        await queue.offer(-2, delay=3600, id="rescheduled")
        for _ in range(2):
            for target in (cluster.nodes[1], cluster.nodes[2], cluster.nodes[0]):
                # For a while, half of the keys are on one server and half on the other.
                halfway = partial(time.sleep, 0.3)
                await asyncio.to_thread(cluster.move, f"{{{name}}}", target, between=halfway)
                moved = len(got), len(taken)
                await until(lambda moved=moved: len(got) > moved[0] and len(taken) > moved[1])  # type: ignore[misc]
        assert await queue.cancel("cancelled")
        assert await queue.reschedule("rescheduled", 0)
        stop.set()
        await producing
        await until(lambda: len(got) == offered + 1 and len(taken) == offered)
    assert Counter(got) == Counter([*range(offered), -2])
    assert [value for value in got if value != -2] == list(range(offered))
    assert taken == list(range(offered))


@pytest.mark.gate
@pytest.mark.every_server
@pytest.mark.usefixtures("_usual_limits")
async def test_queues_go_on_after_a_failover(cluster_kind: Kind) -> None:
    with TestCluster(cluster_kind, 3, 3) as replicated:
        dying, other, _ = names(replicated, "jobs")
        victim = replicated.nodes[0]
        leases = {dying: 2, other: 60}
        got: dict[str, Counter[int]] = {dying: Counter(), other: Counter()}
        async with (
            delayq.connect(replicated.url, resync_interval=2) as producer,
            delayq.connect(replicated.url, resync_interval=2) as client,
        ):

            async def consume(name: str) -> None:
                queue: Jobs = client.reliable_queue(name, lease=leases[name])
                async for message in queue:
                    # A message comes again whose acknowledgement waits for the dead master until
                    # its lease ends.
                    forgiven = (delayq.LeaseLost, delayq.ServerUnavailable, delayq.OutcomeUnknown)
                    with suppress(*forgiven) if name == dying else nullcontext():
                        async with message:
                            got[name][message.value] += 1

            async with running(*(consume(name) for name in got)):
                for name in got:
                    offers = [Offer(n, delay=0.02 * n) for n in range(400)]
                    await producer.reliable_queue(name, lease=leases[name]).offer_many(offers)
                # Without durability an acknowledged write may be lost with its master, so wait here
                # until everything is replicated.
                await until(lambda: is_replicated(victim))
                await until(lambda: len(got[dying]) > 20)
                victim.kill()
                taken_over = lambda: replicated.owner(dying, replicated.nodes[1]) is not victim
                await asyncio.to_thread(wait_for, taken_over, "the failover")
                await until(lambda: {*got[dying]} == {*got[other]} == {*range(400)}, within=60)
                # Offers get through afterwards as well.
                await producer.reliable_queue(dying, lease=2).offer(400)
                await until(lambda: 400 in got[dying])
                # All acknowledgements arrive in the end.
                for name in got:
                    await until(partial(is_empty, producer.reliable_queue(name)))
        # Each message of the other queue came once.
        assert {*got[other].values()} == {1}


@pytest.mark.gate
@pytest.mark.usefixtures("_usual_limits")
async def test_clients_open_and_hear_if_one_master_hangs(cluster: TestCluster) -> None:
    name = name_elsewhere(cluster, cluster.nodes[2])
    with cluster.nodes[2].paused():
        for number in range(4):
            # With this interval the consumer re-checks on its own only at the start.
            async with (
                delayq.connect(cluster.url, resync_interval=3600) as consumer,
                delayq.connect(cluster.url) as producer,
            ):
                assert (await asyncio.gather(*(consumer.server_time() for _ in range(5))))[0]
                queue = consumer.reliable_queue(name, lease=LEASE)
                claiming = asyncio.create_task(queue.claim(1, wait=20))
                await until(partial(_subscribers, cluster.nodes[:2], name))
                await producer.reliable_queue(name, lease=LEASE).offer(number, delay=0.05)
                (message,) = await claiming
                assert message.value == number
                await message.ack()


@pytest.mark.gate
@pytest.mark.every_server
async def test_loops_go_on_when_every_master_was_busy(cluster: TestCluster) -> None:
    name = names(cluster, "jobs")[0]
    async with delayq.connect(cluster.url, resync_interval=0.5) as client:
        queue = client.reliable_queue(name, lease=LEASE)
        claiming = asyncio.create_task(queue.claim(1, wait=60))
        await queue.offer(1, delay=5)
        due = asyncio.get_running_loop().time() + 5
        busy: list[Any] = []
        for node in cluster.nodes:
            node.call("CONFIG", "SET", "lua-time-limit", "50")
            script = ("EVAL", "while true do end", "0")
            busy.append(asyncio.to_thread(node.call, *script, timeout=30.0))
        scripts = asyncio.gather(*busy)
        try:
            for node in cluster.nodes:
                await until(lambda node=node: node.call("PING").startswith(b"-BUSY"))  # type: ignore[misc]
            asked = client.statistics().errors
            await until(lambda: client.statistics().errors > asked + 2)
            # They are busy when it is due, and for a few re-checks more.
            await asyncio.sleep(due + 1 - asyncio.get_running_loop().time())
            assert not claiming.done()
        finally:
            for node in cluster.nodes:
                node.call("SCRIPT", "KILL")
        await scripts
        (message,) = await claiming
        await message.ack()


@pytest.mark.every_server
async def test_a_cluster_that_announces_unknown_names_can_be_used(cluster: TestCluster) -> None:
    for node in cluster.nodes:
        node.call("CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname")
    try:
        async with delayq.connect(f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}") as client:
            for name in names(cluster, "jobs"):
                await client.reliable_queue(name).offer(1)
                # The redirect to another server does not name its host.
                nodes = nodes_of(client)
                # A call for another key may have followed a redirect, after which no master is
                # certain.
                await nodes.refresh()
                nodes._owners = [nodes.masters()[0]] * len(nodes._owners)
                await client.reliable_queue(name).offer(2)
    finally:
        for node in cluster.nodes:
            node.call("CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")


async def test_queues_on_masters_that_answer_are_listed_and_silent_masters_are_named(
    cluster: TestCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.client.GIVE_UP_AFTER", 0.5)
    async with delayq.connect(cluster.url) as client:
        for name in names(cluster, "jobs"):
            await client.reliable_queue(name).offer(1, 3600)
        *seen, hidden = names(cluster, "jobs")
        with cluster.nodes[2].paused():
            # Its connections are unusable, and new ones cannot be established.
            for wire in list(client.session.nodes.masters()[2]._free):
                wire.close()
            found = {queue.name for queue in await list_queues(client)}
        assert set(seen) <= found
        assert hidden not in found
        assert f"127.0.0.1:{cluster.nodes[2].port} is left out of the result" in caplog.text


@asynccontextmanager
async def less_than(seconds: float, *servers: PrivateServer) -> AsyncIterator[None]:
    """Demand that the block takes less than ``seconds``, pauses of the machine apart."""
    with ExitStack() as stack:
        controls = [stack.enter_context(Control(server)) for server in servers]
        began = time.monotonic()
        yield
        took = time.monotonic() - began
    assert took < seconds + sum(control.lost for control in controls)


def name_elsewhere(cluster: TestCluster, node: PrivateServer) -> str:
    """Return the name of a queue that the cluster places on another server than ``node``."""
    names = (f"queue{number}" for number in itertools.count())
    return next(name for name in names if cluster.owner(ReliableKeys.of(name).wake) is not node)


async def spread_with_settings_elsewhere(cluster: TestCluster, hanging: PrivateServer) -> str:
    """Store the settings of a queue in partitions on another server than ``hanging``."""
    name = name_elsewhere(cluster, hanging)
    async with delayq.connect(cluster.url) as other:
        await other.reliable_queue(name).configure(partitions=12)
    return name


@pytest.mark.gate
@pytest.mark.timing
async def test_offers_without_an_id_go_to_partitions_that_answer(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 2.5)
    name = await spread_with_settings_elsewhere(cluster, cluster.nodes[2])
    async with delayq.connect(cluster.url) as client:
        queue: Jobs = client.reliable_queue(name, lease=LEASE)
        await queue.settings()

        failed = client.session.nodes.failed_lately
        # Another server may fail briefly as well: one that hears too late from the rest.
        hang = {
            partition
            for partition in queue._open.partitions
            if cluster.owner(partition.keys.wake) is cluster.nodes[2]
        }
        offers: list[asyncio.Task[str]] = []
        with cluster.nodes[2].paused():
            # The partitions take turns, until one of those that hang has had its own.
            while not any(failed(partition.keys.wake) for partition in hang):
                assert len(offers) < 1000
                offers.append(asyncio.create_task(queue.offer(len(offers), 3600)))
                await asyncio.sleep(0.01)
            ids = await asyncio.gather(*offers)
            assert not any(queue._open.partition_of(each) in hang for each in ids)
            # From now on offers go straight to the partitions that answer.
            async with less_than(2, *cluster.nodes[:2]):
                ids += await queue.offer_many([Offer(number) for number in range(40)])
        assert len(set(ids)) == len(offers) + 40


@pytest.mark.timing
@pytest.mark.gate
@pytest.mark.usefixtures("_usual_limits")
async def test_other_partitions_go_on_while_a_server_hangs(cluster: TestCluster) -> None:
    got: asyncio.Queue[int] = asyncio.Queue()
    hanging = cluster.nodes[2]
    name = await spread_with_settings_elsewhere(cluster, hanging)
    async with delayq.connect(cluster.url) as client:
        queue: Jobs = client.reliable_queue(name, lease=LEASE)
        worker = delayq.Worker(client, concurrency=2)

        @worker.listener(name, lease=LEASE)
        async def handle(value: int) -> None:
            got.put_nowait(value)

        def ids(*, here: bool) -> Iterator[str]:
            """Generate ids of messages that lie on the server that hangs, or elsewhere."""
            for name in (f"m{number}" for number in itertools.count()):
                is_here = cluster.owner(queue._open.partition_of(name).keys.wake) is hanging
                if is_here is here:
                    yield name

        # Subscribed while the server hangs: one that hangs later takes the notifications with it
        # until that is found out.
        with hanging.paused():
            await queue.settings()
            elsewhere = ids(here=False)
            parts = queue._open.partitions
            here = next(part for part in parts if cluster.owner(part.keys.wake) is hanging)
            taking = asyncio.create_task(worker.run())
            # It takes 5 s to find out that a server hangs. Nothing else waits for that.
            async with less_than(4, *cluster.nodes[:2]):
                for number in range(3):
                    await queue.offer(number, 0.2, id=next(elsewhere))
                    assert await got.get() == number
            # The others are still served afterwards.
            with pytest.raises(delayq.ServerError):
                await here.store.depth()
            async with less_than(4, *cluster.nodes[:2]):
                await queue.offer(3, id=next(elsewhere))
                assert await got.get() == 3
            assert not taking.done()
        await queue.offer(4, id=next(ids(here=True)))
        assert await got.get() == 4
        await end(taking)


async def test_a_re_check_takes_few_round_trips(cluster: TestCluster) -> None:
    async with delayq.connect(cluster.url, resync_interval=3600) as client:
        for number in range(100):
            client.delayed_queue(f"orders{number}")
        scheduler = client.session.scheduler
        plan = scheduler.subscriber._plan
        await until(lambda: plan._requested and not plan._sent)
        await scheduler.recheck()
        before = client.statistics().round_trips
        await scheduler.recheck()
        assert client.statistics().round_trips - before <= cluster.masters + 2


async def test_a_given_client_names_the_cluster(cluster: TestCluster) -> None:
    url = f"redis://127.0.0.1:{cluster.nodes[1].port}"
    # A seed that is dead is passed over.
    seeds = f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[1].port}"
    async with RedisCluster.from_url(url) as theirs:
        for address in (theirs, seeds):
            async with delayq.connect(address) as client:
                for name in names(cluster, "jobs"):
                    await client.reliable_queue(name).offer(1)


async def test_a_client_closed_without_its_cluster_leaves_nothing(cluster: TestCluster) -> None:
    async with delayq.connect(cluster.url) as client:
        queue = client.reliable_queue("jobs", lease=LEASE)
        with ExitStack() as paused:
            for node in cluster.nodes:
                paused.enter_context(node.paused())
            offering = asyncio.create_task(queue.offer(1))
            refreshing = asyncio.create_task(nodes_of(client).refresh())
            await asyncio.sleep(0.05)
            await asyncio.wait_for(client.aclose(), 20)
            with pytest.raises(delayq.DelayqError):
                await asyncio.wait_for(offering, 20)
            with pytest.raises(delayq.Closed):
                await asyncio.wait_for(refreshing, 20)


@pytest.mark.parametrize("moves", [in_gate("while it closes"), "before"])
async def test_messages_fetched_ahead_go_back_to_the_master_to_which_their_queue_moves(
    cluster: TestCluster, client: Client, moves: str
) -> None:
    """While a slot moves, no server runs scripts for it."""
    async with delayq.connect(cluster.url) as other:
        queue = other.delayed_queue("moving")
        await queue.offer_many([(n, 0) for n in range(300)])
        _loop, taken = await fetch_ahead(queue, 20)
        target = next(node for node in cluster.nodes if node is not cluster.owner("moving"))
        halfway, closed = threading.Event(), threading.Event()

        def wait() -> None:
            halfway.set()
            # Longer than closing takes otherwise.
            closed.wait(2.5 if moves == "while it closes" else 0)

        moving = asyncio.create_task(
            asyncio.to_thread(cluster.move, "moving", target, between=wait)
        )
        if moves == "before":
            # No call in between tells the client about the move.
            await moving
        await asyncio.to_thread(halfway.wait, 10)
        await other.aclose()
        closed.set()
        await moving
    assert await client.delayed_queue("moving").drain() == [*range(len(taken), 300)]
