"""Run random operations on a real queue and on a plain model of it, and compare them.

Time does not pass in the model: a message is due either now or in an hour, so nothing here depends
on the speed of the machine.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import delayq
from tests.support.depth import examples

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

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


@pytest.mark.hypothesis
@pytest.mark.parametrize("listed", [True, False], ids=["with ordered list", "without"])
def test_a_queue_behaves_like_its_model(server: PrivateServer, listed: bool) -> None:
    run_state_machine_as_test(
        queue_machine(server, listed=listed),
        settings=settings(max_examples=examples(200), stateful_step_count=25),
    )
