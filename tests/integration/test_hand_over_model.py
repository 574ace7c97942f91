"""A delayed queue, and what is on its way to a caller, checked against plain models."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack, payload_of
from delayq._redisson.store import ACK, GIVE_BACK, POLL_PENDING, TRANSFER
from tests.support.depth import examples

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from delayq._redis.scripts import Script
    from tests.support.servers import PrivateServer


KEYS = DelayedKeys.of("orders")
HOUR_US = 3_600_000_000
FAR_MS = 4e12


class Desk:
    """A server, the calls of its clients, and the place where each message must be."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.out: dict[str, list[bytes]] = {}  # by call, neither confirmed nor given back
        self.fenced: set[str] = set()  # calls that were given up, or were returns
        self.done: list[bytes] = []  # what callers have for good
        self.offered = 0
        self.due_ms: dict[bytes, float] = {}  # of those that were offered as pending
        self._loaded: dict[str, Any] = {}

    def run(self, script: Script, keys: dict[str, str], args: dict[str, Any], *rest: bytes) -> Any:
        names = [keys.get(name) or getattr(KEYS, name) for name in script.keys]
        plain = [name for name in script.args if not name.endswith("...")]
        if script.name not in self._loaded:
            self._loaded[script.name] = self.raw.register_script(script.text)
        return self._loaded[script.name](keys=names, args=[*(args[name] for name in plain), *rest])

    def move(self, call: str, *, take: int, most_bytes: int = 1000) -> list[Any]:
        """Transfer what is due, and hand out ``take`` messages under the name of a call."""
        limits: dict[str, Any] = {
            "limit": 100,
            "take": take,
            "most_bytes": most_bytes,
            "lease_us": HOUR_US,
        }
        args = limits | {"each": 0, "call": call, "signature": ""}
        return list(self.run(TRANSFER, {"fence": KEYS.fence(call)}, args))

    def offer(self, count: int, *, due_ms: float | None) -> None:
        """Offer messages that are pending until then; None: they are ready."""
        for _ in range(count):
            payload = b"%d" % self.offered
            self.offered += 1
            if due_ms is None:
                self.raw.rpush(KEYS.ready, payload)
            else:
                record = pack(self.offered.to_bytes(8, "big"), payload, 8)
                self.due_ms[payload] = due_ms
                self.raw.zadd(KEYS.timeout, {record: due_ms})
                self.raw.rpush(KEYS.ordered, record)

    def ready(self) -> list[bytes]:
        return list(self.raw.lrange(KEYS.ready, 0, -1))

    def pending(self) -> list[bytes]:
        return [payload_of(record) or b"" for record in self.raw.lrange(KEYS.ordered, 0, -1)]

    def due(self) -> list[bytes]:
        return [payload_of(record) or b"" for record in self.raw.zrangebyscore(KEYS.timeout, 0, 9)]

    def transfer(self, call: str, take: int) -> None:
        before = [*self.ready(), *self.due()]
        handed = self.move(call, take=take)[-1]
        assert handed == ([] if call in self.fenced else before[:take])
        if handed:
            self.out[call] = handed

    def poll(self, call: str, limit: int) -> None:
        before = self.pending()
        limits = {"limit": limit, "most_bytes": 1000, "listed": 1, "lease_us": HOUR_US}
        args: dict[str, Any] = limits | {"token": f"{call}:pending"}
        taken, handed = self.run(POLL_PENDING, {"fence": KEYS.fence(call)}, args)
        assert handed == ([] if call in self.fenced else before[:limit])
        assert taken == len(handed)
        if handed:
            self.out[f"{call}:pending"] = handed

    def confirm(self, token: str) -> None:
        assert self.run(ACK, {}, {}, token.encode()) == [int(token in self.out)]
        self.done += self.out.pop(token, [])

    def give_back(self, token: str, payloads: list[bytes]) -> None:
        call = token.partition(":")[0]
        args = {"fence_ms": 3_600_000, "call": token, "places": 0}
        count = self.run(GIVE_BACK, {"fence": KEYS.fence(call)}, args, *payloads)
        expected = [] if call in self.fenced else [*self.out.pop(token, []), *payloads]
        self.fenced.add(call)
        assert count == len(expected)

    def end_leases(self) -> None:
        """Let time pass until all leases have ended, then have a client look."""
        for token in self.out:
            self.raw.zadd(KEYS.leases, {token: 1})
        assert self.move("look", take=0)[4] == sum(map(len, self.out.values()))
        self.out.clear()

    def check(self) -> None:
        held = [payload for payloads in self.out.values() for payload in payloads]
        everywhere = Counter([*self.ready(), *self.pending(), *held, *self.done])
        # Each message is in one place.
        assert everywhere == Counter(b"%d" % number for number in range(self.offered))
        assert self.raw.hlen(KEYS.leased) == self.raw.zcard(KEYS.leases) == len(self.out)
        # A message that returns to the pending ones has its due time again.
        scores = dict(self.raw.zrange(KEYS.timeout, 0, -1, withscores=True))
        assert {payload_of(record): score for record, score in scores.items()} == {
            payload: self.due_ms[payload] for payload in self.pending()
        }


CALLS = st.sampled_from(["a", "b"])
COUNTS = st.integers(1, 5)
STEPS = st.one_of(
    st.tuples(st.just("offer"), COUNTS, st.sampled_from([None, 1, 9, FAR_MS])),
    st.tuples(st.just("transfer"), CALLS, COUNTS),
    st.tuples(st.just("poll"), CALLS, COUNTS),
    st.tuples(st.just("confirm"), CALLS, st.booleans()),
    st.tuples(st.just("give back"), CALLS, st.booleans()),
    st.tuples(st.just("return"), CALLS, COUNTS),
    st.tuples(st.just("time passes"), st.none(), st.none()),
)


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[Any]:
    with Redis.from_url(server.url, socket_timeout=60) as raw:
        yield raw


@pytest.mark.every_server
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=8, max_size=30))
# What returns is due before what is due meanwhile.
@example(steps=[("offer", 1, 1), ("poll", "a", 1), ("offer", 1, 9), ("time passes", None, None)])
def test_every_message_is_in_one_place_after_any_calls(raw: Any, steps: list[Any]) -> None:
    raw.flushall()
    desk = Desk(raw)
    returned: dict[str, list[bytes]] = {}
    for step, first, second in steps:
        match step:
            case "offer":
                desk.offer(first, due_ms=second)
            case "transfer" if first not in desk.out:
                # Each call has a name of its own, but may be carried out after it was given up.
                desk.transfer(first, second)
            case "poll" if f"{first}:pending" not in desk.out:
                desk.poll(first, second)
            case "confirm":
                desk.confirm(f"{first}:pending" if second else first)
            case "give back":
                desk.give_back(f"{first}:pending" if second else first, [])
            case "return":
                # By value, under a name of its own; a retry is the very same call.
                name = f"back-{first}"
                if name not in returned:
                    returned[name], desk.done = desk.done[-second:], desk.done[:-second]
                desk.give_back(name, returned[name])
            case "time passes":
                desk.end_leases()
        desk.check()


@pytest.mark.every_server
def test_returned_messages_come_first_and_in_order(raw: Any) -> None:
    desk = Desk(raw)
    desk.offer(10, due_ms=None)
    desk.transfer("a", 3)
    desk.transfer("b", 3)
    desk.give_back("b", [])
    desk.give_back("a", [])
    assert desk.ready() == [b"%d" % number for number in range(10)]
    desk.offer(6, due_ms=FAR_MS)
    desk.poll("c", 2)
    desk.poll("d", 2)
    desk.give_back("d:pending", [])
    desk.give_back("c:pending", [])
    assert desk.pending() == [b"%d" % number for number in range(10, 16)]


@pytest.mark.every_server
def test_a_reply_is_bounded_by_bytes_but_never_empty(raw: Any) -> None:
    desk = Desk(raw)
    payloads = [b"%d" % number * 400 for number in range(5)]
    raw.rpush(KEYS.ready, *payloads)
    handed = [desk.move(f"n{number}", take=100)[-1] for number in range(3)]
    # What did not fit went back in order.
    assert handed == [payloads[:2], payloads[2:4], payloads[4:]]
    raw.rpush(KEYS.ready, b"x" * 5000, b"y")
    assert desk.move("large", take=100)[-1] == [b"x" * 5000]
    assert desk.ready() == [b"y"]


HOUR = 3600
# Few values, so that equal ones are frequent.
VALUES = st.integers(0, 4)


def queue_machine(server: PrivateServer, *, listed: bool) -> type[RuleBasedStateMachine]:
    class QueueMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            server.flush()
            self.runner = asyncio.Runner()
            self.client = delayq.connect(server.url)
            self.queue: delayq.DelayedQueue[int] = self.run(self.open())
            # Pending messages in offer order; those due in an hour come after those due now.
            self.pending: list[delayq.Receipt[int]] = []
            self.values: dict[str, int] = {}
            # Due messages in delivery order.
            self.due: list[int] = []
            # Leased messages.
            self.held: list[delayq.Delivery[int]] = []

        async def open(self) -> delayq.DelayedQueue[int]:
            await self.client.__aenter__()
            return self.client.delayed_queue("orders", ordered_list=listed)

        def run(self, work: Coroutine[Any, Any, Any]) -> Any:
            return self.runner.run(work)

        def teardown(self) -> None:
            self.run(self.client.aclose())
            self.runner.close()

        def pending_values(self) -> list[int]:
            return [self.values[receipt.id] for receipt in self.pending]

        def by_due(self) -> list[delayq.Receipt[int]]:
            return sorted(self.pending, key=lambda receipt: (receipt.due_at, receipt.id))

        def in_poll_order(self) -> list[delayq.Receipt[int]]:
            return list(self.pending) if listed else self.by_due()

        def forget(self, receipts: list[delayq.Receipt[int]]) -> None:
            for receipt in receipts:
                self.pending.remove(receipt)

        @rule(values=st.lists(VALUES, min_size=1, max_size=5))
        def offer_for_later(self, values: list[int]) -> None:
            for receipt, value in zip(
                self.run(self.queue.offer_many([(v, HOUR) for v in values])), values, strict=True
            ):
                self.pending.append(receipt)
                self.values[receipt.id] = value

        @rule(value=VALUES)
        def offer_and_transfer(self, value: int) -> None:
            async def offer() -> None:
                await self.queue.offer(value)
                while await self.queue.pending.size() > len(self.pending):
                    await asyncio.sleep(0)

            self.run(offer())
            self.due.append(value)

        @precondition(lambda self: self.pending)
        @rule(data=st.data())
        def hasten(self, data: st.DataObject) -> None:
            receipt = data.draw(st.sampled_from(self.pending))

            async def hasten() -> None:
                assert await receipt.reschedule(0)
                while await self.queue.pending.size() == len(self.pending):
                    await asyncio.sleep(0)

            self.run(hasten())
            self.forget([receipt])
            self.due.append(self.values[receipt.id])
            assert not self.run(receipt.cancel())

        @precondition(lambda self: self.pending)
        @rule(data=st.data())
        def put_off(self, data: st.DataObject) -> None:
            receipt = data.draw(st.sampled_from(self.pending))
            before = receipt.due_at
            assert self.run(receipt.reschedule(2 * HOUR))
            # Equal if it was put off in this very millisecond.
            assert receipt.due_at >= before

        @precondition(lambda self: self.pending)
        @rule(data=st.data())
        def cancel(self, data: st.DataObject) -> None:
            receipt = data.draw(st.sampled_from(self.pending))
            assert self.run(receipt.cancel())
            self.forget([receipt])
            assert not self.run(receipt.cancel())
            assert not self.run(receipt.reschedule(1))

        @rule()
        def poll(self) -> None:
            assert self.run(self.queue.poll()) == (self.due.pop(0) if self.due else None)

        @rule(most=st.none() | st.integers(0, 4))
        def drain(self, most: int | None) -> None:
            expected = self.due[:most]
            del self.due[:most]
            assert self.run(self.queue.drain(most)) == expected

        @precondition(lambda self: self.due)
        @rule(count=st.integers(1, 3))
        def loop(self, count: int) -> None:
            async def some() -> list[int]:
                seen: list[int] = []
                async for value in self.queue:
                    seen.append(value)
                    if len(seen) == min(count, len(self.due)):
                        break
                for _ in range(200):
                    # Messages fetched ahead are on their way back.
                    if await self.queue.ready.size() == len(self.due) - len(seen):
                        break
                    await asyncio.sleep(0.001)
                return seen

            seen = self.run(some())
            assert seen == self.due[: len(seen)]
            del self.due[: len(seen)]

        @precondition(lambda self: self.due)
        @rule(count=st.integers(1, 3))
        def lease(self, count: int) -> None:
            async def some() -> None:
                taken = 0
                async for delivery in self.queue.deliveries(HOUR):
                    self.held.append(delivery)
                    taken += 1
                    if taken == count or taken == len(self.due):
                        break
                while await self.queue.ready.leased() != len(self.held):
                    await asyncio.sleep(0.001)  # messages fetched ahead are on their way back

            before = len(self.held)
            self.run(some())
            taken = [delivery.value for delivery in self.held[before:]]
            assert taken == self.due[: len(taken)]
            del self.due[: len(taken)]

        @precondition(lambda self: self.held)
        @rule(data=st.data(), how=st.sampled_from(["ack", "nack", "extend", "raise", "cancel"]))
        def settle(self, data: st.DataObject, how: str) -> None:
            delivery = data.draw(st.sampled_from(self.held))

            async def settle() -> None:
                if how == "ack":
                    await delivery.ack()
                elif how == "nack":
                    await delivery.nack(0)
                elif how == "extend":
                    await delivery.extend(2 * HOUR)
                else:
                    with suppress(ZeroDivisionError, asyncio.CancelledError):
                        async with delivery:
                            raise ZeroDivisionError if how == "raise" else asyncio.CancelledError
                while await self.queue.pending.size() > len(self.pending) + (how == "raise"):
                    await asyncio.sleep(0)

            self.run(settle())
            if how == "extend":
                return
            self.held.remove(delivery)
            if how == "nack":
                self.due.append(delivery.value)
            elif how == "cancel":
                self.due.insert(0, delivery.value)
            elif how == "raise":
                # The server offered the message again, so there is no receipt.
                assert self.run(self.queue.pending.read_all())[-1] == delivery.value
                assert self.run(self.remove_newest()) == delivery.value

        async def remove_newest(self) -> int | None:
            known = {receipt.id for receipt in self.pending}
            store = self.queue._open.store
            for record, _ in await store.pending_page(0, 1_000):
                if record[1:9].hex() not in known:
                    assert await store.cancel([record])
                    return int(record[17:])
            return None

        @rule(n=st.integers(1, 3))
        def poll_pending(self, n: int) -> None:
            expected = self.in_poll_order()[:n]
            assert self.run(self.queue.pending.poll_many(n)) == [
                self.values[receipt.id] for receipt in expected
            ]
            self.forget(expected)

        @rule()
        def poll_last(self) -> None:
            last = self.in_poll_order()[-1:]
            expected = [self.values[receipt.id] for receipt in last]
            assert self.run(self.queue.pending.poll_last_and_offer_first_to("orders")) == (
                expected[0] if expected else None
            )
            self.forget(last)
            self.due[:0] = expected

        @rule(value=VALUES)
        def remove(self, value: int) -> None:
            hits = [receipt for receipt in self.pending if self.values[receipt.id] == value]
            assert self.run(self.queue.pending.remove(value)) == bool(hits)
            self.forget(hits[:1])

        @rule(values=st.lists(VALUES, max_size=2), keep=st.booleans())
        def remove_all_or_retain_all(self, values: list[int], keep: bool) -> None:
            hits = [
                receipt
                for receipt in self.pending
                if (self.values[receipt.id] in values) is not keep
            ]
            method = self.queue.pending.retain_all if keep else self.queue.pending.remove_all
            assert self.run(method(values)) == bool(hits)
            self.forget(hits)

        @rule(values=st.lists(VALUES, max_size=3))
        def contains(self, values: list[int]) -> None:
            held = set(self.pending_values())
            assert self.run(self.queue.pending.contains_all(values)) == held.issuperset(values)

        @rule(ready=st.booleans())
        def clear(self, ready: bool) -> None:
            if ready:
                assert self.run(self.queue.ready.clear()) == bool(self.due)
                self.due.clear()
            else:
                assert self.run(self.queue.pending.clear()) == bool(self.pending)
                self.pending.clear()

        @invariant()
        def views_agree_with_the_model(self) -> None:
            async def look() -> list[Any]:
                pending, ready = self.queue.pending, self.queue.ready
                return [
                    await pending.size(),
                    await pending.read_all(),
                    await pending.entries(),
                    await pending.peek(),
                    await ready.read_all(),
                    await ready.size(),
                    await ready.leased(),
                ]

            values = self.pending_values()
            first = self.in_poll_order()[:1]
            assert self.run(look()) == [
                len(values),
                values,
                [(self.values[receipt.id], receipt.due_at) for receipt in self.by_due()],
                self.values[first[0].id] if first else None,
                self.due,
                len(self.due),
                len(self.held),
            ]

    return QueueMachine


@pytest.mark.every_server
@pytest.mark.hypothesis
@pytest.mark.parametrize("listed", [True, False], ids=["with ordered list", "without"])
def test_a_queue_behaves_like_its_model(server: PrivateServer, listed: bool) -> None:
    run_state_machine_as_test(
        queue_machine(server, listed=listed),
        settings=settings(max_examples=examples(200), stateful_step_count=25),
    )
