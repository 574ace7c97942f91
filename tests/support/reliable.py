"""Shorthand for what most tests do with a reliable queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hypothesis import settings

from delayq import Offer, ReliableQueue
from delayq.admin.catalog import list_workers
from tests.support.depth import examples

if TYPE_CHECKING:
    from delayq import Client, Message
    from tests.support.reliable_store import Store

Jobs = ReliableQueue[Any]


def tries(number: int, *, usually: int) -> int:
    """Return how many examples of a model to try: ``usually`` in ``make test``, and ``number`` with
    the hypothesis profile ``full``.
    """
    return usually if settings.get_current_profile_name() == "quick" else examples(number)


def offers(count: int, *, ids: bool = False, **fields: Any) -> list[Offer[int]]:
    """Make offers of the values from 0 on, each with its value as id if ``ids``."""
    return [Offer(value=n, id=str(n) if ids else None, **fields) for n in range(count)]


async def get(queue: Jobs, id: str) -> Message[Any]:  # noqa: A002
    message = await queue.get(id)
    assert message is not None
    return message


async def claim_one(queue: Jobs, count: int = 1, **options: Any) -> Message[Any]:
    """Claim up to ``count`` messages, and expect a single one."""
    (message,) = await queue.claim(count, **options)
    return message


async def leased(queue: Jobs, value: Any = 1, **fields: Any) -> Message[Any]:
    """Offer a message, and claim it."""
    await queue.offer(value, **fields)
    return await claim_one(queue)


async def is_empty(queue: Jobs) -> bool:
    """Return whether no message waits, and none is being handled."""
    stats = await queue.stats()
    return not stats.ready + stats.delayed + stats.leased


async def claim_all(queue: Jobs) -> list[Message[Any]]:
    """Claim all available messages, in batches."""
    claimed: list[Message[Any]] = []
    while messages := await queue.claim(100):
        claimed += messages
    return claimed


async def values(queue: Jobs, count: int = 100, **options: Any) -> list[Any]:
    """Claim available messages, acknowledge them, and return their values."""
    messages = await queue.claim(count, **options)
    await asyncio.gather(*(message.ack() for message in messages))
    return [message.value for message in messages]


async def all_values(queue: Jobs, batch: int = 100) -> list[Any]:
    """Claim and acknowledge batch after batch, and return the values."""
    result: list[Any] = []
    while batch_values := await values(queue, batch):
        result += batch_values
    return result


async def bury_all(queue: Jobs, reason: str = "no good") -> None:
    """Bury all available messages, one after another."""
    while messages := await queue.claim(100):
        for message in messages:
            await message.bury(reason)


async def depths(queue: Jobs) -> tuple[int, int, int, int]:
    """Return the number of delayed, ready, leased and dead messages."""
    stats = await queue.stats()
    return stats.delayed, stats.ready, stats.leased, stats.dead


async def listed(queue: Jobs, *states: Any) -> list[Any]:
    """Return the values of the messages in these states."""
    return [message.value for state in states for message in await queue.list(state)]


async def leases(store: Store) -> int:
    """Return how many messages are leased."""
    return len((await store.look()).leases)


async def bodies(store: Store) -> int:
    """Return how many messages are stored."""
    return len((await store.look()).bodies)


async def lists_work(client: Client, queue: str) -> bool:
    """Return whether a worker of the queue is listed with a message that it handles."""
    return any(worker.messages for worker in await list_workers(client, queue))
