"""A delayed queue from outside: its depth, and its records."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from delayq._background import gather_mixed
from delayq._durations import datetime_at, when_due
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import any_id_of, payload_of
from delayq._redisson.store import DelayedStore
from delayq.errors import BadDelay, BadInput, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from typing import Self

    from delayq._durations import Duration
    from delayq._engine.session import Session
    from delayq.client import Client
    from delayq.stats import QueueDepth

RecordState = Literal["delayed", "ready", "leased", "quarantined"]
PurgeState = Literal["delayed", "ready", "all"]

_ID_BYTES = 8


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


class DelayedInspector:
    """Reads and changes a delayed queue without opening it.

    It moves no messages. Every method may raise the errors of
    :class:`~delayq.errors.ServerError`.

    Attributes:
        name: The queue's name.
        store: Its data.
    """

    kind: Literal["delayed"] = "delayed"

    def __init__(
        self, session: Session, name: str, *, name_mapper: Callable[[str], str] | None = None
    ) -> None:
        """Args:
        session: The session of an open client.
        name: The queue's name: on the server, unless there is a name mapper.
        name_mapper: As for :func:`delayq.connect`.
        """
        self._server = session.server
        self.name: str = name
        self.store: DelayedStore = DelayedStore(session.server, DelayedKeys.of(name, name_mapper))

    @classmethod
    def of(cls, client: Client, name: str) -> Self:
        """Inspect the queue that a client knows by this name."""
        client.session.check_loop()
        return cls(client.session, name, name_mapper=client.name_mapper)

    async def depth(self) -> QueueDepth:
        """Return the number of messages in each state.

        ``quarantined`` is None if the user may not look.
        """
        depth, quarantined, now_us = await gather_mixed(
            self.store.depth(), self._count_quarantined(), self._now_us()
        )
        return depth.of_queue(now_us, quarantined)

    async def _count_quarantined(self) -> int | None:
        try:
            return await self.store.count_quarantined()
        except ServerRefused:
            return None

    async def _now_us(self) -> int:
        try:
            return await self._server.time_us(self.store.keys.timeout)
        except ServerRefused:
            # A user that may only inspect queues may not ask for the time.
            return time.time_ns() // 1000

    async def next_due_at(self) -> datetime | None:
        """Return when the first pending message is due; None if there is none."""
        first = await self.records("delayed", limit=1)
        return first[0].due_at if first else None

    async def records(
        self, state: RecordState, *, offset: int = 0, limit: int = 100
    ) -> list[Record]:
        """Return messages, in the order of delivery."""
        if limit < 1:
            return []
        if state == "delayed":
            pending = await self.store.pending_page(offset, limit)
            return [_record(entry.record, entry.due_us) for entry in pending]
        if state == "ready":
            payloads = await self.store.ready_page(offset, limit)
            return [Record(None, None, payload, payload) for payload in payloads]
        if state == "quarantined":
            # Records, and payloads that could not be decoded: nothing tells them apart for sure.
            return [_record(raw, None) for raw in await self.store.quarantined_page(offset, limit)]
        leased = await self.store.leased_page(offset, limit)
        return [Record(None, datetime_at(ends_us), payload, payload) for payload, ends_us in leased]

    async def find_record(self, id: str) -> Record | None:  # noqa: A002
        """Return the pending message with that id; None if there is none. Searches all of them.

        Raises:
            BadInput: ``id`` is not a valid id.
        """
        try:
            raw_id = bytes.fromhex(id)
        except ValueError:
            raw_id = b""
        if len(raw_id) != _ID_BYTES:
            raise BadInput(
                "the id of a message in a delayed queue must have 16 hexadecimal digits, unlike"
                f" {id!r}"
            )
        pending = await self.store.find(raw_id)
        return None if pending is None else _record(pending.record, pending.due_us)

    async def cancel_record(self, id: str) -> bool:  # noqa: A002
        """Remove the pending message with that id, and return whether there was one.

        Raises as :meth:`find_record`.
        """
        record = await self.find_record(id)
        return record is not None and await self.store.cancel([record.raw]) > 0

    async def reschedule_record(
        self,
        id: str,  # noqa: A002
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> datetime | None:
        """Reschedule the pending message with that id, and return its new due time; None if it is
        gone.

        Raises as :meth:`find_record`.
        """
        if delay is None and at is None:
            raise BadDelay("pass delay or at")
        due = when_due(delay, at)
        record = await self.find_record(id)
        due_us = None if record is None else await self.store.reschedule(record.raw, due)
        return None if due_us is None else datetime_at(due_us)

    async def purge(self, state: PurgeState = "all") -> int:
        """Drop pending messages, ready ones, or both, at once, and return how many there were."""
        return await self.store.purge(state)

    async def remove(self) -> int:
        """Remove every key of a queue that is no longer used, and return how many there were.

        Use it only if no other client uses the name: calls made meanwhile may bring keys back.
        """
        return await self.store.remove()


def _record(raw: bytes, due_us: int | None) -> Record:
    record_id = any_id_of(raw)
    return Record(
        None if record_id is None else record_id.hex(),
        None if due_us is None else datetime_at(due_us),
        payload_of(raw),
        raw,
    )
