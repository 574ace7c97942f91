"""The complete job of each role, to be run as a user who has that role's rights alone.

What each script needs is shown by ``test_rights.py``; this is about all that happens around them.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import delayq
from delayq import Limit, Offer
from delayq._dashboard.sources import DelayedSource, ReliableSource
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.store import POLL_PENDING, TRANSFER
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import CLAIM
from delayq.admin.catalog import list_workers
from delayq.admin.delayed import DelayedInspector
from delayq.admin.migrate import migrate
from delayq.errors import OutcomeUnknown
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq import Client, DelayedQueue, ReliableQueue

NAME = "orders"
DELAYED, RELIABLE = DelayedKeys.of(NAME), ReliableKeys.of(NAME)
# The wording differs between servers, and between a call and a command inside a script.
NOT_PERMITTED = re.compile(
    r"NOPERM|[Pp]ermission|no permission to subscribe|can't run this command|ACL failure"
)
WAIT = 60.0


@dataclass
class Place:
    """The surroundings in which a job runs."""

    client: Client
    helper: Client
    """It may do everything, as may ``raw``."""
    raw: Any
    lose: Callable[[str], None]
    """Drops the reply to the next call of the named script."""

    def theirs(self, **options: Any) -> ReliableQueue[Any]:
        """Return the helper's queue."""
        return self.helper.reliable_queue(NAME, lease=60, **options)

    async def subscribed(self, channel: str, count: int) -> None:
        numsub = lambda: self.raw.pubsub_numsub(channel)
        await until(numsub, equals=[(channel.encode(), count)])

    async def stops_listening(self, channel: str, queue: Any) -> None:
        """Assert that a closed queue receives no notifications, unlike the helper's.

        A client that may not move messages may have stopped listening before.
        """
        await queue.aclose()
        await self.subscribed(channel, 1)


async def delayed_producer(place: Place) -> None:
    theirs, queue = place.helper.delayed_queue(NAME), place.client.delayed_queue(NAME)
    receipts = [await queue.offer(0, 60)]
    receipts += await queue.offer_many([(i, 60 + i) for i in range(1, 9)])
    # At the head, at the tail and in the middle.
    for at in (0, 8, 4):
        assert await receipts[at].cancel()
    # Each is the first to come due, but not before the messages are counted.
    assert await receipts[5].reschedule(40)
    await queue.offer(9, 30)
    assert await theirs.pending.size() == 7
    await place.stops_listening(DELAYED.channel, queue)


async def delayed_consumer(place: Place) -> None:
    theirs: DelayedQueue[Any] = place.helper.delayed_queue(NAME)
    queue: DelayedQueue[Any] = place.client.delayed_queue(NAME)
    raw = place.raw
    # A message that comes due while a caller is waiting, and a value that Java pushes.
    taking = asyncio.create_task(queue.take())
    await theirs.offer("due", 0.05)
    assert await taking == "due"
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0.05)
    await raw.rpush(DELAYED.ready, b'"pushed"')
    assert await taking == "pushed"
    # A message that cannot be read.
    await raw.rpush(DELAYED.ready, b"{")
    with suppress(delayq.DecodeError):
        await queue.poll()
    await until(lambda: raw.llen(DELAYED.quarantine), equals=1)
    # Values that were fetched ahead go back.
    await raw.rpush(DELAYED.ready, *(b"%d" % i for i in range(50)))
    delivery_count = 0
    async with aclosing(queue.__aiter__()) as values:  # type: ignore[type-var]
        async for _ in values:
            delivery_count += 1
            if delivery_count > 20 and await raw.llen(DELAYED.ready) < 50 - delivery_count:
                break
    await until(lambda: raw.llen(DELAYED.ready), equals=50 - delivery_count)
    # Lose a reply while taking for good, then take under a lease.
    place.lose(TRANSFER.name)
    with suppress(OutcomeUnknown):
        await queue.poll()
    assert len(await queue.drain()) == 50 - delivery_count
    await raw.rpush(DELAYED.ready, b"1", b"2", b"3", b"4")
    async with aclosing(queue.deliveries(30)) as deliveries:  # type: ignore[type-var]
        delivery = await anext(deliveries)
        await delivery.extend(60)
        await delivery.ack()
        await (await anext(deliveries)).nack(60)
        with suppress(asyncio.CancelledError):
            async with await anext(deliveries):
                raise asyncio.CancelledError
    drained: list[Any] = []
    while len(drained) < 2:
        drained += await queue.drain()
    await until(lambda: raw.keys("delayq_leased*"), equals=[])
    await place.subscribed(DELAYED.channel, 2)
    await place.stops_listening(DELAYED.channel, queue)


async def delayed_dashboard(place: Place) -> None:
    await place.helper.delayed_queue(NAME).offer_many([(1, 60), (2, 30)])
    await place.raw.rpush(DELAYED.ready, b"3")
    for ordered, first in ((True, 1), (False, 2)):
        queue: DelayedQueue[Any] = place.client.delayed_queue(NAME, ordered_list=ordered)
        assert await queue.pending.size() == 2
        assert await queue.pending.peek() == first
        assert sorted(await queue.pending.read_all()) == [1, 2]
        assert [value for value, _ in await queue.pending.entries()] == [2, 1]
        assert await queue.pending.contains_all([1, 2])
        assert await queue.ready.size() == 1
        assert await queue.ready.read_all() == [3]
        assert await queue.ready.leased() == 0
        await place.stops_listening(DELAYED.channel, queue)
    await place.raw.zadd(DELAYED.leases, {b"token": 2e15})
    await place.raw.hset(DELAYED.leased, b"token", b"4")
    board = DelayedSource(place.client.session, NAME)
    await show(board)
    assert [row.payload for row in (await board.page("leased", 0, 9)).rows] == [b"4"]
    await place.raw.unlink(DELAYED.leases, DELAYED.leased)


async def show(board: DelayedSource | ReliableSource) -> None:
    """Read everything that the dashboard shows of a queue."""
    assert (await board.depth()).delayed == 2
    assert sum(await board.histogram(0)) >= 2
    assert (await board.settings() is None) == (board.kind == "delayed")
    for state in (*board.states, *(("dead",) if board.kind == "reliable" else ())):
        pages = await board.search_pages([state])
        searched = [row for partition in pages for row in await partition.page(0, 9)]
        for row in (await board.page(state, 0, 9)).rows:
            assert row in searched
            if row.ref is not None:
                assert await board.find(row.ref, dead=state == "dead")
                assert state == "dead" or await board.find_live([row.ref])
            if row.ref is not None and isinstance(board, ReliableSource):
                assert await board.find_by_id(row.ref.id.decode())
    if isinstance(board, ReliableSource):
        assert len(await board.letters()) == 1


async def delayed_admin(place: Place) -> None:
    await delayed_dashboard(place)
    theirs, raw = place.helper.delayed_queue(NAME), place.raw
    queue: DelayedQueue[Any] = place.client.delayed_queue(NAME)
    board = DelayedSource(place.client.session, NAME)
    row = (await board.page("delayed", 0, 1)).rows[0]
    assert row.ref is not None
    (is_moved,) = await board.reschedule([row.ref], 10_000_000)
    assert is_moved is not None
    assert await board.cancel([is_moved]) == [True]
    assert await queue.pending.clear()
    assert await queue.ready.clear()
    await theirs.offer_many([(i, 60) for i in range(12)])
    assert await queue.pending.remove(5)
    assert await queue.pending.remove_all([0, 1, 11])
    assert await queue.pending.retain_all(range(10))
    assert await queue.pending.poll() == 2
    assert await queue.pending.poll_many(2) == [3, 4]
    assert await queue.pending.poll_last_and_offer_first_to(NAME) == 9
    # Lose a reply: the messages in it go back.
    place.lose(POLL_PENDING.name)
    with suppress(OutcomeUnknown):
        await queue.pending.poll_many(2)
    await until(theirs.pending.read_all, equals=[6, 7, 8])
    # A record in an outdated form.
    await raw.zadd(DELAYED.timeout, {b"00000001" + (1).to_bytes(8, "little") + b"1": 2e15})
    assert [step.rewritten async for step in migrate(place.client, NAME)][-1] == 1
    assert await queue.pending.expire(3600)
    assert await DelayedInspector.of(place.client, NAME).purge() > 0
    await place.stops_listening(DELAYED.channel, queue)


async def reliable_producer(place: Place) -> None:
    theirs = place.theirs()
    queue = place.client.reliable_queue(NAME, max_size=12, keep=60)
    await queue.offer(1)
    await queue.offer_many([Offer(i, delay=60, priority=i % 3, ttl=600) for i in range(9)])
    await queue.offer(2, id="a", delay=60, unique_for=60)
    await queue.offer(3, id="a", on_duplicate="replace", delay=60)
    (leased,) = await theirs.claim()
    assert not await queue.cancel(leased.id)
    assert await queue.reschedule("a", 5)
    assert await queue.cancel("a")
    await theirs.purge()
    await queue.offer_many([Offer(i, id=f"of {i}", group="tenant") for i in range(3)])
    assert await queue.cancel("of 1")
    await theirs.purge()
    await queue.offer(7, id="done")
    waiting = asyncio.create_task(queue.result("done", timeout=WAIT))
    await until(lambda: place.raw.zscore(RELIABLE.awaited, "done"))
    await (await theirs.claim())[0].ack("result")
    assert await waiting == "result"
    await place.subscribed(RELIABLE.settings, 2)
    await place.stops_listening(RELIABLE.settings, queue)
    # The calls of this job have left nothing behind.
    await theirs.aclose()
    await until(lambda: place.raw.keys(RELIABLE.call("*")), equals=[])


async def reliable_consumer(place: Place) -> None:
    theirs = place.theirs(keep=60, dedup_window=60)
    queue = place.client.reliable_queue(NAME, lease=60, max_attempts=3)
    claiming = asyncio.create_task(queue.claim(wait=WAIT))
    await place.subscribed(RELIABLE.wake, 1)
    await theirs.offer("later", 0.05)
    await (await claiming)[0].ack("result")
    await theirs.offer_many([Offer(i, priority=i % 2, ttl=600) for i in range(8)])
    async with aclosing(queue.__aiter__()) as messages:  # type: ignore[type-var]
        async for message in messages:
            async with message:
                pass
            break
    one, two, three, four, five = await queue.claim(5)
    await one.ack()
    await two.nack(0, "no")
    await three.extend(60)
    await four.bury("why")
    await five.release()
    await theirs.purge("all")
    # Lose a reply.
    await theirs.offer_many([Offer(i, priority=i % 2) for i in range(3)])
    place.lose(CLAIM.name)
    with suppress(OutcomeUnknown):
        await queue.claim(3)
    for message in await queue.claim(3):
        await message.ack()
    # What recurs; the definition changes while a worker has the message.
    await queue.schedule("often", every=0.05, value=1, priority=2, ttl=60)
    (message,) = await queue.claim(wait=WAIT)
    await queue.schedule("often", every=0.05, value=3)
    await message.nack(0)
    assert await queue.pause_schedule("often")
    assert await queue.resume_schedule("often")
    assert await queue.unschedule("often")
    # The same as when a schedule runs out of planned occurrences.
    await queue.schedule("again", cron="* * * * * *", value=1)
    await theirs.purge()
    await queue._open.partitions[0].recurrence.check()
    await queue._open.partitions[0].recurrence._refill("again")
    assert await queue.unschedule("again")
    await theirs.purge("all")
    # Groups that wait for their limits.
    limit = Limit(concurrency=4, rate=40, per=0.1)
    await theirs.configure(limit=limit, group_limit=Limit(concurrency=1, rate=2, per=0.1))
    await theirs.offer_many([Offer(i, group=f"tenant {i % 3}") for i in range(12)])
    handled = 0
    while handled < 12:
        for message in await queue.claim(9, wait=WAIT):
            await message.ack()
            handled += 1
    await queue.aclose()
    worker, events = delayq.Worker(place.client), asyncio.Event()

    @worker.listener(NAME)
    async def handle(value: Any) -> None:
        events.set()

    await theirs.offer("work")
    async with worker:
        await events.wait()
    await worker.run(burst=True)
    await place.subscribed(RELIABLE.settings, 2)
    await place.stops_listening(RELIABLE.settings, place.client.reliable_queue(NAME))


async def reliable_dashboard(place: Place) -> None:
    # A message in each state, a group and a schedule.
    theirs, queue = place.theirs(), place.client.reliable_queue(NAME)
    await theirs.offer_many([Offer(i, priority=i % 2) for i in range(4)])
    dead, _leased = await theirs.claim(2)
    await dead.bury("why", "an error")
    await theirs.configure(keep=60)
    await theirs.offer(8, id="done", priority=9)
    await (await theirs.claim())[0].ack("result")
    await theirs.offer(9, 60)
    await theirs.groups.pause("idle")
    await theirs.schedule("nightly", every=3600, value=1)
    stats = await queue.stats()
    assert (stats.delayed, stats.ready, stats.leased, stats.dead) == (2, 2, 1, 1)
    assert len(await queue.peek(2)) == 2
    assert len(await queue.activity(minutes=2)) == 2
    assert isinstance(await list_workers(place.client, NAME), list)
    for state in ("delayed", "ready", "leased"):
        assert await queue.get((await queue.list(state))[0].id)
    assert await queue.dead.size() == 1
    assert (await queue.dead.list())[0].reason == "why"
    await show(ReliableSource(place.client.session, NAME, 1))
    assert [schedule.name for schedule in await queue.schedules()] == ["nightly"]
    assert [group.name for group in await queue.groups.list()] == ["idle"]
    history = await queue.history("done")
    assert history is not None
    assert history.result == "result"
    await place.subscribed(RELIABLE.settings, 2)
    await place.stops_listening(RELIABLE.settings, queue)


async def reliable_admin(place: Place) -> None:
    await reliable_dashboard(place)
    theirs, queue = place.theirs(), place.client.reliable_queue(NAME)
    await queue.pause()
    assert (await queue.stats()).paused
    assert await queue.resume()
    leased, ready = [(await queue.list(state))[0].id for state in ("leased", "ready")]
    assert not await queue.cancel(leased)
    assert await queue.reschedule(ready, 60)
    assert await queue.bury(ready, "why")
    for message in await theirs.claim(100):
        await message.ack()
    # Hastening a message reaches a waiting consumer at once.
    await theirs.offer("soon", 60, id="hurried")
    claiming = asyncio.create_task(theirs.claim(wait=WAIT))
    await place.subscribed(RELIABLE.wake, 1)
    # The look that follows a subscription must not find it.
    await asyncio.sleep(0.05)
    await queue.reschedule("hurried", 0)
    await (await claiming)[0].bury("why")
    assert await queue.dead.redrive(["hurried", "no such"]) == 1
    assert await queue.dead.redrive() == 2
    for ids in (None, ["hurried"]):
        for message in await theirs.claim(9):
            await message.bury("why")
        assert await queue.dead.purge(ids) > 0
        await theirs.offer(1, id="hurried", on_duplicate="ignore")
    assert await queue.pause_schedule("nightly")
    assert await queue.resume_schedule("nightly")
    assert await queue.purge("delayed") > 0
    assert await queue.unschedule("nightly")
    await queue.groups.set_limit("tenant", Limit(concurrency=1, rate=9))
    await queue.groups.pause("tenant")
    assert (await queue.groups.get("tenant")).paused
    assert await queue.groups.resume("tenant")
    await queue.configure(group_limit=Limit(concurrency=2))
    await queue.groups.set_limit("tenant", None)
    assert await queue.purge() > 0
    await queue.aclose()


_JOBS = (
    *(delayed_producer, delayed_consumer, delayed_admin, delayed_dashboard),
    *(reliable_producer, reliable_consumer, reliable_admin, reliable_dashboard),
)
JOBS = {(kind, role): job for job in _JOBS for kind, role in [job.__name__.split("_")]}
"""The jobs, by the kind of queue and the role."""
