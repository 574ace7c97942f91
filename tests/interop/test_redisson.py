"""delayq and Redisson on one queue: each reads, moves, wakes and removes what the other wrote."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from tests.interop import redis32, report
from tests.interop.movers import MovedByJava
from tests.interop.pairs import PAIRS, TEXT, Pair
from tests.interop.redisson import JavaQueue, Redisson
from tests.interop.settings import (
    with_all_readers,
    with_current,
    with_movers,
    with_newest,
    with_old,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.java

MESSAGES = 10_000
MAX_DELAY_MS = 600
TAKERS = 4
DEADLINE = 60.0
"""The time limit for a step, seconds. A step takes two."""
FAR_MS = 60_000

JAVA_TO_PYTHON = "from Java to Python"
PYTHON_TO_JAVA = "from Python to Java"
MIXED = "between all"


@pytest.fixture(params=PAIRS, ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.param
    return found


must_fail = pytest.mark.xfail(raises=AssertionError, strict=True)


@dataclass
class Log:
    """When values were due and when they arrived, ms, by the bytes to which we encode them."""

    pair: Pair
    due: dict[bytes, float] = field(default_factory=dict)
    arrived: dict[bytes, list[float]] = field(default_factory=dict)

    def offered_by_python(self, value: Any, receipt: delayq.Receipt[Any]) -> None:
        self.due[self.pair.codec.encode(value)] = receipt.due_at.timestamp() * 1000

    def offered_by_java(self, value: Any, left: int, delay: int) -> None:
        self.due[self.pair.codec.encode(value)] = left + delay

    def all_offered_by_python(
        self, messages: list[tuple[Any, int]], receipts: list[delayq.Receipt[Any]]
    ) -> None:
        for (value, _), receipt in zip(messages, receipts, strict=True):
            self.offered_by_python(value, receipt)

    def all_offered_by_java(self, messages: list[tuple[Any, int]], left: list[int]) -> None:
        for (value, delay), when in zip(messages, left, strict=True):
            self.offered_by_java(value, when, delay)

    def came(self, value: Any, at: float) -> None:
        self.arrived.setdefault(self.pair.codec.encode(value), []).append(at)

    def came_to_java(self, arrivals: list[tuple[Any, int]]) -> None:
        for value, at in arrivals:
            self.came(value, at)

    async def consume(self, queue: delayq.DelayedQueue[Any]) -> None:
        async for value in queue:
            self.came(value, time.time() * 1000)

    def check(self, *, lost: int = 0) -> None:
        """Assert that all but ``lost`` values arrived, once, none early, and no other value."""
        assert len(self.due) > 0
        assert self.arrived.keys() <= self.due.keys()
        assert len(self.missing()) <= lost
        assert [payload for payload, times in self.arrived.items() if len(times) != 1] == []
        assert self.early() == []

    def missing(self) -> list[bytes]:
        return [payload for payload in self.due if payload not in self.arrived]

    def early(self) -> list[bytes]:
        return [
            payload for payload, times in self.arrived.items() if min(times) < self.due[payload]
        ]

    def lateness(self) -> list[float]:
        return [self.arrived[payload][0] - due for payload, due in self.due.items()]


@asynccontextmanager
async def consuming(log: Log, *queues: delayq.DelayedQueue[Any]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(log.consume(queue)) for queue in queues]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def raw(server: PrivateServer) -> AsyncIterator[Any]:
    async with Redis.from_url(server.url) as connection:
        yield connection


async def nothing_is_left(server: PrivateServer) -> None:
    """Wait until every key with messages is gone."""
    async with raw(server) as redis:

        async def empty() -> bool:
            # A fence is an empty mark of a call that was given up, for instance by a client that
            # closed. It disappears after a minute.
            return not [key for key in await redis.keys() if not key.startswith(b"delayq_fence:")]

        await until(empty, DEADLINE)


def random_messages(
    pair: Pair, count: int = MESSAGES, first: int = 0, most: int = MAX_DELAY_MS
) -> list[tuple[Any, int]]:
    chance = random.Random(first)
    return [(pair.value(n), chance.randint(0, most)) for n in range(first, first + count)]


def for_java(pair: Pair, messages: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    return [(pair.to_java(value), delay) for value, delay in messages]


def for_python(messages: list[tuple[Any, int]]) -> list[tuple[Any, float]]:
    return [(value, delay / 1000) for value, delay in messages]


def encoded(pair: Pair, values: list[Any]) -> list[bytes]:
    """Encode values to compare them: NaN equals NaN, and Java's long 5 is not its int 5."""
    return [pair.codec.encode(value) for value in values]


@pytest.mark.parametrize(
    "arrivals",
    [
        [(0, 100), (1, 200)],
        pytest.param([(0, 100)], id="lost", marks=must_fail),
        pytest.param([(0, 100), (1, 200), (1, 201)], id="doubled", marks=must_fail),
        pytest.param([(0, 99), (1, 200)], id="early", marks=must_fail),
        pytest.param([(0, 100), (1, 200), (2, 200)], id="offered by nobody", marks=must_fail),
    ],
)
def test_the_log_notices_what_is(arrivals: list[tuple[int, int]]) -> None:
    log = Log(TEXT, due={TEXT.codec.encode(TEXT.value(n)): 100.0 + n * 100 for n in range(2)})
    log.came_to_java([(TEXT.value(n), at) for n, at in arrivals])
    log.check()


# Ten thousand messages each way


async def test_what_java_offers_comes_to_python_once_each_and_never_early(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    log, messages = Log(pair), random_messages(pair)
    java = await redisson.open(name, pair.java)
    async with consuming(log, client.delayed_queue(name, codec=pair.codec)):
        left = await java.offer(for_java(pair, messages))
        # From here on, only we move them.
        await java.detach()
        log.all_offered_by_java(messages, left)
        await until(lambda: len(log.arrived) >= MESSAGES, DEADLINE)
        await nothing_is_left(server)
    log.check()
    assert client.statistics().quarantined == 0
    report.MESSAGES[str(redisson)][JAVA_TO_PYTHON, str(pair)] += MESSAGES


@with_all_readers
async def test_what_python_offers_comes_to_java_once_each_and_never_early(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    log, messages = Log(pair), random_messages(pair)
    java = await redisson.open(name, pair.java, attached=not redisson.release.writes_old_records)
    takes = [asyncio.create_task(java.take(MESSAGES // TAKERS)) for _ in range(TAKERS)]
    queue = client.delayed_queue(name, codec=pair.codec)
    log.all_offered_by_python(messages, await queue.offer_many(for_python(messages)))
    if not redisson.release.writes_old_records:
        # From here on, only Java moves them. An old client cannot read them, so there we have to.
        await queue.aclose()
    async with asyncio.timeout(DEADLINE):
        for arrivals in await asyncio.gather(*takes):
            log.came_to_java(arrivals)
    await nothing_is_left(server)
    log.check()
    await java.detach()
    report.MESSAGES[str(redisson)][PYTHON_TO_JAVA, str(pair)] += MESSAGES


@with_movers
async def test_both_kinds_offer_move_and_take_on_one_queue(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    """Three clients offer, move and take at once; one of them is Java."""
    half = MESSAGES // 2
    moved_by_java = await share(server, client, redisson, pair, name, for_both=(half, half))
    assert 0 < moved_by_java < MESSAGES
    report.MESSAGES[str(redisson)][MIXED, str(pair)] += MESSAGES
    report.MOVED_BY_JAVA[str(redisson)].append(moved_by_java / MESSAGES)


@with_old
async def test_both_kinds_move_and_take_what_an_old_java_client_offers(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """An old client repeats its own messages when it meets a current record: here are none."""
    moved_by_java = await share(server, client, redisson, TEXT, name, for_both=(MESSAGES, 0))
    assert 0 < moved_by_java < MESSAGES
    report.MESSAGES[str(redisson)][MIXED, str(TEXT)] += MESSAGES
    report.MOVED_BY_JAVA[str(redisson)].append(moved_by_java / MESSAGES)


async def share(
    server: PrivateServer,
    client: delayq.Client,
    redisson: Redisson,
    pair: Pair,
    name: str,
    *,
    for_both: tuple[int, int],
) -> int:
    """Let Java and two of our clients offer and take all. Return how many Java moved."""
    log = Log(pair)
    from_java, from_python = (
        random_messages(pair, for_both[0]),
        random_messages(pair, for_both[1], for_both[0]),
    )
    java = await redisson.open(name, pair.java)
    with MovedByJava(server, name) as moved:
        takes = [asyncio.create_task(java.consume()) for _ in range(2)]
        # Java starts alone, because we are quicker: its timer works in ticks.
        left = await java.offer(for_java(pair, from_java[:200]))
        await until(lambda: moved.count > 0, DEADLINE)
        async with delayq.connect(server.url, resync_interval=60) as other:
            queues = [c.delayed_queue(name, codec=pair.codec) for c in (client, other)]
            async with consuming(log, *queues):
                more, _, _ = await asyncio.gather(
                    java.offer(for_java(pair, from_java[200:])),
                    offer_in_parts(log, queues[0], from_python[::2]),
                    offer_in_parts(log, queues[1], from_python[1::2]),
                )
                log.all_offered_by_java(from_java, left + more)
                await nothing_is_left(server)
                to_python = len(log.arrived)
                await java.stop()
                for arrivals in await asyncio.gather(*takes):
                    log.came_to_java(arrivals)
    await java.detach()
    log.check()
    assert 0 < to_python < MESSAGES
    return moved.count


async def offer_in_parts(
    log: Log, queue: delayq.DelayedQueue[Any], messages: list[tuple[Any, int]]
) -> None:
    for at in range(0, len(messages), 100):
        part = messages[at : at + 100]
        log.all_offered_by_python(part, await queue.offer_many(for_python(part)))


@with_old
async def test_beside_an_attached_old_java_client_messages_may_come_twice_but_all_come_none_early(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """The old client's script fails at the first current record, after it moved some messages.

    It does the same beside any newer Redisson. Nothing is lost, and our messages come once.
    """
    log = Log(TEXT)
    from_java, from_python = random_messages(TEXT, 1000), random_messages(TEXT, 1000, 1000)
    java = await redisson.open(name, TEXT.java)
    queue = client.delayed_queue(name, codec=TEXT.codec)
    async with consuming(log, queue):
        left, receipts = await asyncio.gather(
            java.offer(from_java), queue.offer_many(for_python(from_python))
        )
        log.all_offered_by_java(from_java, left)
        log.all_offered_by_python(from_python, receipts)
        await until(lambda: len(log.arrived) >= 2000, DEADLINE)
        await nothing_is_left(server)
    await java.detach()
    assert log.arrived.keys() == log.due.keys()
    assert log.early() == []
    assert [
        value for value, _ in from_python if len(log.arrived[TEXT.codec.encode(value)]) != 1
    ] == []
    twice = sum(len(times) > 1 for times in log.arrived.values())
    report.NOTES.append(
        f"{redisson}, attached beside current records: it repeated {twice} of its own 1,000"
        " messages"
    )


@with_newest
async def test_the_count_of_what_java_moved_leaves_out_what_we_moved(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    java = await redisson.open(name, TEXT.java)
    with MovedByJava(server, name) as moved:
        await java.offer([(TEXT.value(n), n) for n in range(100)])
        await java.take(100)
    assert moved.count == 100
    await java.detach()
    queue = client.delayed_queue(name, codec=TEXT.codec)
    with MovedByJava(server, name) as moved:
        await queue.offer_many([(TEXT.value(n), n / 1000) for n in range(100)])
        await java.take(100)
    assert moved.count == 0


@with_newest
async def test_a_java_client_that_is_killed_takes_along_only_what_it_had_in_hand(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """At most one message is lost for each of its takers."""
    log, taken = Log(TEXT), list[tuple[Any, int]]()
    half = MESSAGES // 2
    from_java = random_messages(TEXT, half, most=2 * MAX_DELAY_MS)
    from_python = random_messages(TEXT, half, half, most=2 * MAX_DELAY_MS)
    victim = Redisson(redisson.release, server)
    java = await victim.open(name, TEXT.java)
    takes = [asyncio.create_task(java.consume(taken)) for _ in range(TAKERS)]
    queue = client.delayed_queue(name, codec=TEXT.codec)
    async with consuming(log, queue):
        left, _ = await asyncio.gather(
            java.offer(from_java), offer_in_parts(log, queue, from_python[::2])
        )
        log.all_offered_by_java(from_java, left)
        meanwhile, afterwards = from_python[1:-200:2], from_python[-199::2]
        offering = asyncio.create_task(offer_in_parts(log, queue, meanwhile))
        # Kill it early: the other side takes most of the messages.
        await until(lambda: len(taken) >= 100, DEADLINE)
        victim.kill()
        ends = await asyncio.gather(*takes, return_exceptions=True)
        # Each of them was still taking.
        assert all(isinstance(end, RuntimeError) for end in ends)
        await offering
        # However slow the machine is, the queue continues without the victim.
        await offer_in_parts(log, queue, afterwards)
        await until(lambda: len(log.arrived) + len(taken) >= MESSAGES - TAKERS, DEADLINE)
        await nothing_is_left(server)
    victim.close()
    log.came_to_java(taken)
    log.check(lost=TAKERS)
    lost = len(log.missing())
    report.NOTES.append(
        f"{redisson}, killed after taking {len(taken):,} of {MESSAGES:,}: {lost} gone, all others"
        " once"
    )


# Waking each other


@with_current
async def test_java_is_woken_by_a_python_offer(
    server: PrivateServer, redisson: Redisson, name: str
) -> None:
    """Java sleeps until a far message. Each offer is due sooner; then only Java remains."""
    log = Log(TEXT)
    java = await redisson.open(name, TEXT.java)
    taken = asyncio.create_task(java.take(10))
    async with raw(server) as redis, redis.pubsub() as channel:
        await channel.subscribe(f"redisson_delay_queue_channel:{{{name}}}")
        async with delayq.connect(server.url) as client:
            queue = client.delayed_queue(name, codec=TEXT.codec)
            offers = [
                (TEXT.value(99), FAR_MS),
                *((TEXT.value(n), 1200 - n * 100) for n in range(10)),
            ]
            receipts = [await queue.offer(value, delay / 1000) for value, delay in offers]
        log.all_offered_by_python(offers[1:], receipts[1:])
        log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
        announced = [await channel.get_message(timeout=1.0) for _ in range(1 + len(offers))]
    # All eleven were announced, and each woke Java earlier than it had planned: the last one
    # offered arrived first, and the first one, for which Java had gone to sleep, has not arrived.
    due = [str(round(receipt.due_at.timestamp() * 1000)).encode() for receipt in receipts]
    assert [message and message["data"] for message in announced[1:]] == due
    assert list(log.arrived) == [TEXT.codec.encode(TEXT.value(n)) for n in reversed(range(10))]
    assert await java.ask("size") == 1
    await java.detach()
    log.check()
    # Normally under 200 ms, as Java's timer ticks at least every 100 ms. A lost wake-up would cost
    # a minute.
    assert max(log.lateness()) < 1000
    report.LATENESS_MS[str(redisson)]["Java woken by Python, and alone,"] += log.lateness()


@with_current
async def test_java_hears_of_an_offer_over_the_channel_and_in_no_other_way(
    server: PrivateServer, redisson: Redisson, name: str
) -> None:
    """Without our announcement, the test above would fail."""
    java = await redisson.open(name, TEXT.java)
    taken = asyncio.create_task(java.take(1))
    async with delayq.connect(server.url) as client:
        receipt = await client.delayed_queue(f"{name}-silent", codec=TEXT.codec).offer(
            TEXT.value(0), 0.2
        )
    announced = round(receipt.due_at.timestamp() * 1000) + 600
    async with raw(server) as redis:
        for key in ("redisson_delay_queue", "redisson_delay_queue_timeout"):
            await redis.rename(f"{key}:{{{name}-silent}}", f"{key}:{{{name}}}")
        assert await redis.publish(f"redisson_delay_queue_channel:{{{name}}}", announced) == 1
    ((value, at),) = await asyncio.wait_for(taken, DEADLINE)
    assert value == TEXT.value(0)
    assert at >= announced
    await java.detach()


async def test_python_is_woken_by_a_java_offer(
    client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """The reverse: Java leaves, and only we remain, without a re-check."""
    log = Log(TEXT)
    queue = client.delayed_queue(name, codec=TEXT.codec)
    java = await redisson.open(name, TEXT.java)
    await java.offer([(TEXT.value(99), FAR_MS)])
    async with consuming(log, queue):
        for n in range(10):
            await java.offer([(TEXT.value(n), 2200 - n * 200)])
        await java.detach()
        for value, due_at in await queue.pending.entries():
            if value != TEXT.value(99):
                log.due[TEXT.codec.encode(value)] = due_at.timestamp() * 1000
        await until(lambda: len(log.arrived) >= 10, DEADLINE)
    assert list(log.arrived) == sorted(log.due, key=log.due.__getitem__)
    assert len(log.due) == 10
    assert await queue.pending.read_all() == [TEXT.value(99)]
    log.check()
    # Under 20 ms on a quiet machine.
    assert max(log.lateness()) < 500
    report.LATENESS_MS[str(redisson)]["Python woken by Java, and alone,"] += log.lateness()


async def test_an_offer_without_delay_reaches_a_waiting_take_of_the_other_side(
    client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """Both sides are there, as usual. Measured from before the offer until after the take."""
    java = await redisson.open(name, TEXT.java)
    queue = client.delayed_queue(name, codec=TEXT.codec)
    to_java, to_python = [], []
    for n in range(20):
        taken = asyncio.create_task(java.take(1))
        await asyncio.sleep(0.02)
        before = time.time() * 1000
        await queue.offer(TEXT.value(n))
        ((value, at),) = await asyncio.wait_for(taken, DEADLINE)
        assert value == TEXT.value(n)
        to_java.append(at - before)
    for n in range(20):
        waiting = asyncio.create_task(queue.take())
        await asyncio.sleep(0.02)
        (left,) = await java.offer([(TEXT.value(n), 0)])
        assert await asyncio.wait_for(waiting, DEADLINE) == TEXT.value(n)
        to_python.append(time.time() * 1000 - left)
    await java.detach()
    assert max(to_java + to_python) < 1000
    report.LATENESS_MS[str(redisson)]["Python's offer without delay in Java's hands"] += to_java
    report.LATENESS_MS[str(redisson)]["Java's offer without delay in Python's hands"] += to_python


# Cancelling


async def test_what_python_cancels_does_not_come_to_java(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    # Far enough ahead for a machine that starts several Java processes to cancel 500 of them in
    # time.
    log, messages = Log(TEXT), [(TEXT.value(n), 5000 + n) for n in range(1000)]
    java = await redisson.open(name, TEXT.java)
    queue = client.delayed_queue(name, codec=TEXT.codec)
    receipts = await queue.offer_many(for_python(messages))
    assert all(await asyncio.gather(*(receipt.cancel() for receipt in receipts[::2])))
    for (value, _), receipt in zip(messages[1::2], receipts[1::2], strict=True):
        log.offered_by_python(value, receipt)
    log.came_to_java(await asyncio.wait_for(java.take(500), DEADLINE))
    await nothing_is_left(server)
    log.check()
    assert not any(await asyncio.gather(*(receipt.cancel() for receipt in receipts)))
    await java.detach()


async def test_a_cancel_at_the_due_time_says_truly_whether_the_message_comes(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    log, messages = Log(TEXT), [(TEXT.value(n), 300 + n) for n in range(1000)]
    java = await redisson.open(name, TEXT.java)
    consumer = asyncio.create_task(java.consume())
    queue = client.delayed_queue(name, codec=TEXT.codec)
    receipts = await queue.offer_many(for_python(messages))
    cancelled = 0
    for (value, _), receipt in zip(messages, receipts, strict=True):
        await asyncio.sleep(receipt.due_at.timestamp() - time.time())
        if await receipt.cancel():
            cancelled += 1
        else:
            log.offered_by_python(value, receipt)
    await nothing_is_left(server)
    await java.stop()
    log.came_to_java(await consumer)
    await java.detach()
    if cancelled < len(messages):
        log.check()
    report.NOTES.append(f"{redisson}: {cancelled} of 1,000 cancels at the due time were in time")


# Each side's views of the other's messages


def payload(record: bytes, redisson: Redisson, *, old: bool) -> bytes:
    """Return a record's payload, which follows an id and a length of the server's width."""
    header, width = 8 if old else 9, 4 if redisson.server.kind.name == redis32.NAME else 8
    assert old or record[0] == 8
    found = record[header + width :]
    assert int.from_bytes(record[header : header + width], "little") == len(found)
    return found


async def test_both_sides_write_the_same_payload_bytes(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    values = [pair.value(n) for n in range(200)]
    java = await redisson.open(f"{name}-java", pair.java)
    await java.offer([(pair.to_java(value), FAR_MS) for value in values])
    await client.delayed_queue(f"{name}-python", codec=pair.codec).offer_many(
        [(value, 60) for value in values]
    )
    async with raw(server) as redis:
        by_java = await redis.zrange(f"redisson_delay_queue_timeout:{{{name}-java}}", 0, -1)
        by_python = await redis.lrange(f"redisson_delay_queue:{{{name}-python}}", 0, -1)
        assert sorted(by_java) == sorted(
            await redis.lrange(f"redisson_delay_queue:{{{name}-java}}", 0, -1)
        )
    await java.detach()
    old = redisson.release.writes_old_records
    java_payloads = [payload(record, redisson, old=old) for record in by_java]
    python_payloads = [payload(record, redisson, old=False) for record in by_python]
    assert python_payloads == [pair.codec.encode(value) for value in values]
    assert Counter(java_payloads) == Counter(python_payloads)
    # Java's payloads stay the same when we decode and encode them again.
    assert [pair.codec.encode(pair.codec.decode(found)) for found in java_payloads] == java_payloads


@with_current
async def test_java_sees_and_removes_what_python_wrote(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    values = [pair.value(n) for n in range(100)]
    java = await redisson.open(name, pair.java)
    queue = client.delayed_queue(name, codec=pair.codec)
    # Java lists messages in the order of their offers, not of their due times.
    await queue.offer_many([(value, 100 - n / 10) for n, value in enumerate(values)])

    assert await java.ask("size") == 100
    assert encoded(pair, await java.ask("readAll")) == encoded(pair, values)
    assert await java.ask("contains", value=pair.to_java(values[70])) is True
    assert await java.ask("contains", value=pair.to_java(pair.value(100))) is False
    assert await java.ask("remove", value=pair.to_java(values[70])) is True
    assert await java.ask("remove", value=pair.to_java(values[70])) is False
    assert encoded(pair, [await java.ask("poll") for _ in range(2)]) == encoded(pair, values[:2])

    left = values[2:70] + values[71:]
    assert await java.ask("size") == await queue.pending.size() == len(left)
    assert encoded(pair, await queue.pending.read_all()) == encoded(pair, left)
    async with raw(server) as redis:
        assert await redis.zcard(f"redisson_delay_queue_timeout:{{{name}}}") == len(left)
    await java.detach()


@with_old
async def test_an_old_java_client_can_count_what_python_wrote(
    client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """An old client can do no more than that: it reads only its own records."""
    java = await redisson.open(name, TEXT.java)
    await client.delayed_queue(name, codec=TEXT.codec).offer_many(
        [(TEXT.value(n), 60) for n in range(10)]
    )
    assert await java.ask("size") == 10
    await java.detach()


async def test_python_sees_and_removes_what_java_wrote(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    values = [pair.value(n) for n in range(20)]
    java = await redisson.open(name, pair.java)
    pending = client.delayed_queue(name, codec=pair.codec).pending
    left: list[int] = []
    for n, value in enumerate(values):
        # One by one, because Redisson sends simultaneous offers over several connections, in any
        # order.
        left += await java.offer([(pair.to_java(value), FAR_MS - n * 1000)])

    assert await pending.size() == 20
    assert encoded(pair, [await pending.peek()]) == encoded(pair, values[:1])
    assert encoded(pair, await pending.read_all()) == encoded(pair, values)
    entries = await pending.entries()
    assert encoded(pair, [value for value, _ in entries]) == encoded(pair, values[::-1])
    assert all(early < late for (_, early), (_, late) in pairwise(entries))
    for n, (_, due_at) in enumerate(reversed(entries)):
        assert 0 <= due_at.timestamp() * 1000 - (left[n] + FAR_MS - n * 1000) < 1000

    assert await pending.contains(values[7])
    assert not await pending.contains(pair.value(20))
    assert await pending.contains_all(values)
    assert await pending.remove(values[7])
    assert not await pending.remove(values[7])
    polled = [
        await pending.poll(),
        *await pending.poll_many(2),
        await pending.poll_last_and_offer_first_to(name),
    ]
    assert encoded(pair, polled) == encoded(pair, [*values[:3], values[19]])
    assert await pending.remove_all([values[3], values[7]])
    assert encoded(pair, await java.ask("readAll")) == encoded(pair, values[4:7] + values[8:19])
    assert await pending.retain_all(values[8:10])
    assert await java.ask("size") == await pending.size() == 2
    assert await java.ask("remove", value=pair.to_java(values[8])) is True
    assert encoded(pair, [value for value, _ in await java.take(1)]) == encoded(pair, [values[19]])
    assert await pending.clear()
    await nothing_is_left(server)
    await java.detach()


# Java's other operations on a queue that Python uses


async def test_javas_blocking_queue_has_what_python_moved(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    java = await redisson.open(name, TEXT.java, attached=False)
    queue = client.delayed_queue(name, codec=TEXT.codec)
    values = [TEXT.value(n) for n in range(10)]
    await queue.offer_many([(value, n / 1000) for n, value in enumerate(values)])
    await until(lambda: all_moved(java, len(values)))
    assert await java.ask("ready.readAll") == values
    assert await java.ask("ready.peek") == values[0]
    assert await java.ask("ready.drainTo", most=3) == values[:3]
    assert await java.ask("ready.pollFromAny", other=f"{name}-other") == values[3]
    assert await java.ask("ready.pollLastAndOfferFirstTo", other=f"{name}-other") == values[9]
    assert await client.delayed_queue(f"{name}-other", codec=TEXT.codec).take() == values[9]
    assert await queue.drain() == values[4:9]
    await nothing_is_left(server)


async def all_moved(java: JavaQueue, count: int) -> bool:
    return bool(await java.ask("ready.size") == count)


async def test_python_goes_on_when_java_deletes_the_queue_or_lets_it_expire(
    server: PrivateServer,
    client: delayq.Client,
    redisson: Redisson,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log(TEXT)
    java = await redisson.open(name, TEXT.java)
    # Only we move messages.
    await java.detach()
    queue = client.delayed_queue(name, codec=TEXT.codec)

    async def offer_one(n: int) -> None:
        log.offered_by_python(TEXT.value(n), await queue.offer(TEXT.value(n), 0.5))

    async def gone() -> bool:
        return await queue.pending.size() == 0

    async with consuming(log, queue):
        # Java deletes the queue while our timer is set for it.
        await queue.offer_many([(TEXT.value(n), 0.3) for n in range(100)])
        assert await java.ask("delete") is True
        assert await gone()
        await offer_one(100)
        await until(lambda: len(log.arrived) == 1)

        await queue.offer_many([(TEXT.value(n), 60) for n in range(100)])
        assert await java.ask("expire", ms=100) is True
        await until(gone)
        await offer_one(101)
        await until(lambda: len(log.arrived) == 2)

        await offer_one(102)
        assert await java.ask("expire", ms=300) is True
        assert await java.ask("clearExpire") is True
        await until(lambda: len(log.arrived) == 3)
        await nothing_is_left(server)
    log.check()
    assert max(log.lateness()) < 1000
    assert client.statistics().errors == 0
    # We do not retry in a loop: that would make thousands of calls while we wait.
    assert client.statistics().round_trips < 1000
    assert [record for record in caplog.records if record.name.startswith("delayq")] == []
