"""A queue is moved to another number of partitions, with everything in it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import DuplicateMessage, Limit, NoResult, Offer
from delayq._redis.client import RedisClient
from delayq._redis.error_reader import SettingsChanged
from delayq._reliable.ids import home_of
from delayq._reliable.keys import MESSAGES, ReliableKeys
from delayq._reliable.moved_partition import ASIDE, MovedPartition
from delayq._reliable.store import ReliableStore
from delayq.admin.acl import acl_rules
from delayq.admin.reliable import ReliableInspector
from delayq.errors import ConfigurationError, ServerRefused, ServerUnavailable
from tests.integration.test_acl import granted
from tests.support.depth import nightly
from tests.support.reliable import all_values
from tests.support.reliable_fixtures import faults
from tests.support.reliable_store import HOUR, REPORTS
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from delayq import Client, Message
    from delayq._reliable.mover import Repartition
    from delayq._reliable.settings import StoredSettings
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer

__all__ = ["faults"]

Jobs = delayq.ReliableQueue[Any]
SETTINGS: dict[str, Any] = {
    "lease": HOUR,
    "max_attempts": None,
    "dedup_window": HOUR,
    "keep": HOUR,
    "group_limit": Limit(concurrency=2),
    "backoff": delayq.Backoff.exponential(base=0.001, max=0.001),
}
GROUPS = tuple(f"tenant-{n}" for n in range(5))


async def take(jobs: Jobs, count: int) -> list[Message[Any]]:
    """Claim so many messages, which lie in several partitions."""
    taken: list[Message[Any]] = []
    while len(taken) < count:
        taken += await jobs.claim(count - len(taken), wait=60)
    return taken


async def fill(jobs: Jobs) -> None:
    """Store messages of every kind, dead letters, schedules, results and settings of groups."""
    due = datetime.now(UTC) + timedelta(hours=2)
    await jobs.offer_many([Offer("taken", id=f"taken-{n}") for n in range(8)])
    for message in await take(jobs, 8):
        n = int(message.id[-1])
        if n % 2:
            await message.ack(n)
        else:
            await message.bury(f"no good {n}")
    # A second dead letter with the same id.
    await jobs.offer("again", id="taken-0")
    await (await take(jobs, 1))[0].bury("no good again")
    await jobs.offer_many([Offer("retried", id=f"retried-{n}") for n in range(4)])
    for message in await take(jobs, 4):
        await message.nack(delay=HOUR, error=f"failed {message.id}")
    await jobs.offer_many(
        [
            *(Offer(n, delay=HOUR + n) for n in range(20)),
            *(Offer(n, id=f"own-{n}", priority=n, headers={"n": str(n)}) for n in range(6)),
            *(Offer(n, at=due, ttl=3 * HOUR, id=f"once-{n}", unique_for=HOUR) for n in range(4)),
            *(Offer(n, group=group) for group in GROUPS for n in range(4)),
            *(
                Offer(n, group=group, id=f"{group}/{n}", delay=HOUR)
                for group in GROUPS
                for n in (1, 2)
            ),
        ]
    )
    await jobs.groups.set_limit(GROUPS[1], Limit(concurrency=1))
    await jobs.groups.pause(GROUPS[2])
    for n in range(4):
        await jobs.schedule(f"report-{n}", every=HOUR, value=n)


async def view(jobs: Jobs) -> dict[str, Any]:
    """Return everything that users see of a queue."""

    def shown(message: Message[Any]) -> tuple[Any, ...]:
        return (message.id, message.value, message.attempt, message.due_at, message.enqueued_at,
                message.headers, message.group)  # fmt: skip

    stats = await jobs.stats()
    messages = {state: await jobs.list(state) for state in ("ready", "delayed", "leased")}
    refused = []
    for n in range(8):
        try:
            await jobs.offer("again", id=f"taken-{n}")
            assert await jobs.cancel(f"taken-{n}")
        except DuplicateMessage:
            refused.append(n)
    return {
        "counts": (stats.ready, stats.delayed, stats.leased, stats.dead, stats.paused),
        "messages": {state: sorted(map(shown, found)) for state, found in messages.items()},
        "by id": [shown(message) for n in range(6) if (message := await jobs.get(f"own-{n}"))],
        "dead": [(x.id, x.value, x.error, x.reason) for x in await jobs.dead.list()],
        "schedules": sorted((x.name, x.next_at) for x in await jobs.schedules()),
        "groups": [*await jobs.groups.list()],
        "results": [await jobs.result(f"taken-{n}") for n in (1, 3, 5, 7)],
        "histories": [await jobs.history(f"taken-{n}") for n in range(8)],
        "refused": refused,
        "limits": (await jobs.settings()).group_limit,
    }


async def contents(raw: Any) -> dict[bytes, Any]:
    """Return what every key of a queue in one partition has, and whether it expires, except for its
    settings and calls, and for the reports of clients.
    """
    keys = [key async for key in raw.scan_iter("delayq:{jobs}:*")]
    kinds = {key: await raw.type(key) for key in keys}

    async def content(key: bytes) -> Any:
        if kinds[key] == b"hash":
            return await raw.hgetall(key)
        return await raw.zrange(key, 0, -1, withscores=True)

    return {
        key: (await content(key), await raw.pttl(key) > 0)
        for key in sorted(keys)
        if not key.endswith((b":settings", b":paused", *REPORTS)) and b":call:" not in key
    }


@pytest.mark.every_server
async def test_an_admin_moves_a_queue_and_it_has_what_it_had_before(
    client: Client, server: PrivateServer, raw: Any
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=1, **SETTINGS)
    await fill(jobs)
    before, stored = await view(jobs), await contents(raw)
    rules = acl_rules("admin", reliable=["jobs"], partitions=7)
    # Each key is moved, or has nothing that depends on the number of partitions.
    keys = {field.name for field in fields(ReliableKeys) if field.type == "str"} | {*MESSAGES}
    stay = {"name", "wake", "summons", "paused", "history", "workers", "worker_facts", "settings"}
    assert keys - {*ASIDE} == stay
    for partitions in (4, 7, 2, 1):
        async with granted(server, rules) as url, delayq.connect(url) as admin:
            result = await ReliableInspector.of(admin, "jobs").repartition(partitions)
        aside = [name for name in ASIDE if await raw.exists(ReliableKeys.of("jobs").aside(name))]
        assert aside == []
        assert result.moved == sum(before["counts"][:3])
        assert (await jobs.settings()).partitions == partitions
        assert await view(jobs) == before, partitions
    assert await contents(raw) == stored
    await jobs.groups.resume(GROUPS[2])
    handled: list[Any] = []
    while messages := await jobs.claim(50):
        for message in messages:
            handled.append((message.group, message.value))
            await message.ack()
    for group in GROUPS:
        assert [value for name, value in handled if name == group] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "step", [12, 40, 82, *map(nightly, range(1, 301, 2)), *map(nightly, range(150, 300, 4))]
)
async def test_a_move_that_is_interrupted_anywhere_is_continued(
    step: int, client: Client, server: PrivateServer, faults: Faults
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=2, **SETTINGS)
    await fill(jobs)
    before = await view(jobs)
    calls = 0

    def fail(*_: object) -> str | None:
        nonlocal calls
        calls += 1
        if calls == step and step % 2:
            # This call is carried out, and is the last one.
            return "lost"
        if calls >= step:
            raise asyncio.CancelledError
        return None

    async with delayq.connect(server.url) as other:
        faults.plan = fail
        with contextlib.suppress(asyncio.CancelledError):
            await ReliableInspector.of(other, "jobs").repartition(3)
        faults.plan = lambda *_: None
    await ReliableInspector.of(client, "jobs").repartition(3)
    assert await view(jobs) == before


@pytest.mark.parametrize("knows_of_it", [True, False])
async def test_a_server_that_fails_over_and_has_set_nothing_aside_is_looked_after(
    knows_of_it: bool, client: Client, raw: Any, faults: Faults
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=4, **SETTINGS)
    await fill(jobs)
    before = await view(jobs)

    def fail(name: str, count: int) -> None:
        # Before the third step: begin, close, move.
        if name == "reliable/repartition" and count == 3:
            raise asyncio.CancelledError

    faults.plan = fail
    with pytest.raises(asyncio.CancelledError):
        await ReliableInspector.of(client, "jobs").repartition(2)
    for keys in (ReliableKeys.of("jobs", partition=place) for place in (2, 1)[: 2 - knows_of_it]):
        for name in ASIDE:
            with contextlib.suppress(Exception):
                await raw.rename(keys.aside(name), keys.named(name))
        if not knows_of_it:
            await raw.hdel(keys.settings, "aside")
    await ReliableInspector.of(client, "jobs").repartition(2)
    assert await view(jobs) == before


@pytest.mark.parametrize("script", ["nothing", "receive_letters", "drop"])
async def test_messages_of_the_same_id_in_several_groups_are_all_kept(
    script: str, client: Client, faults: Faults
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=2, **SETTINGS)
    groups = [next(x for x in map(str, range(99)) if home_of(x, 2) == n) for n in (0, 1)]
    for group in groups:
        await jobs.offer(f"dead {group}", id="same", group=group)
    for message in await take(jobs, 2):
        await message.bury("bad")
    for group in groups:
        await jobs.offer_many([Offer(f"{group} {n}", id=f"{n}", group=group) for n in range(3)])
    for message in await take(jobs, 4):
        await message.nack()
    for nth in (0, 3, 9, 12, 15, 16, 21, 26, 31):
        interrupted_at = nth

        def fail(name: str, count: int) -> None:
            if name == f"reliable/{script}" and count > interrupted_at:  # noqa: B023
                raise asyncio.CancelledError

        faults.plan, faults.calls = fail, []
        with contextlib.suppress(asyncio.CancelledError):
            await ReliableInspector.of(client, "jobs").repartition(1)
    faults.plan = lambda *_: None
    await ReliableInspector.of(client, "jobs").repartition(1)
    dead = [(letter.value, letter.reason) for letter in await jobs.dead.list()]
    values = await all_values(jobs)
    buried = {value for value, reason in dead if "id was taken" in reason}
    assert sorted([*values, *buried]) == sorted(
        f"{group} {n}" for group in groups for n in range(3)
    )
    assert {(f"dead {group}", "bad") for group in groups} <= {*dead}
    assert len(dead) == 5


async def test_while_a_queue_is_moved_nothing_is_stored_and_nothing_seems_to_be_gone(
    client: Client, server: PrivateServer, faults: Faults
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", **SETTINGS)
    await jobs.offer(1, id="one", delay=HOUR)
    await jobs.schedule("nightly", every=HOUR, value=1)
    waits = asyncio.create_task(jobs.result("one"))

    def fail(name: str, _: int) -> None:
        if name == "reliable/receive":
            raise asyncio.CancelledError

    faults.plan = fail
    with pytest.raises(asyncio.CancelledError):
        await ReliableInspector.of(client, "jobs").repartition(4)
    async with delayq.connect(server.url, retry_for=0) as other:
        hasty: Jobs = other.reliable_queue("jobs", **SETTINGS)
        for call in (
            lambda: hasty.offer(2),
            lambda: hasty.cancel("one"),
            lambda: hasty.reschedule("one", 1),
            lambda: hasty.get("one"),
            lambda: hasty.history("one"),
            lambda: hasty.result("one", timeout=0),
            lambda: hasty.list("delayed"),
            hasty.stats,
            hasty.schedules,
            lambda: hasty.schedule("hourly", every=HOUR, value=2),
            lambda: hasty.pause_schedule("nightly"),
            lambda: hasty.unschedule("nightly"),
            hasty.purge,
            hasty.pause,
            hasty.resume,
            hasty.dead.list,
            hasty.dead.redrive,
            lambda: hasty.dead.purge(["one"]),
            hasty.groups.list,
            lambda: hasty.configure(max_size=9),
            lambda: ReliableInspector.of(client, "jobs").remove(),
        ):
            with pytest.raises(ServerUnavailable, match="being moved to 4 partitions"):
                await call()
    with pytest.raises(ConfigurationError, match="delayq repartition jobs --to 4"):
        await ReliableInspector.of(client, "jobs").repartition(8)
    faults.plan = lambda *_: None
    waiting = asyncio.create_task(jobs.offer(2, id="two"))
    await ReliableInspector.of(client, "jobs").repartition(4)
    assert await waiting == "two"
    assert [schedule.name for schedule in await jobs.schedules()] == ["nightly"]
    assert not waits.done()
    assert await jobs.cancel_many(["one", "two"]) == [True, True]
    with pytest.raises(NoResult):
        await waits


@pytest.mark.parametrize("step", ["repartition", "copy_settings", "pause_for_move"])
@pytest.mark.parametrize("failure", ["cancelled", "error", "errors"])
async def test_a_move_can_be_given_up_until_workers_have_finished(
    failure: str,
    step: str,
    client: Client,
    server: PrivateServer,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=2, **SETTINGS)
    await jobs.offer_many([Offer(1), Offer(2)])
    message = (await take(jobs, 1))[0]
    failed, taken, begin = False, set[tuple[str, int]](), MovedPartition.take

    async def begin_and_note(partition: MovedPartition, settings: StoredSettings) -> None:
        await begin(partition, settings)
        taken.add((settings.epoch, partition.number))

    monkeypatch.setattr(MovedPartition, "take", begin_and_note)

    def fail(name: str, _: int) -> None:
        nonlocal failed
        if (name == f"reliable/{step}" and not failed) or (failed and failure == "errors"):
            failed = True
            if failure != "cancelled":
                raise ServerRefused("the user may not")
            move.cancel()

    async with delayq.connect(server.url) as other:
        faults.plan = fail
        move = asyncio.create_task(ReliableInspector.of(other, "jobs").repartition(3))
        with pytest.raises((asyncio.CancelledError, ServerRefused)) as error:
            await move
        faults.plan = lambda *_: None
    if failure == "errors" and step != "repartition":
        assert "stays paused; continue with: delayq repartition jobs --to 3" in str(error.value)
        assert "give it up with: delayq repartition jobs --to 2" in str(error.value)
        await ReliableInspector.of(client, "jobs").repartition(2)
    # A call of the move that arrives only now pauses nothing.
    for epoch, number in taken if step != "repartition" else ():
        if epoch != min(taken)[0]:
            continue
        keys = ReliableKeys.of("jobs", partition=number)
        late = MovedPartition(ReliableStore(client.session.server, keys), number)
        late._epoch = epoch
        with pytest.raises(SettingsChanged):
            await late.pause()
    assert not (await jobs.stats()).paused
    states: list[Repartition] = []
    move = asyncio.create_task(
        ReliableInspector.of(client, "jobs").repartition(1, progress=states.append)
    )
    await until(lambda: bool(states))
    assert (states[-1].phase, states[-1].running) == ("waiting", 1)
    # An operator cannot end the pause meanwhile.
    with pytest.raises(ServerUnavailable, match="being moved to 1 partitions"):
        await jobs.resume()
    await message.ack()
    await move
    assert (await jobs.settings()).partitions == 1
    assert len(await all_values(jobs)) == 1


async def test_a_move_waits_for_the_handler_of_a_cancelled_message(client: Client) -> None:
    jobs: Jobs = client.reliable_queue("jobs", **SETTINGS)
    await jobs.offer_many([Offer(n, group="tenant") for n in range(3)])
    message = (await jobs.claim())[0]
    assert await jobs.cancel(message.id, running=True)
    states: list[Repartition] = []
    move = asyncio.create_task(
        ReliableInspector.of(client, "jobs").repartition(2, progress=states.append)
    )
    await until(lambda: bool(states))
    assert (states[-1].phase, states[-1].running) == ("waiting", 1)
    with pytest.raises(delayq.LeaseLost):
        await message.ack()
    await move
    assert sorted(await all_values(jobs)) == [1, 2]


async def test_a_queue_that_was_paused_is_paused_after_the_move(
    client: Client, server: PrivateServer
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", **SETTINGS)
    await jobs.offer(1)
    await jobs.pause()
    a_minute_ago = f"{int(time.time()) - 60}000"
    server.call("SET", ReliableKeys.of("jobs").paused, a_minute_ago)
    await ReliableInspector.of(client, "jobs").repartition(2)
    assert await jobs.claim() == []
    # Since the first pause.
    await jobs.pause()
    paused_for = (await jobs.stats()).paused_for
    assert paused_for is not None
    assert paused_for >= 60
    # As earlier releases paused it.
    await jobs.resume()
    server.call("SET", ReliableKeys.of("jobs").paused, "1")
    stats = await jobs.stats()
    assert (stats.paused, stats.paused_for) == (True, None)
    await jobs.resume()
    assert await all_values(jobs) == [1]


@dataclass
class Process:
    """A process that moves the queue, and stands still before one of its calls."""

    client: Client
    move: asyncio.Task[Repartition]
    stops: asyncio.Event
    goes_on: asyncio.Event

    async def fails(self) -> None:
        """Let it go on, and assert that it then finds that another one has taken over."""
        if not self.move.done():
            self.goes_on.set()
            with pytest.raises(ServerUnavailable, match="taken over"):
                await self.move


@pytest.fixture
async def processes(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[int, int | str], Awaitable[Process]]]:
    """Start a process that moves the queue to a number of partitions, and stands still before the
    call of a number, or the first one of a name.
    """
    started: dict[object, tuple[Process, int | str, Iterator[int]]] = {}
    attempt = RedisClient._attempt

    async def attempt_or_wait(server: RedisClient, key: str | None, call: Any) -> Any:
        process, stop, numbers = started.get(server, (None, 0, iter(())))
        if process and stop in (next(numbers), call.script and call.script.name):
            process.stops.set()
            await process.goes_on.wait()
        return await attempt(server, key, call)

    monkeypatch.setattr(RedisClient, "_attempt", attempt_or_wait)
    async with contextlib.AsyncExitStack() as clients:

        async def start(partitions: int, stop: int | str) -> Process:
            client = await clients.enter_async_context(delayq.connect(server.url))
            move = asyncio.create_task(ReliableInspector.of(client, "jobs").repartition(partitions))
            process = Process(client, move, asyncio.Event(), asyncio.Event())
            started[client.session.server] = (process, stop, itertools.count(1))
            stops = asyncio.create_task(process.stops.wait())
            await asyncio.wait({stops, move}, return_when=asyncio.FIRST_COMPLETED)
            stops.cancel()
            return process

        yield start
        moves = [process.move for process, _, _ in started.values()]
        for move in moves:
            move.cancel()
        await asyncio.gather(*moves, return_exceptions=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [(150, 9), (9, 97), (9, 240), (9, 271), *(nightly(8, step) for step in range(2, 280))],
)
async def test_a_process_that_stood_still_while_others_took_over_changes_nothing(
    first: int,
    second: int,
    client: Client,
    processes: Callable[[int, int | str], Awaitable[Process]],
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=2, **SETTINGS)
    await fill(jobs)
    before = await view(jobs)
    one = await processes(3, first)
    other = await processes(3, second)
    await one.fails()
    await ReliableInspector.of(client, "jobs").repartition(3)
    # Everything was set aside again.
    back = await processes(2, "reliable/receive")
    await other.fails()
    back.goes_on.set()
    await back.move
    assert await view(jobs) == before


async def test_no_window_of_a_rate_has_too_many_starts_after_a_move(client: Client) -> None:
    rate = Limit(rate=8, per=HOUR)
    jobs: Jobs = client.reliable_queue("jobs", limit=rate, group_limit=Limit(rate=2, per=HOUR))
    await jobs.offer_many([Offer(n, group=f"g{n % 3}") for n in range(20)])
    for partitions in (4, 2, 1):
        for message in await jobs.claim(5):
            await message.ack()
        await ReliableInspector.of(client, "jobs").repartition(partitions)
    while messages := await jobs.claim(5):
        for message in messages:
            await message.ack()
    assert (await jobs.stats()).ready >= 20 - 6


@pytest.mark.nightly
async def test_a_large_queue_is_moved_by_processes_that_are_killed_on_their_way(
    client: Client, server: PrivateServer, raw: Any
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", **SETTINGS)
    await fill(jobs)
    before = await view(jobs)
    count = 200_000
    for first in range(0, count, 1_000):
        await jobs.offer_many(
            [
                Offer(n, id=f"m{n}", delay=2 * HOUR, group=f"g{n % 1000}" if n % 4 == 0 else None)
                for n in range(first, first + 1_000)
            ]
        )

    async def due_times() -> list[Any]:
        return [
            message and message.due_at
            for n in (0, 1, 199_999)
            if (message := await jobs.get(f"m{n}"))
        ]

    due = await due_times()
    command = (sys.executable, "-m", "delayq", "repartition", "jobs", "--to", "8")
    keys = [ReliableKeys.of("jobs", partition=n) for n in range(8)]
    for kill in range(1, 6):
        process = await asyncio.create_subprocess_exec(*command, "--url", server.url)

        async def arrived(kill: int = kill) -> bool:
            counts: list[int] = [await raw.hlen(key.named("bodies")) for key in keys]
            return sum(counts) > kill * count / 6

        await until(arrived, 600)
        process.kill()
        await process.wait()
    process = await asyncio.create_subprocess_exec(*command, "--url", server.url)
    assert await process.wait() == 0
    assert await due_times() == due
    gone = await jobs.cancel_many([f"m{n}" for n in range(count)])
    assert all(gone)
    assert await view(jobs) == before
