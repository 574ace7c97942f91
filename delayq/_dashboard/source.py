"""Reads and changes one queue for the dashboard without opening it: that means taking part."""

from __future__ import annotations

import asyncio
import heapq
import json
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from delayq._delayed.keys import DelayedKeys
from delayq._delayed.store import DelayedStore, score_of
from delayq._reliable.bodies import parse, parse_letter
from delayq._reliable.dead_letters import purge_letters, redrive_letters
from delayq._reliable.error_text import unpack_error
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.known_settings import KnownSettings
from delayq._reliable.store import ReliableStore
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._delayed.store import PendingRecord
    from delayq._engine.session import Session
    from delayq._reliable.replies import MessageTimes, StoredLetter, StoredMessage
    from delayq._reliable.settings import Declared, QueueSettings
    from delayq._reliable.tallies import Unit
    from delayq.admin.catalog import QueueKind
    from delayq.stats import Activity, WorkerInfo

R = TypeVar("R")

SECOND = 1_000_000
"""One second in microseconds, the unit of all moments here."""
# Ends of the bars of a histogram. There is another bar beyond the last one.
HORIZONS = (60 * SECOND, 3600 * SECOND, 86400 * SECOND)


@dataclass(frozen=True)
class Place:
    """Where to find one message again.

    Attributes:
        id: The message's id.
        partition: The partition that holds the message.
        due: In a delayed queue, the message's score, as the server writes it.
    """

    id: bytes
    partition: int = 0
    due: str = ""


@dataclass(frozen=True)
class Row:
    """A message, as it is shown. Moments are in microseconds; unknown ones are None."""

    place: Place | None
    state: str
    payload: bytes | None
    due_us: int | None = None
    lease_us: int | None = None
    died_us: int | None = None
    enqueued_us: int | None = None
    expires_us: int | None = None
    priority: int = 0
    attempt: int = 0
    error: str = ""
    error_line: str = ""
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class DelayedSource:
    """A delayed queue, in Redisson's format."""

    kind: QueueKind = "delayed"
    states = ("delayed", "ready", "leased", "unreadable")
    partitions = 1

    def __init__(self, session: Session, name: str) -> None:
        self._server = session.server
        self._store = DelayedStore(session.server, DelayedKeys.of(name))
        self.name = name

    def has(self, place: Place) -> bool:
        """Return whether a message of this queue can have that place."""
        return bool(place.due)

    async def depth(self) -> QueueDepth:
        depth, bad, now = await asyncio.gather(
            self._store.depth(),
            self._store.count_quarantined(),
            self._server.time_us(self._store.keys.timeout),
        )
        return depth.of_queue(now, bad)

    async def settings(self) -> None:
        """Return None: a delayed queue has no settings on the server."""

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages are due by each of :data:`HORIZONS`, and how many later."""
        edges = [now, *(now + horizon for horizon in HORIZONS)]
        bars = (self.due_between(*bar) for bar in zip(edges, [*edges[1:], None], strict=True))
        return await asyncio.gather(*bars)

    async def due_between(self, start: int, end: int | None) -> int:
        return await self._store.count_due(start, end)

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
        if state == "delayed":
            return [_record(found) for found in await self._store.pending_page(offset, limit)]
        if state == "leased":
            leased = await self._store.leased_page(offset, limit)
            return [Row(None, state, payload, lease_us=ends_us) for payload, ends_us in leased]
        read = self._store.ready_page if state == "ready" else self._store.quarantined_page
        return [Row(None, state, payload) for payload in await read(offset, limit)]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        found = None if dead else await self._store.find_at(place.due, place.id)
        return None if found is None else _record(found)

    async def cancel(self, place: Place) -> bool:
        found = await self._store.find_at(place.due, place.id)
        return found is not None and await self._store.cancel([found.record]) > 0

    async def reschedule(self, place: Place, delay_us: int) -> Place | None:
        """Give a message another delay. Return its new place, or None if it is gone."""
        found = await self._store.find_at(place.due, place.id)
        due_us = None if found is None else await self._store.reschedule(found.record, delay_us)
        return None if due_us is None else Place(place.id, 0, score_of(due_us))


class ReliableSource:
    """A reliable queue, with all its partitions."""

    kind: QueueKind = "reliable"
    states = ("delayed", "ready", "leased")

    def __init__(self, session: Session, name: str, partitions: int) -> None:
        self._session = session
        self.name = name
        self._parts = [self._partition(number) for number in range(partitions)]

    def _partition(self, number: int) -> ReliableStore:
        return ReliableStore(self._session.server, ReliableKeys.of(self.name, partition=number))

    @property
    def partitions(self) -> int:
        return len(self._parts)

    def has(self, place: Place) -> bool:
        return place.partition < len(self._parts)

    async def depth(self) -> QueueDepth:
        return QueueDepth.total(await self._each(lambda _, store: store.depth()))

    async def settings(self) -> QueueSettings:
        return (await self._parts[0].settings()).public()

    async def configure(self, changes: Declared) -> None:
        """Change settings. Raises as :meth:`delayq.ReliableQueue.configure`."""
        known = KnownSettings(self.name, self._partition, self._session.background, lambda _: None)
        await known.configure(changes)

    async def activity(self, unit: Unit, span: int) -> list[Activity]:
        return await self._parts[0].activity(unit, span)

    async def workers(self) -> list[WorkerInfo]:
        return await self._parts[0].workers()

    async def histogram(self, now: int) -> list[int]:
        edges = [now, *(now + horizon for horizon in HORIZONS)]
        parts = await self._each(lambda _, store: store.histogram(edges))
        return [sum(bars) for bars in zip(*parts, strict=True)]

    async def due_between(self, start: int, end: int) -> int:
        return sum(await self._each(lambda _, store: store.count_due(start, end)))

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
        # Each partition may have all the messages that come first.
        single = len(self._parts) == 1
        first, count = (offset, limit) if single else (0, offset + limit)

        async def rows(number: int, store: ReliableStore) -> list[Row]:
            if state == "dead":
                letters = await store.dead_page(first, count)
                return [_letter(Place(letter.name, number), letter) for letter in letters]
            messages = await store.page(state, first, count)
            return [_live(Place(found.id, number), found) for found in messages]

        def order(row: Row) -> tuple[int, int]:
            priority = row.priority if state == "ready" else 0
            return -priority, row.died_us or row.due_us or row.lease_us or 0

        parts = await self._each(rows)
        merged = heapq.merge(*parts, key=order)
        return parts[0] if single else [*islice(merged, offset, offset + limit)]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        if not self.has(place):
            return None
        store = self._parts[place.partition]
        if dead:
            letter = await store.dead_letter(place.id)
            return None if letter is None else _letter(place, letter)
        found = await store.get(place.id)
        return None if found is None else _live(place, found, await store.times(found))

    async def cancel(self, place: Place) -> bool:
        (done,) = await self._parts[place.partition].cancel([place.id])
        return done

    async def reschedule(self, place: Place, delay_us: int) -> Place | None:
        (done,) = await self._parts[place.partition].reschedule([place.id], delay_us)
        return place if done else None

    async def redrive(self, places: Sequence[Place] | None) -> int:
        """Redrive dead letters; all of them if None."""
        await self._learn()
        return sum([await redrive_letters(*letters) for letters in self._letters(places)])

    async def purge_dead(self, places: Sequence[Place] | None) -> int:
        """Drop dead letters; all of them if None."""
        await self._learn()
        return sum([await purge_letters(*letters) for letters in self._letters(places)])

    async def pause(self) -> None:
        """Stop all claims."""
        await self._everywhere(ReliableStore.pause)

    async def resume(self) -> None:
        """End a pause."""
        await self._everywhere(ReliableStore.resume)

    # Internals

    async def _learn(self) -> str:
        """Add the partitions that were not found yet, and return the epoch of the settings."""
        stored = await self._parts[0].settings()
        number = max(stored.partitions, *stored.former, 0)
        self._parts += map(self._partition, range(len(self._parts), number))
        return stored.epoch

    async def _everywhere(self, act: Callable[[ReliableStore], Awaitable[object]]) -> None:
        """Act on every partition, the first one first: see :mod:`delayq._reliable.settings_writer`.

        Act on all of them again if the queue has got others meanwhile.
        """
        epoch = ""
        while epoch != (epoch := await self._learn()):
            if len(self._parts) > 1:
                await act(self._parts[0])
            await self._each(lambda _, store: act(store))

    async def _each(self, of: Callable[[int, ReliableStore], Awaitable[R]]) -> list[R]:
        # Wait for all calls, so that none continues behind the page.
        outcomes = await asyncio.gather(
            *(of(*part) for part in enumerate(self._parts)), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def _letters(
        self, places: Sequence[Place] | None
    ) -> list[tuple[ReliableStore, list[bytes] | None]]:
        if places is None:
            return [(store, None) for store in self._parts]
        chosen: dict[int, list[bytes]] = {}
        for place in places:
            # By name: ids of other programs may not be text, and letters may share an id.
            chosen.setdefault(place.partition, []).append(place.id)
        return [(self._parts[number], names) for number, names in chosen.items()]


AnySource = DelayedSource | ReliableSource


def late_us(depth: QueueDepth, kind: QueueKind) -> int | None:
    """Return how long the oldest due message has been due, in microseconds; 0 if there is none.

    None if that is unknown: Redisson's ready list has no times.
    """
    late = round(depth.oldest_due_age * SECOND)
    return None if kind == "delayed" and depth.ready and not late else late


def undeliverable(depth: QueueDepth) -> int:
    """Return the number of dead letters, or of a delayed queue's unreadable records."""
    return depth.dead + (depth.quarantined or 0)


def _record(found: PendingRecord) -> Row:
    place = Place(found.start, 0, found.score.decode(errors="replace"))
    payload = found.payload
    state = "unreadable" if payload is None else "delayed"
    return Row(place, state, found.record if payload is None else payload, found.due_us)


def _live(place: Place, found: StoredMessage, times: MessageTimes | None = None) -> Row:
    enqueued, headers, payload = _body(found.body)
    leased = found.state == "leased"
    due_us = found.moment_us if not leased else None if times is None else times.due_us
    return Row(
        place,
        found.state,
        payload,
        due_us=due_us,
        lease_us=found.moment_us if leased else None,
        enqueued_us=enqueued,
        expires_us=None if times is None else times.expires_us,
        priority=found.priority,
        attempt=found.attempt,
        error="" if found.error is None else unpack_error(found.error)[1],
        headers=headers,
    )


def _letter(place: Place, stored: StoredLetter) -> Row:
    try:
        why, body = parse_letter(stored.letter)
    except ValueError:
        # A letter that cannot be read must not hide the others.
        return Row(place, "dead", stored.letter, died_us=stored.died_us, reason="unreadable")
    enqueued, headers, payload = _body(body)
    line, error = unpack_error(str(why.get("error") or ""))
    return Row(
        place,
        "dead",
        payload,
        died_us=stored.died_us,
        enqueued_us=enqueued,
        priority=_number(why.get("priority")),
        attempt=_number(why.get("attempt")),
        error=error,
        error_line=line,
        reason=str(why.get("reason") or ""),
        headers=headers,
    )


def _body(body: bytes) -> tuple[int | None, dict[str, str], bytes]:
    try:
        parts = parse(body)
    except ValueError:
        return None, {}, body
    texts = {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in parts.headers.items()
    }
    return parts.enqueued_us, texts, parts.payload


def _number(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0
