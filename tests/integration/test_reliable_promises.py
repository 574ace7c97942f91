"""Large answers, repeated ids, and careless callers of a reliable queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delayq import Offer
from tests.support.reliable import claim_one, leased, values

if TYPE_CHECKING:
    from tests.support.reliable import Jobs
    from tests.support.reliable_store import Store


@pytest.mark.every_server
async def test_a_reply_holds_only_a_few_large_bodies(jobs: Jobs) -> None:
    await jobs.offer_many([Offer("x" * 100_000) for _ in range(7)])
    sizes = []
    while some := await values(jobs):
        sizes.append(len(some))
    # The first message, and 256 KiB beyond it.
    assert sizes == [3, 3, 1]
    # A body larger than that comes alone.
    await jobs.offer_many([Offer("x" * 400_000), Offer("small"), Offer("y" * 400_000)])
    for first_letters in (["x", "s"], ["y"]):
        assert [message.value[0] for message in await jobs.claim(100)] == first_letters


@pytest.mark.every_server
async def test_dead_letters_of_one_id_lie_side_by_side(jobs: Jobs, store: Store) -> None:
    for value in ("first", "second", "third"):
        await (await leased(jobs, value, id="order-42")).bury(f"reason of {value}")
    letters = await jobs.dead.list()
    assert [(letter.id, letter.value, letter.reason) for letter in letters] == [
        ("order-42", value, f"reason of {value}") for value in ("first", "second", "third")
    ]
    assert await jobs.dead.size() == 3
    for value in ("first", "second"):
        # Only one message of an id lives at a time.
        assert await jobs.dead.redrive(["order-42"]) == 1
        assert await jobs.dead.redrive(["order-42"]) == await jobs.dead.redrive() == 0
        assert await values(jobs, 5) == [value]
    await (await leased(jobs, "fourth", id="order-42")).bury("no good")
    assert await jobs.dead.purge(["order-42"]) == 2
    assert (await store.look()).dead_messages == {}


async def test_a_bad_reply_to_a_claim_hands_out_nothing(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.offer(1)
    client = jobs._open.partitions[0].store.client
    run_once = client.run_once

    async def break_one(*call: Any) -> Any:
        monkeypatch.undo()
        await run_once(*call)
        return ["?"]

    monkeypatch.setattr(client, "run_once", break_one)
    message = await claim_one(jobs, wait=60)
    # The messages claimed by the first call went back, and its attempt does not count.
    assert (message.value, message.attempt) == (1, 1)
