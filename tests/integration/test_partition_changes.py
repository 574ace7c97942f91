"""The number of partitions changes while the queue is in use."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Limit, Offer
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.placement import home_of, partition_of
from delayq._reliable.store import ReliableStore
from tests.integration.test_partitioned_queue import handled
from tests.support.reliable_store import HOUR
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delayq import ReliableQueue
    from delayq._reliable.settings import StoredSettings
    from tests.support.servers import PrivateServer


@pytest.fixture
async def jobs(client: delayq.Client) -> ReliableQueue[int]:
    return client.reliable_queue("jobs")


@pytest.fixture
async def stale(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ReliableQueue[int]]:
    """The queue as a process sees it that knows one partition and hears of no change."""
    async with delayq.connect(server.url, resync_interval=HOUR) as client:
        queue: ReliableQueue[int] = client.reliable_queue("jobs")
        await queue.stats()
        monkeypatch.setattr(queue._open.settings, "on_change", lambda: None)
        yield queue


def ids_that_move(before: int, after: int) -> list[str]:
    """Return ids that are placed in other partitions after the change."""
    names = (f"m{n}" for n in range(100))
    return [name for name in names if partition_of(name, before) != partition_of(name, after)]


async def copies(raw: Any, count: int) -> list[dict[bytes, bytes]]:
    return [await raw.hgetall(ReliableKeys.of("jobs", partition=n).settings) for n in range(count)]


async def test_all_messages_of_a_queue_that_grows_are_handled_once(
    jobs: ReliableQueue[int], server: PrivateServer
) -> None:
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(50)])
    async with delayq.connect(server.url) as other:
        theirs: ReliableQueue[int] = other.reliable_queue("jobs", lease=60)
        handling = asyncio.create_task(handled(theirs, 250))
        for at, partitions in ((50, 4), (150, 16)):
            await jobs.configure(partitions=partitions)
            await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(at, at + 100)])
        assert sorted(await handling) == list(range(250))
    stats = await jobs.stats()
    assert (stats.ready, stats.delayed, stats.leased) == (0, 0, 0)


async def test_what_was_placed_by_a_former_number_is_found_by_its_id(
    client: delayq.Client,
) -> None:
    queue: ReliableQueue[int] = client.reliable_queue("jobs", dedup_window=60)
    await queue.offer_many([Offer(n, id=name) for n, name in enumerate(("taken", "d1", "d2"))])
    taken, *buried = await queue.claim(3)
    await taken.ack()
    for message in buried:
        await message.bury("no")
    names = [f"m{n}" for n in range(6)]
    await queue.offer_many([Offer(n, delay=HOUR, id=name) for n, name in enumerate(names)])
    await queue.schedule("nightly", every=HOUR, value=0)
    await queue.configure(partitions=9)
    with pytest.raises(delayq.DuplicateMessage):
        await queue.offer(1, id="taken")
    assert await queue.dead.redrive(["d1"]) == 1
    assert await queue.dead.purge(["d2"]) == 1
    assert await queue.cancel("d1")
    for name in names[:3]:
        assert await queue.reschedule(name, 2 * HOUR)
        with pytest.raises(delayq.DuplicateMessage):
            await queue.offer(1, id=name)
        assert await queue.offer(1, id=name, on_duplicate="ignore") == name
    assert await queue.offer(-1, HOUR, id="m3", on_duplicate="replace") == "m3"
    replaced = await queue.get("m3")
    assert replaced is not None
    assert replaced.value == -1
    with pytest.raises(delayq.DuplicateMessage) as caught:
        await queue.offer_many([Offer(1, delay=HOUR, id=name) for name in ("m4", "new", "m5")])
    assert (caught.value.ids, caught.value.stored) == (("m4", "m5"), ("new",))
    for name in names:
        assert await queue.cancel(name)
    # A schedule stays where it is, too.
    await queue.schedule("nightly", every=HOUR, value=0)
    assert len(await queue.schedules()) == 1
    assert (await queue.stats()).delayed == 2
    assert await queue.pause_schedule("nightly")
    assert await queue.resume_schedule("nightly")
    assert await queue.unschedule("nightly")


async def test_clients_that_were_not_told_find_everything(
    jobs: ReliableQueue[int], stale: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call asks the wrong partition first, whatever was learnt by the one before."""
    name = next(name for name in ids_that_move(1, 4) if home_of(name, 4))
    settings = stale._open.settings
    old, partitions = settings.stored, stale._open.partitions[:1]
    await jobs.configure(partitions=4)
    await jobs.offer(1, HOUR, id=name)
    await jobs.schedule(name, every=HOUR, value=1)
    await jobs.offer_many([Offer(n) for n in range(40)])
    many = [f"o{n}" for n in range(200)]
    calls: list[tuple[Callable[[], Awaitable[Any]], Callable[[Any], Any]]] = [
        # The first one leaves alone, and is refused. The others wait behind it.
        (lambda: asyncio.gather(*(stale.offer(1, HOUR, id=name) for name in many)), bool),
        (lambda: jobs.cancel_many(many), all),
        (lambda: stale.offer_many([Offer(1, delay=HOUR, id=name) for name in many]), bool),
        (lambda: jobs.cancel_many(many), all),
        (lambda: stale.get(name), bool),
        (lambda: stale.reschedule(name, HOUR), bool),
        (lambda: stale.cancel(name), bool),
        (lambda: stale.schedule(name, every=HOUR, value=1), bool),
        (lambda: stale.unschedule(name), bool),
        (stale.stats, lambda depth: depth.ready == 40),
        (lambda: stale.list("ready"), lambda found: len(found) == 40),
        (stale.pause, lambda result: result is None),
        (stale.purge, lambda dropped: dropped == 40),
    ]
    for call, is_right in calls:
        monkeypatch.setattr(settings, "stored", old)
        monkeypatch.setattr(stale._open, "partitions", partitions)
        assert is_right(await call())
    await jobs.offer_many([Offer(n) for n in range(40)])
    assert await jobs.claim(40) == []


async def test_only_an_empty_queue_shrinks(jobs: ReliableQueue[int], raw: Any) -> None:
    await jobs.configure(partitions=4)
    await jobs.offer(1, HOUR)
    await jobs.schedule("nightly", every=HOUR, value=0)
    before = await copies(raw, 4)
    with pytest.raises(delayq.ConfigurationError, match=r"is not empty.*2 partitions.*purge"):
        await jobs.configure(partitions=2, max_size=1)
    assert await copies(raw, 4) == before
    await jobs.purge("all")
    with pytest.raises(delayq.ConfigurationError, match="unschedule what recurs"):
        await jobs.configure(partitions=2)
    assert await jobs.unschedule("nightly")
    assert (await jobs.configure(partitions=2)).partitions == 2
    # No client with the old settings reaches a partition that has gone.
    epochs = {copy[b"epoch"] for copy in await copies(raw, 4)}
    assert before[0][b"epoch"] not in epochs


async def test_a_change_that_is_cancelled_leaves_nothing_behind(
    jobs: ReliableQueue[int], raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.configure(partitions=4, max_size=100)
    before = await copies(raw, 4)
    calls = itertools.count()
    configure = ReliableStore.configure

    async def counted(self: ReliableStore, expected: str, new: StoredSettings) -> str:
        if next(calls) == 3:
            changing.cancel()
            await asyncio.sleep(0)
        return await configure(self, expected, new)

    monkeypatch.setattr(ReliableStore, "configure", counted)
    changing = asyncio.create_task(jobs.configure(partitions=8, dedup_window=60))
    with pytest.raises(asyncio.CancelledError):
        await changing

    async def are_repaired() -> bool:
        truth, *others = await copies(raw, 4)
        said = {**truth, b"epoch": b""} == {**before[0], b"epoch": b""}
        return said and others == [truth] * 3 and truth[b"epoch"] != before[0][b"epoch"]

    await until(are_repaired)
    await jobs.offer_many([Offer(n) for n in range(100)])


async def test_a_group_without_messages_keeps_its_settings(jobs: ReliableQueue[int]) -> None:
    before, after = 8, 2
    await jobs.configure(partitions=before)
    groups = (f"tenant {n}" for n in range(100))
    moving = (name for name in groups if home_of(name, before) != home_of(name, after))
    limited, paused, reset = names = [*itertools.islice(moving, 3)]
    await jobs.groups.set_limit(limited, Limit(concurrency=3, rate=100))
    await jobs.groups.set_limit(paused, Limit(concurrency=2))
    await jobs.groups.pause(paused)
    await jobs.groups.set_limit(reset, Limit(concurrency=1))
    await jobs.configure(partitions=after)
    assert (await jobs.groups.get(limited)).limit == Limit(concurrency=3, rate=100)
    found = await jobs.groups.get(paused)
    assert (found.limit, found.paused) == (Limit(concurrency=2), True)
    # Nothing is left where they were: neither in the list, nor after they have moved back.
    assert sorted(group.name for group in await jobs.groups.list()) == sorted(names)
    await jobs.groups.set_limit(reset, None)
    await jobs.configure(partitions=before)
    assert (await jobs.groups.get(reset)).limit is None
    await jobs.offer_many([Offer(1, group=paused), Offer(2, group=limited)])
    assert [message.value for message in await jobs.claim(10)] == [2]
