"""What other programs do to a queue's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delayq._redis.keys import DelayedKeys


async def store(raw: Any, keys: DelayedKeys, records: dict[bytes, float]) -> None:
    """Store records with their due times, ms, in one step, as Redisson's script does, and announce nothing.

    A client that looks for what is due in between would find a record in one of the two structures only.
    """
    async with raw.pipeline(transaction=True) as transaction:
        transaction.zadd(keys.timeout, records)
        transaction.rpush(keys.ordered, *records)
        await transaction.execute()
