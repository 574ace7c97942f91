"""The calls that each role may and may not make, as enforced by real servers, and what users need
besides with several servers or with durable offers.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import ResponseError

import delayq
from delayq import Offer
from delayq._engine.scheduler import Scheduler
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from delayq.admin.acl import ROLES, acl_rules
from delayq.admin.reliable import ReliableInspector
from tests.integration.test_faults import Faults
from tests.support.acl_jobs import JOBS, NAME, NOT_PERMITTED, Place
from tests.support.clusters import TestCluster, Watched, admin
from tests.support.lua import SCRIPTS
from tests.support.names import every_key
from tests.support.reliable_store import Store
from tests.support.servers import WAIT_FOR_DISK, Kind, PrivateServer
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

    from delayq.admin.acl import Role

    Attempt = Callable[[Any, Any], Awaitable[object]]


pytestmark = pytest.mark.every_server

jobs = pytest.mark.parametrize(("kind", "role"), [*JOBS], ids=["-".join(job) for job in JOBS])
USER, PASSWORD = "limited", "its-password"


def rules_of(kind: str, role: Role) -> list[str]:
    return acl_rules(role, **{kind: [NAME]})  # type: ignore[arg-type]


@asynccontextmanager
async def granted(server: PrivateServer, rules: Sequence[str]) -> AsyncIterator[str]:
    """Create a user with these rules, and yield the URL with the user's name and password."""
    async with Redis.from_url(server.url, socket_timeout=60) as connection:
        raw: Any = connection
        words: list[str | bytes] = ["on", f">{PASSWORD}", *rules]
        await raw.execute_command("ACL", "SETUSER", USER, "reset", *words)
        try:
            await raw.script_flush()
            yield server.url.replace("unix://", f"unix://{USER}:{quote(PASSWORD)}@")
        finally:
            await raw.execute_command("ACL", "DELUSER", USER)


@jobs
async def test_a_role_can_do_its_whole_job(
    server: PrivateServer,
    kind: str,
    role: Role,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Faults(monkeypatch)

    def lose(script: str) -> None:
        done = faults.calls.count(script)
        faults.plan = lambda name, n: "lost" if name == script and n == done + 1 else None

    async with (
        granted(server, rules_of(kind, role)) as url,
        Redis.from_url(server.url, socket_timeout=60) as raw,
        # Notifications alone must reach them in time: a re-check would make up for a missing rule.
        delayq.connect(server.url, resync_interval=300) as helper,
        delayq.connect(url, resync_interval=300) as client,
    ):
        await JOBS[kind, role](Place(client, helper, raw, lose))
    # Who may only offer is told once that others have to move its messages.
    may_not_move = "no permission to move due messages"
    lines = [record.getMessage() + str(record.exc_info or "") for record in caplog.records]
    assert not [line for line in lines if NOT_PERMITTED.search(line) and may_not_move not in line]


FOREIGN = ("theirs", "{orders}:theirs", "orders2", "orders:theirs")
FORBIDDEN = (
    "KEYS * | SCAN 0 | FLUSHALL | FLUSHDB | CONFIG GET * | SCRIPT FLUSH | FUNCTION LIST | DBSIZE |"
    " INFO | MONITOR | ACL LIST | CLIENT LIST | SAVE | SHUTDOWN | REPLICAOF NO ONE | SWAPDB 0 1 |"
    " MIGRATE h 1 k 0 1 | RENAME orders theirs | COPY orders theirs | DUMP orders |"
    " OBJECT ENCODING orders | PSUBSCRIBE * | SUBSCRIBE theirs | PUBLISH theirs x | GET theirs |"
    " LPOP theirs | DEL theirs | EVAL return(redis.call('GET','theirs')) 0 |"
    " EVAL return(redis.call('KEYS','*')) 0"
)


async def test_no_role_reaches_other_queues(server: PrivateServer) -> None:
    # A server that knows the command denies it; an older server refuses it because it does not.
    words = r"[Pp]ermission|can't run|can't access|ACL failure|unknown command"
    user: Any
    async with Redis.from_url(server.url, socket_timeout=60) as raw:
        await raw.set("theirs", "1")
        for kind, role in itertools.product(("delayed", "reliable"), ROLES):
            async with (
                granted(server, rules_of(kind, role)) as url,
                Redis.from_url(url, socket_timeout=60) as user,
            ):
                for command in FORBIDDEN.split(" | "):
                    with pytest.raises(ResponseError, match=words):
                        await user.execute_command(*command.split())
                for script, name in itertools.product(SCRIPTS, FOREIGN):
                    for keys in (every_key(DelayedKeys.of(name)), every_key(ReliableKeys.of(name))):
                        needed = (keys * 3)[: len(script.keys)]
                        with pytest.raises(ResponseError, match=r"[Pp]ermission"):
                            await user.eval(script.text, len(needed), *needed, *["1"] * 12)
        assert await raw.keys("*") == [b"theirs"]
        assert await raw.get("theirs") == b"1"


async def test_settings_that_may_not_be_read_are_unknown(server: PrivateServer) -> None:
    rules = [rule for rule in rules_of("reliable", "dashboard") if "settings" not in rule]
    async with delayq.connect(server.url) as other:
        await other.reliable_queue(NAME).offer(1)
    async with granted(server, rules) as url, delayq.connect(url) as client:
        assert await ReliableInspector.of(client, NAME).visible_settings() is None
        assert (await ReliableInspector.of(client, NAME).stats()).ready == 1


REFUSED: dict[tuple[str, Role], str] = {
    ("delayed", "producer"): "poll() drain() ready.clear() ready.read_all() ready.size() take()",
    ("reliable", "producer"): "claim() pause() dead.purge() stats() dead.size() schedules()",
    ("reliable", "consumer"): "purge() dead.purge() dead.redrive() resume()",
    ("reliable", "admin"): "offer(1) claim()",
    ("delayed", "admin"): "poll() drain()",
    ("delayed", "dashboard"): """
        poll() drain() ready.clear() offer(1) pending.poll() pending.remove(1) pending.clear()
        pending.retain_all([]) pending.poll_last_and_offer_first_to("orders") pending.expire(1)
    """,
    ("reliable", "dashboard"): """
        claim() pause() dead.purge() offer(1) cancel("two") reschedule("two",0) purge() resume()
        dead.redrive() schedule("nightly",every=1,value=1) unschedule("nightly")
        pause_schedule("nightly") resume_schedule("nightly")
    """,
}


@pytest.mark.parametrize(("kind", "role"), [*REFUSED], ids=["-".join(job) for job in REFUSED])
async def test_a_call_outside_the_job_of_a_role_is_refused_and_changes_nothing(
    server: PrivateServer, raw: Any, kind: str, role: Role
) -> None:
    async with (
        granted(server, rules_of(kind, role)) as url,
        delayq.connect(url) as client,
        delayq.connect(server.url) as other,
    ):
        receipt: Any = None
        if kind == "delayed":
            theirs = await other.delayed_queue(NAME).offer(1, 60)
            await raw.rpush(NAME, b"2")
            queue: Any = client.delayed_queue(NAME)
            receipt = delayq.Receipt(queue, theirs._payload, theirs._stored)
        else:
            jobs = other.reliable_queue(NAME)
            await jobs.offer_many([Offer(1, id="one"), Offer(2, id="two")])
            await jobs.schedule("nightly", every=3600, value=1)
            await (await jobs.claim())[0].bury("why")
            queue = client.reliable_queue(NAME)
        before = await contents(raw)
        for call in REFUSED[kind, role].split():
            with pytest.raises(delayq.ServerRefused):
                await asyncio.wait_for(eval(f"queue.{call}"), 60)
        if role == "dashboard" and receipt is not None:
            for attempt in (receipt.cancel(), receipt.reschedule(0)):
                with pytest.raises(delayq.ServerRefused):
                    await attempt
        assert await contents(raw) == before


async def contents(raw: Any) -> dict[str, bytes]:
    return await Store(raw, "jobs").keys_and_dumps()


async def test_a_user_who_may_only_offer_moves_nothing_and_logs_that_once(
    server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        granted(server, rules_of("delayed", "producer")) as url,
        delayq.connect(url, resync_interval=0.02) as client,
    ):
        queue: delayq.DelayedQueue[Any] = client.delayed_queue(NAME)
        await until(lambda: "no permission to move" in caplog.text)
        await queue.offer(1)
        # Long enough for ten re-checks, each of which would transfer the message if it could.
        await asyncio.sleep(0.2)
        assert await raw.zcard(DelayedKeys.of(NAME).timeout) == 1
        # On a slow machine a link with such short timeouts is reopened now and then, which is
        # logged too. Count only refusals.
        refusals = [
            record for record in caplog.records if NOT_PERMITTED.search(record.getMessage())
        ]
        assert [record.levelname for record in refusals] == ["WARNING"]


async def test_a_user_who_may_not_move_messages_is_warned_once_though_the_queue_is_reopened(
    server: PrivateServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    async def counted(scheduler: Scheduler, *queues: Any) -> None:
        try:
            await recheck(scheduler, *queues)
        except delayq.ServerRefused:
            looks.append("refused")
            raise

    recheck = Scheduler.recheck
    monkeypatch.setattr(Scheduler, "recheck", counted)
    async with (
        granted(server, rules_of("delayed", "producer")) as url,
        delayq.connect(url, resync_interval=1) as client,
    ):
        for count in (1, 2, 3):
            # Before anything else was looked at.
            queue = client.delayed_queue(NAME)
            await until(lambda: len(looks), equals=count)
            await queue.aclose()
    assert "no permission to move" in caplog.text
    assert "re-checking" not in caplog.text


async def test_a_prefix_covers_its_queues_and_no_others(server: PrivateServer) -> None:
    rules = acl_rules("producer", delayed=["shop:"], reliable=["shop:"], prefix=True)
    async with granted(server, rules) as url, delayq.connect(url) as client:
        await client.delayed_queue("shop:orders").offer(1)
        await client.reliable_queue("shop:orders").offer(1)
        for queue in (client.delayed_queue("shops"), client.reliable_queue("shops")):
            with pytest.raises(delayq.ServerRefused):
                await queue.offer(1)


# Names, and others that they would match or reach if they were taken for patterns or rules.
NAMES = {
    "a*": ("abc", "a"),
    "a?c": ("abc", "aXc"),
    "a[bc]": ("ab",),
    "a\\*": ("a\\b", "a*", "a"),
    "[^a]": ("b",),
    "{t}:*": ("{t}:x",),
    **dict.fromkeys(("ä", '"', "'", "~a", "a&b", "%R~x", "a]"), ("a", "b")),
}


async def test_a_name_is_not_taken_for_a_pattern(server: PrivateServer) -> None:
    for name, others in NAMES.items():
        async with (
            granted(server, acl_rules("producer", delayed=[name], reliable=[name])) as url,
            delayq.connect(url) as client,
        ):
            await client.delayed_queue(name).offer(1)
            await client.reliable_queue(name).offer(1)
            for other in others:
                for queue in (client.delayed_queue(other), client.reliable_queue(other)):
                    with pytest.raises(delayq.ServerRefused):
                        await queue.offer(1)


async def test_another_database_needs_one_more_rule(server: PrivateServer) -> None:
    rules = acl_rules("producer", reliable=[NAME], database=1)
    async with granted(server, rules) as url, delayq.connect(f"{url}?db=1") as client:
        await client.reliable_queue(NAME).offer(1)
    async with granted(server, acl_rules("producer", reliable=[NAME])) as url:
        with pytest.raises(delayq.ServerRefused, match="select"):
            await delayq.connect(f"{url}?db=1").__aenter__()


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


async def test_on_a_cluster_each_role_works_and_reaches_nothing_else(cluster: TestCluster) -> None:
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
