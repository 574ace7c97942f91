"""Data that a foreign writer has left in a reliable queue's keys blocks no other message."""
# ruff: noqa: F401, F811 - fixtures

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from tests.support.reliable_fixtures import jobs, raw, store

if TYPE_CHECKING:
    from delayq import ReliableQueue
    from tests.support.reliable_store import Store

pytestmark = pytest.mark.every_server


@pytest.mark.parametrize("field", ["tokens", "attempts", "expiries", "priorities", "errors"])
@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "garbage",
        "nan",
        "1e999",
        "-",
        "1:2",
        "1-0",
        "1-1:x:s",
        "0-0:9e999:r",
        "99999999999999999999",
    ],
)
async def test_garbage_beside_a_message_harms_neither_it_nor_others(
    jobs: ReliableQueue[Any], store: Store, raw: Any, field: str, garbage: str
) -> None:
    await jobs.offer_many([Offer(name, id=name) for name in ("first", "damaged", "last")])
    await raw.hset(f"delayq:{{jobs}}:{field}", "damaged", garbage)
    assert (await jobs.stats()).ready == 3
    assert len(await jobs.list("ready")) == 3
    messages = await jobs.claim(10)
    assert [message.id for message in messages] == ["first", "damaged", "last"]
    await messages[0].ack()
    await messages[1].nack(0)
    await messages[2].bury("no good")
    assert await jobs.dead.redrive() == 1
    assert sorted([message.id for message in await jobs.claim(10)]) == ["damaged", "last"]


@pytest.mark.parametrize("score", ["-inf", "-5", "-1e300", "0"])
@pytest.mark.parametrize("how", ["ack", "nack", "release", "bury"])
async def test_a_score_that_is_no_moment_harms_neither_its_message_nor_others(
    jobs: ReliableQueue[Any], store: Store, raw: Any, score: str, how: str
) -> None:
    await jobs.offer_many([Offer(name, id=name) for name in ("damaged", "other")])
    await raw.zadd("delayq:{jobs}:waiting", {"damaged": score})
    seen = await jobs.get("damaged")
    assert seen is not None
    assert seen.due_at is not None
    assert (await jobs.stats()).ready == 2
    messages = await jobs.claim(10)
    assert sorted(message.id for message in messages) == ["damaged", "other"]
    arguments: dict[str, tuple[Any, ...]] = {"nack": (0,), "bury": ("no good",)}
    for message in messages:
        await getattr(message, how)(*arguments.get(how, ()))
    (await store.look()).demand_no_orphans()


async def test_half_of_a_message_holds_no_id(jobs: ReliableQueue[Any], raw: Any) -> None:
    await raw.hset("delayq:{jobs}:bodies", "no place", "1 \nnull")
    await raw.zadd("delayq:{jobs}:waiting", {"no body": 1})
    assert await jobs.get("no place") is None
    assert not await jobs.cancel("no body")
    await jobs.offer("new", id="no place")
    await jobs.offer("new", id="no body")
    assert sorted([message.id for message in await jobs.claim(10)]) == ["no body", "no place"]


@pytest.mark.parametrize(
    "letter",
    [b"", b"garbage", b"{}\n", b"[]\n1 \n2", b'{"priority":"high"}\nno body', b"{\xff\n\xff"],
)
async def test_a_damaged_dead_letter_is_shown(
    jobs: ReliableQueue[Any], raw: Any, letter: bytes
) -> None:
    await jobs.offer("good", id="good")
    await (await jobs.claim())[0].bury("a reason")
    await raw.hset("delayq:{jobs}:dead:messages", "damaged", letter)
    await raw.zadd("delayq:{jobs}:dead", {"damaged": 1, "nothing at all": 2})
    reasons = {each.id: each.reason for each in await jobs.dead.list()}
    assert reasons == {"damaged": "unreadable", "good": "a reason"}
    lives_again = letter.endswith(b"1 \n2")
    assert await jobs.dead.redrive(["damaged", "good"]) == 1 + lives_again
    alive = [message.id for message in await jobs.claim(10)]
    assert alive == ["damaged", "good"][not lives_again :]
    for each in await jobs.dead.list():
        with pytest.raises(delayq.DecodeError):
            _ = each.value
    assert await jobs.dead.redrive() == 0
    assert await jobs.dead.purge(["damaged"]) == (not lives_again)


async def test_an_unreadable_body_can_die_and_be_listed(jobs: ReliableQueue[Any], raw: Any) -> None:
    await raw.hset("delayq:{jobs}:bodies", "damaged", "no newline here")
    await raw.zadd("delayq:{jobs}:waiting", {"damaged": 1})
    (message,) = await jobs.claim()
    with pytest.raises(delayq.DecodeError):
        _ = message.value
    await message.bury("undecodable")
    (letter,) = await jobs.dead.list()
    assert (letter.id, letter.reason) == ("damaged", "undecodable")
    assert await jobs.dead.redrive() == 0
