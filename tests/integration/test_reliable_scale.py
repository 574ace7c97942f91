"""A queue of many messages costs the server no more commands per call than a small one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._engine.scheduler import Scheduler
from delayq._redis.rights import Rights
from delayq.codecs import BytesCodec
from tests.support.reliable_fixtures import LEASE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delayq import Message
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server


async def fill(queue: Jobs, count: int) -> None:
    for at in range(0, count, 5_000):
        await queue.offer_many([Offer(value=b"x" * 100) for _ in range(min(5_000, count - at))])


async def commands(raw: Any, work: Callable[[], Awaitable[Any]]) -> dict[str, int]:
    """Count the commands of each name that were run by the scripts that ``work`` called."""
    await raw.config_resetstat()
    await work()
    known = await raw.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): facts["calls"] for name, facts in known.items()}
    # A connection that nothing has come through for a while is asked whether it is alive, and on a
    # busy machine another is opened meanwhile.
    for name in ("info", "config|resetstat", "config", "eval", "evalsha", "ping", "hello"):
        calls.pop(name, None)
    return calls


@pytest.fixture
async def quiet_client(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    """Return a client that neither re-checks its queues nor reports its work during a test."""
    async with delayq.connect(server.url, resync_interval=3600) as client:
        yield client


async def test_a_batch_costs_the_same_few_commands_however_many_are_pending(
    quiet_client: delayq.Client, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rights are checked only once every few seconds, so leave that out, and so the check after the
    # subscription and the probe of a slow connection.
    monkeypatch.setattr("delayq._redis.connection.DOUBT_AFTER", 60)
    monkeypatch.setattr(Scheduler, "_check", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(Rights, "form", lambda _rights, _wire, script, _key: script)
    counts: dict[int, dict[str, dict[str, int]]] = {}
    for size in (500, 20_000):
        queue = quiet_client.reliable_queue(f"of {size}", codec=BytesCodec(), lease=LEASE)
        await fill(queue, size)
        held: list[Message[bytes]] = []

        async def claim(queue: Jobs = queue, held: list[Message[bytes]] = held) -> None:
            held += await queue.claim(100)

        async def ack(held: list[Message[bytes]] = held) -> None:
            await asyncio.gather(*(message.ack() for message in held))
            held.clear()

        counts[size] = {
            # The first claim finds no lease that might have ended.
            "first claim": await commands(raw, claim),
            "claim": await commands(raw, claim),
            "stats": await commands(raw, queue.stats),
            "ack": await commands(raw, ack),
            "third claim": await commands(raw, claim),
            "extend": await commands(raw, lambda queue=queue, held=held: extend(queue, held)),  # type: ignore[misc]
            "purge": await commands(raw, partial(queue._open.partitions[0].store.purge, "all", 0)),
        }
    small, large = counts.values()
    assert small == large
    totals = {name: sum(of_work.values()) for name, of_work in small.items()}
    print(totals)
    # For 100 messages, or 200. A purge tries every key before it begins.
    assert totals.pop("purge") <= 50
    assert max(totals.values()) <= 20
    # The acknowledgements left in three calls, of 5 each.
    assert (totals["claim"], totals["ack"]) == (15, 15)


async def extend(queue: Jobs, held: list[Message[bytes]]) -> None:
    await queue._open.partitions[0].acknowledger.extend(
        [message._claim for message in held], LEASE * 1_000_000
    )


async def test_a_check_of_schedules_costs_the_same_however_many_a_queue_has(
    server: PrivateServer, raw: Any
) -> None:
    costs = []
    async with delayq.connect(server.url, resync_interval=3600) as client:
        for size in (200, 1_600):
            queue = client.reliable_queue(f"of {size}")
            names = map(str, range(size))
            await asyncio.gather(*(queue.schedule(name, every=3600, value=1) for name in names))
            check = queue._open.partitions[0].recurrence.check
            costs.append(sum((await commands(raw, check)).values()))
            # What is missing is put back in one round, however much that is.
            assert await queue.purge() == size
            await check()
            await check()
            assert (await queue.stats()).delayed == size
    print(costs)
    assert costs[1] < 2 * costs[0]
