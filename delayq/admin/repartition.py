"""Moves a reliable queue to another number of partitions: see :mod:`delayq._reliable.mover`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._reliable.keys import ReliableKeys, check_partitions
from delayq._reliable.mover import Mover, Repartition
from delayq._reliable.store import ReliableStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq.client import Client

__all__ = ["Repartition", "repartition"]


async def repartition(
    client: Client,
    name: str,
    partitions: int,
    *,
    progress: Callable[[Repartition], None] = lambda _: None,
) -> Repartition:
    """Move a queue to another number of partitions, or continue a move that was interrupted.

    Due times, order, ids, groups and their limits, schedules, dead letters, remembered ids and
    results are kept. The queue is paused meanwhile, and offers fail after some seconds without
    having stored anything. While workers still have messages, cancelling or an error ends the move,
    and nothing has changed; if that is not possible, the error says how to go on. So does a call
    with the number of partitions that the queue has. Later, another call has to continue the move.

    Args:
        client: A client whose user may use all keys of the queue.
        name: The queue's name.
        partitions: The new number of partitions.
        progress: Called with each step.

    Raises:
        BadInput: The number of partitions is invalid.
        ConfigurationError: The queue is being moved to another number of partitions, its limit is
            smaller than the number, or another release has written it.
        ServerUnavailable: Another process changes the number of partitions, or has taken the move
            over.
        ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
    """
    check_partitions(partitions)

    def store_of(number: int) -> ReliableStore:
        keys = ReliableKeys.of(name, client.name_mapper, number)
        return ReliableStore(client.session.server, keys)

    return await Mover(name, store_of, partitions, progress).run()
