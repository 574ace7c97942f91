"""A reliable queue keeps its promises when answers are large, ids repeat, or callers are
careless.
"""
# ruff: noqa: F401, F811 - fixtures

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._reliable.settings import Settings
from delayq._reliable.store import CLAIM, GET, LEASED, LIST, PURGE
from tests.support.reliable_fixtures import LEASE, jobs, raw, store

if TYPE_CHECKING:
    from delayq import Client, ReliableQueue
    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server


# One answer


async def test_one_answer_holds_few_large_bodies_and_the_rest_stays_due(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    await jobs.offer_many([Offer("x" * 100_000, id=str(n)) for n in range(7)])
    sizes = []
    while messages := await jobs.claim(100):
        sizes.append(len(messages))
        for message in messages:
            await message.ack()
    # The first message, and 256 KiB beyond it.
    assert sizes == [3, 3, 1]


async def test_a_body_larger_than_an_answer_comes_alone(jobs: ReliableQueue[Any]) -> None:
    await jobs.offer_many([Offer("x" * 400_000), Offer("small"), Offer("y" * 400_000)])
    assert [message.value[0] for message in await jobs.claim(100)] == ["x", "s"]
    assert [message.value[0] for message in await jobs.claim(100)] == ["y"]


# Pages


async def test_no_script_looks_at_more_than_a_page(
    jobs: ReliableQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.offer_many([Offer(n, delay=60 if n % 2 else 0) for n in range(1_000)])
    for _ in range(5):
        await jobs.claim(100)
    await jobs.offer_many([Offer(n) for n in range(500)])
    asked: list[tuple[str, int]] = []
    run = jobs._open.partitions[0].store.client.run

    async def counted(script: Any, keys: Any, args: Any = ()) -> Any:
        if script in (LIST, PURGE):
            asked.append((script.name, args[-1]))
        elif script in (GET, LEASED):
            asked.append((script.name, len(args)))
        return await run(script, keys, args)

    monkeypatch.setattr(jobs._open.partitions[0].store.client, "run", counted)
    for state, count in (("delayed", 500), ("ready", 500), ("leased", 500)):
        assert len(await jobs.list(state, limit=1_000_000)) == count  # type: ignore[arg-type]
        assert len(await jobs.list(state, offset=450, limit=1_000_000)) == 50  # type: ignore[arg-type]
    assert await jobs.purge("delayed") == 500
    assert await jobs.purge("ready") == 500
    assert (await jobs.stats()).leased == 500
    assert await jobs.purge("all") == 500
    assert max(most for _, most in asked) <= 200


# Dead letters of one id


async def test_dead_letters_of_one_id_lie_side_by_side(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    for value in ("first", "second", "third"):
        await jobs.offer(value, id="order-42")
        await (await jobs.claim())[0].bury(f"reason of {value}")
    letters = await jobs.dead.list()
    assert [(letter.id, letter.value, letter.reason) for letter in letters] == [
        ("order-42", value, f"reason of {value}") for value in ("first", "second", "third")
    ]
    assert await jobs.dead.size() == 3
    for value in ("first", "second"):
        # Only one message of an id lives at a time.
        assert await jobs.dead.redrive(["order-42"]) == 1
        assert await jobs.dead.redrive(["order-42"]) == await jobs.dead.redrive() == 0
        (message,) = await jobs.claim(5)
        assert message.value == value
        await message.ack()
    assert await jobs.dead.purge(["order-42"]) == 1
    assert (await store.look()).dead_messages == {}


async def test_all_dead_letters_of_an_id_are_purged(jobs: ReliableQueue[Any], store: Store) -> None:
    for value in range(4):
        await jobs.offer(value, id="order-42")
        await (await jobs.claim())[0].bury("no good")
    assert await jobs.dead.purge(["order-42"]) == 4
    assert (await store.look()).dead_messages == {}


# Leases


async def test_a_lease_that_is_made_shorter_wakes_whoever_waits(
    server: PrivateServer, jobs: ReliableQueue[Any]
) -> None:
    await jobs.offer(1)
    (message,) = await jobs.claim()
    async with delayq.connect(server.url, resync_interval=3600) as other:
        waiting = asyncio.create_task(other.reliable_queue("jobs", lease=LEASE).claim(wait=3600))
        await asyncio.sleep(0.2)
        await message.extend(0.2)
        (again,) = await asyncio.wait_for(waiting, 30)
    assert again.id == message.id


@pytest.mark.parametrize("how", ["ack", "nack", "release", "bury", "extend"])
async def test_after_the_queue_is_closed_no_message_can_be_settled(
    client: Client, jobs: ReliableQueue[Any], store: Store, how: str
) -> None:
    await jobs.offer(1, id="a")
    (message,) = await jobs.claim()
    await jobs.aclose()
    with pytest.raises(delayq.Closed):
        await getattr(message, how)(*{"bury": ("no good",), "extend": (5,)}.get(how, ()))
    assert set((await store.look()).leases) == {"a"}


async def test_a_claim_whose_answer_cannot_be_read_is_made_again(
    jobs: ReliableQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.offer(1)
    run_once, failures = jobs._open.partitions[0].store.client.run_once, iter([True, False])

    async def broken(script: Any, *args: Any) -> Any:
        answer = await run_once(script, *args)
        return ["?"] if script is CLAIM and next(failures, False) else answer

    monkeypatch.setattr(jobs._open.partitions[0].store.client, "run_once", broken)
    (message,) = await asyncio.wait_for(jobs.claim(wait=60), 30)
    # The messages claimed by the first call went back, and its attempt does not count.
    assert (message.value, message.attempt) == (1, 1)


# Careless callers


@pytest.mark.parametrize("call", ["redrive", "purge"])
@pytest.mark.parametrize("ids", ["order-42", b"bytes", [None], [7], [""], 7])
async def test_ids_that_are_none_are_refused(jobs: ReliableQueue[Any], call: str, ids: Any) -> None:
    with pytest.raises(delayq.BadInput):
        await getattr(jobs.dead, call)(ids)


async def test_offers_that_cannot_work_are_refused_before_anything_is_written(
    jobs: ReliableQueue[Any], store: Store
) -> None:
    with pytest.raises(delayq.BadInput, match="Offer objects"):
        await jobs.offer_many([Offer(1), "a"])  # type: ignore[list-item]
    for delay, ttl in ((10, 1), (10, 10)):
        with pytest.raises(delayq.BadInput, match="longer than the delay"):
            await jobs.offer(1, delay, ttl=ttl)
    assert (await store.look()).bodies == {}


def test_a_lease_that_no_handler_can_keep_is_refused() -> None:
    with pytest.raises(delayq.BadInput, match="lease"):
        Settings(lease=1e-6).check()
