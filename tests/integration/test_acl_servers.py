"""The extra rights that users need with several servers or with durable offers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot

import delayq
from delayq import Offer
from delayq._reliable.keys import ReliableKeys
from delayq.admin.acl import acl_rules
from tests.support.clusters import TestCluster, Watched, admin
from tests.support.servers import WAIT_FOR_DISK, Kind, PrivateServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

pytestmark = pytest.mark.every_server

NAME = "orders"


@pytest.fixture(scope="module")
def cluster(cluster_kind: Kind) -> Iterator[TestCluster]:
    with TestCluster(cluster_kind, 2) as cluster:
        yield cluster


def grant(servers: Iterable[PrivateServer], user: str, rules: Sequence[str]) -> None:
    for server in servers:
        with admin(server) as redis:
            redis.execute_command("ACL", "SETUSER", user, "reset", "on", ">secret", *rules)


def as_user(url: str, user: str) -> str:
    return url.replace("://", f"://{user}:secret@", 1)


async def work(url: str) -> list[Any]:
    """Let a producer and a consumer work, each as its own user."""
    got: list[Any] = []
    async with (
        delayq.connect(as_user(url, "producer")) as producer,
        delayq.connect(as_user(url, "consumer")) as consumer,
    ):
        offers = [Offer(n, delay=0.05, priority=n % 3) for n in range(60)]
        await producer.reliable_queue(NAME).offer_many(offers)
        async for message in consumer.reliable_queue(NAME):
            async with message:
                got.append(message.value)
            if len(got) == 60:
                break
    return got


async def test_on_a_cluster_each_role_does_its_work_and_reaches_no_other_queue(
    cluster: TestCluster,
) -> None:
    for partitions in (1, 12):
        for node in cluster.nodes:
            node.flush()
        async with delayq.connect(cluster.url) as client:
            await client.reliable_queue(NAME, partitions=partitions).stats()
        for role in ("producer", "consumer"):
            rules = acl_rules(role, reliable=[NAME], servers="cluster", partitions=partitions)
            grant(cluster.nodes, role, rules)
        assert sorted(await work(cluster.url)) == [*range(60)]
    async with delayq.connect(as_user(cluster.url, "producer")) as client:
        for name in ("other", f"{NAME}2"):
            with pytest.raises(delayq.ServerRefused):
                await client.reliable_queue(name).offer(1)


async def test_a_user_who_may_not_read_the_slots_of_a_cluster_gets_an_error_that_says_so(
    cluster: TestCluster,
) -> None:
    rules = acl_rules("producer", reliable=[NAME], servers="cluster")
    grant(cluster.nodes, "producer", [rule for rule in rules if rule != "+cluster|slots"])
    with pytest.raises(delayq.ServerRefused, match=r"[Pp]ermission"):
        await delayq.connect(as_user(cluster.url, "producer")).__aenter__()


async def test_while_a_slot_moves_asking_must_be_permitted(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only single-key commands need ASKING: scripts wait until the slot has moved."""
    key = ReliableKeys.of(NAME).paused
    slot, source = key_slot(key.encode()), cluster.owner(key)
    target = next(node for node in cluster.nodes if node is not source)
    rules = acl_rules("admin", reliable=[NAME], servers="cluster")
    for node in cluster.nodes:
        node.flush()
    with admin(source) as left, admin(target) as right:
        right.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        left.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
        try:
            grant(cluster.nodes, "admin", [rule for rule in rules if rule != "+asking"])
            async with delayq.connect(as_user(cluster.url, "admin")) as client:
                with monkeypatch.context() as patch:
                    patch.setattr("delayq._redis.client.RETRY_FOR", 0.2)
                    with pytest.raises(delayq.ServerUnavailable):
                        await client.reliable_queue(NAME).pause()
            grant(cluster.nodes, "admin", rules)
            async with delayq.connect(as_user(cluster.url, "admin")) as client:
                await client.reliable_queue(NAME).pause()
            stored = right.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10)
            assert sorted(stored) == [key, ReliableKeys.of(NAME).settings]
        finally:
            for redis in (right, left):
                redis.execute_command("CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(target))


@pytest.mark.gate
async def test_behind_sentinels_no_right_is_needed_besides(server_kind: Kind) -> None:
    # The handshake already tells a client whether a server is the master.
    rules = acl_rules("producer", reliable=[NAME], servers="sentinel")
    assert rules == acl_rules("producer", reliable=[NAME])
    with Watched(server_kind) as watched:
        grant(watched.servers, "producer", rules)
        async with delayq.connect(as_user(watched.url, "producer")) as client:
            await client.reliable_queue(NAME).offer(1)


@pytest.mark.parametrize(("durability", "rule"), [("replicas:1", "+wait"), ("fsync", "+waitaof")])
async def test_a_durable_offer_without_the_right_to_wait_is_refused_before_anything_is_written(
    server_kind: Kind, durability: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are no replicas to wait for. A disk is written once a second, or later if it is slow.
    monkeypatch.setattr(
        "delayq._redis.durability.WITHIN_MS", 500 if durability == "replicas:1" else 20_000
    )
    monkeypatch.setattr("delayq._redis.client.BLOCKS_FOR", 20)
    if server_kind.name not in WAIT_FOR_DISK:
        pytest.skip(f"{server_kind.name} cannot wait for its disk")
    rules = acl_rules("producer", reliable=[NAME], delayed=[NAME], durability=durability)
    with PrivateServer(server_kind, appendonly="everysec") as server:
        url = as_user(server.url, "producer")
        grant([server], "producer", [other for other in rules if other != rule])
        async with delayq.connect(url) as client:
            for queue in (client.reliable_queue(NAME), client.delayed_queue(NAME)):
                with pytest.raises(delayq.ServerRefused, match=r"[Pp]ermission"):
                    await queue.offer(1, durability=durability)
        with admin(server) as redis:
            # An offer stores the number of partitions first.
            assert redis.keys() == [ReliableKeys.of(NAME).settings]
        grant([server], "producer", rules)
        # There are no replicas.
        kept = pytest.raises(delayq.NotDurable, match="0 of 1 replicas")
        async with delayq.connect(url) as client:
            with kept if durability == "replicas:1" else nullcontext():
                await client.reliable_queue(NAME).offer(1, durability=durability)
