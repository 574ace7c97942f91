"""The number of partitions is chosen when a queue is created, and stays while anything is in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Limit, Offer
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.store import ReliableStore
from tests.support.reliable_fixtures import raw
from tests.support.reliable_store import HOUR

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delayq import Message, ReliableQueue
    from tests.support.servers import PrivateServer

    Jobs = ReliableQueue[int]
    Clear = Callable[[], Awaitable[object]]

__all__ = ["raw"]

pytestmark = pytest.mark.every_server

KEYS = [ReliableKeys.of("jobs", partition=n) for n in range(4)]


@pytest.fixture
async def jobs(client: delayq.Client) -> Jobs:
    return client.reliable_queue("jobs", partitions=4)


@pytest.fixture
async def stale(
    server: PrivateServer, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Jobs]:
    """The queue as a process sees it that hears of no change."""
    await jobs.stats()
    async with delayq.connect(server.url, resync_interval=HOUR) as client:
        queue: Jobs = client.reliable_queue("jobs")
        await queue.stats()
        monkeypatch.setattr(queue._open.settings, "on_change", lambda: None)
        yield queue


async def copies(raw: Any, count: int) -> list[dict[bytes, bytes]]:
    return [await raw.hgetall(ReliableKeys.of("jobs", partition=n).settings) for n in range(count)]


async def take(jobs: Jobs) -> Message[int]:
    (message,) = await jobs.claim(wait=60)
    return message


async def leave_a_message(jobs: Jobs, raw: Any) -> Clear:
    id = await jobs.offer(1, HOUR)  # noqa: A001
    return lambda: jobs.cancel(id)


async def leave_a_lease(jobs: Jobs, raw: Any) -> Clear:
    await jobs.offer(1)
    return (await take(jobs)).ack


async def leave_a_cancelled_message(jobs: Jobs, raw: Any) -> Clear:
    await jobs.configure(limit=Limit(concurrency=10))
    await jobs.offer(1)
    message = await take(jobs)
    assert await jobs.cancel(message.id, running=True)

    async def end() -> None:
        for keys in KEYS:
            for name in await raw.zrange(keys.kept_slots, 0, -1):
                await raw.zadd(keys.kept_slots, {name: 1})

    return end


async def leave_a_dead_letter(jobs: Jobs, raw: Any) -> Clear:
    await jobs.offer(1)
    await (await take(jobs)).bury("no")
    return jobs.dead.purge


async def leave_a_schedule(jobs: Jobs, raw: Any) -> Clear:
    await jobs.schedule("nightly", every=HOUR, value=0)
    return lambda: jobs.unschedule("nightly")


async def leave_an_id(jobs: Jobs, raw: Any) -> Clear:
    await jobs.offer(1, id="a", unique_for=HOUR)
    await (await take(jobs)).ack()

    async def forget() -> None:
        for keys in KEYS:
            await raw.zadd(keys.remembered, {"a": 1}, xx=True)

    return forget


async def leave_a_start(jobs: Jobs, raw: Any) -> Clear:
    await jobs.configure(limit=Limit(rate=100, per=HOUR))
    await jobs.offer(1)
    await (await take(jobs)).ack()

    async def forget() -> None:
        for keys in KEYS:
            await raw.delete(keys.named("rate_log"))
            # As it was left when its period had ended.
            await raw.zadd(keys.named("rate_log"), {"\0" + "0000000000000001.00 5 0 1 0": 0})

    return forget


async def leave_a_result(jobs: Jobs, raw: Any) -> Clear:
    await jobs.configure(keep=HOUR)
    await jobs.offer(1)
    await (await take(jobs)).ack()

    async def forget() -> None:
        for keys in KEYS:
            await raw.delete(keys.record_times, keys.records)

    return forget


async def leave_a_pause(jobs: Jobs, raw: Any) -> Clear:
    await jobs.pause()
    return jobs.resume


async def leave_a_group(jobs: Jobs, raw: Any) -> Clear:
    await jobs.groups.set_limit("tenant", Limit(concurrency=1))
    return lambda: jobs.groups.set_limit("tenant", None)


@pytest.mark.parametrize(
    "leave",
    [
        leave_a_message,
        leave_a_lease,
        leave_a_cancelled_message,
        leave_a_dead_letter,
        leave_a_schedule,
        leave_an_id,
        leave_a_start,
        leave_a_result,
        leave_a_pause,
        leave_a_group,
    ],
)
async def test_only_a_queue_with_nothing_in_it_gets_another_number(
    jobs: Jobs, raw: Any, leave: Callable[[Jobs, Any], Awaitable[Clear]]
) -> None:
    clear = await leave(jobs, raw)
    before = await jobs.settings()
    cure = r"run: delayq repartition jobs --to 3$"
    with pytest.raises(delayq.ConfigurationError, match=cure) as caught:
        await jobs.configure(partitions=3, max_size=7)
    assert "\n" not in str(caught.value)
    assert await jobs.settings() == before
    await clear()
    late = await jobs._open.settings.read()
    await jobs.configure(partitions=3, max_size=7)
    # A client that has read the settings before writes a copy afterwards.
    client = jobs._open.partitions[0].store.client
    await ReliableStore(client, KEYS[3]).copy_settings(late, 3)
    truth, *others = await copies(raw, 4)
    assert (truth[b"partitions"], truth[b"max_size"]) == (b"3", b"7")
    limits = (b"share", b"turns_updated_to")
    assert others.pop().keys() == {b"epoch"}
    fields = [{k: v for k, v in copy.items() if k not in limits} for copy in (truth, *others)]
    assert fields == [fields[0]] * 3


async def test_every_first_call_finds_messages_that_other_clients_have_placed(
    jobs: Jobs, server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was learnt by another call does not help."""
    await jobs.stats()
    calls: list[tuple[Callable[[Jobs], Awaitable[Any]], Callable[[Any], Any]]] = [
        (lambda queue: queue.get("m3"), bool),
        (lambda queue: queue.reschedule_many(["m3", "m4"], HOUR), all),
        (lambda queue: queue.cancel_many(["m3", "m4"]), all),
        (lambda queue: queue.schedule("often", every=HOUR, value=1), bool),
        (lambda queue: queue.unschedule("often"), bool),
        (lambda queue: queue.stats(), lambda depth: depth.delayed == 48),
        (lambda queue: queue.list("delayed"), lambda found: len(found) == 48),
        (lambda queue: queue.groups.pause("tenant"), lambda _: True),
        (lambda queue: queue.groups.resume("tenant"), bool),
        (lambda queue: queue.pause(), lambda _: True),
        (lambda queue: queue.resume(), bool),
        (lambda queue: queue.purge(), lambda dropped: dropped == 48),
    ]
    clients = [await delayq.connect(server.url, resync_interval=HOUR).__aenter__() for _ in calls]
    queues: list[Jobs] = [client.reliable_queue("jobs") for client in clients]
    for queue in queues:
        await queue.stats()
        monkeypatch.setattr(queue._open.settings, "on_change", lambda: None)
    await jobs.configure(partitions=9)
    await jobs.offer_many([Offer(n, delay=HOUR, id=f"m{n}") for n in range(50)])
    for queue, (call, is_right) in zip(queues, calls, strict=True):
        assert is_right(await call(queue))
    for client in clients:
        await client.aclose()


async def test_offers_race_with_a_change_and_none_is_lost(jobs: Jobs, stale: Jobs) -> None:
    for turn in range(10):
        offers = [asyncio.create_task(stale.offer(1, HOUR, id=f"m{n}")) for n in range(20)]
        change = asyncio.create_task(jobs.configure(partitions=2 + turn))
        assert await asyncio.gather(*offers) == [f"m{n}" for n in range(20)]
        await asyncio.wait({change})
        assert isinstance(change.exception(), delayq.ConfigurationError | None)
        assert await jobs.cancel_many([f"m{n}" for n in range(20)]) == [True] * 20


@pytest.mark.parametrize("dies_in", ["vacate", "renumber"])
async def test_a_change_that_is_given_up_or_never_ended_holds_up_nobody(
    jobs: Jobs, stale: Jobs, raw: Any, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    before = await jobs.settings()
    hanging = asyncio.Event()

    async def hang(*_: Any) -> None:
        hanging.set()
        await asyncio.sleep(HOUR)

    with monkeypatch.context() as patch:
        patch.setattr(ReliableStore, "vacate", hang)
        changing = asyncio.create_task(jobs.configure(partitions=8))
        await hanging.wait()
        if dies_in == "renumber":
            # It cannot even tell the server.
            patch.setattr(ReliableStore, "renumber", hang)
            settings = ReliableKeys.of("jobs").settings
            token = (await raw.hget(settings, "renumbering")).split()[0]
            await raw.hset(settings, "renumbering", token + b" 1")
        changing.cancel()
        await asyncio.wait({changing})
        assert len(await stale.offer_many([Offer(n) for n in range(40)])) == 40
    assert await jobs.settings() == before
    assert sum([len(await jobs.claim(100, wait=1)) for _ in range(4)]) == 40
