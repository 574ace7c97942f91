"""Changes that other programs make to a queue's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delayq._redisson.keys import DelayedKeys


async def store(raw: Any, keys: DelayedKeys, records: dict[bytes, float]) -> None:
    """Store records with their due times (ms) in one step, as Redisson does, but silently."""
    async with raw.pipeline(transaction=True) as transaction:
        transaction.zadd(keys.timeout, records)
        transaction.rpush(keys.ordered, *records)
        await transaction.execute()
