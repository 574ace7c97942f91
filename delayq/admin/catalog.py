"""Finds the queues on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from delayq._redisson.keys import DelayedKeys
from delayq._redisson.keys import name_in as delayed_name_in
from delayq._reliable.keys import ReliableKeys, check_partitions
from delayq._reliable.keys import name_in as reliable_name_in
from delayq.errors import BadInput, BadName

if TYPE_CHECKING:
    from delayq._redis.client import RedisClient

QueueKind = Literal["delayed", "reliable"]

QUEUE_KEYS = "[dr]e[dl][ai]*"
"""A pattern that matches every key by which a queue can be recognised, and few others."""


async def find_queues(server: RedisClient) -> dict[tuple[QueueKind, str], set[int]]:
    """Return every queue that has a key, by kind and name on the server, with its partitions seen.

    A reliable queue has keys as long as it has messages, dead letters or schedules, is paused, or
    was used within the 30 days of its history. A delayed queue that has only its ready list left is
    not found, because such a list looks like any other.

    Reads the names of all keys, page by page.

    Raises:
        ServerUnavailable, OutcomeUnknown: The server does not answer.
        ServerRefused: The user may not run SCAN.
    """
    found: dict[tuple[QueueKind, str], set[int]] = {}
    async for key in server.scan(QUEUE_KEYS):
        try:
            queue = known_queue(key.decode())
        except UnicodeDecodeError:
            continue
        if queue is not None:
            kind, name, partition = queue
            found.setdefault((kind, name), set()).add(partition)
    return found


def known_queue(key: str) -> tuple[QueueKind, str, int] | None:
    """Return the same as :func:`queue_of`, but only for a key that such a queue really has."""
    queue = queue_of(key)
    if queue is None:
        return None
    kind, name, partition = queue
    try:
        if kind == "delayed":
            DelayedKeys.of(name)
            return queue
        check_partitions(partition + 1)
        keys = ReliableKeys.of(name, partition=partition)
    except (BadInput, BadName):
        return None
    return queue if key.startswith(keys.wake.removesuffix("wake")) else None


def queue_of(key: str) -> tuple[QueueKind, str, int] | None:
    """Return the queue and partition that have a key; None if none has, or it is unclear."""
    if (reliable := reliable_name_in(key)) is not None:
        return "reliable", *reliable
    name = delayed_name_in(key)
    return None if name is None else ("delayed", name, 0)
