"""Inspects a server from outside: the queues on it, and the records of a delayed queue.

Nothing here opens a queue, so looking at a queue moves no messages. Every function may raise the
errors of :class:`~delayq.errors.ServerError`.
"""
# ruff: noqa: SLF001 - part of the client, in a module of its own

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, get_args

from delayq._durations import moment_us, when_due
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import any_id_of, payload_of
from delayq._redisson.store import DelayedStore
from delayq._reliable.dead_letters import read_dead_letter
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.known_settings import KnownSettings
from delayq._reliable.settings import Difference
from delayq._reliable.store import ReliableStore
from delayq._reliable.tallies import checked_span
from delayq.admin.catalog import QUEUE_KEYS, QueueKind, find_queues, known_queue
from delayq.admin.search import Shelf
from delayq.errors import BadDelay, BadInput, ServerRefused
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from delayq._durations import Duration
    from delayq._generics import T
    from delayq._redis.client import RedisClient
    from delayq._reliable.dead_letters import DeadLetter
    from delayq._reliable.message import Message
    from delayq._reliable.partition import Partition
    from delayq._reliable.queue import ReliableQueue
    from delayq._reliable.replies import State
    from delayq._reliable.settings import Declared, QueueSettings, StoredSettings
    from delayq.client import Client
    from delayq.stats import Activity, WorkerInfo

PendingState = Literal["delayed", "ready", "leased"]
RecordState = Literal["delayed", "ready", "leased", "quarantined"]
PurgeState = Literal["delayed", "ready", "all"]

KINDS: Final[tuple[QueueKind, ...]] = get_args(QueueKind)

_ID_BYTES = 8


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


@dataclass(frozen=True)
class Record:
    """A message of a delayed queue, as stored on the server.

    Attributes:
        id: 16 hexadecimal digits; None if it no longer has an id, or its record cannot be read.
        due_at: When it is due, or when its lease ends; None if it is ready.
        payload: The value as the codec encoded it; None if the record cannot be read.
        raw: The whole record.
    """

    id: str | None
    due_at: datetime | None
    payload: bytes | None
    raw: bytes


async def queues(client: Client) -> list[FoundQueue]:
    """Return the queues on the server, by kind and name.

    Goes through all keys, in steps that do not hold the server up.

    A delayed queue is found while it has pending, leased or quarantined messages: a ready list by
    itself could belong to any program.
    """
    server, found = _server(client), []
    for (kind, name), seen in sorted((await find_queues(server)).items()):
        if kind == "delayed":
            found.append(FoundQueue(kind, name))
            continue
        stored = await _settings(ReliableStore(server, ReliableKeys.of(name)))
        partitions = max(max(seen) + 1, 1 if stored is None else stored.partitions)
        found.append(FoundQueue(kind, name, partitions))
    return found


async def collect(client: Client, found: set[FoundQueue]) -> None:
    """Add the queues on the server as they are found, without the number of their partitions."""
    async for key in _server(client).scan(QUEUE_KEYS):
        with suppress(UnicodeDecodeError):
            if (queue := known_queue(key.decode())) is not None:
                kind, name, _ = queue
                found.add(FoundQueue(kind, name))


async def clock_ahead(client: Client, questions: int = 10) -> tuple[float, float]:
    """Return how far the server's clock is ahead of ours, by the quickest answer, and how long that
    took, in seconds.
    """
    answers: list[tuple[float, float]] = []
    for _ in range(questions):
        began = time.time()
        theirs = (await client.server_time()).timestamp()
        ended = time.time()
        answers.append((ended - began, theirs - (began + ended) / 2))
    took, ahead = min(answers)
    return ahead, took


async def delayed_stats(client: Client, name: str) -> QueueDepth:
    """Return the number of messages of a delayed queue in each state.

    ``quarantined`` is None if the user may not look. For a reliable queue, use
    :meth:`delayq.ReliableQueue.stats`.
    """
    return await _delayed_stats(client, _store(client, name))


async def _delayed_stats(client: Client, store: DelayedStore) -> QueueDepth:
    depth = await store.depth()
    try:
        quarantined: int | None = await store.count_quarantined()
    except ServerRefused:
        quarantined = None
    try:
        now_us = await _server(client).time_us(store.keys.timeout)
    except ServerRefused:
        # A user that may only inspect queues may not ask for the time.
        now_us = time.time_ns() // 1000
    return depth.of_queue(now_us, quarantined)


async def found_stats(client: Client, queue: FoundQueue) -> QueueDepth:
    """Return the figures of a queue that was found. The name mapper has made its name already."""
    if queue.kind == "delayed":
        store = DelayedStore(_server(client), DelayedKeys.of(queue.name))
        return await _delayed_stats(client, store)
    stores = await stores_of_found(client, queue)
    return QueueDepth.total([await store.depth() for store in stores])


async def next_due_at(client: Client, name: str) -> datetime | None:
    """Return when the first pending message of a delayed queue is due; None if there is none."""
    first = await records(client, name, "delayed", limit=1)
    return first[0].due_at if first else None


async def reliable_stats(client: Client, name: str) -> QueueDepth:
    """Return the figures of :meth:`delayq.ReliableQueue.stats` without opening the queue."""
    return QueueDepth.total([await store.depth() for store in await stores_of(client, name)])


async def activity(
    client: Client, name: str, *, minutes: int | None = None, hours: int | None = None
) -> list[Activity]:
    """Return what :meth:`delayq.ReliableQueue.activity` does, without opening the queue."""
    unit, span = checked_span(minutes, hours)
    return await _partition(client, name, 0).activity(unit, span)


async def workers(client: Client, name: str | None = None) -> list[WorkerInfo]:
    """Return the clients that work on a reliable queue, or on any, by host, process and queue.

    A client reports with every re-check if what it handles has changed, otherwise with every fourth
    one. Its entry goes when it closes the queue or stops its worker, and if it dies, twelve
    re-checks after its last report: one minute by default. Without a name, this goes through all
    keys, in steps that do not hold the server up.
    """
    server = _server(client)
    if name is not None:
        stores = [_partition(client, name, 0)]
    else:
        names = [each for kind, each in await find_queues(server) if kind == "reliable"]
        stores = [ReliableStore(server, ReliableKeys.of(each)) for each in names]
    found = [worker for store in stores for worker in await store.workers()]
    return sorted(found, key=lambda worker: (worker.host, worker.pid, worker.queue))


async def differences(store: ReliableStore) -> list[tuple[Difference, list[WorkerInfo]]]:
    """Return the settings of which processes declare another value than the server has, each with
    these processes, of the queue with this first partition.
    """
    stored = await store.settings()
    found: dict[Difference, list[WorkerInfo]] = {}
    for worker in await store.workers():
        for difference in stored.differences(worker.declared):
            found.setdefault(difference, []).append(worker)
    return [*found.items()]


async def undeclared(client: Client, name: str, declared: Declared) -> list[Difference]:
    """Return those of the declared settings of a reliable queue that the server does not have: its
    value is empty if it has none.
    """
    stored = await _partition(client, name, 0).settings()
    stored.check_layout(name)
    missing = stored.missing(declared)
    return [
        *(Difference(setting, "", text) for setting, text in missing.items()),
        *stored.differences(declared),
    ]


async def configure(client: Client, name: str, changes: Declared) -> None:
    """Change settings of a reliable queue without opening it.

    Raises as :meth:`delayq.ReliableQueue.configure`.
    """
    background = client.session.background
    await KnownSettings(
        name, partial(_partition, client, name), background, lambda _: None
    ).configure(changes)


async def settings(client: Client, name: str) -> QueueSettings | None:
    """Return the settings of a reliable queue without opening it.

    None if the user may not read them.
    """
    stored = await _settings(_partition(client, name, 0))
    return None if stored is None else stored.public()


async def exists(client: Client, name: str) -> bool:
    """Return whether a reliable queue was ever used: has had a message, or a setting.

    True if the user may not know.
    """
    return await was_used(_partition(client, name, 0))


async def was_used(store: ReliableStore) -> bool:
    """Return the same as :func:`exists`, of a queue with this first partition."""
    try:
        if "layout" in (await store.settings()).fields:
            return True
        # Its settings may have been evicted.
        depth = await store.depth()
    except ServerRefused:
        return True
    return depth.delayed + depth.ready + depth.leased + depth.dead > 0


async def shelves(queue: ReliableQueue[T], state: State) -> Sequence[Shelf[Message[T]]]:
    """Return the messages of a reliable queue in one state, to be searched: one partition after
    the other.
    """
    await queue._settled()

    async def page(partition: Partition, offset: int, limit: int) -> list[Message[T] | None]:
        found = await partition.store.page(state, offset, limit)
        return [
            None if each is None else queue._consumer.wrap_stored(partition, each) for each in found
        ]

    async def shelf(partition: Partition) -> Shelf[Message[T]]:
        return Shelf(await partition.store.length(state), partial(page, partition))

    return await queue._open.for_each_partition(shelf)


async def letter_shelves(queue: ReliableQueue[T]) -> Sequence[Shelf[DeadLetter[T]]]:
    """Return the dead letters of a reliable queue, as :func:`shelves` returns messages."""

    async def page(store: ReliableStore, offset: int, limit: int) -> list[DeadLetter[T]]:
        return [
            read_dead_letter(each, queue._codec) for each in await store.dead_page(offset, limit)
        ]

    stores = await queue._letters_at(None)
    return [Shelf(await store.count_dead(), partial(page, store)) for store in stores]


async def records(
    client: Client, name: str, state: RecordState, *, offset: int = 0, limit: int = 100
) -> list[Record]:
    """Return messages of a delayed queue, in the order in which they will come."""
    store = _store(client, name)
    if limit < 1:
        return []
    if state == "delayed":
        return [
            _record(found.record, found.due_us) for found in await store.pending_page(offset, limit)
        ]
    if state == "ready":
        return [
            Record(None, None, payload, payload)
            for payload in await store.ready_page(offset, limit)
        ]
    if state == "quarantined":
        # Records, and payloads that could not be decoded: nothing tells them apart for sure.
        return [_record(raw, None) for raw in await store.quarantined_page(offset, limit)]
    leased = await store.leased_page(offset, limit)
    return [Record(None, moment_us(ends_us), payload, payload) for payload, ends_us in leased]


async def find(client: Client, name: str, id: str) -> Record | None:  # noqa: A002
    """Return the pending message with that id; None if there is none. Searches all of them.

    Raises:
        BadInput: ``id`` is not a valid id.
    """
    try:
        wanted = bytes.fromhex(id)
    except ValueError:
        wanted = b""
    if len(wanted) != _ID_BYTES:
        raise BadInput(
            f"the id of a message in a delayed queue must have 16 hexadecimal digits, unlike {id!r}"
        )
    found = await _store(client, name).find(wanted)
    return None if found is None else _record(found.record, found.due_us)


async def cancel(client: Client, name: str, id: str) -> bool:  # noqa: A002
    """Remove the pending message with that id, and return whether there was one.

    Raises as :func:`find`.
    """
    found = await find(client, name, id)
    return found is not None and await _store(client, name).cancel([found.raw]) > 0


async def reschedule(
    client: Client,
    name: str,
    id: str,  # noqa: A002
    delay: Duration | None = None,
    *,
    at: datetime | None = None,
) -> datetime | None:
    """Reschedule the pending message with that id, and return its new due time; None if it is gone.

    Raises as :func:`find`.
    """
    if delay is None and at is None:
        raise BadDelay("pass delay or at")
    when = when_due(delay, at)
    found = await find(client, name, id)
    due_us = None if found is None else await _store(client, name).reschedule(found.raw, when)
    return None if due_us is None else moment_us(due_us)


async def purge(client: Client, name: str, state: PurgeState = "all") -> int:
    """Drop pending messages, ready ones, or both, at once, and return how many there were."""
    return await _store(client, name).purge(state)


async def remove(client: Client, kind: QueueKind, name: str) -> int:
    """Remove every key of a queue that is no longer used, and return how many there were.

    Use it only if no other client uses the name: calls made meanwhile may bring keys back.
    """
    if kind == "delayed":
        return await _store(client, name).remove()
    return sum([await store.remove() for store in reversed(await stores_of(client, name))])


def _server(client: Client) -> RedisClient:
    session = client.session
    session.check_loop()
    return session.server


def _store(client: Client, name: str) -> DelayedStore:
    return DelayedStore(_server(client), DelayedKeys.of(name, client.name_mapper))


async def stores_of(client: Client, name: str) -> list[ReliableStore]:
    """Return the data of a reliable queue's partitions.

    Raises:
        ServerUnavailable: The queue is being moved to another number of partitions.
    """
    stores = await _stores_of(partial(_partition, client, name))
    if (stored := await _settings(stores[0])) is not None:
        stored.check_at_rest(name)
    return stores


async def stores_of_found(client: Client, queue: FoundQueue) -> list[ReliableStore]:
    """Return the data of the partitions of a reliable queue that was found."""
    return await _stores_of(partial(_found_partition, client, queue.name))


async def _stores_of(partition: Callable[[int], ReliableStore]) -> list[ReliableStore]:
    stored = await _settings(partition(0))
    # A user that may not read the settings sees what the queue's own keys hold.
    partitions = 1 if stored is None else stored.partitions
    return [partition(number) for number in range(partitions)]


async def _settings(store: ReliableStore) -> StoredSettings | None:
    """Return the stored settings; None if the user may not read them."""
    with suppress(ServerRefused):
        return await store.settings()
    return None


def _partition(client: Client, name: str, number: int) -> ReliableStore:
    return ReliableStore(_server(client), ReliableKeys.of(name, client.name_mapper, number))


def _found_partition(client: Client, name: str, number: int) -> ReliableStore:
    return ReliableStore(_server(client), ReliableKeys.of(name, partition=number))


def _record(raw: bytes, due_us: int | None) -> Record:
    record_id = any_id_of(raw)
    return Record(
        None if record_id is None else record_id.hex(),
        None if due_us is None else moment_us(due_us),
        payload_of(raw),
        raw,
    )
