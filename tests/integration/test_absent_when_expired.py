"""An expired message that no worker has counts as gone, even before a claim has dropped it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._reliable.keys import ReliableKeys
from tests.support.reliable_store import HOUR, Store, expire

if TYPE_CHECKING:
    from delayq import Client, ReliableQueue
    from delayq._reliable.replies import LiveState


@pytest.mark.every_server
async def test_expired_messages_neither_count_nor_take_room(
    client: Client, raw: Any, store: Store
) -> None:
    """Also of those that a worker had in the meantime, or that were put off."""
    queue = client.reliable_queue("jobs", lease=4 * HOUR, max_size=1_500)
    await queue.offer_many([Offer("old", id=f"{n:04}", ttl=2 * HOUR) for n in range(1_500)])
    held = await queue.claim(40)
    for message in held[:10]:
        await message.nack(delay=3 * HOUR)
    for message in held[10:20]:
        await message.extend(HOUR)
    assert await queue.reschedule("1400", 3 * HOUR)
    await store.let_pass(2.5 * HOUR)
    # The leases of twenty go on, those of ten have ended.
    stats = await queue.stats()
    assert (stats.delayed, stats.ready, stats.leased) == (0, 0, 20)
    assert len(await queue.offer_many([Offer("new") for _ in range(1_480)])) == 1_480
    with pytest.raises(delayq.QueueFull):
        await queue.offer("too many")
    await store.let_pass(2 * HOUR)
    assert (await queue.stats()).ready == 1_480
    (await store.look()).demand_no_orphans()


@pytest.mark.every_server
async def test_a_retry_too_late_holds_no_ordered_group_up(client: Client, store: Store) -> None:
    queue = client.reliable_queue("jobs", lease=HOUR, group_limit=delayq.Limit(ordered=True))
    await queue.offer("first", id="a", group="g", ttl=2 * HOUR)
    await queue.offer("second", group="g")
    (first,) = await queue.claim(10)
    await first.nack(delay=9 * HOUR)
    await store.let_pass(HOUR)
    assert await queue.claim(10) == []
    await store.let_pass(HOUR + 1)
    assert await queue.get("a") is None
    await queue.offer("third", id="a", group="g")
    for expected in ("second", "third"):
        (message,) = await queue.claim(10)
        assert message.value == expected
        await message.ack()


@pytest.mark.every_server
async def test_a_message_knows_when_it_expires(client: Client, store: Store) -> None:
    for policy in ("drop", "dead"):
        queue = client.reliable_queue("jobs", keep=HOUR, max_size=1)
        await queue.configure(expired=policy)
        await queue.pause()
        # Nobody announces the end of one that no worker takes.
        await queue.offer("old", id=policy, ttl=0.2)
        with pytest.raises(delayq.DelayqError) as caught:
            await queue.result(policy, timeout=600)
        if policy == "dead":
            assert isinstance(caught.value, delayq.MessageFailed)
            assert caught.value.reason == "expired"
            assert (await queue.history(policy)).state == "dead"  # type: ignore[union-attr]
        else:
            assert isinstance(caught.value, delayq.NoResult)
            assert await queue.history(policy) is None


async def test_many_expired_messages_in_front_hold_up_nothing(client: Client, raw: Any) -> None:
    queue = client.reliable_queue("many", lease=HOUR)
    for _ in range(20):
        await queue.offer_many([Offer(0, ttl=HOUR) for _ in range(1_000)])
    await expire(raw, ReliableKeys.of("many"))
    await queue.offer("alive")
    assert [message.value for message in await queue.claim(5)] == ["alive"]
    assert client.statistics().errors == 0


async def offer_around_expired(
    client: Client, raw: Any, partitions: int, expired: int
) -> tuple[ReliableQueue[Any], list[str]]:
    """Offer messages that expire in front of, and between, 120 others; return those others' ids."""
    queue = client.reliable_queue("many", lease=HOUR, partitions=partitions)
    await queue.offer_many([Offer("old", ttl=HOUR) for _ in range(expired)])
    live = [f"live{n}" for n in range(120)]
    for start in range(0, 120, 40):
        await queue.offer_many([Offer("new", id=each) for each in live[start : start + 40]])
        await queue.offer_many([Offer("old", ttl=HOUR) for _ in range(30)])
    for number in range(partitions):
        await expire(raw, ReliableKeys.of("many", partition=number))
    return queue, live


@pytest.mark.every_server
@pytest.mark.parametrize(("partitions", "expired"), [(1, 1100), (2, 120)])
async def test_lists_read_on_to_those_that_live(
    client: Client, raw: Any, partitions: int, expired: int
) -> None:
    queue, live = await offer_around_expired(client, raw, partitions, expired)
    ids = [message.id for message in await queue.list("ready", limit=1000)]
    assert sorted(ids) == sorted(live)
    # Partitions store the messages of one call at different moments.
    assert partitions > 1 or ids == live
    assert [message.id for message in await queue.peek(3)] == ids[:3]
    pages = [await queue.list("ready", offset=at, limit=25) for at in range(0, 150, 25)]
    assert [len(page) for page in pages] == [25, 25, 25, 25, 20, 0]
    assert [message.id for page in pages for message in page] == ids
    # With a limit that is larger than what one script looks at.
    assert [message.id for message in await queue.list("ready", offset=7, limit=300)] == ids[7:]


@pytest.mark.usefixtures("_full_batches")
@pytest.mark.parametrize(("partitions", "ttl"), [(1, None), (3, HOUR)])
async def test_pages_neither_skip_nor_repeat(
    client: Client, raw: Any, partitions: int, ttl: float | None
) -> None:
    queue = client.reliable_queue("many", lease=HOUR, partitions=partitions)
    await queue.offer_many(
        Offer(n, delay=n % 7 * 100, id=f"m{n}", priority=n % 3, ttl=ttl) for n in range(700)
    )
    held = await queue.claim(50)
    states: dict[LiveState, int] = {"delayed": 600, "ready": 50, "leased": 50}
    for state, count in states.items():
        everything = [message.id for message in await queue.list(state, limit=1000)]
        assert len({*everything}) == len(everything) == count
        paged = [
            message.id
            for at in range(0, count + 90, 90)
            for message in await queue.list(state, offset=at, limit=90)
        ]
        assert paged == everything
    assert held
