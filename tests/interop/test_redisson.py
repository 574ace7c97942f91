"""delayq and Redisson on one queue: each reads, moves, wakes and removes what the other wrote."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq.admin.acl import acl_rules
from tests.interop import report
from tests.interop.live import (
    AT_NIGHT,
    DEADLINE,
    MAX_DELAY_MS,
    MESSAGES,
    SPREAD,
    Live,
    Log,
    MovedByJava,
    encoded,
    for_python,
    in_each_codec,
    random_messages,
)
from tests.interop.pairs import KRYO, PAIRS, TEXT, Pair
from tests.interop.redisson import (
    Redisson,
    newest_current_first,
    newest_first,
    with_current,
    with_newest,
    with_old,
)
from tests.support.depth import nightly
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.clusters import TestCluster


pytestmark = pytest.mark.java

TAKERS = 4
FAR_MS = 60_000
HOUR_MS = 3_600_000
# A lost wake-up costs more than this, until a message that is due later. A pause of the machine
# costs less.
WOKEN_MS = 10_000


amounts = pytest.mark.parametrize("count", [MESSAGES, nightly(AT_NIGHT)])


# A thousand messages each way in each codec


@amounts
async def test_messages_of_java_come_to_python_once_and_not_early(live: Live, count: int) -> None:
    async def play(live: Live, pair: Pair) -> None:
        log, messages = Log(pair), random_messages(pair, count)
        java = await live.open(pair)
        async with log.consuming(live.queue(pair)):
            await log.offer_by_java(java, messages)
            # From here on, only we move them.
            await java.detach()
            await until(lambda: len(log.arrived) >= count, DEADLINE)
            await live.drained()
        log.check()

    await in_each_codec(live, play)
    assert live.client.statistics().quarantined == 0


@amounts
async def test_messages_of_python_come_to_java_once_and_not_early(live: Live, count: int) -> None:
    async def play(live: Live, pair: Pair) -> None:
        log, messages = Log(pair), random_messages(pair, count)
        java = await live.open(pair, attached=not live.redisson.release.writes_old_records)
        takes = [asyncio.create_task(java.take(count // TAKERS)) for _ in range(TAKERS)]
        queue = live.queue(pair)
        await log.offer_by_python(queue, messages)
        if not live.redisson.release.writes_old_records:
            # From here on, only Java moves them. An old client cannot read them: there we have to.
            await queue.aclose()
        async with asyncio.timeout(DEADLINE):
            log.came_to_java(*await asyncio.gather(*takes))
        await live.drained()
        log.check()
        await java.detach()

    await in_each_codec(live, play)


@with_current
@amounts
async def test_java_and_python_offer_move_and_take_on_one_queue(live: Live, count: int) -> None:
    """Three clients offer, move and take at once; one of them is Java."""
    for pair in (KRYO,) if count == MESSAGES else PAIRS:
        await share(replace(live, name=f"{live.name}-{pair}"), pair, count // 2, count // 2)


@with_old
async def test_java_and_python_move_and_take_messages_of_an_old_java_client(live: Live) -> None:
    """An old client repeats its own messages when it meets a current record: here are none."""
    await share(live, TEXT, MESSAGES, 0)


async def share(live: Live, pair: Pair, by_java: int, by_python: int) -> None:
    """Let Java and two of our clients offer, move and take so many messages."""
    log, count = Log(pair), by_java + by_python
    from_java, from_python = (
        random_messages(pair, by_java),
        random_messages(pair, by_python, by_java),
    )
    java = await live.open(pair)
    with MovedByJava(live.server, live.name) as moved:
        takes = [asyncio.create_task(java.consume()) for _ in range(2)]
        # Java starts alone, because we are quicker: its timer works in ticks.
        await log.offer_by_java(java, from_java[:200])
        await until(lambda: moved.count > 0, DEADLINE)
        async with delayq.connect(live.server.url, resync_interval=60) as other:
            queues = [c.delayed_queue(live.name, codec=pair.codec) for c in (live.client, other)]
            async with log.consuming(*queues):
                await asyncio.gather(
                    log.offer_by_java(java, from_java[200:]),
                    log.offer_by_python(queues[0], from_python[::2], at_once=100),
                    log.offer_by_python(queues[1], from_python[1::2], at_once=100),
                )
                await live.drained()
                to_python = len(log.arrived)
                await java.stop()
                log.came_to_java(*await asyncio.gather(*takes))
    await java.detach()
    log.check()
    assert 0 < to_python < count
    assert 0 < moved.count < count


@with_old
async def test_beside_an_old_java_client_messages_may_come_twice_but_none_early(live: Live) -> None:
    """The old client's script fails at the first current record, after it moved some messages.

    It does the same beside any newer Redisson. Nothing is lost, and our messages come once.
    """
    log = Log()
    from_java, from_python = random_messages(TEXT, 1000), random_messages(TEXT, 1000, 1000)
    java = await live.open()
    queue = live.queue()
    async with log.consuming(queue):
        await asyncio.gather(
            log.offer_by_java(java, from_java), log.offer_by_python(queue, from_python)
        )
        await until(lambda: len(log.arrived) >= 2000, DEADLINE)
        await live.drained()
    await java.detach()
    assert log.arrived.keys() == log.due.keys()
    assert log.early() == []
    assert [
        value for value, _ in from_python if len(log.arrived[TEXT.codec.encode(value)]) != 1
    ] == []


@with_newest
async def test_a_java_client_that_is_killed_takes_only_what_it_had_in_hand(live: Live) -> None:
    """At most one message is lost for each of its takers."""
    log, taken = Log(), list[tuple[Any, int]]()
    count, half = 4_000, 2_000
    from_java = random_messages(TEXT, half, most=2 * MAX_DELAY_MS)
    from_python = random_messages(TEXT, half, half, most=2 * MAX_DELAY_MS)
    victim = Redisson(live.redisson.release, live.server)
    java = await victim.open(live.name, TEXT.java)
    takes = [asyncio.create_task(java.consume(taken)) for _ in range(TAKERS)]
    queue = live.queue()
    async with log.consuming(queue):
        await asyncio.gather(
            log.offer_by_java(java, from_java),
            log.offer_by_python(queue, from_python[::2], at_once=100),
        )
        meanwhile, afterwards = from_python[1:-200:2], from_python[-199::2]
        offering = asyncio.create_task(log.offer_by_python(queue, meanwhile, at_once=100))
        # Kill it early: the other side takes most of the messages.
        await until(lambda: len(taken) >= 100, DEADLINE)
        victim.kill()
        ends = await asyncio.gather(*takes, return_exceptions=True)
        # Each of them was still taking.
        assert all(isinstance(end, RuntimeError) for end in ends)
        await offering
        # However slow the machine is, the queue continues without the victim.
        await log.offer_by_python(queue, afterwards, at_once=100)
        await until(lambda: len(log.arrived) + len(taken) >= count - TAKERS, DEADLINE)
        await live.drained()
    victim.close()
    log.came_to_java(taken)
    log.check(lost=TAKERS)


@with_newest
async def test_java_takes_what_waits_behind_a_handler_that_has_become_slow(live: Live) -> None:
    java, queue, quick = await live.open(), live.queue(), 300

    async def consume(handled: list[Any], *, leased: bool) -> None:
        async for message in queue.deliveries() if leased else queue:
            handled.append(message)
            if leased:
                await message.ack()
            if len(handled) == quick:
                await asyncio.Event().wait()

    for leased in (False, True):
        handled = list[Any]()
        await queue.offer_many([(TEXT.value(n), 0) for n in range(2 * quick)])
        async with running(consume(handled, leased=leased)):
            await until(lambda: len(handled) == quick, DEADLINE)  # noqa: B023
            await asyncio.wait_for(java.take(quick), DEADLINE)
    await live.drained()
    await java.detach()


# Waking each other


@newest_current_first
async def test_java_is_woken_by_a_python_offer(live: Live) -> None:
    """Java sleeps until a far message. Each offer is due sooner; then only Java remains."""
    log = Log()
    java = await live.open()
    taken = asyncio.create_task(java.take(4))
    async with live.raw() as redis, redis.pubsub() as channel:
        await channel.subscribe(f"redisson_delay_queue_channel:{{{live.name}}}")
        async with delayq.connect(live.server.url) as client:
            queue = client.delayed_queue(live.name, codec=TEXT.codec)
            offers = [
                (TEXT.value(99), FAR_MS),
                # Far apart: each is to be offered before the last one is due, and to be due first.
                *((TEXT.value(n), 8000 - n * 2000) for n in range(4)),
            ]
            receipts = [await queue.offer(value, delay / 1000) for value, delay in offers]
        for (value, _), receipt in zip(offers[1:], receipts[1:], strict=True):
            log.offered_by_python(value, receipt)
        log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
        announced = [await channel.get_message(timeout=1.0) for _ in range(1 + len(offers))]
    # All five were announced, and each woke Java earlier than it had planned: the last one
    # offered arrived first, and the first one, for which Java had gone to sleep, has not arrived.
    due = [str(round(receipt.due_at.timestamp() * 1000)).encode() for receipt in receipts]
    assert [message and message["data"] for message in announced[1:]] == due
    assert list(log.arrived) == [TEXT.codec.encode(TEXT.value(n)) for n in reversed(range(4))]
    assert await java.ask("size") == 1
    await java.detach()
    log.check()
    # Normally under 200 ms, as Java's timer ticks at least every 100 ms.
    assert max(log.lateness()) < WOKEN_MS


@newest_first
async def test_python_is_woken_by_a_java_offer(live: Live) -> None:
    """The reverse: Java leaves, and only we remain, without a re-check."""
    log, far = Log(), [TEXT.value(99), TEXT.value(98)]
    queue = live.queue()
    java = await live.open()
    await java.offer([(TEXT.value(99), FAR_MS)])
    async with log.consuming(queue):
        await java.offer([(TEXT.value(98), FAR_MS // 2)])
        for n in range(10):
            await java.offer([(TEXT.value(n), 6200 - n * 200)])
        await java.detach()
        for value, due_at in await queue.pending.entries():
            if value not in far:
                log.due[TEXT.codec.encode(value)] = due_at.timestamp() * 1000
        await until(lambda: len(log.arrived) >= 10, DEADLINE)
    assert list(log.arrived) == sorted(log.due, key=log.due.__getitem__)
    assert len(log.due) == 10
    assert await queue.pending.read_all() == far
    log.check()
    # Under 20 ms on a quiet machine.
    assert max(log.lateness()) < WOKEN_MS


async def test_an_offer_without_delay_reaches_a_waiting_take_of_the_other_side(live: Live) -> None:
    java = await live.open()
    queue = live.queue()
    for n in range(20):
        taken = asyncio.create_task(java.take(1))
        await asyncio.sleep(0.02)
        await queue.offer(TEXT.value(n))
        assert [value for value, _ in await asyncio.wait_for(taken, DEADLINE)] == [TEXT.value(n)]
        waiting = asyncio.create_task(queue.take())
        await asyncio.sleep(0.02)
        await java.offer([(TEXT.value(n), 0)])
        assert await asyncio.wait_for(waiting, DEADLINE) == TEXT.value(n)
    await java.detach()


# Cancelling


@newest_first
async def test_a_cancel_at_the_due_time_says_truly_whether_the_message_comes(live: Live) -> None:
    log, messages = Log(), [(TEXT.value(n), 300 + n) for n in range(1000)]
    java = await live.open()
    consumer = asyncio.create_task(java.consume())
    queue = live.queue()
    receipts = await queue.offer_many(for_python(messages))
    cancelled = 0
    for (value, _), receipt in zip(messages, receipts, strict=True):
        await asyncio.sleep(receipt.due_at.timestamp() - time.time())
        if await receipt.cancel():
            cancelled += 1
        else:
            log.offered_by_python(value, receipt)
    await live.drained()
    await java.stop()
    log.came_to_java(await consumer)
    await java.detach()
    if cancelled < len(messages):
        log.check()


# Each side's views of the other's messages


def payload(record: bytes, *, old: bool) -> bytes:
    """Return a record's payload, which follows an id and a length."""
    header = 8 if old else 9
    assert old or record[0] == 8
    assert int.from_bytes(record[header : header + 8], "little") == len(record) - header - 8
    return record[header + 8 :]


async def test_java_and_python_write_the_same_payload_bytes(live: Live) -> None:
    async def play(live: Live, pair: Pair) -> None:
        values = [pair.value(n) for n in range(200)]
        java = await live.redisson.open(f"{live.name}-java", pair.java)
        await java.offer([(pair.to_java(value), FAR_MS) for value in values])
        await live.client.delayed_queue(f"{live.name}-python", codec=pair.codec).offer_many(
            [(value, 60) for value in values]
        )
        ordered, timeout = "redisson_delay_queue:{%s}", "redisson_delay_queue_timeout:{%s}"
        async with live.raw() as redis:
            by_java = await redis.zrange(timeout % f"{live.name}-java", 0, -1)
            by_python = await redis.lrange(ordered % f"{live.name}-python", 0, -1)
            assert sorted(by_java) == sorted(
                await redis.lrange(ordered % f"{live.name}-java", 0, -1)
            )
        await java.detach()
        old = live.redisson.release.writes_old_records
        java_payloads = [payload(record, old=old) for record in by_java]
        python_payloads = [payload(record, old=False) for record in by_python]
        assert python_payloads == [pair.codec.encode(value) for value in values]
        assert Counter(java_payloads) == Counter(python_payloads)
        # Java's payloads stay the same when we decode and encode them again.
        again = [pair.codec.encode(pair.codec.decode(theirs)) for theirs in java_payloads]
        assert again == java_payloads

    await in_each_codec(live, play)


@with_current
async def test_java_sees_and_removes_what_python_wrote(live: Live) -> None:
    async def play(live: Live, pair: Pair) -> None:
        values = [pair.value(n) for n in range(100)]
        java = await live.open(pair)
        queue = live.queue(pair)
        # Java lists messages in the order of their offers, not of their due times.
        await queue.offer_many([(value, 100 - n / 10) for n, value in enumerate(values)])

        assert await java.ask("size") == 100
        assert encoded(pair, await java.ask("readAll")) == encoded(pair, values)
        assert await java.ask("contains", value=pair.to_java(values[70])) is True
        assert await java.ask("contains", value=pair.to_java(pair.value(100))) is False
        assert await java.ask("remove", value=pair.to_java(values[70])) is True
        assert await java.ask("remove", value=pair.to_java(values[70])) is False
        assert encoded(pair, [await java.ask("poll") for _ in range(2)]) == encoded(
            pair, values[:2]
        )

        left = values[2:70] + values[71:]
        assert await java.ask("size") == await queue.pending.size() == len(left)
        assert encoded(pair, await queue.pending.read_all()) == encoded(pair, left)
        async with live.raw() as redis:
            assert await redis.zcard(f"redisson_delay_queue_timeout:{{{live.name}}}") == len(left)
        await java.detach()

    await in_each_codec(live, play)


async def test_python_sees_and_removes_what_java_wrote(live: Live) -> None:
    async def play(live: Live, pair: Pair) -> None:
        values = [pair.value(n) for n in range(20)]
        java = await live.open(pair)
        pending = live.queue(pair).pending
        # Far apart: the first calls of a Java process take long.
        delays = [HOUR_MS - n * FAR_MS for n in range(20)]
        offered: list[tuple[float, float]] = []
        for value, delay in zip(values, delays, strict=True):
            # One by one: Redisson sends simultaneous offers over several connections, in any order.
            before = time.time() * 1000
            await java.offer([(value, delay)])
            offered.append((before, time.time() * 1000))

        assert await pending.size() == 20
        assert encoded(pair, [await pending.peek()]) == encoded(pair, values[:1])
        assert encoded(pair, await pending.read_all()) == encoded(pair, values)
        entries = await pending.entries()
        assert encoded(pair, [value for value, _ in entries]) == encoded(pair, values[::-1])
        assert all(early < late for (_, early), (_, late) in pairwise(entries))
        for (before, after), delay, (_, due_at) in zip(
            offered, delays, reversed(entries), strict=True
        ):
            assert before - 1 <= due_at.timestamp() * 1000 - delay <= after + 1

        assert await pending.contains(values[7])
        assert not await pending.contains(pair.value(20))
        assert await pending.contains_all(values)
        assert await pending.remove(values[7])
        assert not await pending.remove(values[7])
        polled = [
            await pending.poll(),
            *await pending.poll_many(2),
            await pending.poll_last_and_offer_first_to(live.name),
        ]
        assert encoded(pair, polled) == encoded(pair, [*values[:3], values[19]])
        assert await pending.remove_all([values[3], values[7]])
        assert encoded(pair, await java.ask("readAll")) == encoded(pair, values[4:7] + values[8:19])
        assert await pending.retain_all(values[8:10])
        assert await java.ask("size") == await pending.size() == 2
        assert await java.ask("remove", value=pair.to_java(values[8])) is True
        assert encoded(pair, [value for value, _ in await java.take(1)]) == encoded(
            pair, [values[19]]
        )
        assert await pending.clear()
        await live.drained()
        await java.detach()

    await in_each_codec(live, play)


# Java's other operations on a queue that Python uses


async def test_javas_blocking_queue_has_what_python_moved(live: Live) -> None:
    java = await live.open(attached=False)
    queue = live.queue()
    values = [TEXT.value(n) for n in range(10)]
    await queue.offer_many([(value, n / 1000) for n, value in enumerate(values)])

    async def all_moved() -> bool:
        return bool(await java.ask("ready.size") == len(values))

    await until(all_moved)
    assert await java.ask("ready.readAll") == values
    assert await java.ask("ready.peek") == values[0]
    assert await java.ask("ready.drainTo", most=3) == values[:3]
    assert await java.ask("ready.pollFromAny", other=f"{live.name}-other") == values[3]
    assert await java.ask("ready.pollLastAndOfferFirstTo", other=f"{live.name}-other") == values[9]
    assert (
        await live.client.delayed_queue(f"{live.name}-other", codec=TEXT.codec).take() == values[9]
    )
    assert await queue.drain() == values[4:9]
    await live.drained()


@newest_first
async def test_python_goes_on_when_java_deletes_the_queue_or_lets_it_expire(
    live: Live,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()
    java = await live.open()
    # Only we move messages.
    await java.detach()
    # A Java process is slow at what it does for the first time.
    assert await java.ask("delete") is False
    assert await java.ask("expire", ms=100) is False
    assert await java.ask("clearExpire") is False
    queue = live.queue()

    async def offer_one(n: int) -> None:
        log.offered_by_python(TEXT.value(n), await queue.offer(TEXT.value(n), 2.5))

    async def gone() -> bool:
        return await queue.pending.size() == 0

    async with log.consuming(queue):
        # Java deletes the queue while our timer is set for it.
        await queue.offer_many([(TEXT.value(n), 2) for n in range(100)])
        assert await java.ask("delete") is True
        assert await gone()
        assert not log.arrived, "Java came too late to delete the queue before it was due"
        await offer_one(100)
        await until(lambda: len(log.arrived) == 1)

        await queue.offer_many([(TEXT.value(n), 60) for n in range(100)])
        assert await java.ask("expire", ms=100) is True
        await until(gone)
        await offer_one(101)
        await until(lambda: len(log.arrived) == 2)

        await offer_one(102)
        assert await java.ask("expire", ms=2400) is True
        assert await java.ask("clearExpire") is True
        await until(lambda: len(log.arrived) == 3)
        await live.drained()
    log.check()
    assert max(log.lateness()) < WOKEN_MS
    assert live.client.statistics().errors == 0
    # We do not retry in a loop: that would make thousands of calls while we wait.
    assert live.client.statistics().round_trips < 1000
    assert [record for record in caplog.records if record.name.startswith("delayq")] == []


# Leases, and queues without an ordered list: Java notices neither


@newest_current_first
async def test_python_leases_messages_of_java_and_failed_ones_come_to_java(live: Live) -> None:
    """Every third delivery is refused: it waits in a record that Java moves and takes."""
    log, messages = Log(), random_messages(TEXT, MESSAGES)
    java = await live.open()
    queue = live.queue()
    acks: list[asyncio.Task[None]] = []
    refusing: list[delayq.Delivery[Any]] = []
    deliveries = queue.deliveries(lease=3600)
    offered = Log()
    await offered.offer_by_java(java, messages)
    handled = 0
    async for delivery in deliveries:
        handled += 1
        if handled % 3 == 0:
            refusing.append(delivery)
            key = TEXT.codec.encode(delivery.value)
            log.due[key] = offered.due[key]
        else:
            acks.append(asyncio.create_task(delivery.ack()))
        if handled == MESSAGES:
            break
    # Refused at the end: none comes back while this loop still takes messages.
    await asyncio.gather(*acks, *(delivery.nack(2) for delivery in refusing))
    # From here on, only Java is there.
    await queue.aclose()
    log.came_to_java(await asyncio.wait_for(java.take(len(refusing)), DEADLINE))
    await live.drained()
    log.check()
    await java.detach()


@newest_current_first
async def test_java_delivers_what_python_offered_without_an_ordered_list(live: Live) -> None:
    log, messages = Log(), random_messages(TEXT, MESSAGES)
    java = await live.open()
    taken = asyncio.create_task(java.take(MESSAGES))
    queue = live.queue(ordered_list=False)
    await log.offer_by_python(queue, messages)
    assert await java.ask("size") == 0
    await queue.aclose()
    log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
    await live.drained()
    log.check()
    await java.detach()


# Python as a user with limited rights, beside a Redisson that may do everything


async def take_what_it_may(log: Log, url: str, name: str) -> int:
    """Take until cancelled, no matter how often it is refused. Return the number of refusals."""
    refused = 0
    async with delayq.connect(url) as client:
        queue = client.delayed_queue(name, codec=TEXT.codec)
        try:
            while True:
                try:
                    log.came(await queue.take(), float("inf"))
                except delayq.ServerRefused:
                    refused += 1
                    await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            return refused


@with_newest
@pytest.mark.parametrize(
    "rights",
    [
        *("as delayq acl says", "no channel of notices"),
        *map(nightly, ("by hand", "no channels")),
    ],
)
async def test_no_message_is_stranded_whatever_python_may(live: Live, rights: str) -> None:
    by_hand = (f"redisson_delay_queue*:{{{live.name}}}", f"delayq_*:{{{live.name}}}")
    rules = {
        "as delayq acl says": acl_rules("consumer", delayed=[live.name]),
        # The rules that docs/redisson.md gives.
        "by hand": [
            f"~{live.name}",
            *(f"{kind}{pattern}" for kind in "~&" for pattern in by_hand),
            "+@all",
        ],
        # The rights of a user on Redis 7 and Valkey that was given only keys and commands.
        "no channels": ["~*", "+@all"],
        "no channel of notices": ["~*", f"&redisson_delay_queue_channel:{{{live.name}}}", "+@all"],
    }[rights]
    reply = live.server.call("ACL", "SETUSER", "limited", "reset", "on", ">its-password", *rules)
    assert reply == b"+OK", reply
    url = live.server.url.replace("redis://", "redis://limited:its-password@")
    log = Log()
    from_java, from_python = random_messages(TEXT, 200), random_messages(TEXT, 200, 200)
    java = await live.open()
    taking = asyncio.create_task(take_what_it_may(log, url, live.name))
    taken = asyncio.create_task(java.consume())
    # The client that offers is gone by then, and moves none of them.
    async with delayq.connect(live.server.url) as client:
        await log.offer_by_python(client.delayed_queue(live.name, codec=TEXT.codec), from_python)
    await log.offer_by_java(java, from_java)
    await live.drained()
    await java.stop()
    log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
    await until(lambda: not log.missing(), DEADLINE)
    taking.cancel()
    refused = await taking
    live.server.call("ACL", "DELUSER", "limited")
    await java.detach()
    log.check()
    if rights in {"as delayq acl says", "by hand"}:
        assert (refused, len(taken.result()) < 400) == (0, True)


# A cluster, in which the slot moves from master to master meanwhile


async def test_java_and_python_share_a_queue_of_a_cluster_while_its_slot_moves(
    cluster: TestCluster, redisson_of_cluster: Redisson, name: str
) -> None:
    log, most, moves = Log(), 4000, 3
    from_java = random_messages(TEXT, 1000, most=most)
    from_python = random_messages(TEXT, 1000, 1000, most=most)
    java = await redisson_of_cluster.open(name, TEXT.java)
    takes = [asyncio.create_task(java.consume()) for _ in range(2)]
    first = cluster.owner(name)
    async with delayq.connect(cluster.url) as client:
        queue = client.delayed_queue(name, codec=TEXT.codec)
        async with log.consuming(queue):
            offering = asyncio.gather(
                log.offer_by_java(java, from_java),
                log.offer_by_python(queue, from_python, at_once=100),
            )
            for n in range(moves):
                await asyncio.sleep(most / 1000 / (moves + 1))
                await asyncio.to_thread(
                    cluster.move, name, cluster.nodes[(cluster.nodes.index(first) + n + 1) % 3]
                )
            await offering

            async def empty() -> bool:
                return await queue.pending.size() + await queue.ready.size() == 0

            await until(empty, DEADLINE)
            await java.stop()
            log.came_to_java(*await asyncio.gather(*takes))
            await until(lambda: not log.missing(), DEADLINE)
    by_java = sum(len(take.result()) for take in takes)
    await java.detach()
    log.check()
    assert 0 < by_java < 2000


# Figures for docs/redisson.md: shares, and Java's losses when its connections are killed


MOST_MS = 2000
KILLS = 40


@pytest.mark.nightly
@with_newest
@pytest.mark.parametrize(
    ("pause_ms", "threads", "count"), [(0, 1, SPREAD), (2, 1, 2000), (2, 4, 4000)]
)
async def test_java_and_python_both_get_a_share_of_the_messages(
    live: Live, pause_ms: int, threads: int, count: int
) -> None:
    """One loop in Python beside ``threads`` loops in Java."""
    log, messages = Log(), random_messages(TEXT, count, most=MOST_MS)
    java = await live.open()
    to_java = list[tuple[Any, int]]()
    takes = [asyncio.create_task(java.consume(to_java, pause=pause_ms)) for _ in range(threads)]
    to_python = 0
    async with delayq.connect(live.server.url) as client:
        queue = client.delayed_queue(live.name, codec=TEXT.codec)

        async def consume() -> None:
            nonlocal to_python
            async for value in queue:
                log.came(value, float("inf"))
                to_python += 1
                if pause_ms:
                    await asyncio.sleep(pause_ms / 1000)

        consumer = asyncio.create_task(consume())
        await log.offer_by_python(queue, messages)
        # When they stop, no message is in flight to either.
        await until(lambda: to_python + len(to_java) >= count, DEADLINE)
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
    await java.stop()
    await asyncio.wait_for(asyncio.gather(*takes), DEADLINE)
    log.came_to_java(to_java)
    await java.detach()
    await live.drained()
    log.check()
    assert 0 < to_python < count
    summary = (
        f"one loop in Python beside {threads} in Java took {to_python / count:.0%} of {count:,}"
    )
    report.LINES[f"{live.redisson}: with {pause_ms} ms for each message, {summary}"] = None


@pytest.mark.nightly
@with_newest
async def test_java_alone_loses_what_it_pops_for_a_connection_that_is_killed(live: Live) -> None:
    """This tests no promise of ours: the figure shows what to expect of consumers in Java."""
    count = SPREAD
    log, messages = Log(), random_messages(TEXT, count, most=MOST_MS)
    java = await live.open()
    await log.offer_by_java(java, messages)
    takes = [asyncio.create_task(java.consume()) for _ in range(4)]
    for _ in range(KILLS):
        await asyncio.sleep(MOST_MS / 1000 / KILLS)
        live.server.call("CLIENT", "KILL", "TYPE", "normal")
    await live.drained()
    await java.stop()
    log.came_to_java(*await asyncio.gather(*takes))
    await java.detach()
    summary = f"alone: {KILLS} times cut, it lost {len(log.missing())} of {count:,}"
    report.LINES[f"{live.redisson} {summary}"] = None
