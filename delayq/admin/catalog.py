"""Finds the queues on a server, and those who work on them."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from delayq._redisson.keys import DelayedKeys
from delayq._redisson.keys import name_in as delayed_name_in
from delayq._reliable.keys import ReliableKeys, check_partitions
from delayq._reliable.keys import name_in as reliable_name_in
from delayq._reliable.store import ReliableStore
from delayq.admin.delayed import DelayedInspector
from delayq.admin.reliable import ReliableInspector
from delayq.errors import BadInput, BadName, ServerRefused

if TYPE_CHECKING:
    from delayq._redis.client import RedisClient
    from delayq.client import Client
    from delayq.stats import WorkerInfo

QueueKind = Literal["delayed", "reliable"]
KINDS: Final[tuple[QueueKind, ...]] = get_args(QueueKind)

QUEUE_KEYS = "[dr]e[dl][ai]*"
"""A pattern that matches every key by which a queue can be recognised, and few others."""


@dataclass(frozen=True)
class FoundQueue:
    """A queue that has keys on the server.

    Attributes:
        kind: ``"delayed"`` or ``"reliable"``.
        name: Its name on the server.
        partitions: The number of its partitions, as far as it is known.
    """

    kind: QueueKind
    name: str
    partitions: int = 1

    @property
    def argument(self) -> str:
        """The command-line argument that names it, for advice that users copy to a shell."""
        is_plain = self.kind == "reliable" and not self.name.startswith(
            ("-", *(f"{kind}:" for kind in KINDS))
        )
        return shlex.quote(self.name if is_plain else f"{self.kind}:{self.name}")

    def inspector(self, client: Client) -> DelayedInspector | ReliableInspector:
        """Inspect the queue. No name mapper applies, because this is the name on the server."""
        client.session.check_loop()
        if self.kind == "delayed":
            return DelayedInspector(client.session, self.name)
        return ReliableInspector(client.session, self.name)


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
    queues: dict[tuple[QueueKind, str], set[int]] = {}
    async for key in server.scan(QUEUE_KEYS):
        with suppress(UnicodeDecodeError):
            if (queue := known_queue(key.decode())) is not None:
                kind, name, partition = queue
                queues.setdefault((kind, name), set()).add(partition)
    return queues


async def list_queues(client: Client) -> list[FoundQueue]:
    """Return the queues on the server, by kind and name.

    Goes through all keys, in steps that do not hold the server up.

    Raises as :func:`find_queues`.
    """
    server = _server(client)
    return [
        FoundQueue(kind, name, await count_partitions(server, kind, name, max(partitions) + 1))
        for (kind, name), partitions in sorted((await find_queues(server)).items())
    ]


async def count_partitions(server: RedisClient, kind: QueueKind, name: str, at_least: int) -> int:
    """Return the number of a queue's partitions, which is at least that of those seen."""
    if kind == "delayed":
        return 1
    try:
        stored = await ReliableStore(server, ReliableKeys.of(name)).settings()
    except ServerRefused:
        return at_least
    return max(at_least, stored.partitions)


async def collect_queues(client: Client, queues: set[FoundQueue]) -> None:
    """Add the queues on the server as they are found, without the number of their partitions."""
    async for key in _server(client).scan(QUEUE_KEYS):
        with suppress(UnicodeDecodeError):
            if (queue := known_queue(key.decode())) is not None:
                kind, name, _ = queue
                queues.add(FoundQueue(kind, name))


async def list_workers(client: Client, name: str | None = None) -> list[WorkerInfo]:
    """Return the clients that work on a reliable queue, or on any, by host, process and queue.

    :meth:`ReliableInspector.workers` says how long a client is listed. Without a name, this goes
    through all keys, in steps that do not hold the server up.
    """
    if name is not None:
        return await ReliableInspector.of(client, name).workers()
    workers: list[WorkerInfo] = []
    for kind, queue in await find_queues(_server(client)):
        if kind == "reliable":
            workers += await ReliableInspector(client.session, queue).workers()
    return sorted(workers, key=lambda worker: (worker.host, worker.pid, worker.queue))


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


def _server(client: Client) -> RedisClient:
    client.session.check_loop()
    return client.session.server
