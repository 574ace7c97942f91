"""Tasks in tests: run at once, or recorded, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from delayq import (
    BadDelay,
    BadInput,
    ConfigurationError,
    EncodeError,
    Message,
    NoResult,
    ResultTimeout,
    Tasks,
)
from delayq.tasks import INJECTED, Call
from delayq.testing import eager, recorded

tasks = Tasks("mails")
done: list[Any] = []


@dataclass
class Order:
    id: int


class Db:
    pass


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    done.clear()


@tasks.task
async def close(order: Order) -> None:
    done.append(order)


@tasks.task
def count(to: int, db: Db = INJECTED) -> None:
    done.append(db)
    if to:
        count.offer_sync(to - 1)


@tasks.task
async def chain(n: int) -> None:
    done.append(n)
    if n:
        await chain.options(delay=3600).offer(n - 1)


async def test_recorded_calls_are_not_made() -> None:
    with recorded(tasks) as offers:
        assert await close.options(delay=3600, id="a", durability="fsync").offer(Order(1)) == "a"
        close.options(priority=2, durability="fsync").offer_sync(Order(2))
        await tasks.offer_many([chain.to_offer(3)])
        await tasks.schedule("daily", chain.options(ttl=60).to_offer(4), every=60)
    assert done == []
    assert [
        (offer.value, offer.delay, offer.id, offer.priority, offer.ttl) for offer in offers
    ] == [
        (Call("close", {"order": Order(1)}), 3600, "a", 0, None),
        (Call("close", {"order": Order(2)}), None, None, 2, None),
        (Call("chain", {"n": 3}), None, None, 0, None),
        (Call("chain", {"n": 4}), None, None, 0, 60),
    ]
    with pytest.raises(ConfigurationError, match="not bound"):
        await close.offer(Order(1))


async def test_eager_calls_are_made_at_once_whatever_their_delay() -> None:
    with eager(tasks) as offers:
        order = Order(1)
        assert await close.options(delay=3600, id="a").offer(order) == "a"
        assert done == [order]
        assert done[0] is not order, "it takes the way through JSON"
        await tasks.offer_many([close.to_offer(Order(2)), close.to_offer(Order(3))])
        await tasks.schedule("daily", close.to_offer(Order(4)), every=60)
        assert done == [Order(1), Order(2), Order(3)]
        assert len(offers) == 4
        done.clear()
        # What they offer is made at once, too.
        await chain.offer(2)
        assert done == [2, 1, 0]
        assert len(offers) == 7

    others = Tasks("others")

    @others.task
    def fails() -> None:
        raise KeyError("no")

    # Several groups are replaced together.
    with eager(tasks, others) as offers:
        with pytest.raises(KeyError, match="no"):
            await fails.offer()
        await chain.offer(0)
    assert [offer.value.task for offer in offers] == ["fails", "chain"]


def test_eager_calls_need_no_event_loop() -> None:
    with eager(tasks):
        chain.offer_sync(1)
        tasks.offer_many_sync([chain.to_offer(0)])
    assert done == [1, 0, 0]


async def test_parameters_that_a_worker_fills_are_provided_in_tests() -> None:
    db = Db()
    with eager(tasks, provide={Db: db}):
        await count.offer(1)
    assert done == [db, db]
    with eager(tasks), pytest.raises(ConfigurationError, match=r"count\(\) asks for a Db: pass"):
        await count.offer(1)

    more = Tasks("more")

    @more.task
    async def look(message: Message[Call] = INJECTED) -> None:
        done.append(message)

    # A generic type is provided by its class.
    with eager(more, provide={Message: "the message"}):
        await look.offer()
    assert done[-1] == "the message"


async def test_a_call_that_a_queue_refuses_is_refused_in_tests_too() -> None:
    with recorded(tasks) as offers:
        with pytest.raises(BadDelay):
            await chain.options(delay=-1).offer(1)
        with pytest.raises(BadInput):
            await chain.options(priority=10).offer(1)
        with pytest.raises(BadInput):
            await tasks.offer_many([chain.to_offer(1), chain.options(id="").to_offer(1)])
    assert offers == []


async def test_results_come_of_calls_that_run_at_once_and_never_of_recorded_ones() -> None:
    sums = Tasks("sums")

    @sums.task
    async def close_and_tell(order: Order) -> Order:
        return Order(order.id + 1)

    @sums.task
    def tell(what: Any) -> Any:
        return object() if what is None else what

    with eager(sums):
        assert await close_and_tell.result(await close_and_tell.offer(Order(1))) == Order(2)
        assert await tell.result(await tell.offer([1]), timeout=0) == [1]
        assert await asyncio.to_thread(tell.result_sync, await tell.offer(2)) == 2
        odd = await tell.offer(None)
        with pytest.raises(EncodeError):
            await tell.result(odd)
        with pytest.raises(NoResult):
            await tell.result("no such")
    with recorded(tasks):
        call = await close.offer(Order(1))
        with pytest.raises(ResultTimeout):
            await close.result(call, timeout=3600)
