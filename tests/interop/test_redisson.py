"""delayq and real Redisson on one queue: each reads, moves, wakes and removes what the other wrote."""

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
from tests.interop import report
from tests.interop.pairs import PAIRS, TEXT, Pair
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.interop.redisson import Redisson
    from tests.servers import PrivateServer

MESSAGES = 10_000
MAX_DELAY_MS = 2000
TAKERS = 4
DEADLINE = 60.0
"""Seconds for what takes three."""
FAR_MS = 60_000

JAVA_TO_PYTHON = "from Java to Python"
PYTHON_TO_JAVA = "from Python to Java"
MIXED = "between all"


@pytest.fixture(params=PAIRS, ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.param
    return found


@dataclass
class Log:
    """What came when, and not before when it should. Both processes and the server read one machine's clock, ms.

    Values are told apart by what our codec makes of them.
    """

    pair: Pair
    due: dict[bytes, float] = field(default_factory=dict)
    arrived: dict[bytes, list[float]] = field(default_factory=dict)

    def offered_by_python(self, value: Any, receipt: delayq.Receipt[Any]) -> None:
        self.due[self.pair.codec.encode(value)] = receipt.due_at.timestamp() * 1000

    def offered_by_java(self, value: Any, left: int, delay: int) -> None:
        self.due[self.pair.codec.encode(value)] = left + delay

    def came(self, value: Any, at: float) -> None:
        self.arrived.setdefault(self.pair.codec.encode(value), []).append(at)

    def came_to_java(self, arrivals: list[tuple[Any, int]]) -> None:
        for value, at in arrivals:
            self.came(self.pair.from_json(value), at)

    async def consume(self, queue: delayq.DelayedQueue[Any]) -> None:
        async for value in queue:
            self.came(value, time.time() * 1000)

    def check(self) -> None:
        """All of them, none twice, none early, and none that nobody offered."""
        assert len(self.due) > 0
        assert self.arrived.keys() == self.due.keys()
        assert [payload for payload, times in self.arrived.items() if len(times) != 1] == []
        assert self.early() == []

    def early(self) -> list[bytes]:
        return [payload for payload, times in self.arrived.items() if min(times) < self.due[payload]]

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
    """Every key is gone: what came is all that there was."""
    async with raw(server) as redis:

        async def empty() -> bool:
            return not await redis.dbsize()

        await until(empty, DEADLINE)


def random_messages(pair: Pair, count: int = MESSAGES, first: int = 0) -> list[tuple[Any, int]]:
    chance = random.Random(first)
    return [(pair.value(n), chance.randint(0, MAX_DELAY_MS)) for n in range(first, first + count)]


def for_java(pair: Pair, messages: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    return [(pair.to_json(value), delay) for value, delay in messages]


def for_python(messages: list[tuple[Any, int]]) -> list[tuple[Any, float]]:
    return [(value, delay / 1000) for value, delay in messages]


# Ten thousand messages each way


async def test_what_java_offers_comes_to_python_once_each_and_never_early(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    log, messages = Log(pair), random_messages(pair)
    java = await redisson.open(name, pair.java)
    async with consuming(log, client.delayed_queue(name, codec=pair.codec)):
        left = await java.offer(for_java(pair, messages))
        # From here on only we move them.
        await java.detach()
        for (value, delay), when in zip(messages, left, strict=True):
            log.offered_by_java(value, when, delay)
        await until(lambda: len(log.arrived) >= MESSAGES, DEADLINE)
        await nothing_is_left(server)
    log.check()
    assert client.statistics().quarantined == 0
    report.MESSAGES[redisson.version, JAVA_TO_PYTHON] += MESSAGES


async def test_what_python_offers_comes_to_java_once_each_and_never_early(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    log, messages = Log(pair), random_messages(pair)
    java = await redisson.open(name, pair.java, attached=not redisson.writes_old_records)
    takes = [asyncio.create_task(java.take(MESSAGES // TAKERS)) for _ in range(TAKERS)]
    queue = client.delayed_queue(name, codec=pair.codec)
    for (value, _), receipt in zip(messages, await queue.offer_many(for_python(messages)), strict=True):
        log.offered_by_python(value, receipt)
    if not redisson.writes_old_records:
        # From here on only Java moves them. An old one cannot read them, so we have to.
        await queue.aclose()
    async with asyncio.timeout(DEADLINE):
        for arrivals in await asyncio.gather(*takes):
            log.came_to_java(arrivals)
    await nothing_is_left(server)
    log.check()
    await java.detach()
    report.MESSAGES[redisson.version, PYTHON_TO_JAVA] += MESSAGES


async def test_producers_and_consumers_of_both_kinds_share_a_queue(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """An old Redisson repeats its own messages where it meets a current record, so here it meets none."""
    log = Log(TEXT)
    from_java, from_python = random_messages(TEXT, MESSAGES // 2), random_messages(TEXT, MESSAGES // 2, MESSAGES // 2)
    if redisson.writes_old_records:
        from_java, from_python = random_messages(TEXT), []
    java = await redisson.open(name, TEXT.java)
    consumers = [asyncio.create_task(java.consume()) for _ in range(2)]
    async with delayq.connect(server.url) as other:
        queues = [c.delayed_queue(name, codec=TEXT.codec) for c in (client, other)]

        async def offer(which: int) -> None:
            mine = from_python[which::2]
            for at in range(0, len(mine), 100):
                part = mine[at : at + 100]
                for (value, _), receipt in zip(part, await queues[which].offer_many(for_python(part)), strict=True):
                    log.offered_by_python(value, receipt)

        async with consuming(log, *queues):
            left, *_ = await asyncio.gather(java.offer(from_java), offer(0), offer(1))
            for (value, delay), when in zip(from_java, left, strict=True):
                log.offered_by_java(value, when, delay)
            await nothing_is_left(server)
            await java.stop()
            to_python = len(log.arrived)
            for arrivals in await asyncio.gather(*consumers):
                log.came_to_java(arrivals)
    log.check()
    assert 0 < to_python < MESSAGES
    await java.detach()
    report.MESSAGES[redisson.version, MIXED] += MESSAGES


async def test_beside_an_attached_old_java_client_messages_may_come_twice_but_all_come_and_none_early(
    server: PrivateServer, client: delayq.Client, old: Redisson, name: str
) -> None:
    """Its script fails at the first current record, and what it moved before that stays due: it does so to any newer
    Redisson, too. Nothing of that can be mended from outside; but nothing is lost, and our messages come once.
    """
    log = Log(TEXT)
    from_java, from_python = random_messages(TEXT, 1000), random_messages(TEXT, 1000, 1000)
    java = await old.open(name, TEXT.java)
    queue = client.delayed_queue(name, codec=TEXT.codec)
    async with consuming(log, queue):
        left, receipts = await asyncio.gather(java.offer(from_java), queue.offer_many(for_python(from_python)))
        for (value, delay), when in zip(from_java, left, strict=True):
            log.offered_by_java(value, when, delay)
        for (value, _), receipt in zip(from_python, receipts, strict=True):
            log.offered_by_python(value, receipt)
        await until(lambda: len(log.arrived) >= 2000, DEADLINE)
        await nothing_is_left(server)
    await java.detach()
    assert log.arrived.keys() == log.due.keys()
    assert log.early() == []
    assert [value for value, _ in from_python if len(log.arrived[TEXT.codec.encode(value)]) != 1] == []
    twice = sum(len(times) > 1 for times in log.arrived.values())
    report.NOTES.append(f"an attached {old.version} beside current records repeated {twice} of its own 1,000 messages")


# Waking each other


async def test_java_is_woken_by_a_python_offer(server: PrivateServer, current: Redisson, name: str) -> None:
    """Java sleeps until a far message. Each offer is due sooner than all before; then we go, and only Java is there."""
    log = Log(TEXT)
    java = await current.open(name, TEXT.java)
    taken = asyncio.create_task(java.take(10))
    async with delayq.connect(server.url) as client:
        queue = client.delayed_queue(name, codec=TEXT.codec)
        await queue.offer(TEXT.value(99), FAR_MS / 1000)
        for n in range(10):
            log.offered_by_python(TEXT.value(n), await queue.offer(TEXT.value(n), 2.5 - n * 0.2))
    log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
    await java.detach()
    log.check()
    # Under 200 ms: its timer ticks every 100. A wake-up that was lost would cost a minute.
    assert max(log.lateness()) < 1000
    report.LATENESS_MS[current.version, "Java woken by Python, and alone,"] += log.lateness()


async def test_python_is_woken_by_a_java_offer(client: delayq.Client, redisson: Redisson, name: str) -> None:
    """The same the other way round: Java goes, and only we are there."""
    log = Log(TEXT)
    queue = client.delayed_queue(name, codec=TEXT.codec)
    java = await redisson.open(name, TEXT.java)
    await java.offer([(TEXT.value(99), FAR_MS)])
    async with consuming(log, queue):
        for n in range(10):
            await java.offer([(TEXT.value(n), 2500 - n * 200)])
        await java.detach()
        for value, due_at in await queue.pending.entries():
            if value != TEXT.value(99):
                log.due[TEXT.codec.encode(value)] = due_at.timestamp() * 1000
        await until(lambda: len(log.arrived) >= 10, DEADLINE)
    log.check()
    # Under 20 ms on a quiet machine.
    assert max(log.lateness()) < 500
    report.LATENESS_MS[redisson.version, "Python woken by Java, and alone,"] += log.lateness()


async def test_an_offer_without_delay_reaches_a_waiting_take_of_the_other_side(
    client: delayq.Client, redisson: Redisson, name: str
) -> None:
    """Both sides are there, as usual. From before the offer to after the take."""
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
    report.LATENESS_MS[redisson.version, "Python's offer without delay in Java's hands"] += to_java
    report.LATENESS_MS[redisson.version, "Java's offer without delay in Python's hands"] += to_python


# Cancelling


async def test_what_python_cancels_does_not_come_to_java(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str
) -> None:
    log, messages = Log(TEXT), [(TEXT.value(n), 1000 + n) for n in range(1000)]
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
    report.NOTES.append(f"{redisson.version}: {cancelled} of 1,000 cancels at the due time were in time")


# Each side's views of what the other wrote


def is_current_form(record: bytes) -> bool:
    return record[0] == 8 and int.from_bytes(record[9:17], "little") == len(record) - 17


def is_old_form(record: bytes) -> bool:
    return int.from_bytes(record[8:16], "little") == len(record) - 16


async def test_both_sides_write_the_same_payload_bytes(
    server: PrivateServer, client: delayq.Client, redisson: Redisson, pair: Pair, name: str
) -> None:
    values = [pair.value(n) for n in range(200)]
    java = await redisson.open(f"{name}-java", pair.java)
    await java.offer([(pair.to_json(value), FAR_MS) for value in values])
    await client.delayed_queue(f"{name}-python", codec=pair.codec).offer_many([(value, 60) for value in values])
    async with raw(server) as redis:
        by_java = await redis.zrange(f"redisson_delay_queue_timeout:{{{name}-java}}", 0, -1)
        by_python = await redis.lrange(f"redisson_delay_queue:{{{name}-python}}", 0, -1)
        assert sorted(by_java) == sorted(await redis.lrange(f"redisson_delay_queue:{{{name}-java}}", 0, -1))
    await java.detach()
    assert all(map(is_current_form, by_python))
    assert all(map(is_old_form if redisson.writes_old_records else is_current_form, by_java))
    header = 16 if redisson.writes_old_records else 17
    assert Counter(record[header:] for record in by_java) == Counter(record[17:] for record in by_python)


async def test_java_sees_and_removes_what_python_wrote(
    server: PrivateServer, client: delayq.Client, current: Redisson, pair: Pair, name: str
) -> None:
    values = [pair.value(n) for n in range(100)]
    java = await current.open(name, pair.java)
    queue = client.delayed_queue(name, codec=pair.codec)
    # Offer order is what Java shows, not due order.
    await queue.offer_many([(value, 100 - n / 10) for n, value in enumerate(values)])

    assert await java.ask("size") == 100
    assert [pair.from_json(value) for value in await java.ask("readAll")] == values
    assert await java.ask("contains", value=pair.to_json(values[70])) is True
    assert await java.ask("contains", value=pair.to_json(pair.value(100))) is False
    assert await java.ask("remove", value=pair.to_json(values[70])) is True
    assert await java.ask("remove", value=pair.to_json(values[70])) is False
    assert pair.from_json(await java.ask("poll")) == values[0]
    assert pair.from_json(await java.ask("poll")) == values[1]

    left = values[2:70] + values[71:]
    assert await java.ask("size") == await queue.pending.size() == len(left)
    assert await queue.pending.read_all() == left
    async with raw(server) as redis:
        assert await redis.zcard(f"redisson_delay_queue_timeout:{{{name}}}") == len(left)
    await java.detach()


async def test_an_old_java_client_can_count_what_python_wrote(client: delayq.Client, old: Redisson, name: str) -> None:
    """More it cannot: it reads only its own records."""
    java = await old.open(name, TEXT.java)
    await client.delayed_queue(name, codec=TEXT.codec).offer_many([(TEXT.value(n), 60) for n in range(10)])
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
        # One by one: Redisson sends what is offered at once over several connections, in any order.
        left += await java.offer([(pair.to_json(value), FAR_MS - n * 1000)])

    assert await pending.size() == 20
    assert await pending.peek() == values[0]
    assert await pending.read_all() == values
    entries = await pending.entries()
    assert [value for value, _ in entries] == values[::-1]
    assert all(early < late for (_, early), (_, late) in pairwise(entries))
    for n, (_, due_at) in enumerate(reversed(entries)):
        assert 0 <= due_at.timestamp() * 1000 - (left[n] + FAR_MS - n * 1000) < 1000

    assert await pending.contains(values[7])
    assert not await pending.contains(pair.value(20))
    assert await pending.contains_all(values)
    assert await pending.remove(values[7])
    assert not await pending.remove(values[7])
    assert await pending.poll() == values[0]
    assert await pending.poll_many(2) == values[1:3]
    assert await pending.poll_last_and_offer_first_to(name) == values[19]
    assert await pending.remove_all([values[3], values[7]])
    assert [pair.from_json(value) for value in await java.ask("readAll")] == values[4:7] + values[8:19]
    assert await pending.retain_all(values[8:10])
    assert await java.ask("size") == await pending.size() == 2
    assert await java.ask("remove", value=pair.to_json(values[8])) is True
    assert [pair.from_json(value) for value, _ in await java.take(1)] == [values[19]]
    assert await pending.clear()
    await nothing_is_left(server)
    await java.detach()
