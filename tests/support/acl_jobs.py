"""The complete job of each role, to be run as a user who has that role's rights alone."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import delayq
from delayq._dashboard.delayed_source import DelayedSource
from delayq._dashboard.reliable_source import ReliableSource
from delayq._delayed.keys import DelayedKeys
from delayq._delayed.records import pack
from delayq._delayed.store import POLL_PENDING, TRANSFER
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.store import CLAIM
from delayq.admin import inspect as inspection
from delayq.admin.migrate import migrate
from delayq.errors import OutcomeUnknown
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from typing import Self

    from delayq import Client, DelayedQueue, ReliableQueue

NAME = "orders"
# The wording differs between servers, and between a call and a command inside a script.
NOT_PERMITTED = re.compile(
    r"NOPERM|[Pp]ermission|no permission to subscribe|can't run this command|ACL failure"
)
MAY_NOT_MOVE = "no permission to move due messages"


class Warned(logging.Handler):
    """Collects log lines about calls that were not permitted, in the background too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage() + str(record.exc_info or "")
        if NOT_PERMITTED.search(line) and MAY_NOT_MOVE not in line:
            self.lines.append(line)

    def __enter__(self) -> Self:
        logging.getLogger("delayq").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("delayq").removeHandler(self)


@dataclass
class Place:
    """The surroundings in which a job runs."""

    client: Client
    helper: Client
    """It may do everything, as may ``raw``."""
    raw: Any
    warned: Warned
    lose: Callable[[str], None]
    """Drops the reply to the next call of the named script."""
    within: float = 60.0
    """How long any single step may take, seconds."""

    def theirs(self, **options: Any) -> ReliableQueue[Any]:
        """Return the helper's queue."""
        return self.helper.reliable_queue(NAME, lease=60, **options)

    async def until(self, condition: Callable[[], Any]) -> None:
        def over() -> Any:
            assert not self.warned.lines, self.warned.lines
            return condition()

        await until(over, self.within)

    async def subscribed(self, channel: str, count: int) -> None:
        async def right() -> bool:
            return bool((await self.raw.pubsub_numsub(channel))[0][1] == count)

        await self.until(right)

    async def no_key(self, pattern: str) -> None:
        async def right() -> bool:
            return not await self.raw.keys(pattern)

        await self.until(right)


async def listens(place: Place, channel: str, queue: Any) -> None:
    """Assert that the queue receives notifications, and stops receiving them once it is closed."""
    # The helper has the queue open as well.
    await place.subscribed(channel, 2)
    await stops_listening(place, channel, queue)


async def stops_listening(place: Place, channel: str, queue: Any) -> None:
    """Assert that a closed queue receives no notifications.

    A client that may not move messages may have stopped listening before.
    """
    await queue.aclose()
    await place.subscribed(channel, 1)
    assert not place.warned.lines, place.warned.lines


async def delayed_producer(place: Place) -> None:
    keys = DelayedKeys.of(NAME)
    place.helper.delayed_queue(NAME)
    queue = place.client.delayed_queue(NAME)
    first = await queue.offer(0, 60)
    receipts = [first, *await queue.offer_many([(i, 60 + i) for i in range(1, 9)])]
    # At the head, at the tail and in the middle.
    for at in (0, 8, 4):
        assert await receipts[at].cancel()
    # Each is the first to come due, but not before the messages are counted.
    assert await receipts[5].reschedule(40)
    await queue.offer(9, 30)
    assert await place.helper.delayed_queue(NAME).pending.size() == 7
    await stops_listening(place, keys.channel, queue)


async def delayed_consumer(place: Place) -> None:
    keys = DelayedKeys.of(NAME)
    theirs: DelayedQueue[Any] = place.helper.delayed_queue(NAME)
    queue: DelayedQueue[Any] = place.client.delayed_queue(NAME)
    raw = place.raw
    # A message that comes due while a caller is waiting.
    taking = asyncio.create_task(queue.take())
    await theirs.offer("due", 0.05)
    assert await asyncio.wait_for(taking, place.within) == "due"
    # A value that Java pushes in the meantime.
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0.05)
    await raw.rpush(keys.ready, b'"pushed"')
    assert await asyncio.wait_for(taking, place.within) == "pushed"
    await theirs.aclose()
    # Due messages at the head, middle and tail of the list; an unreadable one; one that another
    # program has scheduled.
    receipts = await place.helper.delayed_queue(NAME).offer_many([(i, 60) for i in range(12)])
    await place.helper.delayed_queue(NAME).aclose()
    for at in (0, 5, 11):
        await raw.zadd(keys.timeout, {receipts[at]._record(): 1})
    await raw.zadd(keys.timeout, {b"junk": 1, pack(b"\0" * 8, b"7", 8): 2})
    assert sorted([await queue.poll(1), *await queue.drain()]) == [0, 5, 7, 11]
    assert await raw.llen(keys.quarantine) == 1
    await raw.rpush(keys.ready, b"{")
    with suppress(delayq.DecodeError):
        await queue.poll()
    await place.until(lambda: is_long(raw, keys.quarantine, 2))
    # Values that were fetched ahead go back.
    await raw.rpush(keys.ready, *(b"%d" % i for i in range(50)))
    taken = 0
    async with aclosing(queue.__aiter__()) as values:  # type: ignore[type-var]
        async for _ in values:
            taken += 1
            if taken > 20 and await raw.llen(keys.ready) < 50 - taken:
                break
    await place.until(lambda: is_long(raw, keys.ready, 50 - taken))
    # Lose a reply while taking for good, then take under a lease.
    place.lose(TRANSFER.name)
    with suppress(OutcomeUnknown):
        await queue.poll()
    assert len(await queue.drain()) == 50 - taken
    await raw.rpush(keys.ready, b"1", b"2", b"3", b"4", b"5")
    async with aclosing(queue.deliveries(30)) as deliveries:  # type: ignore[type-var]
        one = await anext(deliveries)
        await one.extend(60)
        await one.ack()
        two = await anext(deliveries)
        await two.nack(60)
        three = await anext(deliveries)
        await three.extend(0)
        with suppress(asyncio.CancelledError):
            async with await anext(deliveries):
                raise asyncio.CancelledError
    # Three come back, including the one whose lease has ended.
    seen: list[Any] = []
    await place.until(lambda: drained(queue, seen, 3))
    await place.no_key("delayq_leased*")
    place.helper.delayed_queue(NAME)
    await listens(place, keys.channel, queue)


async def drained(queue: DelayedQueue[Any], seen: list[Any], count: int) -> bool:
    seen += await queue.drain()
    return len(seen) >= count


async def has_pending(queue: DelayedQueue[Any], values: list[Any]) -> bool:
    return await queue.pending.read_all() == values


async def is_long(raw: Any, key: str, length: int) -> bool:
    return bool(await raw.llen(key) == length)


async def delayed_dashboard(place: Place) -> None:
    keys = DelayedKeys.of(NAME)
    theirs = place.helper.delayed_queue(NAME)
    await theirs.offer_many([(1, 60), (2, 30)])
    await place.raw.rpush(keys.ready, b"3")
    await look_at(place.client.delayed_queue(NAME), first=1)
    await place.client.delayed_queue(NAME).aclose()
    queue: DelayedQueue[Any] = place.client.delayed_queue(NAME, ordered_list=False)
    await look_at(queue, first=2)
    await place.raw.zadd(keys.leases, {b"token": 2e15})
    await place.raw.hset(keys.leased, b"token", b"4")
    board = DelayedSource(place.client._open_session(), NAME)
    await show(board)
    assert [row.payload for row in (await board.page("leased", 0, 9)).rows] == [b"4"]
    await place.raw.unlink(keys.leases, keys.leased)
    await stops_listening(place, keys.channel, queue)


async def show(board: DelayedSource | ReliableSource) -> None:
    """Read everything that the dashboard shows of a queue."""
    depth = await board.depth()
    assert depth.delayed == 2
    assert sum(await board.histogram(0)) >= 2
    assert (await board.settings() is None) == (board.kind == "delayed")
    for state in (*board.states, *(("dead",) if board.kind == "reliable" else ())):
        searched = [row for shelf in await board.shelves([state]) for row in await shelf.page(0, 9)]
        for row in (await board.page(state, 0, 9)).rows:
            assert row in searched
            if row.place is not None:
                assert await board.find(row.place, dead=state == "dead")
                assert state == "dead" or await board.look_at([row.place])
            if row.place is not None and isinstance(board, ReliableSource):
                assert await board.look_up(row.place.id.decode())
    if isinstance(board, ReliableSource):
        assert len(await board.letters()) == 1


async def look_at(queue: DelayedQueue[Any], first: int) -> None:
    assert await queue.pending.size() == 2
    assert await queue.pending.peek() == first
    assert sorted(await queue.pending.read_all()) == [1, 2]
    assert [value for value, _ in await queue.pending.entries()] == [2, 1]
    assert await queue.pending.contains_all([1, 2])
    assert await queue.ready.size() == 1
    assert await queue.ready.read_all() == [3]
    assert await queue.ready.leased() == 0


async def delayed_admin(place: Place) -> None:
    keys = DelayedKeys.of(NAME)
    await delayed_dashboard(place)
    theirs, raw = place.helper.delayed_queue(NAME), place.raw
    queue: DelayedQueue[Any] = place.client.delayed_queue(NAME)
    board = DelayedSource(place.client._open_session(), NAME)
    row = (await board.page("delayed", 0, 1)).rows[0]
    assert row.place is not None
    (moved,) = await board.reschedule([row.place], 10_000_000)
    assert moved is not None
    assert len(await board.look_at([moved])) == 1
    assert await board.cancel([moved]) == [True]
    assert await queue.pending.clear()
    assert await queue.ready.clear()
    await theirs.offer_many([(i, 60) for i in range(20)])
    assert await queue.pending.remove(5)
    assert await queue.pending.remove_all([0, 1, 7, 19])
    assert await queue.pending.retain_all(range(18))
    assert await queue.pending.poll() == 2
    assert await queue.pending.poll_many(2) == [3, 4]
    assert await queue.pending.poll_last_and_offer_first_to(NAME) == 17
    await raw.zadd(keys.timeout, {b"junk": 2e15})
    await raw.lpush(keys.ordered, b"junk")
    assert await queue.pending.poll() == 6
    await place.until(lambda: is_long(raw, keys.quarantine, 1))
    # Lose a reply: the messages in it go back.
    place.lose(POLL_PENDING.name)
    with suppress(OutcomeUnknown):
        await queue.pending.poll_many(2)
    await place.until(lambda: has_pending(theirs, [8, 9, 10, 11, 12, 13, 14, 15, 16]))
    # Records in an outdated form, one in both structures and one in a single structure.
    old = [b"%08d" % i + (1).to_bytes(8, "little") + b"1" for i in range(2)]
    await raw.zadd(keys.timeout, dict.fromkeys(old, 2e15))
    await raw.rpush(keys.ordered, old[0])
    assert [step.rewritten async for step in migrate(place.client, NAME)][-1] == 2
    await queue.aclose()
    queue = place.client.delayed_queue(NAME, ordered_list=False)
    # This message is in the list as well.
    assert await queue.pending.poll() is not None
    assert await queue.pending.poll_last_and_offer_first_to(NAME) == 1
    assert await queue.pending.expire(3600)
    assert await queue.pending.remove(1)
    assert await inspection.purge(place.client, NAME) > 0
    await stops_listening(place, keys.channel, queue)


async def wakes_a_worker(place: Place, hasten: Callable[[], Awaitable[Any]]) -> None:
    """Assert that hastening the message "hurried" reaches a waiting consumer at once."""
    theirs = place.theirs()
    for message in await theirs.claim(100):
        await message.ack()
    await theirs.offer("soon", 60, id="hurried")
    claiming = asyncio.create_task(theirs.claim(wait=place.within))
    await place.subscribed(ReliableKeys.of(NAME).wake, 1)
    # The look that follows a subscription must not find it.
    await asyncio.sleep(0.05)
    await hasten()
    (message,) = await claiming
    await message.ack()


async def reliable_producer(place: Place) -> None:
    keys = ReliableKeys.of(NAME)
    theirs = place.theirs(dedup_window=0.02)
    # Have the queue remember ids, some of which it may forget by now.
    await theirs.offer(0, id="handled")
    async with (await theirs.claim())[0]:
        pass
    await theirs.stats()
    await asyncio.sleep(0.005)
    await place.raw.persist(keys.done)
    await place.raw.zadd(keys.done, {b"long ago": 1})
    queue = place.client.reliable_queue(NAME, max_size=11)
    await queue.offer(1)
    assert await place.raw.hlen(keys.named("bodies")) == 1
    await queue.offer_many([delayq.Offer(i, delay=60, priority=i % 3, ttl=600) for i in range(9)])
    await queue.offer(2, id="a", priority=1, delay=60, unique_for=60)
    assert 0 < await place.raw.pttl(keys.done) <= 60_000
    await queue.offer(3, id="a", on_duplicate="replace", delay=60)
    assert await place.raw.zscore(keys.done, "long ago") is None
    (leased,) = await theirs.claim()
    assert not await queue.cancel(leased.id)
    assert not await queue.reschedule(leased.id, 5)
    assert await queue.reschedule("a", 5)
    assert await queue.cancel("a")
    # There is room only because a message has expired.
    await theirs.offer(4, ttl=0.001)
    await asyncio.sleep(0.005)
    await queue.offer(5, delay=60)
    await theirs.purge()
    await theirs.configure(group_limit=delayq.Limit(concurrency=9, rate=1, per=60))
    await theirs.offer_many([delayq.Offer(i, id=f"of {i}", group="tenant") for i in range(3)])
    await theirs.claim(3)
    # The group waits for its rate, and its first message changes.
    await queue.offer(6, group="tenant", priority=9, delay=60)
    assert await queue.cancel("of 1")
    assert await queue.reschedule("of 2", 5)
    await theirs.configure(group_limit=None, keep=60)
    await theirs.purge()
    await queue.offer(7, id="done")
    async with awaited(place, queue, "done") as waiting:
        (message,) = await theirs.claim()
        await message.ack("result")
        assert await waiting == "result"
    await queue.offer(8, id="dead")
    (message,) = await theirs.claim()
    await message.bury("why")
    with suppress(delayq.MessageFailed):
        await queue.result("dead", timeout=place.within)
        raise AssertionError("the message is dead")
    await listens(place, keys.settings, queue)
    # The calls of this job have left nothing behind.
    await theirs.aclose()
    await place.no_key(keys.call("*"))


async def reliable_consumer(place: Place) -> None:
    keys = ReliableKeys.of(NAME)
    theirs = place.theirs()
    queue = place.client.reliable_queue(
        NAME, lease=60, dedup_window=60, max_attempts=3, backoff=delayq.Backoff.fixed(0)
    )
    claiming = asyncio.create_task(queue.claim(wait=place.within))
    await asyncio.sleep(0.02)
    await theirs.offer("later", 0.05)
    (message,) = await claiming
    await message.ack()
    await theirs.offer_many([delayq.Offer(i, priority=i % 2, ttl=600) for i in range(8)])
    async with aclosing(queue.__aiter__()) as messages:  # type: ignore[type-var]
        async for message in messages:
            with suppress(ZeroDivisionError):
                async with message:
                    _ = 1 / message.value
            break
    one, two, three, four, five = await queue.claim(5)
    await one.ack()
    await two.nack(0, "no")
    await three.extend(60)
    await four.bury("why")
    await five.release()
    await use_up(queue)
    # Lose a reply.
    await theirs.offer_many([delayq.Offer(i, priority=i % 2) for i in range(3)])
    place.lose(CLAIM.name)
    with suppress(OutcomeUnknown):
        await queue.claim(3)
    again = await queue.claim(3)
    assert len(again) == 3
    for message in again:
        await message.ack()
    await recurring(place, queue)
    await grouped(place, queue)
    await kept(place, queue)
    await queue.aclose()
    handled = asyncio.Event()
    worker = delayq.Worker(place.client)

    @worker.listener(NAME)
    async def handle(value: Any) -> None:
        handled.set()

    await theirs.offer("work")
    async with worker:
        await place.until(handled.is_set)
    await worker.run(burst=True)
    await place.client.reliable_queue(NAME).aclose()
    place.theirs()
    await listens(place, keys.settings, place.client.reliable_queue(NAME))


async def grouped(place: Place, queue: ReliableQueue[Any]) -> None:
    """Let groups wait for their limits, and lose a lease."""
    theirs = place.theirs()
    await theirs.purge()
    limit = delayq.Limit(concurrency=4, rate=40, per=0.1)
    await theirs.configure(limit=limit, group_limit=delayq.Limit(concurrency=1, rate=2, per=0.1))
    await theirs.offer_many([delayq.Offer(i, group=f"tenant {i % 3}") for i in range(12)])
    await theirs.offer(12)
    (lost,) = await theirs.claim(1)
    await lost.extend(0.001)
    await asyncio.sleep(0.005)
    first = await queue.claim(9, wait=place.within)
    for message in first:
        await message.release()
    for message in await queue.claim(9, wait=place.within):
        await message.nack(0, "no")
    while messages := await queue.claim(9, wait=0.3):
        for message in messages:
            await message.ack()
    await theirs.configure(limit=None, group_limit=None)


@asynccontextmanager
async def awaited(
    place: Place, queue: ReliableQueue[Any], name: str
) -> AsyncGenerator[asyncio.Task[Any], None]:
    """Wait for the result of the message with this id in a task of its own."""
    waiting = asyncio.create_task(queue.result(name, timeout=place.within))

    async def is_asked_for() -> bool:
        score = await place.raw.zscore(ReliableKeys.of(NAME).awaited, name)
        return score is not None or waiting.done()

    try:
        await place.until(is_asked_for)
        yield waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def kept(place: Place, queue: ReliableQueue[Any]) -> None:
    """Finish messages whose results are kept, of which one is waited for."""
    theirs = place.theirs()
    await theirs.purge()
    await theirs.configure(keep=60, max_kept=1)
    for number in range(3):
        await theirs.offer(number, id=f"kept {number}")
    async with awaited(place, theirs, "kept 1") as waiting:
        first, second, third = await queue.claim(3)
        await first.nack(0, "no")
        await second.ack("result")
        assert await waiting == "result"
    await third.bury("why")
    (first,) = await queue.claim(3)
    await first.ack()
    await theirs.configure(keep=0)


async def use_up(queue: ReliableQueue[Any]) -> None:
    """Fail every message until none is left."""
    while messages := await queue.claim(10):
        for message in messages:
            await message.nack(0, "no")


async def recurring(place: Place, queue: ReliableQueue[Any]) -> None:
    await queue.schedule("cron", cron="0 0 * * *", value=1)
    await queue.schedule("often", every=0.05, value=1, priority=2, ttl=60)
    # The definition changes while a message waits, and again while a worker has it.
    await queue.schedule("often", every=0.05, value=2, priority=1, ttl=60)
    (message,) = await queue.claim(wait=place.within)
    await queue.schedule("often", every=0.05, value=3)
    assert await queue.unschedule("cron")
    await queue._open.partitions[0].recurrence.look()
    await message.nack(0)
    (message,) = await queue.claim(wait=place.within)
    assert await queue.unschedule("often")
    await message.ack()
    # Another worker has the message, and has not put the next one in place yet.
    await queue.schedule("taken", every=0.05, value=1)
    theirs = place.theirs()
    ((_, claim),) = await theirs._open.waiters.get(1, place.within, theirs._policy)
    await queue.schedule("taken", every=0.05, value=2)
    assert await queue.unschedule("taken")
    await theirs._open.partitions[0].settling.ack(claim)
    # The same as when a schedule runs out of planned occurrences.
    await queue.schedule("again", cron="* * * * * *", value=1)
    await place.theirs().purge()
    await queue._open.partitions[0].recurrence.look()
    await queue._open.partitions[0].recurrence._refill("again")
    assert await queue.pause_schedule("again")
    assert await queue.resume_schedule("again")
    assert await queue.unschedule("again")


async def reliable_dashboard(place: Place) -> None:
    keys = ReliableKeys.of(NAME)
    await fill(place)
    queue = place.client.reliable_queue(NAME)
    stats = await queue.stats()
    assert (stats.delayed, stats.ready, stats.leased, stats.dead) == (2, 2, 1, 1)
    assert len(await queue.peek(2)) == 2
    assert len(await queue.activity(minutes=2)) == 2
    assert isinstance(await inspection.workers(place.client, NAME), list)
    for state in ("delayed", "ready", "leased"):
        (found, *_) = await queue.list(state)
        assert await queue.get(found.id)
    assert await queue.dead.size() == 1
    assert (await queue.dead.list())[0].reason == "why"
    await show(ReliableSource(place.client._open_session(), NAME, 1))
    assert [schedule.name for schedule in await queue.schedules()] == ["nightly"]
    assert [group.name for group in await queue.groups.list()] == ["idle"]
    history = await queue.history("done")
    assert history is not None
    assert history.result == "result"
    await listens(place, keys.settings, queue)


async def fill(place: Place) -> None:
    """Put a message into each state, and add a schedule."""
    theirs = place.theirs()
    await theirs.offer_many([delayq.Offer(i, priority=i % 2) for i in range(4)])
    dead, _leased = await theirs.claim(2)
    await dead.bury("why", "an error")
    await theirs.configure(keep=60)
    await theirs.offer(8, id="done", priority=9)
    (message,) = await theirs.claim()
    await message.ack("result")
    await theirs.offer(9, 60)
    await theirs.groups.pause("idle")
    await theirs.schedule("nightly", every=3600, value=1)


async def reliable_admin(place: Place) -> None:
    await reliable_dashboard(place)
    theirs = place.theirs()
    queue = place.client.reliable_queue(NAME)
    await queue.pause()
    assert (await queue.stats()).paused
    assert await queue.resume()
    leased = (await queue.list("leased"))[0].id
    ready = (await queue.list("ready"))[0].id
    assert not await queue.cancel(leased)
    assert await queue.reschedule(ready, 60)
    assert await queue.cancel(ready)
    await wakes_a_worker(place, lambda: queue.reschedule("hurried", 0))
    assert await queue.dead.redrive() == 1
    for ids in (None, ["dead"]):
        await theirs.offer(1, id="dead", priority=9)
        (message,) = [m for m in await theirs.claim(9) if m.id == "dead"]
        await message.bury("why")
        assert await queue.dead.redrive(["dead", "no such"]) == 1
        (message,) = [m for m in await theirs.claim(9) if m.id == "dead"]
        await message.bury("why")
        assert await queue.dead.purge(ids) == 1
    await queue.purge("delayed")
    await theirs.schedule("nightly", every=3600, value=1)
    assert await queue.pause_schedule("nightly")
    assert await queue.resume_schedule("nightly")
    assert await queue.unschedule("nightly")
    assert await queue.purge() > 0
    await theirs.offer_many([delayq.Offer(i, group="tenant") for i in range(3)])
    await queue.groups.set_limit("tenant", delayq.Limit(concurrency=1, rate=9))
    (message,) = await theirs.claim(9)
    await message.bury("why")
    assert await queue.dead.redrive() == 1
    await queue.groups.pause("tenant")
    assert (await queue.groups.get("tenant")).paused
    assert await queue.groups.resume("tenant")
    await queue.configure(group_limit=delayq.Limit(concurrency=2))
    await queue.groups.set_limit("tenant", None)
    assert await queue.purge() == 3
    await queue.aclose()


_JOBS = (
    *(delayed_producer, delayed_consumer, delayed_admin, delayed_dashboard),
    *(reliable_producer, reliable_consumer, reliable_admin, reliable_dashboard),
)
JOBS = {(kind, role): job for job in _JOBS for kind, role in [job.__name__.split("_")]}
"""The jobs, by the kind of queue and the role."""
